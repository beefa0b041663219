"""Keys that UTF-8 cannot encode keep apart, in rows and when a live state is filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.adapter import adapter_named

KEYS = ["\ud800", "\ud801", "\udc80", "\udc81", "\ufffd", "?", "%3F", "a\x80"]
MAKERS: dict[str, Callable[[int], Any]] = {
    "generic": lambda value: np.full(300, value),
    "pytorch": lambda value: torch.full((300,), value),
    "jax": lambda value: jnp.full(300, value),
}


@pytest.mark.parametrize("adapter", MAKERS)
def test_key_that_is_no_utf8_has_a_row_of_its_own(adapter: str, tmp_path: Path) -> None:
    make = MAKERS[adapter]
    store = TensorCasStore(tmp_path, "run", adapter_named(adapter))
    store.save({key: make(number) for number, key in enumerate(KEYS)}, step=0)
    for number, key in enumerate(KEYS):
        store.save({key: make(number)}, step=number + 1)
    rows = [set(store.load_tensors(number + 1)) - {"__skeleton__"} for number in range(len(KEYS))]

    assert len({min(row) for row in rows}) == len(KEYS)
    assert set(store.load_tensors(0)) - {"__skeleton__"} == set().union(*rows)
    live = store.load(0, into={key: make(99) for key in KEYS})
    for loaded in (store.load(0), live):
        assert {key: int(value[0]) for key, value in loaded.items()} == {key: n for n, key in enumerate(KEYS)}

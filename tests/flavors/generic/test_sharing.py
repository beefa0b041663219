"""Parts that an object shares are shared after a load, as with a pickle alone."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_flavors import _facts
from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import SKELETON, Array

ADAPTER = GenericAdapter()
MUTABLE = (np.ndarray, list, dict, bytearray)

LEAVES: tuple[Callable[[], Any], ...] = (
    lambda: 3,
    lambda: np.arange(31.0),
    lambda: np.arange(32.0),
    lambda: np.asfortranarray(np.arange(200.0).reshape(10, 20))[:, ::2],
    lambda: np.arange(200.0).reshape(10, 20).T,
    lambda: "x" * 4095,
    lambda: "é" * 4096,
    lambda: b"x" * 4096,
    lambda: bytearray(5000),
)


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """Nested lists, tuples and dicts whose parts may stand in several places, and hold themselves."""
    parts: list[Any] = [make() for make in LEAVES]
    parts += [parts[2][:], parts[2][::2], parts[3][:5]]
    for kind in draw(st.lists(st.sampled_from([list, tuple, dict]), min_size=1, max_size=8)):
        made: Any = kind()
        chosen = [*parts, *([made] if kind is not tuple else [])]
        items = [chosen[i] for i in draw(st.lists(st.integers(0, len(chosen) - 1), max_size=6))]
        if kind is dict:
            made.update(enumerate(items))
        else:
            made += kind(items)
        parts.append(made)
    return parts[-1]


def drawn(part: Any, met: dict[int, int]) -> Any:
    """Say all of an object, numbering what can be told from its copies."""
    if isinstance(part, MUTABLE):
        if id(part) in met:
            return met[id(part)]
        met[id(part)] = len(met)
    if isinstance(part, np.ndarray):
        return part.dtype, part.shape, part.strides, part.flags.writeable, part.tobytes()
    if isinstance(part, dict):
        return dict, [(key, drawn(value, met)) for key, value in part.items()]
    if isinstance(part, list | tuple):
        return type(part), [drawn(value, met) for value in part]
    return type(part), part


@pytest.mark.long
@given(objects())
def test_shared_parts_of_an_object_are_shared_after_loading(model: Any) -> None:
    rows = {name: np.array(row, order="C") for name, row in ADAPTER.extract(model).items()}

    again = ADAPTER.reconstruct(rows)

    assert drawn(again, {}) == drawn(pickle.loads(pickle.dumps(model, protocol=5)), {})


def test_equal_skeletons_share_one_set_of_facts() -> None:
    def rows() -> dict[str, Array]:
        return ADAPTER.extract({"w": np.arange(9.0), "steps": [1, 2], "rates": {"lr": 0.1}})

    first, second = rows(), rows()
    _facts._known.clear()
    alone = rows()

    assert first[SKELETON].tobytes() == second[SKELETON].tobytes() == alone[SKELETON].tobytes()
    assert len(_facts._known) == 1


def test_equal_skeletons_with_other_values_get_other_facts() -> None:
    ADAPTER.extract({"w": np.arange(9.0), "step": 1})
    live = {"w": np.zeros(9), "step": 1}
    ADAPTER.reconstruct(ADAPTER.extract({"w": np.arange(9.0), "step": 2}), live)

    assert live["step"] == 2


def test_facts_of_code_are_read_at_every_save() -> None:
    _facts._known.clear()
    ADAPTER.extract(OrderedDict(w=np.arange(9.0)))

    assert not _facts._known


def test_names_of_rows_are_quoted_keys() -> None:
    keys = [*map(chr, range(300)), "", "a.b", "layer 1/w", "é*", "~x", "--", "k" * 250]
    kept = " /()[]<>=,;:+@$&!?'"

    names = [name for name in ADAPTER.extract({key: np.arange(99.0) for key in keys}) if name != SKELETON]

    assert names == [quote(key[:200], safe=kept) or "%" for key in keys]

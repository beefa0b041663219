"""``explain`` on a real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorcas_mlflow.store import Store

Tensorcas = Callable[..., Any]


def test_explain_prints_how_a_checkpoint_would_be_read(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("explain", "--run", "train", "--step", "1", "--root", store.uri)

    assert done.status == 0
    assert "1 read by " in done.out
    assert ", because it " in done.out


def test_explain_answers_in_json_for_some_tensors_and_a_forced_way(tensorcas: Tensorcas, store: Store) -> None:
    [ref] = [ref for ref in store.checkpoints() if ref.run_id == "other"]
    name = store.manifest(ref).names()[0]
    words = ("explain", "--run", "other", "--tensor", name, "--way", "map", "--root", store.uri, "--json")
    told = tensorcas(*words).json

    assert told["checkpoint"]["key"] == ref.key
    assert told["n_tensors"] == 1
    # Of a bucket there are only requests, whatever is asked for.
    is_far = store.backend.is_remote
    assert {pack["way"] for pack in told["packs"]} == {"ranges" if is_far else "map"}
    assert {pack["reason"] == "it was asked for" for pack in told["packs"]} == {not is_far}

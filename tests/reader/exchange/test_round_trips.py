"""From a store through each format and back: the same tensors, by their digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import import_checkpoint, open_path, open_ref, plan_export
from tensorcas_mlflow.store import Store
from tests.file_formats.arrays import ArrayTensors, write

KINDS: dict[str, dict[str, Any]] = {
    "safetensors": {"format": "safetensors"},
    "shards": {"shard_bytes": 5000},
    "torch": {"format": "torch"},
    "bintensors": {"format": "bintensors"},
    "partitions": {"partitions": 3},
    "npz": {"format": "npz"},
}


def arrays(kind: str) -> dict[str, Any]:
    draw = np.random.default_rng(3)
    made: dict[str, Any] = {
        f"layers.{at}.w": draw.integers(0, 255, 4 * 300 * at, np.uint8).view("f4").reshape(at, 300) for at in range(4)
    }
    made |= {"é.scalar": np.array(-7), "flags": np.array([True, False]), "empty": np.zeros((3, 0, 2))}
    if kind != "npz":
        made["half"] = draw.normal(size=(5, 3)).astype(ml_dtypes.bfloat16)
        made["eighth"] = draw.normal(size=9).astype(ml_dtypes.float8_e4m3fn)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_from_each_format_with_its_digest(tmp_path: Path, kind: str) -> None:
    store = Store.init(tmp_path / "store")
    given = arrays(kind) | {SKELETON: np.frombuffer(b"what is left", np.uint8)}
    with store.write_checkpoint(given, flavor="test") as pending:
        before = pending.commit(RefTarget(run_id="r", step=1))
    with open_ref(store, before) as reader:
        plan_export(reader, tmp_path / "out", **KINDS[kind]).execute()
        digest = reader.tensors_digest()
    packs = [info.key for info in store.backend.list("packs")]
    after = import_checkpoint(store, open_listing(tmp_path / "out"), RefTarget(run_id="r", step=2))

    with open_ref(store, after) as reader:
        assert reader.tensors_digest() == digest
    with open_path(tmp_path / "out") as reader:
        assert reader.tensors_digest() == digest
    assert [info.key for info in store.backend.list("packs")] == packs


def test_a_file_comes_back_from_a_walk_through_all_formats_bit_for_bit(tmp_path: Path) -> None:
    write(ArrayTensors(arrays("npz")), tmp_path / "first.safetensors")
    here = tmp_path / "first.safetensors"
    for name, options in KINDS.items():
        plan_export(open_listing(here), tmp_path / name, **options).execute()
        here = tmp_path / name
    plan_export(open_listing(here), tmp_path / "last.safetensors").execute()

    assert (tmp_path / "last.safetensors").read_bytes() == (tmp_path / "first.safetensors").read_bytes()

"""Checkpoints become files: all their tensors or some, checked, and whole or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.errors import ConflictError, CorruptChunkError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.reader import open_listed, open_ref, plan_export
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.reader.exchange.listings import listing_of
from tests.stored_bytes import flip_in_packs
from tests.zygote import run_program

ARRAYS: dict[str, Any] = {
    "layers.0.attn.w": np.arange(60_000, dtype="f4"),
    "layers.0.mlp.w": np.ones((3, 4), "f8"),
    "layers.1.attn.w": np.zeros(5, "i8"),
    "head": np.array(2.5),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "store")


def saved(store: Store, arrays: dict[str, Any]) -> Ref:
    with store.write_checkpoint(arrays, flavor="test") as pending:
        return pending.commit(RefTarget(run_id="r", step=1))


def test_a_checkpoint_is_written_with_all_its_tensors(store: Store, tmp_path: Path) -> None:
    with open_ref(store, saved(store, ARRAYS)) as reader:
        written = plan_export(reader, tmp_path / "m.safetensors").execute()

    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    assert written.n_tensors == 4
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in ARRAYS.items()
    }


def test_export_of_a_saved_module_writes_tensors_that_torch_loads(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with TensorCasStore(tmp_path / "store", "r") as runs:
        runs.save(module, 1)
        with runs.open(1) as reader:
            plan_export(reader, tmp_path / "m.pt").execute()

    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in module.state_dict().items())
    module.load_state_dict(loaded)


def test_only_tensors_whose_names_match_are_written(store: Store, tmp_path: Path) -> None:
    with open_ref(store, saved(store, ARRAYS)) as reader:
        plan_export(reader, tmp_path / "m.npz", match="*.attn.*").execute()
        with pytest.raises(ValueError, match="no tensor has a name like"):
            plan_export(reader, tmp_path / "none.npz", match="attn").execute()

    with np.load(tmp_path / "m.npz") as found:
        assert sorted(found.files) == ["layers.0.attn.w", "layers.1.attn.w"]


@pytest.mark.usefixtures("store_of_files")
def test_nothing_is_left_of_an_export_that_meets_damage(store: Store, tmp_path: Path) -> None:
    ref = saved(store, ARRAYS)
    flip_in_packs(store.backend)
    with open_ref(store, ref) as reader, pytest.raises(CorruptChunkError):
        plan_export(reader, tmp_path / "m.safetensors").execute()

    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_a_plan_reads_no_tensor(store: Store, tmp_path: Path) -> None:
    ref = saved(store, ARRAYS)
    with open_ref(store, ref) as reader:
        before = reader.stats.read_bytes
        plan = plan_export(reader, tmp_path / "m", shard_bytes=100_000)

        assert reader.stats.read_bytes == before
        assert plan.execute() == plan.result


KILLED = """
import os, signal, sys
from tensorcas_mlflow.reader import plan_export
from tensorcas_mlflow.reader import open_listed, open_ref
from tensorcas_mlflow.store import Store

def die(done, n_all):
    os.kill(os.getpid(), signal.SIGKILL)

store = Store.open(sys.argv[1])
with open_ref(store, store.checkpoints()[0]) as reader:
    plan_export(reader, sys.argv[2], overwrite=True).execute(progress=die)
"""


def test_an_export_that_is_killed_leaves_the_file_that_was_there(store: Store, tmp_path: Path) -> None:
    saved(store, ARRAYS)
    out = tmp_path / "m.safetensors"
    out.write_bytes(b"what was there")
    ended = run_program(KILLED, store.uri, out)

    assert ended.returncode == -signal.SIGKILL
    assert out.read_bytes() == b"what was there"


def test_a_file_is_converted_without_a_store(tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "f", ARRAYS, metadata={"n": 1}, deflated=("head",), transposed=("layers.0.mlp.w",))
    told: list[tuple[int, int]] = []
    written = plan_export(listing, tmp_path / "m.safetensors").execute(
        progress=lambda done, n_all: told.append((done, n_all))
    )

    found = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in ARRAYS.items()
    }
    assert written.n_tensors == 4
    assert told[-1][0] == told[-1][1]


def test_export_names_the_parts_it_would_leave_out_unless_allowed(tmp_path: Path) -> None:
    reader = open_listed(listing_of(tmp_path / "f", ARRAYS, left_out={"q": "Q4_K"}), label="f")
    with pytest.raises(ValueError, match=r"'q' \(Q4_K\)"):
        plan_export(reader, tmp_path / "m.npz")

    assert not (tmp_path / "m.npz").exists()
    assert plan_export(reader, tmp_path / "m.npz", allow_left_out=True).result.n_tensors == 4
    assert plan_export(reader, tmp_path / "m.npz", match="*w").result.n_tensors == 3


def test_a_file_can_be_converted_in_its_own_place(tmp_path: Path) -> None:
    listing = listing_of(tmp_path / "m.npz", ARRAYS)
    with pytest.raises(ConflictError):
        plan_export(listing, tmp_path / "m.npz").execute()
    plan_export(listing, tmp_path / "m.npz", overwrite=True).execute()

    with np.load(tmp_path / "m.npz") as found:
        assert found["layers.0.attn.w"].tobytes() == ARRAYS["layers.0.attn.w"].tobytes()

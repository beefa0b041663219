"""Folders of `torch.distributed.checkpoint`: shards put together, and nothing of theirs is run."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorcas_mlflow.errors import BackendError, CorruptError, FormatError, MalformedFileError, NoCheckpointError
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import open_path, open_ref
from tensorcas_mlflow.store import Store
from tests.file_formats.test_read_fuzz import damaged, read_all

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, "step": 3}

RANK = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
rank, folder, meeting = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{meeting}")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(7, 5)
state = {f"shard {axis}": distribute_tensor(whole, mesh, [Shard(axis)]) for axis in (0, 1)}
dcp.save(state | {"same": torch.ones(3)}, checkpoint_id=folder)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(STATE, checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(folder: Path, change: Any) -> None:
    """Change what the metadata says, by its own classes."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))


def test_a_folder_is_read_by_its_name_or_by_that_of_its_metadata(folder: Path) -> None:
    for path in (folder, folder / ".metadata"):
        listing = open_listing(path)

        assert {*listing.locations} == {"model.w", "model.b"}
        assert listing.array("model.w").tolist() == STATE["model"]["w"].tolist()  # type: ignore[index]


@pytest.mark.long
def test_shards_of_several_processes_are_put_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "saved"), str(tmp_path / "meeting")]) for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    whole = np.arange(35.0, dtype=np.float32).reshape(7, 5)

    listing = open_listing(tmp_path / "saved")

    assert {*listing.locations} == {"shard 0", "shard 1", "same"}
    for axis in (0, 1):
        assert (listing.array(f"shard {axis}") == whole).all()
        with open_path(tmp_path / "saved") as reader:
            assert reader.get_slice(f"shard {axis}")[2:6, 1:4].tolist() == whole[2:6, 1:4].tolist()


def test_dcp_folder_in_a_store_is_read_as_on_disk(folder: Path, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    for file in folder.iterdir():
        with store.write_file(file) as pending:
            pending.commit(RefTarget(path=f"model/{file.name}"))
    metadata, shards = (store.artifact(f"model/{name}") for name in (".metadata", "__0_0.distcp"))
    assert metadata is not None
    assert shards is not None

    with open_ref(store, metadata) as reader, open_path(folder) as there:
        assert reader.tensors_digest() == there.tensors_digest()
        assert reader.digest() == there.digest()
    with pytest.raises(FormatError, match=r"open its folder, or \.metadata in it"):
        open_ref(store, shards)


def test_shards_without_their_metadata_are_refused_with_the_way_out(folder: Path) -> None:
    with pytest.raises(MalformedFileError, match=r"open its folder, or \.metadata in it"):
        open_listing(folder / "__0_0.distcp")
    (folder / ".metadata").unlink()
    with pytest.raises(NoCheckpointError):
        open_listing(folder)


def test_metadata_without_its_shards_is_refused(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()

    with pytest.raises(BackendError, match="__0_0"):
        open_listing(folder)


def test_shards_that_do_not_make_a_whole_tensor_are_refused(folder: Path) -> None:
    rewrite(folder, lambda said: said.state_dict_metadata["model.w"].__dict__.update(size=torch.Size([4, 4])))

    with pytest.raises(MalformedFileError, match="do not make it whole"):
        open_listing(folder)


def test_a_shard_that_is_another_than_the_metadata_says_is_refused(folder: Path) -> None:
    rewrite(folder, lambda said: setattr(said.state_dict_metadata["model.w"].properties, "dtype", torch.int32))

    with pytest.raises(MalformedFileError, match="differs from the metadata"):
        open_listing(folder)


def test_a_file_outside_of_the_folder_is_never_opened(folder: Path, tmp_path: Path) -> None:
    os.rename(folder / "__0_0.distcp", tmp_path / "outside.distcp")

    def outside(said: Any) -> None:
        for info in said.storage_data.values():
            info.relative_path = "../outside.distcp"

    rewrite(folder, outside)

    with pytest.raises(FormatError, match="no file of the folder"):
        open_listing(folder)


@pytest.mark.long
def test_damaged_metadata_is_read_or_refused(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for broken in damaged(data, random.Random(0), 300):
        (folder / ".metadata").write_bytes(broken)
        try:
            read_all(open_listing(folder))
        except (FormatError, CorruptError, BackendError):
            continue

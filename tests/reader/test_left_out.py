"""Files that hold tensors, of this machine and of a store: what cannot be read of them is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcas_mlflow.errors import MalformedFileError, TensorNotFoundError
from tensorcas_mlflow.reader import CheckpointReader, open_path, open_ref
from tensorcas_mlflow.store import RefTarget, Store
from tests.formats.samples import safetensors_of

PACKED = safetensors_of(
    {
        "m.four": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
        "m.plain": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
    },
    12,
)


def a_file(tmp_path: Path, data: bytes) -> CheckpointReader:
    (tmp_path / "a.file").write_bytes(data)
    return open_path(tmp_path / "a.file")


def a_stored_file(tmp_path: Path, data: bytes) -> CheckpointReader:
    (tmp_path / "a.file").write_bytes(data)
    store = Store.init(tmp_path / "store")
    with store.write_file(tmp_path / "a.file") as pending:
        return open_ref(store, pending.commit(RefTarget(path="a.file")))


@pytest.mark.parametrize("place", [a_file, a_stored_file])
def test_what_cannot_be_read_of_a_file_is_told(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    reader = place(tmp_path, PACKED)

    assert (reader.keys(), reader.left_out) == (["m.plain"], {"m.four": "F4"})
    assert reader.below("m").left_out == {"four": "F4"}
    assert "and 1 tensor of types that cannot be read here (F4)" in str(reader.summary())
    with pytest.raises(TensorNotFoundError, match=r"'m\.four' cannot be read: its type is F4"):
        reader.tensor("m.four")


@pytest.mark.parametrize("place", [a_file, a_stored_file])
def test_a_file_that_its_format_forbids_is_refused_with_the_reason(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}
    with pytest.raises(MalformedFileError, match="there is a hole before tensor 'w'"):
        place(tmp_path, safetensors_of({"w": entry}, 3))

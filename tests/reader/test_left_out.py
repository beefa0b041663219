"""Files that hold tensors, of this machine and of a store: what cannot be read of them is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcas_mlflow.errors import MalformedFileError, TensorNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, SafeOpen, open_path, open_ref
from tensorcas_mlflow.store import Store
from tests.file_formats.samples import safetensors_of

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
def test_reader_names_the_tensors_of_a_file_that_it_cannot_read(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    reader = place(tmp_path, PACKED)

    assert (list(reader), reader.left_out) == (["m.plain"], {"m.four": "F4"})
    assert reader.below("m").left_out == {"four": "F4"}
    assert "and 1 tensor of unsupported types (F4)" in str(reader.summary())
    with pytest.raises(TensorNotFoundError, match=r"'m\.four' cannot be read: its type is F4"):
        reader.tensor("m.four")


@pytest.mark.parametrize("place", [a_file, a_stored_file])
def test_safe_open_names_a_tensor_that_cannot_be_read_and_refuses_to_read_it(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    with SafeOpen(place(tmp_path, PACKED)) as file:
        assert (file.keys(), file.offset_keys()) == (["m.four", "m.plain"], ["m.plain", "m.four"])
        for read in (lambda: file.get_tensor("m.four"), lambda: file.get_slice("m.four"), file.get_tensors):
            with pytest.raises(TensorNotFoundError, match=r"'m\.four' cannot be read: its type is F4"):
                read()
        assert list(file.get_tensors(["m.plain"])) == ["m.plain"]


@pytest.mark.parametrize("place", [a_file, a_stored_file])
def test_a_file_that_its_format_forbids_is_refused_with_the_reason(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}
    with pytest.raises(MalformedFileError, match="there is a hole before tensor 'w'"):
        place(tmp_path, safetensors_of({"w": entry}, 3))


LAYERS = safetensors_of(
    {
        "layers.0.norm": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "layers.0.w": {"dtype": "F4", "shape": [2, 8], "data_offsets": [4, 12]},
        "layers.1.w": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]},
        "layers.1.mlp.experts.0.w": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]},
        "layers.1.mlp.experts.1.w": {"dtype": "F4", "shape": [8], "data_offsets": [20, 24]},
        "layers.2.w": {"dtype": "F4", "shape": [8], "data_offsets": [24, 28]},
    },
    28,
)


def test_layer_with_an_unreadable_tensor_is_refused(tmp_path: Path) -> None:
    reader = a_file(tmp_path, LAYERS)

    assert (reader.layers(), reader.experts(1)) == ([0, 1, 2], [0, 1])
    assert list(reader.match("*.norm")) == ["layers.0.norm"]
    assert list(reader.expert(1, 0)) == ["layers.1.mlp.experts.0.w"]
    for refused in (
        lambda: reader.layer(0),
        lambda: reader.layer(1),
        lambda: reader.layer(2),
        lambda: reader.expert(1, 1),
        lambda: reader.match("layers.0.*"),
        lambda: reader.match("layers.2.*"),
        lambda: reader.below("layers.2"),
    ):
        with pytest.raises(TensorNotFoundError, match="its type is F4"):
            refused()


def test_a_tensor_of_all_experts_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    header = {
        "layers.0.mlp.gate.weight": {"dtype": "U8", "shape": [4, 1], "data_offsets": [0, 4]},
        "layers.0.mlp.experts.up_proj": {"dtype": "U8", "shape": [4, 1, 1], "data_offsets": [4, 8]},
        "layers.0.mlp.experts.down_proj": {"dtype": "F4", "shape": [4, 1, 2], "data_offsets": [8, 12]},
    }
    with pytest.raises(TensorNotFoundError, match=r"down_proj.*F4"):
        a_file(tmp_path, safetensors_of(header, 12)).expert(0, 2)

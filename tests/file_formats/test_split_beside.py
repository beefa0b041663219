"""Raw tensors, split by the description in another file of the folder."""

from __future__ import annotations

import gc
import io
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from tensorcas_mlflow.file_formats import FilePart, FilePlace, Learned, PlainBytes, Tape, Tensor, _beside, split
from tests.file_formats.samples import tensorflow_folder
from tests.file_formats.test_read_fuzz import damaged

ARRAYS = {f"layer/{nth}": np.random.default_rng(nth).normal(size=(40 + nth, 30)).astype(np.float32) for nth in range(4)}
DATA = "weights.data"


def external_data(folder: Path) -> Path:
    """Write a model with external data at multiples of 4 KiB, and return the file of the data."""
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], []))
    data = b""
    for name, array in ARRAYS.items():
        tensor = onnx.numpy_helper.from_array(array, name)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        data += bytes(-len(data) % 4096)
        for key, value in {"location": DATA, "offset": len(data), "length": array.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        data += array.tobytes()
        # Tied weights are described twice.
        model.graph.initializer.extend([tensor, onnx.TensorProto(name=f"{name} again")])
        model.graph.initializer[-1].MergeFrom(tensor)
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / DATA).write_bytes(data)
    return folder / DATA


def variables(folder: Path) -> Path:
    return tensorflow_folder(folder, ARRAYS).with_name("variables.data-00000-of-00001")


Write = Callable[[Path], Path]
WRITERS = pytest.mark.parametrize("write", [external_data, variables])


def parts_of(path: Path) -> list[tuple[FilePart, bytes]]:
    """Split a file with a look beside it, and check that the parts are the file."""
    data = path.read_bytes()
    tape = Tape(io.BytesIO(data))
    parts: list[tuple[FilePart, bytes]] = []
    for part in split(tape, FilePlace.of(path)):
        assert not isinstance(part, Learned)
        parts.append((part, bytes(tape.take(min(part.n_bytes, len(data))))))
    assert b"".join(taken for _, taken in parts) == data
    return parts


@WRITERS
def test_raw_tensors_have_the_names_and_shapes_of_their_description(write: Write, tmp_path: Path) -> None:
    parts = [(part, taken) for part, taken in parts_of(write(tmp_path)) if isinstance(part, Tensor)]
    found = {part.name.removesuffix(" again"): (part, taken) for part, taken in parts}

    assert {name: (part.dtype, part.shape, taken) for name, (part, taken) in found.items()} == {
        name: ("float32", array.shape, array.tobytes()) for name, array in ARRAYS.items()
    }


@WRITERS
def test_a_file_without_its_description_is_plain_bytes(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path)
    for other in tmp_path.iterdir():
        if other != path:
            other.unlink()

    assert {type(part) for part, _ in parts_of(path)} == {PlainBytes}


@WRITERS
def test_a_wrong_description_loses_no_byte(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path)
    [other] = [each for each in tmp_path.iterdir() if each != path]
    for nth, broken in enumerate(damaged(other.read_bytes(), random.Random(0), 150)):
        other.write_bytes(broken)
        os.utime(other, ns=(nth, nth))
        parts_of(path)
    path.write_bytes(path.read_bytes()[:5000])
    parts_of(path)


@pytest.mark.long
@WRITERS
def test_a_description_is_not_kept_open(write: Write, tmp_path: Path) -> None:
    parts_of(write(tmp_path))
    gc.collect()
    opened = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    mapped = Path("/proc/self/maps").read_text()

    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    assert str(tmp_path) not in mapped


@WRITERS
@pytest.mark.parametrize(("n_too_many", "n_tensors"), [(0, 4), (1, 0)])
def test_a_description_of_too_many_tensors_describes_nothing(
    write: Write, n_too_many: int, n_tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    n_described = 8 if write is external_data else 4
    monkeypatch.setattr(_beside, "_MAX_TENSORS", n_described - n_too_many)
    parts = parts_of(path)

    assert sum(isinstance(part, Tensor) for part, _ in parts) == n_tensors

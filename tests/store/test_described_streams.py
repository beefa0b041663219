"""Raw tensors that arrive as a stream, described by a file that the store has in the same folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.test_read_fuzz import damaged
from tests.file_formats.test_split_beside import external_data, variables

Write = Callable[[Path], Path]
WRITERS = pytest.mark.parametrize("write", [external_data, variables])


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=4096)


def upload(store: Store, file: Path, path: str) -> Ref:
    with file.open("rb") as stream, store.write_stream(stream, place=store.place_of(path)) as save:
        return save.commit(RefTarget(path=path))


def description_of(data: Path) -> Path:
    [found] = [file for file in data.parent.iterdir() if file != data]
    return found


def shapes(store: Store, ref: Ref) -> dict[str, tuple[int, ...]]:
    rows = store.manifest(ref).rows
    return {row.spec.name.removesuffix(" again"): row.spec.shape for row in rows if row.spec.name}


@WRITERS
@pytest.mark.parametrize("folder", ["", "run/model data/v%1/"])
def test_a_stored_description_names_the_tensors_of_a_stream(
    store: Store, write: Write, folder: str, tmp_path: Path
) -> None:
    data = write(tmp_path)
    upload(store, description_of(data), f"{folder}{description_of(data).name}")
    ref = upload(store, data, f"{folder}{data.name}")

    assert shapes(store, ref) == {f"layer/{nth}": (40 + nth, 30) for nth in range(4)}
    assert b"".join(store.iter_file(ref)) == data.read_bytes()


@WRITERS
@pytest.mark.parametrize("place", ["other/{}", "{}/below", "a{}"])
def test_a_description_elsewhere_describes_nothing(store: Store, write: Write, place: str, tmp_path: Path) -> None:
    data = write(tmp_path)
    name = description_of(data).name
    upload(store, description_of(data), place.format(name) if "/" in place else f"a{name}.bak")
    ref = upload(store, data, data.name)

    assert shapes(store, ref) == {}
    assert b"".join(store.iter_file(ref)) == data.read_bytes()


@WRITERS
def test_a_damaged_description_does_not_stop_a_stream(store: Store, write: Write, tmp_path: Path) -> None:
    data = write(tmp_path)
    described = upload(store, description_of(data), description_of(data).name)
    store.backend.delete(f"manifests/{described.manifest}")
    ref = upload(store, data, data.name)

    assert shapes(store, ref) == {}
    assert b"".join(store.iter_file(ref)) == data.read_bytes()


@WRITERS
def test_a_new_description_replaces_the_one_that_was_read_before(store: Store, write: Write, tmp_path: Path) -> None:
    data = write(tmp_path)
    description = description_of(data)
    upload(store, description, description.name)
    upload(store, data, data.name)
    # The index shortens the other keys to their ends.
    description.write_bytes(description.read_bytes().replace(b"layer/0", b"LAYER/0"))
    upload(store, description, description.name)
    ref = upload(store, data, data.name)

    assert "LAYER/0" in shapes(store, ref)
    assert b"".join(store.iter_file(ref)) == data.read_bytes()


def test_descriptions_that_cannot_be_read_do_not_hide_one_that_can(store: Store, tmp_path: Path) -> None:
    data = external_data(tmp_path)
    broken = upload(store, data, "a.onnx")
    store.backend.delete(f"manifests/{broken.manifest}")
    upload(store, data, "b.onnx")
    upload(store, description_of(data), "model.onnx")
    ref = upload(store, data, data.name)

    assert len(shapes(store, ref)) == 4


@pytest.mark.long
@WRITERS
def test_a_hostile_description_costs_no_byte_of_a_stream(store: Store, write: Write, tmp_path: Path) -> None:
    data = write(tmp_path)
    description = description_of(data)
    for nth, hostile in enumerate(damaged(description.read_bytes(), random.Random(0), 100)):
        description.write_bytes(hostile)
        upload(store, description, f"{nth}/{description.name}")
        ref = upload(store, data, f"{nth}/{data.name}")

        assert b"".join(store.iter_file(ref)) == data.read_bytes()

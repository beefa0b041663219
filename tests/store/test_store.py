from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import ConflictError, CorruptError, NewerFormatError, StoreNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.store import Store


def blob(root: Path) -> Path:
    return root / ".tensorcas" / "format"


def test_a_store_is_made_once_and_opened_by_anyone(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "new" / "root", chunk_bytes=8192)
    opened = Store.open(tmp_path / "new" / "root")

    assert (opened.id, opened.chunk_bytes, opened.uri) == (store.id, 8192, store.uri)
    with pytest.raises(ConflictError, match="already a store"):
        Store.init(tmp_path / "new" / "root")


def test_opening_makes_a_store_only_if_told_to(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="tensorcas init"):
        Store.open(tmp_path)
    assert list(tmp_path.iterdir()) == []
    made = Store.open(tmp_path, create=True, chunk_bytes=4096)

    assert Store.open(tmp_path, create=True, chunk_bytes=8192).id == made.id
    assert Store.open(tmp_path).chunk_bytes == 4096


@pytest.mark.parametrize("chunk_bytes", [0, -1, 4095, 5000, 1 << 27])
def test_invalid_chunk_size_is_refused(tmp_path: Path, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Store.init(tmp_path, chunk_bytes=chunk_bytes)


def test_no_store_is_made_inside_or_above_another(tmp_path: Path) -> None:
    Store.init(tmp_path / "a" / "b")

    with pytest.raises(ConflictError, match="inside"):
        Store.init(tmp_path / "a" / "b" / "c" / "d")
    with pytest.raises(ConflictError, match="inside"):
        Store.open(tmp_path / "a" / "b" / "c", create=True)
    with pytest.raises(ConflictError, match="above"):
        Store.init(tmp_path)
    assert not (tmp_path / ".tensorcas").exists()


@pytest.mark.parametrize(
    "spelling",
    ["tensorcas:{}", "tensorcas://{}", "tensorcas:///{}", "tensorcas://localhost{}", "file:{}", "file://{}", "{}"],
)
def test_every_spelling_of_a_root_is_one_store(tmp_path: Path, spelling: str) -> None:
    store = Store.init(tmp_path)
    opened = Store.open(spelling.format(tmp_path))

    assert (opened.id, opened.uri) == (store.id, f"tensorcas://{tmp_path}")


@pytest.mark.parametrize(
    "root",
    [
        "s3://bucket/x",
        "tensorcas://host/x",
        "tensorcas:relative",
        "tensorcas:",
        "tensorcas:///x?y=1",
        "tensorcas:///x#y",
        "tensorcas:///x%00y",
    ],
)
def test_a_root_of_another_kind_is_refused(root: str) -> None:
    for call in (Store.open, Store.init, Store.find):
        with pytest.raises(ValueError, match=r"tensorcas:|absolute"):
            call(root)


@pytest.mark.parametrize("name", ["per%cent", "per%41cent", "a space", "模型", "q?x=1", "h#ash", "a+b", "~tilde"])
def test_a_root_of_any_name_is_found_by_path_and_by_its_uri(tmp_path: Path, name: str) -> None:
    store = Store.init(tmp_path / name)

    assert Store.open(tmp_path / name).id == store.id
    assert Store.open(str(tmp_path / name)).id == store.id
    assert Store.open(store.uri).id == store.id
    assert Store.find(f"{store.uri}/x/y")[0].id == store.id
    assert blob(tmp_path / name).exists()


def test_a_relative_root_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.init("checkpoints")

    assert blob(tmp_path / "checkpoints").exists()
    assert store.uri == f"tensorcas://{tmp_path}/checkpoints"


def test_the_store_of_a_place_is_the_nearest_above(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root")

    for place, relative in (("", ""), ("a", "a"), ("a/b c/d%e", "a/b c/d%e")):
        found, path = Store.find(tmp_path / "root" / place)
        assert (found.id, path) == (store.id, relative)
    (tmp_path / "root" / "file").write_text("a file")
    assert Store.find(tmp_path / "root" / "file" / "below")[1] == "file/below"
    with pytest.raises(StoreNotFoundError):
        Store.find(tmp_path)


def test_a_store_found_again_is_the_same_object_until_it_is_another_store(tmp_path: Path) -> None:
    Store.init(tmp_path)
    first, _ = Store.find(tmp_path / "a")
    second, _ = Store.find(tmp_path / "b")
    with first.write_checkpoint({"a": np.arange(5)}) as save:
        save.commit(RefTarget(path="x/checkpoint.arrow"))
    shutil.rmtree(tmp_path / ".tensorcas")
    made = Store.init(tmp_path)
    third, _ = Store.find(tmp_path / "a")
    with third.write_checkpoint({"a": np.arange(5)}) as save:
        ref = save.commit(RefTarget(path="x/checkpoint.arrow"))

    assert first is second
    assert third.id == made.id != first.id
    assert third.read_tensors(third.manifest(ref))["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_store_whose_root_was_moved_is_the_same_store(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "old")
    with store.write_checkpoint({"a": np.arange(5)}) as save:
        save.commit(RefTarget(path="x/checkpoint.arrow"))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = Store.open(tmp_path / "new")
    ref = moved.artifact("x/checkpoint.arrow")

    assert moved.id == store.id
    assert ref is not None
    assert moved.read_tensors(moved.manifest(ref))["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(StoreNotFoundError):
        Store.open(tmp_path / "old")


def write_settings(root: Path, **changed: object) -> None:
    """Put a ``format`` blob in place that says something else, as somebody would write it."""
    settings = {**json.loads(blob(root).read_bytes()), **changed}
    del settings["check"]
    blob(root).write_bytes(record_bytes(settings))


def test_a_store_of_a_later_release_is_refused_by_name(tmp_path: Path) -> None:
    Store.init(tmp_path)
    write_settings(tmp_path, format=3)

    for call in (Store.open, Store.find):
        with pytest.raises(NewerFormatError, match="upgrade tensorcas-mlflow"):
            call(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "1"},
        {"format": None},
        {"id": "short"},
        {"id": 7},
        {"digest": "sha256"},
        {"chunk_bytes": 10},
        {"chunk_bytes": "262144"},
        {"chunk_bytes": 1 << 40},
        {"chunk_bytes": True},
        b"",
        b'{"chunk_bytes": 4096, "digest": "blake3-256", "format": 1, "id": "00000000000000000000000000000000"}',
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        b"{" + b" " * 70_000,
    ],
    ids=lambda change: repr(change)[:30],
)
def test_a_damaged_format_blob_is_corrupt(tmp_path: Path, change: dict[str, object] | bytes) -> None:
    Store.init(tmp_path)
    if isinstance(change, bytes):
        blob(tmp_path).write_bytes(change)
    else:
        write_settings(tmp_path, **change)

    for call in (Store.open, Store.find):
        with pytest.raises(CorruptError, match="format"):
            call(tmp_path)


def test_fields_a_later_release_added_are_ignored(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    write_settings(tmp_path, later=[1, 2])

    assert Store.open(tmp_path).id == store.id


def test_a_store_can_be_kept_in_any_backend() -> None:
    backend = MemoryBackend()
    store = Store.init_backend(backend, chunk_bytes=4096)
    with store.write_checkpoint({"a": np.arange(5_000)}) as save:
        ref = save.commit(RefTarget(run_id="r", step=1))

    opened = Store.open_backend(backend)
    assert opened.id == store.id
    assert (opened.read_tensors(opened.manifest(ref))["a"] == np.arange(5_000)).all()
    with pytest.raises(ConflictError):
        Store.init_backend(backend)


def test_looking_for_a_store_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        Store.find(tmp_path / "a" / "b")

    assert os.listdir(tmp_path) == []
    assert LocalBackend(tmp_path / "none").list_dir("x")[:2] == ({}, set())

"""Links and names that would lead out of a store: nothing is read, written or deleted behind them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

from tensorcas_mlflow.backends import Bucket, LocalBackend, LocalPlainFiles, ObjectPlainFiles, new_void
from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptError, RefusedError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import copy_plain, plan_gc, verify
from tensorcas_mlflow.store import Store

TENSORS = {"w": np.arange(5000, dtype=np.float32)}


def saved(root: Path, *, database: bool = False) -> Store:
    """A store with one checkpoint."""
    store = Store.init(root, database=database)
    save(store, TENSORS, run_id="r", step=1)
    return store


def save(store: Store, tensors: dict[str, Any], **target: Any) -> None:
    with store.write_checkpoint(tensors) as pending:
        pending.commit(RefTarget(**target))


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by path."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores, to be copied."""
    folder = tmp_path_factory.mktemp("both")
    for name in ("ours", "theirs"):
        saved(folder / name)
    return folder


@pytest.fixture
def outside(both: Path, tmp_path: Path) -> Path:
    """Somebody else's store, all of which is garbage to any other."""
    return Path(shutil.copytree(both / "theirs", tmp_path / "theirs")) / ".tensorcas"


@pytest.fixture
def root(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both / "ours", tmp_path / "ours"))


ACTS: dict[str, Callable[[Path], Any]] = {
    "gc": lambda root: f"{(plan := plan_gc(Store.open(root)))}, {plan.execute()}",
    "load": lambda root: load(Store.open(root)),
    "save": lambda root: save(Store.open(root), {"w": TENSORS["w"], "b": TENSORS["w"] + 1}, run_id="r", step=2),
    "verify": lambda root: verify(Store.open(root)),
}


WHO_COMES_BY = {
    "packs": ("gc", "load", "save", "verify"),
    "index": ("gc", "load", "save"),
    "manifests": ("gc", "load", "save", "verify"),
    "refs": ("gc", "load", "save", "verify"),
    "refs/runs": ("gc", "load", "save", "verify"),
    "intents": ("gc", "save", "verify"),
    "condemned": ("gc", "save"),
}


def told_by(act: str, root: Path) -> str:
    """Do something, and say what it has said."""
    try:
        return str(ACTS[act](root))
    except TensorCasError as error:
        return str(error)


def load(store: Store) -> dict[str, Any]:
    [ref] = [store.ref(info.key) for info in store.backend.list("refs")]
    assert ref is not None
    return store.read_tensors(store.manifest(ref))


@pytest.mark.parametrize("folder", WHO_COMES_BY)
def test_target_of_a_linked_store_folder_stays_unchanged(folder: str, root: Path, outside: Path) -> None:
    ours, theirs = root / ".tensorcas" / folder, outside / folder
    if ours.exists():
        ours.rename(root / "aside")
    theirs.mkdir(parents=True, exist_ok=True)
    ours.symlink_to(theirs)
    before = everything(outside)

    said = {act: told_by(act, root) for act in ACTS}

    assert everything(outside) == before
    for act in WHO_COMES_BY[folder]:
        assert "is a symbolic link" in said[act], act


@pytest.mark.long
def test_target_of_a_link_in_the_place_of_a_database_stays_unchanged(tmp_path: Path) -> None:
    saved(tmp_path / "ours", database=True)
    saved(tmp_path / "theirs", database=True)
    Database.close_all()
    ours = tmp_path / "ours/.tensorcas/blobs.db"
    ours.rename(tmp_path / "aside")
    ours.symlink_to(tmp_path / "theirs/.tensorcas/blobs.db")
    before = everything(tmp_path / "theirs")

    said = {act: told_by(act, tmp_path / "ours") for act in ACTS}

    assert everything(tmp_path / "theirs") == before
    assert all("is a symbolic link" in text for text in said.values()), said


def test_a_collection_deletes_no_packs_behind_a_link(root: Path, outside: Path) -> None:
    (root / ".tensorcas/packs").rename(root / "aside")
    (root / ".tensorcas/packs").symlink_to(outside / "packs")

    with pytest.raises(RefusedError, match="symbolic link"):
        plan_gc(Store.open(root), grace_s=0).execute()

    assert len(list((outside / "packs").iterdir())) == 1


def test_a_blob_that_is_a_link_is_damage(root: Path, outside: Path) -> None:
    [pack] = (root / ".tensorcas/packs").iterdir()
    [other] = (outside / "packs").iterdir()
    pack.unlink()
    pack.symlink_to(other)
    backend = LocalBackend(root / ".tensorcas")

    assert [info.key for info in backend.list("packs")] == [f"packs/{pack.name}"]
    with pytest.raises(CorruptError, match="symbolic link"):
        backend.get(f"packs/{pack.name}")
    with pytest.raises(ChunkNotFoundError):
        load(Store.open(root))
    backend.delete(f"packs/{pack.name}")
    assert other.exists()
    assert not pack.is_symlink()


def test_a_blob_that_is_a_pipe_is_not_waited_for(root: Path) -> None:
    os.mkfifo(root / ".tensorcas/refs/@pipe")
    backend = LocalBackend(root / ".tensorcas")

    with pytest.raises(CorruptError, match="no file"):
        backend.get("refs/@pipe")
    assert [info.key for info in backend.list("refs")] == ["refs/runs/r/@1"]


def test_store_can_be_reached_through_links(root: Path, tmp_path: Path) -> None:
    (tmp_path / "by-link").symlink_to(root)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.tensorcas").symlink_to(root / ".tensorcas")

    for place in ("by-link", "other"):
        assert np.array_equal(load(Store.open(tmp_path / place))["w"], TENSORS["w"])


# --- names of objects that would be paths out of the place they are copied to

NAMES = ["%2E%2E/%2E%2E/out", "..%2F..%2Fout", "%2Fout", "a%2F..%2F..%2Fout", "a%00b", "%2E", "a/%2E%2E/b", ".%2E/out"]


@pytest.fixture
def bucket() -> Bucket:
    """A bucket into which somebody has put objects of such names."""
    memory = MemoryStore()
    for name in [*NAMES, "good/file"]:
        obstore.put(memory, f"top/{name}", b"x")
    return Bucket(lambda: (memory, memory), uri="tensorcas-s3://b/top", prefix="top", has_versions=False)


def test_objects_whose_names_lead_elsewhere_are_no_artifacts(bucket: Bucket) -> None:
    tree = ObjectPlainFiles(bucket)

    assert [info.path for info in tree.walk("")] == ["good/file"]
    # A folder is shown by its name, whatever may be in it.
    assert {info.path for info in tree.children("")} == {"good", "a"}
    assert list(tree.children("a")) == []


def test_a_copy_tells_of_objects_whose_names_lead_elsewhere_and_leaves_them(bucket: Bucket, tmp_path: Path) -> None:
    source = ObjectPlainFiles(bucket)
    destination = LocalPlainFiles(tmp_path / "a/b/c")
    report = copy_plain(source, destination)

    assert sorted(report.skipped) == sorted(NAMES)
    assert list(everything(tmp_path)) == ["a/b/c/good/file"]


def test_copy_reports_hidden_objects_and_no_voids(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("good/.artifact.uploading.x", b"half")
    bucket.put("good/gone", new_void())
    report = copy_plain(ObjectPlainFiles(bucket), LocalPlainFiles(tmp_path))

    assert sorted(report.skipped) == sorted([*NAMES, "good/.artifact.uploading.x"])
    assert list(everything(tmp_path)) == ["good/file"]


def test_objects_of_a_folder_with_a_percent_sign_are_found_and_removed(bucket: Bucket) -> None:
    bucket.put("50%25/run/x", b"1234")
    files = ObjectPlainFiles(bucket)
    found = list(files.topmost(lambda folder: folder.endswith("/run")))
    sizes = [size for size, _ in files.content("50%/run")]
    files.remove("50%/run")

    assert found == ["50%/run"]
    assert sizes == [4]
    assert list(files.walk("50%")) == []


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/x", "a//x", ".", "a\0b", ".tensorcas/format", "a/.TensorCAS/x"]
)
def test_nothing_is_written_beside_the_destination_of_a_copy(path: str, tmp_path: Path) -> None:
    destination = LocalPlainFiles(tmp_path / "top")

    with pytest.raises(ValueError, match="plain file"):
        destination.make_folder(path)
    assert not (tmp_path / "top").exists()


# --- names of tensors

TENSOR_NAMES = ["../../out", "/out", "a/b", "C:\\out", "..", "~", "con", "a" * 4000, "-rf", "$(x)", "`x`", "%2e%2e/out"]


def test_names_of_tensors_are_no_paths(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "in/the/middle")
    tensors = {name: np.arange(3000) + number for number, name in enumerate(TENSOR_NAMES)}
    save(store, tensors, path="model/checkpoint.arrow", run_id="r", step=1)
    status = main(["copy", str(tmp_path / "in/the/middle"), str(tmp_path / "in/the/copy"), "--quiet"])
    read = load(Store.open(tmp_path / "in/the/copy"))

    assert status == 0
    assert {name: array.tolist() for name, array in read.items()} == {name: a.tolist() for name, a in tensors.items()}
    assert sorted(path.name for path in tmp_path.rglob("*") if ".tensorcas" not in path.parts) == [
        *("copy", "in", "middle", "the")
    ]

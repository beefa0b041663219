"""Copies of the plain files beside a store: whole or not at all, and never out of the roots."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalPlainFiles
from tensorcas_mlflow.errors import BackendError, ConflictError
from tensorcas_mlflow.integration.forgotten import orphaned_refs
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance import (
    Copied,
    CopyReport,
    PlainReport,
    copy_all,
    copy_plain,
    end_of,
    open_destination,
    read_source,
)
from tensorcas_mlflow.store import Store
from tests.maintenance.copy.copying import damage, new_store, save, state

MODEL = "models/m-" + "0" * 32 + "/artifacts"
COPY = f"{MODEL}/data/checkpoint.arrow"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "destination"


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def copy(source: Path, destination: Path, **options: bool) -> PlainReport:
    return copy_plain(LocalPlainFiles(source), LocalPlainFiles(destination), **options)  # type: ignore[arg-type]


def files(root: Path) -> dict[str, str]:
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()}


def test_plain_files_are_copied_with_their_times(source: Path, destination: Path) -> None:
    file = write(source, f"{MODEL}/MLmodel", "a model")
    write(source, "1/notes/ä b.txt", "a note")
    os.utime(file, ns=(1, 1_700_000_000_123_456_789))
    report = copy(source, destination)

    assert files(destination) == files(source)
    assert (destination / MODEL / "MLmodel").stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert (report.n_copied, report.copied_bytes) == (2, len("a model") + len("a note"))


def test_equal_files_are_left_as_they_are(source: Path, destination: Path) -> None:
    write(source, "a.txt", "a note")
    copy(source, destination)
    inode = (destination / "a.txt").stat().st_ino
    report = copy(source, destination, replace=True)

    assert (report.n_copied, report.n_there) == (0, 1)
    assert (destination / "a.txt").stat().st_ino == inode


@pytest.mark.parametrize("other", ["b note", "another, longer note", ""])
def test_another_file_is_kept_and_told_or_replaced(source: Path, destination: Path, other: str) -> None:
    write(source, "a.txt", "a note")
    write(destination, "a.txt", other)

    assert copy(source, destination).kept == ("a.txt",)
    assert files(destination) == {"a.txt": other}
    assert copy(source, destination, replace=True).n_copied == 1
    assert files(destination) == {"a.txt": "a note"}


def test_a_dry_run_writes_nothing(source: Path, destination: Path) -> None:
    write(source, "a.txt", "a note")
    report = copy(source, destination, dry_run=True)

    assert (report.n_copied, report.copied_bytes) == (1, 6)
    assert not destination.exists()


def test_no_store_is_entered(source: Path, destination: Path) -> None:
    write(source, ".tensorcas/format", "a store's")
    write(source, ".TensorCAS/format", "a store's, to some file systems")
    write(source, "carried/.tensorcas/format", "another store's")
    write(source, "carried/MLmodel", "its model")
    write(source, "a.txt", "a note")
    report = copy(source, destination)

    assert files(destination) == {"a.txt": "a note"}
    assert report.skipped == ("carried",)


def test_files_under_way_are_left_out(source: Path, destination: Path) -> None:
    write(source, ".artifact.uploading.1", "a half")
    copy(source, destination)

    assert not destination.exists()


def test_no_link_is_followed_out_of_the_root(source: Path, destination: Path, tmp_path: Path) -> None:
    write(tmp_path, "secret/key", "a secret")
    write(source, "a.txt", "a note")
    write(source, ".tensorcas/format", "a store's")
    (source / "folder").symlink_to(tmp_path / "secret")
    (source / "file").symlink_to(tmp_path / "secret" / "key")
    (source / "nowhere").symlink_to("nothing")
    (source / "inside").symlink_to("a.txt")
    (source / "store").symlink_to(".tensorcas/format")
    report = copy(source, destination)

    assert files(destination) == {"a.txt": "a note", "inside": "a note"}
    assert not (destination / "inside").is_symlink()
    assert set(report.skipped) == {"folder", "file", "nowhere", "store"}


def test_nothing_is_written_through_a_link(source: Path, destination: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, "b.txt", "theirs")
    write(source, "folder/a.txt", "a note")
    write(source, "b.txt", "ours")
    destination.mkdir()
    (destination / "folder").symlink_to(elsewhere)
    (destination / "b.txt").symlink_to(elsewhere / "b.txt")
    report = copy(source, destination, replace=True)

    assert files(elsewhere) == {"b.txt": "theirs"}
    assert [failure.what for failure in report.failed] == ["folder/a.txt"]
    assert (destination / "b.txt").read_text() == "ours"


def test_a_file_where_a_folder_has_to_be_fails_what_is_below(source: Path, destination: Path) -> None:
    write(source, "a/b.txt", "a note")
    write(source, "c.txt", "a note")
    write(destination, "a", "a file")
    report = copy(source, destination)

    assert [failure.what for failure in report.failed] == ["a/b.txt"]
    assert files(destination) == {"a": "a file", "c.txt": "a note"}


@pytest.mark.parametrize("path", ["../a", "a/../../b", "/a", ".tensorcas/refs/x", "a//b", ".", "a\0b"])
def test_no_path_leads_out_of_the_root_or_into_a_store(destination: Path, path: str) -> None:
    plain = LocalPlainFiles(destination)

    with pytest.raises(ValueError, match="not the path of a plain file"):
        plain.write(path, [b"x"])
    with pytest.raises(ValueError, match="not the path of a plain file"), plain.open(path):
        pass


def test_copy_of_a_plain_file_that_breaks_off_leaves_no_file(destination: Path) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        LocalPlainFiles(destination).write("a", pieces())

    assert list(destination.iterdir()) == []


def test_a_file_that_came_meanwhile_is_not_replaced(destination: Path) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        write(destination, "a", "theirs")
        yield b"ours"

    with pytest.raises(ConflictError):
        LocalPlainFiles(destination).write("a", pieces(), replace=False)

    assert files(destination) == {"a": "theirs"}


def test_a_file_that_cannot_be_read_is_told_and_one_that_is_gone_is_not(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write(source, name, name)
    plain = LocalPlainFiles(source)
    listed = list(plain.walk())
    monkeypatch.setattr(plain, "walk", lambda **_: iter(listed))
    (source / "a").unlink()
    open_file = os.open

    def broken(path, *options, **more):  # type: ignore[no-untyped-def]
        if str(path) == "b":
            raise OSError(5, "Input/output error")
        return open_file(path, *options, **more)

    monkeypatch.setattr(os, "open", broken)
    report = copy_plain(plain, LocalPlainFiles(destination))

    assert [failure.what for failure in report.failed] == ["b"]
    assert files(destination) == {"c": "c"}


def test_a_destination_that_fails_ends_the_copy(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, "a", "a")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(BackendError, match="No space left"):
        copy(source, destination)

    assert list(destination.iterdir()) == []


# --- together with a store


def stored(source: Path) -> tuple[Store, Ref]:
    """A store with a model that MLflow keeps a copy of, as under its own roots."""
    store = Store.init(source, chunk_bytes=4096)
    ref = save(store, state(1), model_id="m-1", copy_path=COPY)
    write(source, f"{MODEL}/MLmodel", "a model")
    write(source, COPY, "").write_bytes(store.manifest(ref).to_bytes())
    return store, ref


def copy_both(source: Path, destination: Path, **options: bool) -> Copied:
    store = Store.open(source)
    there = open_destination(destination, store, new_id=options.pop("new_id", False))
    return copy_all(end_of(store), there, read_source(store)[0], **options)  # type: ignore[arg-type]


def test_a_copy_of_the_same_id_has_the_same_plain_files(source: Path, destination: Path) -> None:
    store, ref = stored(source)
    copied = copy_both(source, destination)

    assert isinstance(copied.refs, CopyReport)
    assert copied.refs.n_copied == 1
    assert (destination / COPY).read_bytes() == store.manifest(ref).to_bytes()
    assert Store.open(destination).id == store.id
    assert Store.open(destination).chunk_bytes == store.chunk_bytes
    assert orphaned_refs(Store.open(destination), grace_s=0) == []


def test_in_a_store_of_another_id_mlflows_copies_of_manifests_belong_to_it(source: Path, destination: Path) -> None:
    store, ref = stored(source)
    copy_both(source, destination, new_id=True)

    there = Store.open(destination)
    manifest = Manifest.from_bytes((destination / COPY).read_bytes())
    assert manifest.store_id == there.id != store.id
    assert np.array_equal(there.read_tensors(manifest)["same"], state(1)["same"])
    assert orphaned_refs(there, grace_s=0) == []
    again = copy_both(source, destination)
    assert again.plain is not None
    assert (again.refs.n_there, again.plain.n_there, again.plain.n_copied) == (1, 2, 0)
    assert ref.copy_path == COPY


def test_a_run_whose_manifest_has_no_copy_keeps_its_folder(source: Path, destination: Path) -> None:
    store = Store.init(source, chunk_bytes=4096)
    run = "a" * 32
    save(store, state(1), run_id=run, step=1, name="", copy_path=f"{run}/artifacts/checkpoints/step-1.arrow")
    (source / ("b" * 32)).mkdir()
    copy_both(source, destination)
    (destination / ("b" * 32)).mkdir()

    assert orphaned_refs(Store.open(destination), grace_s=0) == []


def test_a_damaged_checkpoint_is_left_out_and_its_plain_files_are_copied(source: Path, destination: Path) -> None:
    store, ref = stored(source)
    damage(store, "changing", ref)
    copied = copy_both(source, destination)

    assert isinstance(copied.refs, CopyReport)
    assert len(copied.refs.failed) == 1
    assert (destination / MODEL / "MLmodel").read_text() == "a model"


def test_a_store_is_not_copied_to_itself(source: Path) -> None:
    stored(source)

    with pytest.raises(ConflictError, match="to itself"):
        copy_both(source, source)


@pytest.mark.parametrize("place", ["source/below", "."])
def test_no_store_is_made_within_or_around_the_source(source: Path, tmp_path: Path, place: str) -> None:
    stored(source)

    with pytest.raises(ConflictError, match="lies"):
        copy_both(source, tmp_path / place)


def test_a_store_in_memory_shows_no_plain_files(source: Path) -> None:
    store, _ = stored(source)
    there = end_of(new_store(like=store))

    assert copy_all(end_of(store), there, read_source(store)[0]).plain is None
    assert there.plain is None

"""Files that are not of a store, between its blobs: ignored and told by everything that looks at the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcas_mlflow.backends import FolderBackend, LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import find_strangers
from tensorcas_mlflow.layout._records import now, record_bytes
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes
from tests.store.strangers import FOLDERS, KEYS, OTHER_NAMES, fill, loads, save, use


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_that_are_not_of_the_store_change_nothing_in_a_folder(folder: str, tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    fill(backend)
    paths = [f"{folder}/{name}".lstrip("/") for name in (*KEYS, *OTHER_NAMES)]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"not of the store")
    # A folder that cannot hold blobs is named, and what lies in it is not looked at.
    use(backend, [path.removesuffix("#123") for path in paths])

    assert {(tmp_path / path).read_bytes() for path in paths} == {b"not of the store"}


@pytest.mark.parametrize("is_remote", [False, True])
def test_blobs_that_are_not_of_the_store_change_nothing(is_remote: bool) -> None:
    backend = MemoryBackend()
    backend.is_remote = is_remote
    fill(backend)
    paths = [f"{folder}/{name}".lstrip("/") for folder in FOLDERS for name in KEYS]
    for path in paths:
        backend.put_new(path, [b"not of the store"])
    use(backend, paths)

    assert {backend.get(path) for path in paths} == {b"not of the store"}


@pytest.mark.parametrize("kind", [LocalBackend, FolderBackend])
def test_all_that_a_store_writes_is_its_own(kind: type[LocalBackend], tmp_path: Path) -> None:
    backend = kind(tmp_path)

    assert find_strangers(backend) == ()
    assert loads(fill(backend)) == 5
    assert backend.has_database == (kind is FolderBackend)
    assert find_strangers(backend) == ()


def test_a_folder_of_nothing_but_strangers_is_no_store_without_its_format(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / ".DS_Store").touch()

    assert Store.init_backend(backend).checkpoints() == []


@pytest.mark.parametrize("names", [{"packs": {"x"}, "manifests": set()}, {"packs": set(), "manifests": {".DS_Store"}}])
def test_no_list_is_written_that_a_reader_would_refuse(names: dict[str, set[str]]) -> None:
    with pytest.raises(ValueError, match="not the names of packs and manifests"):
        condemned_bytes(frozenset(names["packs"]), frozenset(names["manifests"]))


def test_a_list_that_names_a_foreign_file_is_damage(tmp_path: Path) -> None:
    store = fill(LocalBackend(tmp_path))
    said = {"format": 1, "created": now(), "packs": [], "manifests": [".DS_Store"]}
    store.backend.put_new("condemned/" + "a" * 32, [record_bytes(said)])

    with pytest.raises(CorruptError, match="is no pack or manifest"):
        save(store, 2)

"""Modes of created files follow umask and folder; the names of unfinished files are not predictable."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import ExtentCache
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store

UMASKS = [0o022, 0o077, 0o002, 0o027]
RANDOM = re.compile(r"[0-9a-f]{32}")


@contextmanager
def under(umask: int) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def use(folder: Path) -> None:
    """Do in a folder whatever makes files: make a store of each kind, save, upload, delete, collect, copy."""
    use_store(folder / "database", database=True)
    use_store(folder / "files", database=False)


def use_store(folder: Path, *, database: bool) -> None:
    root = folder / "root"
    store = Store.init(root, database=database)
    for step in (1, 2):
        with store.write_checkpoint({"w": np.arange(50_000) + step}) as save:
            save.commit(RefTarget(run_id="r", step=step))
    repository = TensorCasArtifactRepository(f"tensorcas://{root}/0/artifacts")
    (folder / "in").mkdir(parents=True)
    (folder / "in/text.txt").write_text("text")
    (folder / "in/data.bin").write_bytes(bytes(99_999))
    repository.log_artifacts(str(folder / "in"), "some/where")
    store.drop(store.checkpoints()[0])
    plan_gc(store, grace_s=0, max_waste=0.0).execute()
    assert main(["copy", str(root), str(folder / "copy"), "--quiet"]) == 0


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_files_of_a_store_follow_the_umask(umask: int, tmp_path: Path) -> None:
    with under(umask):
        use(tmp_path / "all")
    made = list((tmp_path / "all").rglob("*"))

    assert {stat.S_IMODE(path.lstat().st_mode) for path in made if path.is_file()} == {0o666 & ~umask}
    assert {stat.S_IMODE(path.lstat().st_mode) for path in made if path.is_dir()} == {0o777 & ~umask}
    assert len(made) > 40


def test_folders_stay_with_the_group_that_shares_them(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    with under(0o002):
        use(shared / "all")

    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.rglob("*") if path.is_dir()} == {0o2775}
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.rglob("*") if path.is_file()} == {0o664}


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_cached_chunks_are_readable_by_their_user_alone(umask: int, tmp_path: Path) -> None:
    with under(umask):
        ExtentCache(tmp_path / "cache", max_bytes=1 << 24).put("store", "pack", [(8, b"weights" * 1000)])
    made = list((tmp_path / "cache/extents-1").rglob("*"))

    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o700}


def test_cache_file_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a file before its mode is set goes on reading it."""
    born: list[tuple[bool, int]] = []
    by_descriptor, by_path = os.fchmod, os.chmod

    def see_file(descriptor: int, mode: int) -> None:
        born.append((False, stat.S_IMODE(os.fstat(descriptor).st_mode)))
        by_descriptor(descriptor, mode)

    def see_folder(path: Any, mode: int) -> None:
        born.append((True, stat.S_IMODE(os.stat(path).st_mode)))
        by_path(path, mode)

    monkeypatch.setattr(os, "fchmod", see_file)
    monkeypatch.setattr(os, "chmod", see_folder)
    with under(0):
        ExtentCache(tmp_path / "cache", max_bytes=1 << 24).put("store", "pack", [(8, b"weights" * 1000)])

    assert {mode for is_folder, mode in born if is_folder} == {0o700}
    assert [mode for is_folder, mode in born if not is_folder] == [0o600, 0o600]  # the extents and the tally


# --- names of files under way

_opened: list[tuple[str, int]] | None = None
_is_hooked = False


def _note(event: str, facts: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(facts[0], str):
        _opened.append((facts[0], facts[2]))


@pytest.fixture
def opened() -> Iterator[list[tuple[str, int]]]:
    """Every file that is opened, and how."""
    global _opened, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_note)
        _is_hooked = True
    _opened = []
    yield _opened
    _opened = None


def test_nobody_can_know_the_name_of_a_file_under_way(tmp_path: Path, opened: list[tuple[str, int]]) -> None:
    use(tmp_path / "all")
    ours = [f"{tmp_path}/all/{kind}/{name}" for kind in ("database", "files") for name in ("root", "copy")]
    made = [Path(path).name for path, flags in opened if flags & os.O_CREAT and path.startswith(tuple(ours))]

    assert len(made) > 15
    assert [name for name in made if not RANDOM.search(name)] == []


def test_no_file_under_way_takes_the_place_of_another(tmp_path: Path, opened: list[tuple[str, int]]) -> None:
    store = Store.init(tmp_path, database=False)
    with store.write_checkpoint({"w": np.arange(50_000)}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    flags = [flags for path, flags in opened if flags & os.O_CREAT and path.startswith(f"{tmp_path}/.tensorcas")]

    assert len(flags) >= 4
    assert all(each & os.O_EXCL or (each & os.O_APPEND and each & os.O_NOFOLLOW) for each in flags)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "init": lambda folder: main(["init", str(folder)]),
    "init in a folder to be made": lambda folder: main(["init", str(folder / "a/b/c")]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_new_store_is_writable_by_its_owner_alone(name: str, tmp_path: Path) -> None:
    with under(0o022):
        assert MAKERS[name](tmp_path / "store") == 0

    assert not any(path.stat().st_mode & 0o022 for path in (tmp_path / "store").rglob("*"))

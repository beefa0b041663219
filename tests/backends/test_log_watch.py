"""A process that saves again and again learns from the kernel which logs have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorcas_mlflow.backends._log_watch import LogWatch

from tensorcas_mlflow.backends import LoggedBackend, _log_view, _log_watch, _log_writer
from tensorcas_mlflow.errors import CorruptError
from tests.backends.test_logged import commit, made

pytestmark = pytest.mark.skipif(_log_watch._library() is None, reason="this system reports no changes of files")


def watch_of(folder: Path) -> LogWatch:
    watch = LogWatch.begin(str(folder))
    assert watch is not None
    return watch


def watching(folder: Path) -> LoggedBackend:
    """A backend that has committed and watches the logs."""
    backend = LoggedBackend(folder)
    commit(backend, "mine")
    for _ in range(_log_view._WATCHED_AT):
        backend.stat("refs/@none")
    assert backend._view._watch is not None
    return backend


def others(folder: Path, n_logs: int) -> None:
    """Leave logs as other processes would."""
    backend = LoggedBackend(folder) if (folder / "logs").is_dir() else made(folder)
    for number in range(n_logs):
        commit(backend, f"other-{number}")
        # Closed, so that nobody takes it over.
        writer = _log_writer.writer_of(backend._view)
        backend._folder.mark_closed(writer.id, writer.end)
        _log_writer.close_writer(backend._view)


def test_watch_names_each_changed_file_once(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"1")
    with (tmp_path / "a").open("ab") as file:
        file.write(b"2")
    first = watch.changed()
    os.truncate(tmp_path / "b", 0)

    assert first == {"a", "b"}
    assert watch.changed() == {"b"}
    assert watch.changed() == set()


@pytest.mark.parametrize("act", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))])
def test_watch_ends_with_its_folder(act: Any, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    watch = watch_of(folder)
    act(folder)

    assert watch.changed() is None
    assert watch.changed() is None


def test_forked_child_takes_no_reports_from_its_parent(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    child = os.fork()
    if child == 0:
        os._exit(0 if watch.changed() is None else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert watch.changed() == {"a"}


def test_watch_that_is_left_to_the_end_of_a_program_ends_before_the_modules_go(tmp_path: Path) -> None:
    script = f"""
import atexit, sys
atexit.register(lambda: print(_log_watch._n_watches))
from tensorcas_mlflow.backends import _log_watch
kept = _log_watch.LogWatch.begin({str(tmp_path)!r})
print(_log_watch._n_watches)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["1", "0"]


def test_watches_of_a_process_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log_watch, "_MOST", _log_watch._n_watches + 1)
    watch = watch_of(tmp_path)

    assert LogWatch.begin(str(tmp_path)) is None
    watch.close()
    assert LogWatch.begin(str(tmp_path)) is not None


def counted(real: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return real(*args, **options)

    return call


def test_look_takes_as_many_calls_with_many_logs_as_with_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for n_logs in (3, 12):
        folder = tmp_path / str(n_logs)
        others(folder, n_logs)
        backend = watching(folder)
        calls: Counter[str] = Counter()
        with monkeypatch.context() as patch:
            for name in ("lstat", "open", "pread", "read"):
                real = getattr(os, name)
                patch.setattr(os, name, counted(real, name, calls))
            backend.stat("refs/@none")
        counts.append(calls)

    assert counts[0] == counts[1]
    assert counts[0]["lstat"] <= 4


def test_watching_process_sees_what_others_commit_and_delete(tmp_path: Path) -> None:
    others(tmp_path, 3)
    backend, other = watching(tmp_path), LoggedBackend(tmp_path)
    commit(other, "new")
    found = backend.get("refs/@new")
    other.delete("refs/@new")
    other.delete("refs/@other-1")

    assert found == b"new"
    assert backend.stat("refs/@new") is None
    assert backend.stat("refs/@other-1") is None
    assert backend._view._watch is not None


def test_watching_process_reports_damage_at_every_look(tmp_path: Path) -> None:
    others(tmp_path, 3)
    backend = watching(tmp_path)
    entry = backend._view.find("refs/@other-0")
    assert entry is not None
    os.truncate(backend._view.folder.log_path(entry.log), 100)

    for _ in range(2):
        with pytest.raises(CorruptError, match="tensorcas repair"):
            backend.stat("refs/@none")

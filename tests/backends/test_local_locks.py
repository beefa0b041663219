"""A folder is locked while a ref in it is replaced, and no longer, whoever is forked or killed meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.backends._local import _alone_in
from tensorcas_mlflow.backends._locked_file import LockedFile


def is_free(folder: Path, *, within_s: float = 5) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + within_s
    try:
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.01)
        return False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """A child that does some work and then stays."""
    child = os.fork()
    if child == 0:
        try:
            work()
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def locked_by_a_thread(folder: Path) -> Iterator[None]:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _alone_in(os.fspath(folder)):
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_a_child_forked_while_a_folder_is_locked_does_not_keep_it_locked(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with locked_by_a_thread(tmp_path):
            stack.enter_context(forked(lambda: None))

            assert not is_free(tmp_path, within_s=0.05)

        assert is_free(tmp_path)


def test_child_without_fork_hooks_does_not_keep_a_folder_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where a library forks by itself: nothing of Python's runs in the child.
    monkeypatch.setattr(LockedFile, "_held", set())
    with contextlib.ExitStack() as stack:
        with locked_by_a_thread(tmp_path):
            monkeypatch.setattr(LockedFile, "_held", set())
            stack.enter_context(forked(lambda: None))

        assert is_free(tmp_path)


def test_a_parent_killed_while_it_has_locked_a_folder_leaves_no_lock_in_its_child(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def lock_and_fork() -> None:
        with locked_by_a_thread(tmp_path), forked(lambda: None) as grandchild:
            os.write(writing, f"{grandchild}\n".encode())
            time.sleep(60)

    with forked(lock_and_fork):
        grandchild = int(os.read(reading, 100))

    try:
        assert is_free(tmp_path)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_a_ref_is_not_withdrawn_in_place_of_the_one_that_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)

    def put(data: bytes) -> None:
        token = backend.put_new(f"intents/{len(data)}", [b"intent"])
        backend.promote(f"intents/{len(data)}", "refs/@1", data, token=token, replace=True)

    put(b"old")
    old = backend.stat("refs/@1")
    assert old is not None
    replacer = threading.Thread(target=put, args=(b"newer",))
    unlink = os.unlink

    def look_away_first(path: str) -> None:
        # Between the look at the old ref and its removal somebody replaces it, as soon as that can be done.
        if path.endswith("@1"):
            replacer.start()
            replacer.join(0.3)
        unlink(path)

    monkeypatch.setattr(os, "unlink", look_away_first)
    backend.withdraw("refs/@1", old.token)
    replacer.join(10)

    assert backend.get("refs/@1") == b"newer"

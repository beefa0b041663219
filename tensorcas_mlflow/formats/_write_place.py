"""Places at which a file or folder appears when it is complete and durable, or not at all.

What is under way lies in a hidden folder beside the place, which its writer holds locked (flock(2)). The lock goes with
the process, so the next writer of the same place can tell what a dead one has left, and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tensorcas_mlflow._durable import Settled, sync_folder
from tensorcas_mlflow.errors import BackendError, ConflictError

_SUFFIX = ".tensorcas-part"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_free(out: Path, *, overwrite: re.Pattern[str] | None, is_folder: bool) -> None:
    """See that something may be written at a place.

    Args:
        out: The place.
        overwrite: None if nothing may be replaced. Else the names of the files that a folder may hold to be replaced;
            of a single file nothing is asked but that it is one.
        is_folder: Whether a folder is to be written there. An empty one is in nobody's way.

    Raises:
        ConflictError: Something is there that may not be replaced.
        BackendError: It cannot be looked at.
    """
    with _translated(out):
        _check_free(out, overwrite, is_folder)


def _check_free(out: Path, overwrite: re.Pattern[str] | None, is_folder: bool) -> None:
    try:
        found = out.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_folder:
        if stat.S_ISDIR(found.st_mode):
            raise ConflictError(f"{os.fspath(out)!r} is a folder, and a file is to be written there")
        if overwrite is None:
            raise ConflictError(f"there is already a file at {os.fspath(out)!r}: pass overwrite=True to replace it")
        return
    if not stat.S_ISDIR(found.st_mode):
        raise ConflictError(f"{os.fspath(out)!r} is a file, and a folder is to be written there")
    names = sorted(entry.name for entry in os.scandir(out))
    if names and overwrite is None:
        raise ConflictError(f"the folder {os.fspath(out)!r} is not empty: pass overwrite=True to replace it")
    for name in names:
        # Whatever a wrong path leads to must survive: only what such a write may have made is ever removed.
        if overwrite is not None and not overwrite.fullmatch(name):
            raise ConflictError(f"the folder {os.fspath(out)!r} holds {name!r} as well, and is not replaced")


@contextmanager
def appearing_at(out: Path, *, overwrite: re.Pattern[str] | None, is_folder: bool) -> Iterator[Path]:
    """Give an empty folder; what it holds takes a place when the block is over, and vanishes if it fails.

    Args:
        out: An absolute path. Folders above it are made if they are not there.
        overwrite: See `check_free`.
        is_folder: Whether the folder itself takes the place, or the one file in it that has the place's name. The
            files must be durable.

    Raises:
        ConflictError: Something is there that may not be replaced.
        BackendError: It cannot be written.
    """
    with _translated(out):
        _check_free(out, overwrite, is_folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_what_the_dead_left(out)
        staging, lock = _new_folder(out)
        try:
            yield staging
            sync_folder(staging)
            _check_free(out, overwrite, is_folder)
            _put(staging, out, is_folder=is_folder, overwrites=overwrite is not None)
            Settled().settle(os.fspath(out.parent))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)


@contextmanager
def _translated(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError("write", os.fspath(out), f"{type(error).__name__}: {error}") from error


def _put(staging: Path, out: Path, *, is_folder: bool, overwrites: bool) -> None:
    if not is_folder:
        if overwrites:
            os.replace(staging / out.name, out)
            return
        try:
            os.link(staging / out.name, out)  # refuses a name that somebody has made meanwhile
        except FileExistsError:
            raise ConflictError(
                f"there is already a file at {os.fspath(out)!r}: pass overwrite=True to replace it"
            ) from None
    elif overwrites and out.exists() and any(out.iterdir()):
        _exchange(staging, out)
    else:
        os.rename(staging, out)  # POSIX lets it take the place of an empty folder, and of nothing else


def _prefix(out: Path) -> str:
    # A name may be as long as the file system allows, and this one has to be longer.
    return f".{hashlib.blake2b(os.fsencode(out.name), digest_size=8).hexdigest()}."


def _new_folder(out: Path) -> tuple[Path, int]:
    """Make a hidden folder beside a place, and return it with the descriptor that holds its lock."""
    while True:
        staging = out.with_name(f"{_prefix(out)}{uuid.uuid4().hex}{_SUFFIX}")
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)  # somebody took it for dead before it was locked, and removes it
            continue
        except OSError:
            return staging, lock  # no locks here, so nobody can take it for dead either
        if os.fstat(lock).st_nlink > 0 and staging.exists():
            return staging, lock
        os.close(lock)


def _remove_what_the_dead_left(out: Path) -> None:
    for entry in os.scandir(out.parent):
        if not (entry.name.startswith(_prefix(out)) and entry.name.endswith(_SUFFIX)):
            continue
        with suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places, in one moment.

    Raises:
        OSError: The system or its file system cannot do it.
    """
    rename = _renameat2()
    if rename is None:
        raise OSError(errno.ENOSYS, "this system cannot replace a folder in one moment: remove it first")
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the folder cannot be replaced in one moment, remove it first: {os.strerror(code)}")


@cache
def _renameat2() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function

"""Writing tensors into files of foreign formats: first a plan with all files and sizes, then the files.

A file or folder appears at its place when it is complete and durable, or not at all. Until then it lies in a hidden
folder beside the place, which its writer holds locked (flock(2)). The lock goes with the process, so the next writer of
the same place recognises and removes what a dead one has left.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tensorcas_mlflow.base.files import Settled, sync_folder
from tensorcas_mlflow.base.progress import ByteProgress
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.base.text import check_path, count_text, size_text
from tensorcas_mlflow.errors import BackendError, ConflictError
from tensorcas_mlflow.file_formats._formats import FORMATS
from tensorcas_mlflow.file_formats._layout import Feed, FileLayout, FlatLayout
from tensorcas_mlflow.file_formats._listing import Listing, Tensors
from tensorcas_mlflow.file_formats._safetensors import (
    SHARD_FILES,
    header_to_keep,
    lay_out_again,
    lay_out_safetensors_shards,
)
from tensorcas_mlflow.file_formats._serverlessllm import SERVERLESSLLM_FILES, lay_out_serverlessllm
from tensorcas_mlflow.layout.manifests import KEPT_HEADER

FORMATS_OUT: Mapping[str, tuple[str, ...]] = {
    **{each.name: each.suffixes for each in FORMATS if each.lays_out},
    "serverlessllm": (),
}
"""The formats that can be written, and the suffixes of their files; serverlessllm is written as a folder only."""

_HEADED = ("safetensors", "bintensors")
"""Formats of a header, after its size in 8 bytes, and the tensors without gaps."""

_ANY_FILE = re.compile("")
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file, written or planned."""

    path: Path
    n_bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of a write."""

    format: str
    files: tuple[WrittenFile, ...]
    n_tensors: int
    n_bytes: int
    """Size of all files."""

    @property
    def what(self) -> str:
        """Its description."""
        return f"{count_text(self.n_tensors, 'tensor')}, {size_text(self.n_bytes)}, as {self.format}"

    def __str__(self) -> str:
        where = os.fspath(self.files[0].path) if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{self.what}: {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """Plan of a write: nothing is written yet, and all tensors and names fit the format."""

    out: Path
    """The file, or the folder of the files."""
    is_folder: bool
    result: Written
    """The result that `execute` will return."""
    _layouts: tuple[FileLayout, ...] = field(repr=False)
    _tensors: Tensors = field(repr=False)
    _overwrite: re.Pattern[str] | None = field(repr=False)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tensors that cannot be read and are not written, by name, with the file's own name of their type."""
        return self._tensors.left_out

    def __str__(self) -> str:
        return "\n".join(
            [self.result.what, *(f"  {file.path}  {size_text(file.n_bytes)}" for file in self.result.files)]
        )

    def execute(self, *, progress: ByteProgress | None = None) -> Written:
        """Write the files, reading each tensor once and holding some 16 MiB.

        The file, or the folder with all its files, appears when it is complete and durable, or not at all.

        Args:
            progress: Called with the number of tensor bytes written so far, and in all.

        Raises:
            ConflictError: Since the plan, something has appeared there that may not be replaced.
            BackendError: The file cannot be written.
            CorruptError: The source gives too few bytes of a tensor.
            TensorCasError: Any error of reading the tensors.
        """
        specs = [spec for layout in self._layouts for spec in layout.specs]
        feed = Feed(self._tensors, specs, progress)
        with appearing_at(self.out, overwrite=self._overwrite, is_folder=self.is_folder) as folder:
            for layout in self._layouts:
                with open(folder / (layout.name or self.out.name), "xb", buffering=_BUFFER_BYTES) as file:
                    layout.write(file, feed)
                    file.flush()
                    os.fsync(file.fileno())
                    assert os.fstat(file.fileno()).st_size == layout.n_bytes
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The header of the file that tensors come from: an export to its format writes it again."""

    format: str
    content: Any
    """The bytes before the first tensor; for a checkpoint, the value of `KEPT_HEADER`."""

    @classmethod
    def of(cls, file: Listing) -> FileHeader | None:
        """Take the header of a listed file; None if the file has other parts than one header and the tensors."""
        head = _head_of(file)
        return None if head is None else cls(format=file.format, content=head)

    def layout(self, specs: Sequence[Spec], metadata: Mapping[str, Any]) -> FileLayout | None:
        """Lay out the file again; None if the header is not that of these tensors."""
        if isinstance(self.content, bytes):
            return FlatLayout("", head=self.content, specs=specs)
        return lay_out_again(specs, metadata, self.content)


def metadata_to_keep(file: Listing) -> Mapping[str, Any]:
    """Return the metadata of a checkpoint that is imported from a file.

    Raises:
        ValueError: The file's own metadata has the key that is meant for its header.
    """
    if KEPT_HEADER in file.metadata:
        raise ValueError(f"the file's metadata has the key {KEPT_HEADER!r}, which is reserved: rename it")
    head = _head_of(file) if file.format == "safetensors" else None
    kept = None if head is None else header_to_keep(head, file.specs(), file.metadata)
    return file.metadata if kept is None else {**file.metadata, KEPT_HEADER: kept}


def _head_of(file: Listing) -> bytes | None:
    # A folder has other metadata, such as a model's configuration.
    has_texts = all(type(value) is str for value in file.metadata.values())
    if file.format not in _HEADED or len(file.sources) != 1 or file.left_out or not has_texts:
        return None
    first = next(iter(file.locations.values()), None)
    return bytes(file.sources[0].read(0, file.sources[0].size if first is None else first.start)) or None


def plan_write(
    tensors: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
    header: FileHeader | None = None,
) -> WritePlan:
    """Plan to write tensors into a file or folder of another format, bit for bit; read no tensor.

    Equal tensors and metadata make equal files. Safetensors and bintensors store metadata, as texts; the other formats
    store none.

    Args:
        tensors: A listing, or an open checkpoint.
        out: The file, or the folder for shards and partitions. It appears whole or not at all.
        format: One of `FORMATS_OUT`; None to take it from the suffix.
        shard_bytes: For safetensors: write a folder of shards with at most this size of tensors, and the index that
            transformers reads.
        partitions: For serverlessllm: the number of files; None for one.
        overwrite: Whether to replace a file, or a folder that holds only files of such a write. A process that has the
            old one open or mapped keeps it.
        header: The header of the file that the tensors come from, all and in order.

    Raises:
        ValueError: The format is unknown, an option belongs to another format, or the format lacks the dtypes of some
            tensors; the message names them all.
        ConflictError: Something is there that may not be replaced.
    """
    check_path(os.fspath(out))
    place = Path(os.path.abspath(out))
    kind = format_of(place, format, shard_bytes=shard_bytes, partitions=partitions)
    specs, metadata = list(tensors.specs()), tensors.metadata
    names: re.Pattern[str] | None = None
    again = header.layout(specs, metadata) if header and (kind, shard_bytes) == (header.format, None) else None
    if again is not None:
        layouts = [again]
    elif kind == "serverlessllm":
        names = SERVERLESSLLM_FILES
        layouts = lay_out_serverlessllm(specs, metadata, partitions=1 if partitions is None else partitions)
    elif shard_bytes is not None:
        names = SHARD_FILES
        layouts = lay_out_safetensors_shards(specs, metadata, shard_bytes=shard_bytes)
    else:
        layouts = next(each.lays_out for each in FORMATS if each.lays_out and each.name == kind)(specs, metadata)
    replaceable = (names or _ANY_FILE) if overwrite else None
    check_free(place, overwrite=replaceable, is_folder=names is not None)
    files = tuple(
        WrittenFile(path=place / layout.name if names else place, n_bytes=layout.n_bytes) for layout in layouts
    )
    n_bytes = sum(file.n_bytes for file in files)
    return WritePlan(
        out=place,
        is_folder=names is not None,
        result=Written(format=kind, files=files, n_tensors=len(specs), n_bytes=n_bytes),
        _layouts=tuple(layouts),
        _tensors=tensors,
        _overwrite=replaceable,
    )


def format_of(out: Path, format: str | None, *, shard_bytes: int | None = None, partitions: int | None = None) -> str:
    """Return the format to be written, and check that the options belong to it.

    Raises:
        ValueError: As `plan_write`.
    """
    if format is None:
        suffix = out.suffix.lower()
        format = next((name for name, suffixes in FORMATS_OUT.items() if suffix in suffixes), None)
    if format is None:
        format = "safetensors" if shard_bytes is not None else "serverlessllm" if partitions is not None else None
    if format is None:
        raise ValueError(
            f"the name {out.name!r} has no suffix of a format: pass format=, one of {', '.join(FORMATS_OUT)}"
        )
    if format not in FORMATS_OUT:
        raise ValueError(f"there is no format {format!r} to write: there are {', '.join(FORMATS_OUT)}")
    for option, owner, value in (("shards", "safetensors", shard_bytes), ("partitions", "serverlessllm", partitions)):
        if value is not None and format != owner:
            raise ValueError(f"{format} has no {option}, {owner} does")
        if value is not None and value < 1:
            raise ValueError(f"{option} are counted from 1, not {value}")
    return format


_SUFFIX = ".tensorcas-part"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_free(out: Path, *, overwrite: re.Pattern[str] | None, is_folder: bool) -> None:
    """Check that a place is free to be written.

    Args:
        out: The place.
        overwrite: None if nothing may be replaced. Otherwise any file may be, and a folder if all its files' names
            match.
        is_folder: Whether a folder is to be written there. An empty folder may always be replaced.

    Raises:
        ConflictError: Something is there that may not be replaced.
        BackendError: The place cannot be read.
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
        # A wrong path must do no harm: only files that such a write may have made are ever removed.
        if overwrite is not None and not overwrite.fullmatch(name):
            raise ConflictError(f"the folder {os.fspath(out)!r} holds {name!r} as well, and is not replaced")


@contextmanager
def appearing_at(out: Path, *, overwrite: re.Pattern[str] | None, is_folder: bool) -> Iterator[Path]:
    """Yield an empty folder; its content moves to the place after the block, or is removed if the block fails.

    Args:
        out: An absolute path. Missing folders above it are made.
        overwrite: See `check_free`.
        is_folder: Whether the folder itself moves there, or the file in it that has the place's name. The files must
            be durable.

    Raises:
        ConflictError: Something is there that may not be replaced.
        BackendError: The place cannot be written.
    """
    with _translated(out):
        _check_free(out, overwrite, is_folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        staging, lock = _new_folder(out)
        try:
            yield staging
            sync_folder(staging)
            _check_free(out, overwrite, is_folder)
            _publish(staging, out, is_folder=is_folder, overwrites=overwrite is not None)
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


def _publish(staging: Path, out: Path, *, is_folder: bool, overwrites: bool) -> None:
    if not is_folder:
        if overwrites:
            os.replace(staging / out.name, out)
            return
        try:
            os.link(staging / out.name, out)  # fails if the name has appeared meanwhile
        except FileExistsError:
            raise ConflictError(
                f"there is already a file at {os.fspath(out)!r}: pass overwrite=True to replace it"
            ) from None
    elif overwrites and out.exists() and any(out.iterdir()):
        _exchange(staging, out)
    else:
        os.rename(staging, out)  # POSIX: it replaces an empty folder and nothing else


def _prefix(out: Path) -> str:
    # Not the name itself: with anything added, a name of the greatest length would be too long.
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
            os.close(lock)  # another writer took it for dead before it was locked, and removes it
            continue
        except OSError:
            return staging, lock  # a file system without locks: nobody takes it for dead
        if os.fstat(lock).st_nlink > 0 and staging.exists():
            return staging, lock
        os.close(lock)


def _remove_abandoned(out: Path) -> None:
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
    """Exchange two folders atomically.

    Raises:
        OSError: The system or its file system does not support it.
    """
    rename = _renameat2()
    if rename is None:
        raise OSError(errno.ENOSYS, "this system cannot replace a folder atomically: remove it first")
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the folder cannot be replaced atomically, remove it first: {os.strerror(code)}")


@cache
def _renameat2() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function

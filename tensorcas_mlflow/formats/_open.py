"""Which format a file or a folder is in, and what it holds."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tensorcas_mlflow.containers import (
    UNREADABLE,
    is_bhckpt,
    is_bintensors,
    is_gguf,
    is_npy,
    is_pickle,
    is_safetensors,
    is_torch_legacy,
    is_zip,
)
from tensorcas_mlflow.errors import CorruptError, MalformedFileError, NoCheckpointError
from tensorcas_mlflow.formats._folder import files_named
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._read_folders import INDEX_SUFFIX, check_numbers, index_of, list_indexed, list_shards
from tensorcas_mlflow.formats._read_gguf import list_gguf
from tensorcas_mlflow.formats._read_numpy import list_npy, list_npz
from tensorcas_mlflow.formats._read_pickle import list_pickle
from tensorcas_mlflow.formats._read_serverlessllm import INDEX, list_serverlessllm
from tensorcas_mlflow.formats._read_tables import list_bhckpt, list_bintensors, list_safetensors
from tensorcas_mlflow.formats._read_torch import is_torch_archive, list_torch, list_torch_legacy
from tensorcas_mlflow.formats._source import ByteSource, LocalFile
from tensorcas_mlflow.formats._zip_directory import list_members

FORMATS_IN = ("safetensors", "torch", "npz", "npy", "pickle", "gguf", "bintensors", "bhckpt", "serverlessllm")
"""What can be read, by the names that `Listing.format` has."""

_HEAD_BYTES = 4096
_EMPTY_ZIP = b"PK\x05\x06"

_List = Callable[[ByteSource], Listing | None]


def _list_zip(source: ByteSource) -> Listing | None:
    """List a zip archive that is a torch file or has arrays; None for any other."""
    members = list_members(source)
    if is_torch_archive(members):
        return list_torch(source, members)
    if not members or any(member.name.endswith(".npy") for member in members):
        return list_npz(source, members)
    return None


# Name, test of a file's first bytes, and what lists it. Bintensors is the last one: it has no magic number.
_FILES: tuple[tuple[str, Callable[[memoryview], bool], _List], ...] = (
    ("safetensors", is_safetensors, list_safetensors),
    ("torch", is_torch_legacy, list_torch_legacy),
    ("pickle", is_pickle, list_pickle),
    ("zip", lambda head: is_zip(head) or bytes(head[:4]) == _EMPTY_ZIP, _list_zip),
    ("npy", is_npy, list_npy),
    ("gguf", is_gguf, list_gguf),
    ("bhckpt", is_bhckpt, list_bhckpt),
    ("bintensors", is_bintensors, list_bintensors),
)
_BY_SUFFIX = {
    ".safetensors": "safetensors",
    ".bt": "bintensors",
    ".bintensors": "bintensors",
    ".bckpt": "bhckpt",
    ".gguf": "gguf",
    ".npz": "npz",
    ".npy": "npy",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
}


def list_source(source: ByteSource) -> Listing | None:
    """List the tensors of one file that lies anywhere.

    Headers and directories are read, and nothing of the tensors.

    Returns:
        None for a file that begins as none of a known format does, and for zip archives without arrays.

    Raises:
        MalformedFileError: It is of a known format, and not sound.
        CorruptError: What is stored of it is damaged.
        BackendError: The storage does not give it.
    """
    head = source.read(0, min(_HEAD_BYTES, source.size))
    for name, recognizes, lists in _FILES:
        with _sound(source.name, name):
            if recognizes(head):
                return lists(source)
    return None


def open_listing(path: str | os.PathLike[str], *, format: str | None = None) -> Listing:
    """List the tensors of a file or a folder of this machine.

    Args:
        path: A file; or a folder with the shards of one checkpoint, with ``tensor_index.json`` and its files, or with
            one file; or the index of such a folder.
        format: One of `FORMATS_IN` that it must be in; None for whichever it is in.

    Returns:
        The tensors in the order of the file, of shards one after the other.

    Raises:
        ValueError: There is no such format.
        MalformedFileError: It is not sound, or in another format, or in none that is known.
        CorruptError: A file is shorter than it was a moment ago.
        BackendError: It, or one of its files, is not there, or cannot be read.
    """
    if format is not None and format not in FORMATS_IN:
        raise ValueError(f"no format is called {format!r}: there are {', '.join(FORMATS_IN)}")
    path = Path(path)
    with _sound(str(path), format or "checkpoint"):
        if path.is_dir():
            return _of_folder(path, format)
        if path.name == INDEX and format in (None, "serverlessllm"):
            return list_serverlessllm(path.parent)
        if path.name.endswith(INDEX_SUFFIX):
            kind = "safetensors" if path.name.endswith(".safetensors" + INDEX_SUFFIX) else "torch"
            return list_indexed(path.parent, path.name, kind, partial(_of_file, format=kind))
        return _of_file(LocalFile(path), format)


def _of_file(file: LocalFile, format: str | None) -> Listing:
    listing = list_source(file)
    if listing is not None and format in (None, listing.format):
        return listing
    wanted = format or _BY_SUFFIX.get(Path(file.name).suffix.lower(), "")
    if listing is None and wanted:
        # It seems to be in none: say what is wrong with it, rather than that.
        with _sound(file.name, wanted):
            next(lists for name, _, lists in _FILES if name == {"npz": "zip"}.get(wanted, wanted))(file)
    if listing is not None:
        raise MalformedFileError(file.name, wanted, f"it is a file of {listing.format}")
    if not file.size:
        raise MalformedFileError(file.name, wanted or "tensor", "it is empty")
    kinds = "no such file" if wanted else f"none of {', '.join(name for name in FORMATS_IN if name != 'serverlessllm')}"
    raise MalformedFileError(file.name, wanted or "tensor", f"it begins as {kinds} does")


def _of_folder(folder: Path, format: str | None) -> Listing:
    if format in (None, "serverlessllm") and (folder / INDEX).is_file():
        return list_serverlessllm(folder)
    for kind, suffix, usual in (("safetensors", ".safetensors", ""), ("torch", ".bin", "pytorch_model.bin")):
        if format not in (None, kind):
            continue
        index = index_of(folder, suffix)
        if index is not None:
            return list_indexed(folder, index, kind, partial(_of_file, format=kind))
        names = [name for name in files_named(folder, suffix) if name == usual or not usual]
        if names:
            check_numbers(names)
            return list_shards(folder, names, kind, partial(_of_file, format=kind))
    reason = f"it is a folder that holds no checkpoint in {format or 'a known format'}"
    raise NoCheckpointError(str(folder), format or "checkpoint", reason)


@contextlib.contextmanager
def _sound(path: str, format: str) -> Iterator[None]:
    """Say of what reading ends in that the file is to blame, where it is."""
    try:
        yield
    except (CorruptError, MalformedFileError):
        raise
    except (*UNREADABLE, zlib.error) as error:
        raise MalformedFileError(path, format, str(error)) from error

"""Which format a file or a folder is in, and what it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tensorcas_mlflow.containers import (
    UNREADABLE,
    is_bhckpt,
    is_bintensors,
    is_checkpoint_file,
    is_gguf,
    is_npy,
    is_onnx,
    is_pickle,
    is_safetensors,
    is_torch_legacy,
    is_xgboost,
    is_zip,
)
from tensorcas_mlflow.errors import CorruptError, MalformedFileError, NewerFormatError, NoCheckpointError
from tensorcas_mlflow.formats._folder import file_in, files_named
from tensorcas_mlflow.formats._listing import OTHER_FILE, Listing
from tensorcas_mlflow.formats._read_dcp import METADATA, SUFFIX, is_dcp, list_dcp
from tensorcas_mlflow.formats._read_folders import INDEX_SUFFIX, check_numbers, index_of, list_indexed, list_shards
from tensorcas_mlflow.formats._read_gguf import list_gguf
from tensorcas_mlflow.formats._read_numpy import list_npy, list_npz
from tensorcas_mlflow.formats._read_onnx import list_onnx
from tensorcas_mlflow.formats._read_pickle import list_pickles, walk
from tensorcas_mlflow.formats._read_pt2 import is_pt2, list_pt2
from tensorcas_mlflow.formats._read_self_contained import list_self_contained
from tensorcas_mlflow.formats._read_serverlessllm import INDEX, list_serverlessllm
from tensorcas_mlflow.formats._read_skops import is_skops, list_skops
from tensorcas_mlflow.formats._read_tables import list_bhckpt, list_bintensors, list_safetensors
from tensorcas_mlflow.formats._read_torch import is_torch_archive, list_torch, list_torch_legacy
from tensorcas_mlflow.formats._read_torchscript import is_torchscript, list_torchscript
from tensorcas_mlflow.formats._read_xgboost import list_xgboost
from tensorcas_mlflow.formats._source import Beside, ByteSource, LocalFile
from tensorcas_mlflow.formats._zip_directory import list_members

FORMATS_IN = (
    *("safetensors", "torch", "pt2", "dcp", "npz", "npy", "pickle", "skops", "xgboost", "onnx"),
    *("gguf", "bintensors", "bhckpt", "serverlessllm", "self-contained"),
)
"""What can be read, by the names that `Listing.format` has."""

_HEAD_BYTES = 4096
_EMPTY_ZIP = b"PK\x05\x06"

_List = Callable[[ByteSource, Beside | None], Listing | None]


def _alone(lists: Callable[[ByteSource], Listing | None]) -> _List:
    """Make of what lists a file by itself what may look at the files beside it."""
    return lambda source, beside: lists(source)


def _list_zip(source: ByteSource) -> Listing | None:
    """List a zip archive that is a torch file or has arrays; None for any other."""
    members = list_members(source)
    if is_pt2(members):
        return list_pt2(source, members)
    if is_torchscript(members):
        return list_torchscript(source, members)
    if is_skops(members):
        return list_skops(source, members)
    if is_torch_archive(members):
        return list_torch(source, members)
    if not members or any(member.name.endswith(".npy") for member in members):
        return list_npz(source, members)
    return None


def _list_pickle(source: ByteSource, beside: Beside | None) -> Listing | None:
    machines = walk(source)
    return list_dcp(source, machines[0], beside, list_source) if is_dcp(machines) else list_pickles(source, machines)


# Name, test of a file's first bytes, and what lists it; the first whose test passes is taken, and the last ones have no
# magic number.
_FILES: tuple[tuple[str, Callable[[memoryview], bool], _List], ...] = (
    ("self-contained", is_checkpoint_file, _alone(list_self_contained)),
    ("safetensors", is_safetensors, _alone(list_safetensors)),
    ("torch", is_torch_legacy, _alone(list_torch_legacy)),
    ("pickle", is_pickle, _list_pickle),
    ("zip", lambda head: is_zip(head) or bytes(head[:4]) == _EMPTY_ZIP, _alone(_list_zip)),
    ("npy", is_npy, _alone(list_npy)),
    ("gguf", is_gguf, _alone(list_gguf)),
    ("bhckpt", is_bhckpt, _alone(list_bhckpt)),
    ("xgboost", is_xgboost, _alone(list_xgboost)),
    ("bintensors", is_bintensors, _alone(list_bintensors)),
    ("onnx", is_onnx, list_onnx),
)
_BY_SUFFIX = {
    ".safetensors": "safetensors",
    ".bt": "bintensors",
    ".bintensors": "bintensors",
    ".bckpt": "bhckpt",
    ".gguf": "gguf",
    ".pt2": "pt2",
    ".npz": "npz",
    ".npy": "npy",
    ".onnx": "onnx",
    ".pkl": "pickle",
    ".pickle": "pickle",
    ".joblib": "pickle",
    ".skops": "skops",
    ".ubj": "xgboost",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
}


_IN_FILES = {"npz": "zip", "pt2": "zip", "skops": "zip", "dcp": "pickle"}
"""Formats that are listed as others are."""


def list_source(source: ByteSource, beside: Beside | None = None) -> Listing | None:
    """List the tensors of one file that lies anywhere.

    Headers and directories are read, and nothing of the tensors.

    Args:
        source: The file.
        beside: Opens the files beside it that it names, by their names.

    Returns:
        None for a file that begins as none of a known format does, and for zip archives without arrays.

    Raises:
        MalformedFileError: It is of a known format, and not sound.
        CorruptError: What is stored of it is damaged.
        BackendError: The storage does not give it.
    """
    if source.name.endswith(SUFFIX):
        raise MalformedFileError(
            source.name,
            "checkpoint",
            f"it is one of several files of a checkpoint: open its folder, or {METADATA} in it",
        )
    head = source.read(0, min(_HEAD_BYTES, source.size))
    for name, recognizes, lists in _FILES:
        with _sound(source.name, name):
            if recognizes(head):
                return lists(source, beside)
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
            listing = _of_folder(path, format)
            return dataclasses.replace(listing, left_out={**listing.left_out, **_other_files(path, listing)})
        if path.name == INDEX and format in (None, "serverlessllm"):
            return list_serverlessllm(path.parent)
        if path.name.endswith(INDEX_SUFFIX):
            kind = "safetensors" if path.name.endswith(".safetensors" + INDEX_SUFFIX) else "torch"
            return list_indexed(path.parent, path.name, kind, partial(_of_file, format=kind))
        return _of_file(LocalFile(path), format)


def _beside(folder: Path) -> Beside:
    return lambda name: LocalFile(file_in(folder, name))


def _of_file(file: LocalFile, format: str | None) -> Listing:
    listing = list_source(file, _beside(Path(file.name).parent))
    if listing is not None and format in (None, listing.format):
        return listing
    wanted = format or _BY_SUFFIX.get(Path(file.name).suffix.lower(), "")
    if listing is None and wanted:
        # It seems to be in none: say what is wrong with it, rather than that.
        with _sound(file.name, wanted):
            next(lists for name, _, lists in _FILES if name == _IN_FILES.get(wanted, wanted))(file, None)
    if listing is not None:
        raise MalformedFileError(file.name, wanted, f"it is a file of {listing.format}")
    if not file.size:
        raise MalformedFileError(file.name, wanted or "tensor", "it is empty")
    kinds = "no such file" if wanted else f"none of {', '.join(name for name in FORMATS_IN if name != 'serverlessllm')}"
    raise MalformedFileError(file.name, wanted or "tensor", f"it begins as {kinds} does")


def _of_folder(folder: Path, format: str | None) -> Listing:
    if format in (None, "serverlessllm") and (folder / INDEX).is_file():
        return list_serverlessllm(folder)
    if format in (None, "dcp") and (folder / METADATA).is_file():
        return _of_file(LocalFile(folder / METADATA), format)
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


def _other_files(folder: Path, listing: Listing) -> dict[str, str]:
    """Name the files of a folder that may hold tensors and are not of its checkpoint: an optimizer's, for example."""
    # The hub's snapshots are links to files of other names.
    taken = {os.path.realpath(source.name) for source in listing.sources}
    names = (name for name in files_named(folder, "") if Path(name).suffix.lower() in _BY_SUFFIX)
    return {name: OTHER_FILE for name in names if os.path.realpath(folder / name) not in taken}


@contextlib.contextmanager
def _sound(path: str, format: str) -> Iterator[None]:
    """Say of what reading ends in that the file is to blame, where it is."""
    try:
        yield
    except (CorruptError, MalformedFileError, NewerFormatError):
        raise
    except (*UNREADABLE, zlib.error) as error:
        raise MalformedFileError(path, format, str(error)) from error

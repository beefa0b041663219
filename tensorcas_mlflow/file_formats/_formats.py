"""The table of all file formats, and the functions that recognise a file and hand it to its format."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.file_formats._archives import is_archive, list_archive, split_archive
from tensorcas_mlflow.file_formats._beside import FilePlace, locations_beside, split_described
from tensorcas_mlflow.file_formats._bhckpt import is_bhckpt, list_bhckpt, split_bhckpt
from tensorcas_mlflow.file_formats._bintensors import (
    is_bintensors,
    lay_out_bintensors,
    list_bintensors,
    split_bintensors,
)
from tensorcas_mlflow.file_formats._dcp import DCP_METADATA, DCP_SUFFIX
from tensorcas_mlflow.file_formats._deflated import is_compressed, split_compressed
from tensorcas_mlflow.file_formats._flax import is_flax, list_flax, split_flax
from tensorcas_mlflow.file_formats._folders import list_folder, list_index
from tensorcas_mlflow.file_formats._gguf import is_gguf, list_gguf, split_gguf
from tensorcas_mlflow.file_formats._hdf5 import is_hdf5, list_hdf5, split_hdf5
from tensorcas_mlflow.file_formats._layout import FileLayout
from tensorcas_mlflow.file_formats._listing import OTHER_FILE, Listing
from tensorcas_mlflow.file_formats._mat import is_mat, list_mat, split_mat
from tensorcas_mlflow.file_formats._numpy import is_npy, lay_out_npz, list_npy, split_npy
from tensorcas_mlflow.file_formats._onnx import is_onnx, list_onnx, split_onnx
from tensorcas_mlflow.file_formats._parquet import is_parquet, split_parquet
from tensorcas_mlflow.file_formats._pickle import is_pickle, list_pickle, split_pickle
from tensorcas_mlflow.file_formats._safetensors import (
    is_safetensors,
    lay_out_safetensors,
    list_safetensors,
    split_safetensors,
)
from tensorcas_mlflow.file_formats._self_contained import is_self_contained, list_self_contained, split_self_contained
from tensorcas_mlflow.file_formats._source import ByteSource, LocalFile, OpenSibling, blaming, file_in, files_named
from tensorcas_mlflow.file_formats._tape import (
    UNREADABLE,
    DerivedBytes,
    FilePart,
    Learned,
    PlainBytes,
    Skeleton,
    Tape,
    TapePart,
    Tensor,
)
from tensorcas_mlflow.file_formats._tar import is_tar, list_tar, split_tar
from tensorcas_mlflow.file_formats._tensorflow import is_tensorflow, list_tensorflow
from tensorcas_mlflow.file_formats._torch import is_torch_legacy, lay_out_torch, list_torch_legacy, split_torch_legacy
from tensorcas_mlflow.file_formats._xgboost import is_xgboost, list_xgboost, split_xgboost
from tensorcas_mlflow.layout.manifests import Manifest

_log = logging.getLogger(__name__)

_HEAD_BYTES = 4096
_REST_BYTES = 16 << 20
_MANIFEST_BYTES = 64 << 10


def _never(head: memoryview) -> bool:
    return False


class FileFormat(NamedTuple):
    """One line of the table: a format's name, and its functions."""

    name: str
    """Value of `Listing.format`."""
    recognizes: Callable[[memoryview], bool] = _never
    """Tests a file's first bytes."""
    splits: Callable[..., Iterator[FilePart | Learned]] | None = None
    """A `Splitter`; one of `_CONTAINERS` gets a `SplitMember`, too."""
    lists: Callable[..., Listing | None] | None = None
    """Lists a `ByteSource`. One of `_WITH_SIBLINGS` gets an `OpenSibling`, one of `_CONTAINERS` a `ListMember`. None:
    nothing to list."""
    suffixes: tuple[str, ...] = ()
    """Usual suffixes of its files, in lower case."""
    lays_out: Callable[[Sequence[Spec], Mapping[str, Any]], list[FileLayout]] | None = None
    """Lays out one file from specs and metadata."""
    within: str = ""
    """Name of the line that recognises, splits and lists files of this format."""


FORMATS = (
    FileFormat("self-contained", is_self_contained, split_self_contained, list_self_contained),
    # Before pickles: a safetensors header may have a length that looks like a pickle.
    FileFormat(
        "safetensors", is_safetensors, split_safetensors, list_safetensors, (".safetensors",), lay_out_safetensors
    ),
    FileFormat("torch", is_torch_legacy, split_torch_legacy, list_torch_legacy),
    FileFormat("pickle", is_pickle, split_pickle, list_pickle, (".pkl", ".pickle", ".joblib")),
    FileFormat("zip", is_archive, split_archive, list_archive, (".keras", ".mar")),
    FileFormat("npy", is_npy, split_npy, list_npy, (".npy",)),
    FileFormat("gguf", is_gguf, split_gguf, list_gguf, (".gguf",)),
    # Before HDF5, which may begin behind 512 other bytes.
    FileFormat("tar", is_tar, split_tar, list_tar, (".tar", ".nemo")),
    FileFormat("hdf5", is_hdf5, split_hdf5, list_hdf5, (".h5", ".hdf5")),
    FileFormat("bhckpt", is_bhckpt, split_bhckpt, list_bhckpt, (".bckpt",)),
    FileFormat("xgboost", is_xgboost, split_xgboost, list_xgboost, (".ubj",)),
    FileFormat("mat", is_mat, split_mat, list_mat, (".mat",)),
    FileFormat("tensorflow", is_tensorflow, None, list_tensorflow),
    # Last: these have no magic number.
    FileFormat(
        "bintensors", is_bintensors, split_bintensors, list_bintensors, (".bt", ".bintensors"), lay_out_bintensors
    ),
    FileFormat("onnx", is_onnx, split_onnx, list_onnx, (".onnx",)),
    FileFormat("flax", is_flax, split_flax, list_flax, (".msgpack",)),
    # Told from others by the members of an archive, by a pickle, or by the files of a folder.
    FileFormat("torch", suffixes=(".pt", ".pth", ".bin", ".ckpt"), lays_out=lay_out_torch, within="zip"),
    FileFormat("pt2", suffixes=(".pt2",), within="zip"),
    FileFormat("npz", suffixes=(".npz",), lays_out=lay_out_npz, within="zip"),
    FileFormat("skops", suffixes=(".skops",), within="zip"),
    FileFormat("dcp", within="pickle"),
    FileFormat("serverlessllm", within="folder"),
)
"""All formats. The first line that recognises a file gets it."""

FORMATS_IN = tuple(dict.fromkeys(each.name for each in FORMATS))
"""Names of the formats that can be read."""
_BY_SUFFIX = {suffix: each.name for each in FORMATS for suffix in each.suffixes}
_WITH_SIBLINGS = (list_pickle, list_onnx, list_tensorflow)
"""Listers that open the files beside a file."""
_CONTAINERS = (split_archive, list_archive, split_tar, list_tar)
"""Functions of archives, which take members of other formats apart and list them."""
_MAX_NESTING = 3


def split(tape: Tape, place: FilePlace | None = None) -> Iterator[FilePart | Learned]:
    """Take a file of any format apart.

    Args:
        tape: The file.
        place: Its place, if known: other files of the folder may describe raw tensors.

    Yields:
        The parts in order, to the very end of the file. The caller takes each part's bytes from the tape before it asks
        for the next part; the tape has fewer bytes than a part announces only where the file ends.
    """
    yield from _split_as(_format_of(tape.peek(_HEAD_BYTES)), tape, 0, place)


def _split_as(
    found: FileFormat | None, tape: Tape, depth: int, place: FilePlace | None = None
) -> Iterator[FilePart | Learned]:
    """Take a file of a format apart; see `split`.

    Args:
        found: Its format; None if it is unknown.
        tape: The file.
        depth: Number of archives around it.
        place: See `split`.
    """
    head = tape.peek(_HEAD_BYTES)
    splits = None if found is None else found.splits
    if found is None and is_parquet(head):
        splits = split_parquet
    elif found is None and place is not None and len(head) == _HEAD_BYTES and (locations := locations_beside(place)):
        splits = partial(split_described, locations=locations)
    if found is None and splits is None and is_compressed(head) and depth < _MAX_NESTING:
        splits = partial(split_compressed, split_content=partial(_split_content, depth))
    if splits is not None:
        try:
            parts = splits(tape, partial(_split_member, depth)) if splits in _CONTAINERS else splits(tape)
            for part in parts:
                if tape.is_at_end() and not isinstance(part, Learned):
                    break  # the header announces more bytes than the file has
                yield part
        except UNREADABLE as error:
            name = "raw" if found is None else found.name
            _log.debug("malformed %s file, plain bytes from byte %d on: %s", name, tape.position, error)
    is_text = tape.position == 0 and _is_text(head)
    while not tape.is_at_end():
        yield Skeleton(n_bytes=_REST_BYTES) if is_text else PlainBytes(n_bytes=_REST_BYTES)


def _split_content(depth: int, content: Tape, n_bytes: int) -> Iterator[FilePart | Learned]:
    """Take the content of a compressed file apart."""
    return _split_as(_format_of(content.peek(_HEAD_BYTES)), content, depth + 1)


def _split_member(depth: int, tape: Tape, n_bytes: int) -> Iterator[FilePart | Learned] | None:
    """Take a member of an archive apart; see `SplitMember`."""
    member = TapePart(tape, n_bytes)
    head = member.peek(_HEAD_BYTES)
    found = _format_of(head)
    if (found is None and not _is_text(head) and not is_parquet(head)) or depth >= _MAX_NESTING:
        return None
    return _within(member, _split_as(found, member, depth + 1))


def _within(member: TapePart, parts: Iterator[FilePart | Learned]) -> Iterator[FilePart | Learned]:
    """Cut parts off where their member ends."""
    for part in parts:
        if isinstance(part, Learned | DerivedBytes) or part.n_bytes <= member.n_left:
            yield part
        elif isinstance(part, Tensor):
            yield dataclasses.replace(part, n_bytes=member.n_left, dtype=None, shape=None, cuts=None)
        else:
            yield dataclasses.replace(part, n_bytes=member.n_left)


def _format_of(head: memoryview) -> FileFormat | None:
    return next((each for each in FORMATS if each.recognizes(head)), None)


def _is_text(head: memoryview) -> bool:
    """Tell whether a file begins with valid UTF-8, perhaps cut off in a character, and no NUL."""
    data = bytes(head)
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(head) == _HEAD_BYTES and error.start > len(data) - 4
    return True


def list_source(source: ByteSource, beside: OpenSibling | None = None) -> Listing | None:
    """List the tensors of one file of any format, on this machine or in a store.

    Only headers and directories are read, no tensor.

    Args:
        source: The file.
        beside: Opens files beside it, by the names that it gives.

    Returns:
        None for a file of an unknown format, and for a zip archive or a pickle without arrays.

    Raises:
        MalformedFileError: The file is of a known format, and malformed.
        CorruptError: Its stored bytes are damaged.
        BackendError: The storage does not give them.
    """
    if source.name.endswith(DCP_SUFFIX):
        raise MalformedFileError(
            source.name,
            "checkpoint",
            f"it is one of several files of a checkpoint: open its folder, or {DCP_METADATA} in it",
        )
    found = _format_of(source.read(0, min(_HEAD_BYTES, source.size)))
    return None if found is None else _list_as(found, source, beside)


def _list_as(format: FileFormat, source: ByteSource, beside: OpenSibling | None, depth: int = 0) -> Listing | None:
    assert format.lists is not None
    with blaming(source.name, format.name):
        if format.lists in _CONTAINERS:
            return format.lists(source, partial(_list_member, depth))
        return format.lists(source, beside) if format.lists in _WITH_SIBLINGS else format.lists(source)


def _list_member(depth: int, source: ByteSource) -> Listing | str | None:
    """List a member of an archive; see `ListMember`."""
    head = source.read(0, min(_HEAD_BYTES, source.size))
    found = _format_of(head)
    if found is None:
        return None if _is_text(head) else "of an unknown format"
    if depth >= _MAX_NESTING:
        return "archives within archives"
    return _list_as(found, source, None, depth + 1)


def open_listing(path: str | os.PathLike[str], *, format: str | None = None) -> Listing:
    """List the tensors of a file or a folder of this machine.

    Args:
        path: A file; or a folder with the shards of one checkpoint, with ``tensor_index.json`` and its files, or with
            one file; or the index of such a folder.
        format: The required format, one of `FORMATS_IN`; None for any.

    Returns:
        The tensors in the order of the file, of shards one after the other.

    Raises:
        ValueError: There is no such format.
        MalformedFileError: The file is malformed, of another format, or of none that is known.
        CorruptError: A file has been truncated since it was opened.
        BackendError: A file is missing or cannot be read.
    """
    if format is not None and format not in FORMATS_IN:
        raise ValueError(f"no format is called {format!r}: there are {', '.join(FORMATS_IN)}")
    path = Path(path)
    with blaming(str(path), format or "checkpoint"):
        if os.path.isdir(path):  # Path.is_dir raises if the name is too long
            listing = list_folder(path, format, _list_file)
            return dataclasses.replace(listing, left_out={**listing.left_out, **_other_files(path, listing)})
        return list_index(path, format, _list_file) or _list_file(LocalFile(path), format)


def _list_file(file: LocalFile, format: str | None) -> Listing:
    folder = Path(file.name).parent
    listing = list_source(file, lambda name: LocalFile(file_in(folder, name)))
    if listing is not None and format in (None, listing.format):
        return listing
    wanted = format or _BY_SUFFIX.get(Path(file.name).suffix.lower(), "")
    if listing is None and wanted:
        # The file seems to be of no format. Its own format knows better what is wrong with it.
        line = next(each for each in FORMATS if each.name == wanted)
        line = next((each for each in FORMATS if each.lists and each.name == line.within), line)
        if line.lists is not None:
            _list_as(line._replace(name=wanted), file, None)
    if listing is not None:
        raise MalformedFileError(file.name, wanted, f"it is a file of {listing.format}")
    if not file.size:
        raise MalformedFileError(file.name, wanted or "tensor", "it is empty")
    if Manifest.looks_like(bytes(file.read(0, min(_MANIFEST_BYTES, file.size)))):
        reason = "it is the manifest of a checkpoint in a store, and holds no tensors: open or export the checkpoint"
        raise MalformedFileError(file.name, wanted or "tensor", reason)
    kinds = "no such file" if wanted else f"none of {', '.join(name for name in FORMATS_IN if name != 'serverlessllm')}"
    raise MalformedFileError(file.name, wanted or "tensor", f"it begins as {kinds} does")


def _other_files(folder: Path, listing: Listing) -> dict[str, str]:
    """Name the files of a folder that may hold tensors outside of its checkpoint: an optimizer's, for example."""
    # The hub's snapshots are links to files of other names.
    taken = {os.path.realpath(source.name) for source in listing.sources}
    names = (name for name in files_named(folder, "") if Path(name).suffix.lower() in _BY_SUFFIX)
    return {name: OTHER_FILE for name in names if os.path.realpath(folder / name) not in taken}

"""Files of raw tensors, described by another file of their folder.

Such a file has no header. The external data of an ONNX model is described by the model; a data file of TensorFlow's
variables, by their index. The description is read in the folder where both files lie: a folder of this machine, or one
of a store's artifacts. It may be wrong, or of another version of the file: then the store finds fewer equal chunks, and
loses no byte.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from tensorcas_mlflow.errors import FormatError, TensorCasError
from tensorcas_mlflow.file_formats._headers import tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import TensorLocation
from tensorcas_mlflow.file_formats._onnx import list_onnx
from tensorcas_mlflow.file_formats._source import ByteSource, LocalFile, file_in, files_named
from tensorcas_mlflow.file_formats._tape import UNREADABLE, FilePart, PlainBytes, Tape
from tensorcas_mlflow.file_formats._tensorflow import TENSORFLOW_INDEX, list_tensorflow

_OF_TENSORFLOW = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")
_MAX_MODELS = 8
"""Number of ONNX models of a folder that are read for the description of a file."""
_MAX_MODEL_BYTES = 2 << 30
"""Greatest size of a message in protobuf."""
_MAX_TENSORS = 100_000
"""Number of tensors of a description that is used: what it says of them is held in memory for the other files."""
_ANY_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class Description:
    """A file that may describe others of its folder; equal to another one of the same stamp."""

    name: str
    stamp: Hashable
    """Value that changes with the file's content."""
    open: Callable[[], ByteSource] = field(compare=False)


class Folder(ABC):
    """A folder with files that may describe each other.

    The methods raise a `TensorCasError` or an OSError if the folder or a file cannot be read.
    """

    @abstractmethod
    def names(self, suffix: str) -> list[str]:
        """List the names of files with a suffix, sorted."""

    @abstractmethod
    def find(self, name: str) -> Description:
        """Find a file by its name."""


class LocalFolder(Folder):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self, suffix: str) -> list[str]:
        return files_named(self._path, suffix)

    def find(self, name: str) -> Description:
        path = file_in(self._path, name)
        status = path.stat()
        return Description(name, (str(path), status.st_size, status.st_mtime_ns), partial(LocalFile, path))


class FilePlace(NamedTuple):
    """Place of a file."""

    folder: Folder
    name: str

    @classmethod
    def of(cls, path: Path) -> FilePlace:
        """Return the place of a file of this machine."""
        path = path.absolute()
        return cls(LocalFolder(path.parent), path.name)


def locations_beside(place: FilePlace) -> list[TensorLocation]:
    """Return the tensors that another file of the folder describes in this one.

    Returns:
        Tensors in C order, by position. No two share a byte. There are none if no file describes this one.
    """
    folder, name = place
    match = _OF_TENSORFLOW.fullmatch(name)
    try:
        names = [f"{match[1]}{TENSORFLOW_INDEX}"] if match is not None else folder.names(".onnx")[:_MAX_MODELS]
    except (OSError, TensorCasError):
        return []
    return next(filter(None, (_located(folder, each, name) for each in names)), [])


def _located(folder: Folder, description: str, name: str) -> list[TensorLocation]:
    """Return the tensors that one file of the folder describes in another; none if it cannot be read."""
    try:
        described = _described(folder.find(description)).get(name, [])
    except (OSError, TensorCasError):
        return []
    found: list[TensorLocation] = []
    for location in sorted(described, key=lambda each: (each.start, each.n_bytes)):
        # Tied weights are described twice.
        if location.is_plain and (not found or found[-1].start + found[-1].n_bytes <= location.start):
            found.append(location)
    return found


@lru_cache(maxsize=_MAX_MODELS)
def _described(description: Description) -> dict[str, list[TensorLocation]]:
    """Return the tensors that a file describes, by the names of their files; none if it is malformed or too long.

    A folder may have a file for each tensor, so the result is remembered. It keeps no file open.
    """
    source = description.open()
    found: dict[str, list[TensorLocation]] = {}
    if source.size > _MAX_MODEL_BYTES:
        return found
    lists = list_tensorflow if description.name.endswith(TENSORFLOW_INDEX) else list_onnx
    try:
        listing = lists(source, _Unopened)
    except UNREADABLE:
        return found
    if len(listing.locations) > _MAX_TENSORS:
        return found
    for location in listing.locations.values():
        found.setdefault(listing.sources[location.source].name, []).append(location)
    return found


class _Unopened(ByteSource):
    """A file that a description names; nobody reads it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = _ANY_SIZE

    def read_into(self, start: int, out: memoryview) -> None:
        raise FormatError(f"{self.name[:80]!r} is not open")


def split_described(tape: Tape, locations: Sequence[TensorLocation]) -> Iterator[FilePart]:
    """Announce tensors and the plain bytes between them."""
    for location in locations:
        if location.start > tape.position:
            yield PlainBytes(n_bytes=location.start - tape.position)
        spec = location.spec
        yield from tensor_or_skeleton(location.n_bytes, spec.name, spec.dtype, spec.shape)

"""Files of raw tensors, described by another file of their folder.

Such a file has no header. The external data of an ONNX model is described by the model; a data file of TensorFlow's
variables, by their index. The description is read where both files lie on this machine. It may be wrong, or of another
version of the file: then the store finds fewer equal chunks, and loses no byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from tensorcas_mlflow.errors import BackendError, FormatError
from tensorcas_mlflow.file_formats._headers import tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import TensorLocation
from tensorcas_mlflow.file_formats._onnx import list_onnx
from tensorcas_mlflow.file_formats._source import ByteSource, LocalFile, file_in, files_named
from tensorcas_mlflow.file_formats._tape import UNREADABLE, FilePart, PlainBytes, Tape
from tensorcas_mlflow.file_formats._tensorflow import TENSORFLOW_INDEX, list_tensorflow

_OF_TENSORFLOW = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")
_MIN_BYTES = 4096
"""A smaller file is not worth a look beside it."""
_MAX_MODELS = 8
"""Number of ONNX models of a folder that are read for the description of a file."""
_MAX_MODEL_BYTES = 2 << 30
"""Greatest size of a message in protobuf."""
_ANY_SIZE = 1 << 62


def locations_beside(path: Path) -> list[TensorLocation]:
    """Return the tensors that another file of the folder describes in this one.

    Args:
        path: A file of this machine.

    Returns:
        Tensors in C order, by position. No two share a byte. There are none if no file describes this one.
    """
    try:
        path = path.absolute()
        if path.stat().st_size < _MIN_BYTES:
            return []
        match = _OF_TENSORFLOW.fullmatch(path.name)
        if match is not None:
            return _located(file_in(path.parent, f"{match[1]}{TENSORFLOW_INDEX}"), path)
        for name in files_named(path.parent, ".onnx")[:_MAX_MODELS]:
            found = _located(file_in(path.parent, name), path)
            if found:
                return found
    except (OSError, BackendError, *UNREADABLE):
        pass
    return []


def _located(description: Path, path: Path) -> list[TensorLocation]:
    status = description.stat()
    if status.st_size > _MAX_MODEL_BYTES:
        return []
    described = _described(str(description), status.st_size, status.st_mtime_ns).get(path.name, [])
    found: list[TensorLocation] = []
    for location in sorted(described, key=lambda each: (each.start, each.n_bytes)):
        # Tied weights are described twice.
        if location.is_plain and (not found or found[-1].start + found[-1].n_bytes <= location.start):
            found.append(location)
    return found


@lru_cache(maxsize=_MAX_MODELS)
def _described(path: str, size: int, modified_ns: int) -> dict[str, list[TensorLocation]]:
    """Return the tensors that a file describes, by the names of their files.

    A folder may have a file for each tensor, so the result is remembered. It keeps no file open.
    """
    lists = list_tensorflow if path.endswith(TENSORFLOW_INDEX) else list_onnx
    listing = lists(LocalFile(path), _Unopened)
    found: dict[str, list[TensorLocation]] = {}
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

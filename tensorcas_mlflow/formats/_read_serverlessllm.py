"""Folders of ServerlessLLM, and of Tensora: an index, and the files that it names by number.

Sources: ``sllm_store/torch.py`` and ``csrc/checkpoint`` of https://github.com/ServerlessLLM/ServerlessLLM, and
``src/formats/serverlessllm`` of https://github.com/botirk38/tensora. ``tensor_index.json`` maps a tensor's name to
offset, size, shape, strides in elements, dtype and number; the bytes are in ``tensor.data_<number>``.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorcas_mlflow.containers import JSON_SPACE, JSON_TEXT, dtype_called, entries, item_bytes, strict_json, whole
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import is_c_order
from tensorcas_mlflow.formats._folder import file_in
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import LocalFile

INDEX = "tensor_index.json"
_MAX_INDEX_BYTES = 256 << 20
_MAX_FILES = 1 << 16

_NUMBERS = rb"[^][{}]{0,2048}+"
_ENTRY = re.compile(
    JSON_SPACE
    + rb"(" + JSON_TEXT + rb")" + JSON_SPACE + rb":" + JSON_SPACE
    + rb"(\[" + _NUMBERS + rb"\[" + _NUMBERS + rb"\]" + _NUMBERS + rb"\[" + _NUMBERS + rb"\]" + _NUMBERS + rb"\])"
)  # fmt: skip


def list_serverlessllm(folder: Path) -> Listing:
    """List such a folder.

    Tensors may lie in one place, as tied ones do, or leave holes, by which they are aligned. Refused are entries of
    another form, stretches that share only some of their bytes, sizes that are not those of shape, strides and dtype,
    and places outside of a file. A tensor of an unknown dtype is left out.

    Raises:
        FormatError: It is not sound. So does a `ValueError` say.
        BackendError: A file is not there.
    """
    index = LocalFile(file_in(folder, INDEX))
    if index.size > _MAX_INDEX_BYTES:
        raise FormatError(f"its index has {index.size} bytes")
    files: dict[int, tuple[int, LocalFile]] = {}
    stretches: list[tuple[int, int, int]] = []
    places = Places()
    for match in entries(index.read(0, index.size), _ENTRY, b"{}"):
        name = json.loads(match[1])
        begin, n_bytes, shape, strides, kind, number = _fields(name, strict_json(match[2]))
        if number not in files:
            if len(files) == _MAX_FILES:
                raise FormatError(f"it has more than {_MAX_FILES} files")
            files[number] = len(files), LocalFile(file_in(folder, f"tensor.data_{number}"))
        source, file = files[number]
        if begin + n_bytes > file.size:
            raise FormatError(f"tensor {name[:80]!r} lies outside of tensor.data_{number}")
        stretches.append((number, begin, begin + n_bytes))
        dtype = dtype_called(kind)
        if dtype is None:
            places.leave_out(name, kind)
            continue
        is_plain = n_bytes == math.prod(shape) * item_bytes(dtype) and is_c_order(shape, strides)
        places.add(
            name,
            dtype,
            shape,
            source=source,
            start=begin,
            n_bytes=n_bytes,
            file_bytes=file.size,
            strides=None if is_plain else strides,
        )
    _check_apart(stretches)
    sources = [file for _, file in files.values()]
    return Listing(format="serverlessllm", sources=sources, places=places, left_out=places.left_out)


_Fields = tuple[int, int, tuple[int, ...], tuple[int, ...], str, int]


def _fields(name: str, entry: list[Any]) -> _Fields:
    """Read an entry: offset, size, shape, strides, dtype and number."""
    if len(entry) != 6 or type(entry[2]) is not list or type(entry[3]) is not list or type(entry[4]) is not str:
        raise FormatError(f"the index does not say of tensor {name[:80]!r} what it should")
    begin, n_bytes, shape, strides, kind, number = entry
    if len(shape) != len(strides):
        raise FormatError(f"tensor {name[:80]!r} has {len(shape)} sides and {len(strides)} strides")
    sides, steps = tuple(map(whole, shape)), tuple(map(whole, strides))
    return whole(begin), whole(n_bytes), sides, steps, kind, whole(number)


def _check_apart(stretches: list[tuple[int, int, int]]) -> None:
    """Check that no two stretches share some of their bytes, but for those that share all."""
    for (number, _, end), (other, begin, _) in pairwise(sorted({one for one in stretches if one[1] < one[2]})):
        if number == other and begin < end:
            raise FormatError(f"two tensors of tensor.data_{number} share some of their bytes")

"""Folders of ServerlessLLM, and of Tensora: an index, and the partitions that it names by number.

Sources: ``sllm_store/torch.py`` and ``csrc/checkpoint`` of https://github.com/ServerlessLLM/ServerlessLLM, whose index
has one partition, and ``src/formats/serverlessllm`` of https://github.com/botirk38/tensora, which added the sixth
field. ``tensor_index.json`` maps a tensor's name to offset, size, shape, strides in elements, dtype as torch names it,
and number; the bytes are in ``tensor.data_<number>``.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorcas_mlflow.base.tensors import ALIGNMENT, Spec
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import (
    JSON_SPACE,
    JSON_TEXT,
    dtype_by_word,
    item_bytes,
    json_entries,
    strict_json,
    whole_number,
)
from tensorcas_mlflow.file_formats._layout import FileLayout, FlatLayout, check_dtypes, starts_of, strides_of
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable, is_c_order
from tensorcas_mlflow.file_formats._source import LocalFile, file_in
from tensorcas_mlflow.file_formats._torch import TORCH_DTYPES

SERVERLESSLLM_INDEX = "tensor_index.json"
_MAX_INDEX_BYTES = 256 << 20
_MAX_FILES = 1 << 16

_NUMBERS = rb"[^][{}]{0,2048}+"
_ENTRY = re.compile(
    JSON_SPACE
    + rb"(" + JSON_TEXT + rb")" + JSON_SPACE + rb":" + JSON_SPACE
    + rb"(\[" + _NUMBERS + rb"\[" + _NUMBERS + rb"\]" + _NUMBERS + rb"\[" + _NUMBERS + rb"\]" + _NUMBERS + rb"\])"
)  # fmt: skip


def list_serverlessllm(folder: Path) -> Listing:
    """List a folder.

    Tied tensors may share a range, and holes may align tensors. Refused are entries of another form, ranges that
    overlap in part, sizes that do not fit shape, strides and dtype, and ranges outside of a file. A tensor of an
    unknown dtype is left out.

    Raises:
        FormatError: The index is malformed. A `ValueError` says the same.
        BackendError: A file is missing.
    """
    index = LocalFile(file_in(folder, SERVERLESSLLM_INDEX))
    if index.size > _MAX_INDEX_BYTES:
        raise FormatError(f"its index has {index.size} bytes")
    files: dict[int, int] = {}
    ranges: list[tuple[int, int, int]] = []
    table = LocationTable()
    for match in json_entries(index.read(0, index.size), _ENTRY, b"{}"):
        name = json.loads(match[1])
        begin, n_bytes, shape, strides, kind, number = _fields(name, strict_json(match[2]))
        if number not in files:
            if len(files) == _MAX_FILES:
                raise FormatError(f"it has more than {_MAX_FILES} files")
            files[number] = len(files)
            table.sources.append(LocalFile(file_in(folder, f"tensor.data_{number}")))
        if begin + n_bytes > table.sources[files[number]].size:
            raise FormatError(f"tensor {name[:80]!r} lies outside of tensor.data_{number}")
        ranges.append((number, begin, begin + n_bytes))
        dtype = dtype_by_word(kind)
        if dtype is None:
            table.leave_out(name, kind)
            continue
        is_plain = n_bytes == math.prod(shape) * item_bytes(dtype) and is_c_order(shape, strides)
        steps = None if is_plain else strides
        table.add(name, dtype, shape, source=files[number], start=begin, n_bytes=n_bytes, strides=steps)
    _check_apart(ranges)
    return table.listing("serverlessllm")


_Fields = tuple[int, int, tuple[int, ...], tuple[int, ...], str, int]


def _fields(name: str, entry: list[Any]) -> _Fields:
    """Read an entry: offset, size, shape, strides, dtype and number."""
    if len(entry) != 6 or type(entry[2]) is not list or type(entry[3]) is not list or type(entry[4]) is not str:
        raise FormatError(f"the index has a malformed entry for tensor {name[:80]!r}")
    begin, n_bytes, shape, strides, kind, number = entry
    if len(shape) != len(strides):
        raise FormatError(f"tensor {name[:80]!r} has {len(shape)} sides and {len(strides)} strides")
    sides, steps = tuple(map(whole_number, shape)), tuple(map(whole_number, strides))
    return whole_number(begin), whole_number(n_bytes), sides, steps, kind, whole_number(number)


def _check_apart(ranges: list[tuple[int, int, int]]) -> None:
    """Check that no two ranges overlap in part; they may be equal."""
    for (number, _, end), (other, begin, _) in pairwise(sorted({one for one in ranges if one[1] < one[2]})):
        if number == other and begin < end:
            raise FormatError(f"two tensors of tensor.data_{number} share some of their bytes")


SERVERLESSLLM_FILES = re.compile(r"tensor_index\.json|tensor\.data_\d+")
"""Names of the files in a folder."""


def lay_out_serverlessllm(
    specs: Sequence[Spec], metadata: Mapping[str, Any], *, partitions: int = 1
) -> list[FileLayout]:
    """Lay out a folder, the index last; the format stores no metadata.

    The largest tensor goes first, each into the first partition among those that hold least. Empty partitions are not
    written.

    Raises:
        ValueError: The format has no such dtype.
    """
    check_dtypes(specs, TORCH_DTYPES, "ServerlessLLM")
    held: list[list[Spec]] = [[] for _ in range(min(partitions, max(1, len(specs))))]
    fill = [(0, number) for number in range(len(held))]
    for spec in sorted(specs, key=lambda spec: (-spec.n_bytes, spec.name)):
        n_bytes, number = fill[0]
        held[number].append(spec)
        heapq.heapreplace(fill, (n_bytes + spec.n_bytes + -spec.n_bytes % ALIGNMENT, number))
    index: dict[str, list[Any]] = {}
    for number, part in enumerate(held):
        for spec, start in zip(part, starts_of(part, ALIGNMENT), strict=True):
            index[spec.name] = [
                start,
                spec.n_bytes,
                list(spec.shape),
                strides_of(spec.shape),
                f"torch.{spec.dtype}",
                number,
            ]
    files: list[FileLayout] = [
        FlatLayout(f"tensor.data_{number}", specs=part, alignment=ALIGNMENT) for number, part in enumerate(held)
    ]
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False)
    return [*files, FlatLayout(SERVERLESSLLM_INDEX, head=text.encode())]

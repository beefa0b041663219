"""Safetensors files, and folders of their shards with an index, as transformers reads them.

The format: https://github.com/huggingface/safetensors#format. A JSON header gives the dtype, the shape and the position
of each tensor; there are no holes, and no byte belongs to two tensors. The compiled core reads a usual header into
columns. Any other header is read one tensor at a time: the objects of a hostile header as a whole could take many times
its size.

A written file has the bytes of the library (0.8) for the same tensors and metadata, except that metadata is sorted by
key: the library's order is random. A checkpoint from a file keeps what it takes to write that file again. Shards are
laid out and named as by ``PreTrainedModel.save_pretrained``: filled in the order of the tensors, a larger tensor by
itself.

The library itself is not used. It opens a path and so no file in a store, gives no position of a tensor, writes no
shards, and wants all tensors in memory.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorcas_mlflow.base.tensors import Spec, group_by_bytes
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import (
    JSON_SPACE,
    JSON_TEXT,
    HeaderEntry,
    check_shape,
    item_bytes,
    json_entries,
    parts_of_entries,
    sorted_entries,
    strict_json,
    whole_number,
)
from tensorcas_mlflow.file_formats._layout import (
    FileLayout,
    FlatLayout,
    check_dtypes,
    check_header,
    pad,
    refuse,
    starts_of,
    texts_of,
)
from tensorcas_mlflow.file_formats._listing import FlatTable, Listing, listing_of_entries
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import FilePart, Tape
from tensorcas_mlflow.layout.manifests import Specs
from tensorcas_mlflow.native import core

MAX_HEADER_BYTES = 100_000_000
SHARD_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
"""Names of the files in a folder of shards."""

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The format's name of each dtype, in the library's order; files hold the last dtype's tensors first."""
_DTYPES = {kind: name for name, kind in SAFETENSORS_DTYPES.items()}
_RANK = {name: -rank for rank, name in enumerate(SAFETENSORS_DTYPES)}
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one element, for dtypes with several elements to a byte. A manifest has no name for them."""
_ITEM_BYTES = {kind: item_bytes(dtype) for kind, dtype in _DTYPES.items()}
_KINDS = tuple(SAFETENSORS_DTYPES)
_KIND_NAMES = "".join(f"{kind} " for kind in SAFETENSORS_DTYPES.values()).encode()
_KIND_BYTES = bytes(_ITEM_BYTES.values())

_MAX_KEPT_BYTES = 4 << 20
"""A longer header is not kept: each reader of the checkpoint would read it."""

_LENGTH_BYTES = 8
_MAX_METADATA_BYTES = 16 << 20
_METADATA_KEY = "__metadata__"

_PAIR = JSON_SPACE + JSON_TEXT + JSON_SPACE + rb":" + JSON_SPACE + JSON_TEXT + JSON_SPACE
_PAIRS = rb"(?:" + _PAIR + rb"(?:," + _PAIR + rb")*+)?+"
_ENTRY = re.compile(
    rb'%(s)b(?:"__metadata__"%(s)b:%(s)b(\{%(p)b%(s)b\})|(%(t)b)%(s)b:%(s)b(\{[^{}]{0,4096}+\}))'
    % {b"s": JSON_SPACE, b"p": _PAIRS, b"t": JSON_TEXT}
)
"""The metadata, or the name and the facts of a tensor."""


def is_safetensors(head: memoryview) -> bool:
    """Recognise a safetensors file by a possible length and the beginning of an object."""
    return bytes(head[8:9]) == b"{" and int.from_bytes(head[:_LENGTH_BYTES], "little") <= MAX_HEADER_BYTES


def split_safetensors(tape: Tape) -> Iterator[FilePart]:
    """Announce the header, then the tensors in the order of their positions.

    Raises:
        FormatError: The header is too long or malformed.
    """
    header = tape.peek_length_prefixed()
    usual = _usual_columns(header)
    entries = _entries_in_order(header) if usual is None else _entries_of(usual)
    yield from parts_of_entries(_LENGTH_BYTES + len(header), entries)


def list_safetensors(source: ByteSource) -> Listing:
    """List a safetensors file.

    The library refuses, and so does this function: a header of more than 100,000,000 bytes or that does not begin with
    ``{``; a key that occurs twice; holes between tensors, shared bytes, and sizes that do not fit the shape; bytes
    behind the last tensor. This function also refuses more than 16 MiB of metadata, and dtypes unknown to the library.

    Raises:
        FormatError: The file is malformed. A `ValueError` says the same.
    """
    header = source.read_length_prefixed(MAX_HEADER_BYTES)
    usual = _list_usual(source, header)
    if usual is not None:
        return usual
    entries: list[HeaderEntry] = []
    metadata: dict[str, str] = {}
    for _, found in _walk(header):
        if isinstance(found, HeaderEntry):
            entries.append(found)
            continue
        metadata = _read_metadata(found)
    for entry in entries:
        if entry.dtype is None and entry.kind not in _PACKED_BITS:
            raise FormatError(f"tensor {entry.name[:80]!r} has a dtype that does not exist: {entry.kind[:80]!r}")
        if entry.dtype is None:
            check_shape(entry.name, entry.shape, _PACKED_BITS[entry.kind], 8 * (entry.end - entry.begin))
    return listing_of_entries("safetensors", source, sorted_entries(entries), _LENGTH_BYTES + len(header), metadata)


def _read_metadata(text: bytes) -> dict[str, str]:
    if len(text) > _MAX_METADATA_BYTES:
        raise FormatError(f"it has {len(text)} bytes of metadata")
    metadata: dict[str, str] = strict_json(text)
    json.dumps(metadata, ensure_ascii=False).encode()  # a lone surrogate is no text
    return metadata


class _Columns(NamedTuple):
    """The tensors of a header in the order of their bytes, which follow each other; and its metadata."""

    specs: Specs
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    metadata: bytes


def _list_usual(source: ByteSource, header: memoryview) -> Listing | None:
    """List a file with a header as all writers make it; None for any other, valid or not."""
    usual, data_at = _usual_columns(header), _LENGTH_BYTES + len(header)
    if usual is None or data_at + int(usual.ends[-1]) != source.size:
        return None
    metadata = _read_metadata(usual.metadata) if usual.metadata else {}
    locations = FlatTable(usual.specs, data_at + usual.begins, data_at + usual.ends)
    return Listing(format="safetensors", sources=[source], locations=locations, metadata=metadata)


def _usual_columns(header: memoryview) -> _Columns | None:
    scanned: tuple[Any, ...] | None = core.list_header(header, _KIND_NAMES, _KIND_BYTES)
    if scanned is None:
        return None
    metadata_at, metadata_end, names, name_at, kind, side_at, sides, begin, end = scanned
    begins, ends = np.frombuffer(begin, np.int64), np.frombuffer(end, np.int64)
    numbers = np.frombuffer(kind, np.uint8)
    used = np.flatnonzero(np.bincount(numbers))
    specs = Specs(
        names=Texts(np.frombuffer(name_at, np.int64), np.frombuffer(names, np.uint8)),
        dtypes=tuple(_KINDS[number] for number in used.tolist()),
        dtype=np.searchsorted(used, numbers),
        shape_offsets=np.frombuffer(side_at, np.int64),
        sides=np.frombuffer(sides, np.int64),
    )
    if not _follow_each_other(begins, ends):
        order = np.lexsort((ends, begins))
        specs, begins, ends = specs.some(order), begins[order], ends[order]
    if not _follow_each_other(begins, ends):
        return None
    return _Columns(specs, begins, ends, bytes(header[metadata_at:metadata_end]))


def _entries_of(columns: _Columns) -> Iterator[HeaderEntry]:
    specs = columns.specs
    for row, (begin, end) in enumerate(zip(columns.begins.tolist(), columns.ends.tolist(), strict=True)):
        dtype = specs.dtypes[specs.dtype[row]]
        yield HeaderEntry(specs.names[row], dtype or "", dtype, specs.shape(row), begin, end)


def _follow_each_other(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Tell whether each tensor begins where the one before ends, the first at 0."""
    return not begins[0] and np.array_equal(begins[1:], ends[:-1])


def _entries_in_order(header: memoryview) -> Iterator[HeaderEntry]:
    """Return the entries of a header in the order of the tensors in the file.

    Four numbers are kept per tensor, so a header costs little more memory than its own size.
    """
    numbers = array("q")
    for at, entry in _walk(header):
        if isinstance(entry, HeaderEntry):
            numbers.extend((at, entry.begin, entry.end, hash(entry.name)))
    positions, begins, ends, names = np.frombuffer(numbers, np.int64).reshape(-1, 4).T
    order = np.lexsort((ends, begins))
    # Each tensor begins where the one before ends, the first at 0.
    if not np.array_equal(begins[order][1:], ends[order][:-1]) or begins[order][:1].any():
        raise FormatError("a safetensors file with holes, or with bytes in two tensors")
    if len(np.unique(names)) < len(names):
        raise FormatError("a safetensors file with two tensors of one name")
    return (_entry(match) for at in positions[order].tolist() if (match := _ENTRY.match(header, at)))


def _walk(header: memoryview) -> Iterator[tuple[int, HeaderEntry | bytes]]:
    """Find the tensors and the metadata of a header, each with its position in the header.

    Yields:
        Entries in the header's order; and the metadata, once if at all: a JSON object whose values are all texts.

    Raises:
        FormatError: The header is malformed. A `ValueError` says the same. Holes, shared bytes and repeated names are
            the caller's to find.
    """
    if bytes(header[:1]) != b"{":
        raise FormatError("a safetensors header that does not begin with '{'")
    has_metadata = False
    for match in json_entries(header, _ENTRY, b"{}"):
        if match[1] is None:
            yield match.start(), _entry(match)
            continue
        if has_metadata:
            raise FormatError("a safetensors header with its metadata twice")
        has_metadata = True
        yield match.start(), match[1]


def _entry(match: re.Match[bytes]) -> HeaderEntry:
    """Read one tensor's entry, in any valid form."""
    name, fields = json.loads(match[2]), strict_json(match[3])
    if not fields.keys() >= {"dtype", "shape", "data_offsets"} or type(fields["shape"]) is not list:
        raise FormatError(f"a safetensors file that says too little of {name[:80]!r}")
    kind, shape = fields["dtype"], tuple(map(whole_number, fields["shape"]))
    begin, stop = map(whole_number, fields["data_offsets"])
    if name == _METADATA_KEY or type(kind) is not str or begin > stop:
        raise FormatError(f"a safetensors file in which {name[:80]!r} is no tensor")
    n_item_bytes = _ITEM_BYTES.get(kind)
    if n_item_bytes is not None:
        check_shape(name, shape, n_item_bytes, stop - begin)
    return HeaderEntry(name, kind, _DTYPES.get(kind), shape, begin, stop)


def lay_out_safetensors(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay out one file.

    Raises:
        ValueError: The format has no such dtype or name, or the header gets too long.
    """
    _check_specs(specs)
    return [_lay_out_shard("", specs, _metadata_of(metadata))]


def header_to_keep(head: bytes, specs: Sequence[Spec], metadata: Mapping[str, str]) -> list[str] | str | None:
    """Return the value of `KEPT_HEADER` for a file; None if an export writes its header anyway, or it is too long.

    Args:
        head: The bytes before the tensors.
        specs: All tensors of the file, in order.
        metadata: The file's metadata, in order.
    """
    for texts, kept in ((_metadata_of(metadata), None), (metadata, list(metadata))):
        if _lay_out_shard("", specs, texts).head == head:
            return kept
    return head[_LENGTH_BYTES:].decode() if len(head) <= _MAX_KEPT_BYTES else None


def lay_out_again(specs: Sequence[Spec], metadata: Mapping[str, Any], kept: Any) -> FlatLayout | None:
    """Lay out the file of an imported checkpoint; None if the value of `KEPT_HEADER` is not that of its tensors."""
    if isinstance(kept, list):
        is_whole = len(kept) == len(metadata) and all(type(metadata.get(key)) is str for key in kept)
        return _lay_out_shard("", specs, {key: metadata[key] for key in kept}) if is_whole else None
    try:
        head = str(kept).encode()
        found = (entry for _, entry in _walk(memoryview(head)) if isinstance(entry, HeaderEntry))
        entries = sorted_entries([*found])
    except (FormatError, ValueError):
        return None
    if [(each.name, each.dtype, each.shape) for each in entries] != [
        (each.name, each.dtype, each.shape) for each in specs
    ]:
        return None
    return FlatLayout("", head=len(head).to_bytes(_LENGTH_BYTES, "little") + head, specs=specs)


def lay_out_safetensors_shards(
    specs: Sequence[Spec], metadata: Mapping[str, Any], *, shard_bytes: int
) -> list[FileLayout]:
    """Lay out a folder of shards, the index last; a single shard gets no index.

    Args:
        specs: The tensors.
        metadata: Written into each shard.
        shard_bytes: Largest size of a shard's tensors; a single tensor may be larger.

    Raises:
        ValueError: As `lay_out_safetensors`.
    """
    _check_specs(specs)
    texts = _metadata_of(metadata)
    shards = list(group_by_bytes(specs, lambda spec: spec.n_bytes, shard_bytes))
    if len(shards) <= 1:
        return [_lay_out_shard("model.safetensors", specs, texts)]
    names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(spec.n_bytes for spec in specs)},
        "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
    }
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files: list[FileLayout] = [_lay_out_shard(name, shard, texts) for name, shard in zip(names, shards, strict=True)]
    return [*files, FlatLayout("model.safetensors.index.json", head=text.encode())]


def _check_specs(specs: Sequence[Spec]) -> None:
    check_dtypes(specs, SAFETENSORS_DTYPES, "safetensors")
    refuse([(spec, "has the name of the metadata") for spec in specs if spec.name == _METADATA_KEY], "safetensors")


def _metadata_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    # transformers reads no file without a "format".
    return texts_of({"format": "pt", **metadata})


def _lay_out_shard(name: str, specs: Sequence[Spec], metadata: Mapping[str, str]) -> FlatLayout:
    ordered = sorted(specs, key=lambda spec: (_RANK[spec.dtype or ""], spec.name))
    text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    entries = [f"{text(_METADATA_KEY)}:{text(metadata)}"] if metadata else []
    for spec, start in zip(ordered, starts_of(ordered), strict=True):
        sides = ",".join(map(str, spec.shape))
        entries.append(
            f'{text(spec.name)}:{{"dtype":"{SAFETENSORS_DTYPES[spec.dtype or ""]}","shape":[{sides}],'
            f'"data_offsets":[{start},{start + spec.n_bytes}]}}'
        )
    header = pad(("{" + ",".join(entries) + "}").encode(), 8)
    check_header(header, "safetensors")
    return FlatLayout(name, head=len(header).to_bytes(8, "little") + header, specs=ordered)

"""Hints and sketches, behind the manifest in its blob (``docs/design/caches.md``, Hints, Sketches).

Hints are the places of the manifest's chunks at the time of writing, so a remote reader needs no index. They may be
stale, since collections rewrite packs and not manifests. So they are never evidence, and a reader asks the index after
a miss. Sketches are sampled words of the manifest's tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from tensorcas_mlflow.base.digest import Digests, digest, unique_rows
from tensorcas_mlflow.layout._keys import is_pack_name
from tensorcas_mlflow.layout.manifests._rows import Columns
from tensorcas_mlflow.layout.packs import ENTRY, Entries, is_delta, is_possible

MAGIC = b"\x89TCHNT\r\x03"
PACKS_MAGIC = b"\x89TCHNT\r\x02"
SKETCHES_MAGIC = b"\x89TCSKT\r\x01"
_FOOTER = struct.Struct("<I16s8s")
_DIGEST_BYTES = 16
_MAX_OFFSET = 1 << 56
_PACK_BYTES = 40
"""Bound for a pack's name in JSON."""
_NAME_BYTES = 16
_MOST_NAMED = 1024
"""Bound of the packs in hints of deltas: a reader asks for the table of each."""
_COLUMNS = (
    ("pack", "<u4"),
    ("offset", "<i8"),
    ("stored_bytes", "<u4"),
    ("raw_bytes", "<u4"),
    ("codec", "u1"),
    ("typesize", "u1"),
)
_ROW_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


class Hints(NamedTuple):
    """Places of chunks, one row a chunk, ascending by digest."""

    packs: tuple[str, ...]
    pack: Any
    """For each row the position of its pack in ``packs``."""
    entries: Entries
    """For each row its entry in that pack, without the digest of its stored bytes."""


def hint_bytes(packs: Sequence[str], pack: Any, entries: Entries, order: Any = None) -> bytes:
    """Write hints.

    Args:
        packs: Names of packs.
        pack: For each chunk the position of its pack in ``packs``.
        entries: For each chunk its entry; ascending by digest, none twice.
        order: The chunks, by number, in the order of their first places in the manifest; None if that is ascending.
    """
    used, number = np.unique(pack, return_inverse=True)
    if order is not None:
        number, entries = number[order], entries.take(order)
    head = json.dumps({"packs": [packs[at] for at in used.tolist()], "n": len(entries)}).encode() + b"\n"
    columns = {name: entries[name] for name, _ in _COLUMNS if name != "pack"} | {"pack": number}
    # A save writes new chunks in the order of the manifest, so mostly each begins where the one before it ends.
    ends = entries["offset"].astype(np.int64) + entries["stored_bytes"]
    columns["offset"] = entries["offset"].astype(np.int64) - np.append(np.int64(0), ends[:-1])[: len(entries)]
    body = b"".join(_planes(columns[name].astype(dtype)) for name, dtype in _COLUMNS)
    packed = zstandard.ZstdCompressor(level=3).compress(head + body)
    return _with_footer(packed, MAGIC)


def _with_footer(data: bytes, magic: bytes) -> bytes:
    return data + _FOOTER.pack(len(data), digest(data)[:_DIGEST_BYTES], magic)


def _split(blob: bytes, magic: bytes) -> tuple[bytes, bytes]:
    # This accepts any version: a reader skips versions unknown to this release.
    if blob[-len(magic) : -1] != magic[:-1] or len(blob) < _FOOTER.size:
        return blob, b""
    at = len(blob) - _FOOTER.size - _FOOTER.unpack_from(blob, len(blob) - _FOOTER.size)[0]
    return (blob, b"") if at < 0 else (blob[:at], blob[at:])


def _content_of(data: bytes, magic: bytes) -> bytes | None:
    """Return what a footer follows; None if it is damaged, or of another kind or version."""
    content = data[: -_FOOTER.size]
    return content if data and data == _with_footer(content, magic) else None


def split_hints(blob: bytes) -> tuple[bytes, bytes]:
    """Split a manifest's blob into the manifest and its hints; the hints may be empty."""
    return _split(blob, MAGIC)


def read_hints(data: bytes, digests: Digests) -> Hints | None:
    """Read hints; None if they are damaged, of a later version, or for other chunks.

    Args:
        data: Hints from `split_hints`.
        digests: The chunks of their manifest, as they follow each other in it.
    """
    packed = _content_of(data, MAGIC)
    if packed is None:
        return None
    distinct, first, _ = unique_rows(digests)
    try:
        # At most as many packs as chunks: a small manifest must not claim hints that take much memory.
        most_bytes = len(distinct) * (_ROW_BYTES + _PACK_BYTES) + 1024
        if not 0 < zstandard.frame_content_size(packed) <= most_bytes:
            return None
        head, _, body = zstandard.ZstdDecompressor().decompress(packed).partition(b"\n")
        facts = json.loads(head)
        packs, n_rows = facts["packs"], facts["n"]
    except zstandard.ZstdError as error:
        from tensorcas_mlflow.codecs import check_zstd_has_memory

        check_zstd_has_memory(error)
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if n_rows != len(distinct) or len(body) != n_rows * _ROW_BYTES or not isinstance(packs, list):
        return None
    if not all(map(is_pack_name, packs)):
        return None
    entries = np.zeros(n_rows, dtype=ENTRY)
    entries["digest"] = distinct
    order = np.argsort(first)
    columns = {}
    at = 0
    for name, dtype in _COLUMNS:
        columns[name] = _from_planes(body, dtype, n_rows, at)
        at += columns[name].nbytes
    stored = columns["stored_bytes"].astype(np.int64)
    columns["offset"] = np.cumsum(columns["offset"] + stored) - stored
    if n_rows and columns["offset"].min() < 0:
        return None
    pack = np.empty(n_rows, np.uint32)
    pack[order] = columns.pop("pack")
    for name, column in columns.items():
        entries[name][order] = column
    if n_rows and (int(pack.max()) >= len(packs) or not _is_possible(entries)):
        return None
    return Hints(packs=tuple(packs), pack=pack, entries=entries)


def _planes(column: Any) -> bytes:
    """Return the lowest byte of each number, then the next byte of each, and so on."""
    planes: bytes = column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()
    return planes


def _from_planes(body: bytes, dtype: str, n: int, at: int) -> Any:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(body, np.uint8, n * size, at).reshape(size, n)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(n)


def pack_hint_bytes(packs: Collection[str]) -> bytes:
    """Write the hints of a manifest with deltas: the packs that hold its chunks, and all bases behind them."""
    names = bytes.fromhex("".join(sorted(packs)[:_MOST_NAMED]))
    return _with_footer(names, PACKS_MAGIC)


def read_pack_hints(data: bytes) -> frozenset[str] | None:
    """Read the hints of a manifest with deltas; None if they are damaged, or of another kind."""
    names = _content_of(data, PACKS_MAGIC)
    if names is None or len(names) % _NAME_BYTES or len(names) > _MOST_NAMED * _NAME_BYTES:
        return None
    return frozenset(names[at : at + _NAME_BYTES].hex() for at in range(0, len(names), _NAME_BYTES))


def _is_possible(entries: Entries) -> bool:
    """Tell whether there can be such chunks at such places."""
    # Hints do not record the base of a delta.
    return bool(is_possible(entries).all() and entries["offset"].max() <= _MAX_OFFSET and not is_delta(entries).any())


def sketched_rows(columns: Columns) -> Any:
    """Return the numbers of the rows with sketches, ascending."""
    # Opening a checkpoint parts sketches from its manifest, and reads none of them.
    from tensorcas_mlflow.base.sketch import LEAST_SKETCHED_BYTES, is_sketched

    has_dtype = np.array([is_sketched(name) for name in columns.dtypes], dtype=bool)
    rows: Any = (has_dtype[columns.dtype] & (columns.n_bytes >= LEAST_SKETCHED_BYTES)).nonzero()[0]
    return rows


def sketch_bytes(words: Any) -> bytes:
    """Write sketches.

    Args:
        words: Their words, shape ``(n, 32)``: a row for each of `sketched_rows`.
    """
    return _with_footer(words.astype("<u2").tobytes(), SKETCHES_MAGIC)


def split_sketches(blob: bytes) -> tuple[bytes, bytes]:
    """Split a manifest's blob, without hints, into the manifest and its sketches; the sketches may be empty."""
    return _split(blob, SKETCHES_MAGIC)


def read_sketches(data: bytes, columns: Columns) -> tuple[Any, Any] | None:
    """Read sketches: the numbers of the sketched rows, and their words, shape ``(n, 32)``.

    Args:
        data: Sketches from `split_sketches`.
        columns: The rows of their manifest.

    Returns:
        None if there are none, or they are damaged, of a later version, or for other rows.
    """
    from tensorcas_mlflow.base.sketch import N_WORDS, SKETCH_BYTES

    words = _content_of(data, SKETCHES_MAGIC)
    if words is None or len(rows := sketched_rows(columns)) * SKETCH_BYTES != len(words):
        return None
    return rows, np.frombuffer(words, "<u2").reshape(-1, N_WORDS)

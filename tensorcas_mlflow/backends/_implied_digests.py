"""Digests that a record leaves out of a blob, since its other bytes give them (``docs/format.md``, The database)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import blake3

_PACK_FOOTER = struct.Struct("<8sIIQII32s")
_PACK_ENTRY = struct.Struct("<32s16sQIIBBBB")
_RAW = 0
_ENTRY_BYTES = _PACK_ENTRY.size
_DIGEST_BYTES = 32
_CHECK = b', "check": "'
_CHECK_DIGITS = 32
_CHECK_END = b'"}'

_Digest = tuple[int, bytes]
"""A digest, and its place in its blob."""


def _pack_table(pack: bytes) -> range:
    """Return the places of the entries in the table of a pack.

    Raises:
        ValueError: It is no pack, or one of another form.
    """
    size = len(pack) - _PACK_FOOTER.size
    if size < 0:
        raise ValueError("too short for a pack")
    _, entry_bytes, n_entries, table_at, _, _, _ = _PACK_FOOTER.unpack_from(pack, size)
    end = table_at + n_entries * _ENTRY_BYTES
    if entry_bytes != _ENTRY_BYTES or end > size:
        raise ValueError("its table is not inside of it")
    return range(table_at, end, _ENTRY_BYTES)


def _pack_digests(pack: bytes) -> list[_Digest]:
    """Compute the digests in a pack: of each payload, of each raw chunk, and of the table."""
    entries = _pack_table(pack)
    found: list[_Digest] = []
    for at in entries:
        _, _, start, n_stored, _, codec, _, _, _ = _PACK_ENTRY.unpack_from(pack, at)
        if start + n_stored > entries.start:
            raise ValueError("its table points outside of it")
        digest = blake3.blake3(pack[start : start + n_stored]).digest()
        found.append((at + 32, digest[:16]) if codec != _RAW else (at, digest + digest[:16]))
    # The last digest covers the others.
    table = bytearray(pack[entries.start : -_DIGEST_BYTES])
    for at, digest in found:
        table[at - entries.start : at - entries.start + len(digest)] = digest
    found.append((len(pack) - _DIGEST_BYTES, blake3.blake3(table).digest()))
    return found


def _check_digest(record: bytes) -> list[_Digest]:
    """Compute the check of a JSON record."""
    at = len(record) - _CHECK_DIGITS - len(_CHECK_END)
    before = at - len(_CHECK)
    if before < 0 or record[before:at] != _CHECK or not record.endswith(_CHECK_END):
        raise ValueError("no record with a check")
    return [(at, blake3.blake3(record[:before]).hexdigest(length=_CHECK_DIGITS // 2).encode())]


PACK, JSON = 1, 2
"""Kinds of blobs in a record: a pack, and a JSON record; 0 is any other blob."""
_DIGESTS: dict[int, Callable[[bytes], list[_Digest]]] = {PACK: _pack_digests, JSON: _check_digest}


def with_digests(kind: int, data: bytes) -> bytes:
    """Put the digests back into a blob.

    Raises:
        ValueError: The blob is not of this kind.
    """
    if kind not in _DIGESTS:
        return data
    if kind == JSON:  # a listing reads many
        [(at, check)] = _check_digest(data)
        return b"".join([data[:at], check, data[at + _CHECK_DIGITS :]])
    out = bytearray(data)
    for at, digest in _DIGESTS[kind](data):
        out[at : at + len(digest)] = digest
    return bytes(out)


def without_digests(kind: int, data: bytes) -> bytes | None:
    """Replace the digests of a blob by zero bytes; None unless `with_digests` gives exactly these bytes back."""
    out = bytearray(data)
    try:
        for at, digest in _DIGESTS[kind](data):
            if out[at : at + len(digest)] != digest:
                return None
            out[at : at + len(digest)] = bytes(len(digest))
    except ValueError:
        return None
    return bytes(out)


def raw_digests(pack: bytes) -> list[bytes]:
    """Return the digests of the chunks that lie in a whole pack as they are, in the order of its table."""
    entries = (_PACK_ENTRY.unpack_from(pack, at) for at in _pack_table(pack))
    return [entry[0] for entry in entries if entry[5] == _RAW]


_MOST_MISSES = 8


def without_known(data: bytes, digests: Sequence[bytes], zeros: bytes) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Replace digests that are known otherwise, in their order, by zeros of the same size.

    Returns:
        The rest, and the places: start, number of the first digest there, number of digests that follow one another.
    """
    out = bytearray(data)
    places = []
    at = first = n_misses = 0
    while first < len(digests) and n_misses < _MOST_MISSES:
        place = data.find(digests[first], at)
        n = 1
        if place < 0:
            n_misses += 1
        else:
            while first + n < len(digests) and data.startswith(digests[first + n], place + n * len(zeros)):
                n += 1
            at = place + n * len(zeros)
            out[place:at] = zeros * n
            places.append((place, first, n))
        first += n
    return bytes(out), places

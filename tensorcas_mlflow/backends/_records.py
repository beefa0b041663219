"""Records of the database, and compact keys: values to bytes and back (``docs/format.md``, The database)."""

from __future__ import annotations

import re
import struct
from binascii import hexlify
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, starmap
from typing import NamedTuple

import blake3
import zstandard

from tensorcas_mlflow.backends._contract import MOST_SHARED_BYTES, check_key
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CorruptError

_PACKS, _MANIFESTS = "packs/", "manifests/"
_MOST_SHARED_OTHERS = 64 << 10
"""Bound of a blob other than a pack in a shared record."""
_MOST_TOGETHER_BYTES, _MOST_TOGETHER = 256 << 10, 1000
"""Bounds of a shared record."""
_MOST_CONTENT_BYTES = 8 << 20
"""Bound of the content of a record; a reader refuses more."""
_PARAMETERS = [
    zstandard.ZstdCompressionParameters.from_level(
        level, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
    )
    for level in (3, 6)
]
_LEAST_FOR_MORE_LEVELS = 8 << 10
"""Size of a content from which on the second parameters are used, which take more time."""
_HEX = re.compile(rb"[0-9a-f]{8,}")
_RUN = struct.Struct("<II")
_N_RUNS = struct.Struct("<H")
_MOST_RUNS = 0xFFFF
_COUNTS = struct.Struct("<HHH")
_ROW = struct.Struct("<BHI")
_PLACE = struct.Struct("<IHH")
_MOST_PLACES = 0xFFFF
_PLAIN, PACK, JSON, _MANIFEST = 0, 1, 2, 3
"""Kinds of blobs in a record."""
_PACK_FOOTER = struct.Struct("<8sIIQII32s")
_PACK_ENTRY = struct.Struct("<32s16sQIIBBBB")
_RAW = 0
_ENTRY_BYTES = _PACK_ENTRY.size
_LONG_DIGEST_BYTES = 32
_CHECK = b', "check": "'
_CHECK_DIGITS = 32
_CHECK_END = b'"}'
_MOST_MISSES = 8
_NAME_DIGITS = 64
DIGEST_BYTES = 16
"""Size of the digests in commits."""

_KEY_HEX = re.compile("[0-9a-f]{8,}")
_RUN_MARK = 0x80
_MOST_PAIRS = 0x7F
_CODES = {"packs": b"\x01", "manifests": b"\x02", "refs": b"\x03", "index": b"\x04"}
"""The bytes that stand for some first segments of keys, and the slashes behind them."""
_FOLDERS = {code[0]: folder for folder, code in _CODES.items()}
HASHED = frozenset({"packs", "manifests"})
"""First segments of the keys that are stored as hashes: a record has them in full."""
_HASH_BYTES = 8


class NewBlob(NamedTuple):
    """A blob to be written."""

    key: str
    data: bytes


# --- keys


@lru_cache(maxsize=4096)
def packed_key(key: str) -> bytes:
    """Write a key, or a prefix of whole segments, with its hex digits as bytes.

    A run of at least eight digits is a byte 0x80 + n and n bytes, two digits each; no key has other bytes from 0x80 on.
    """
    folder, slash, _ = key.partition("/")
    begin = _CODES.get(folder) if slash else None
    out, at = [begin or b""], 0 if begin is None else len(folder) + 1
    for found in _KEY_HEX.finditer(key, at):
        start, end = found.span()
        n_pairs = min((end - start) // 2, _MOST_PAIRS)
        out += [
            key[at:start].encode(),
            bytes((_RUN_MARK + n_pairs,)),
            bytes.fromhex(key[start : (at := start + 2 * n_pairs)]),
        ]
    return b"".join([*out, key[at:].encode()])


@lru_cache(maxsize=4096)
def stored_key(key: str) -> bytes:
    """Return a key as the table of blobs has it."""
    folder, slash, _ = key.partition("/")
    return _CODES[folder] + digest(key.encode())[:_HASH_BYTES] if slash and folder in HASHED else packed_key(key)


def keys_below(prefix: str) -> tuple[bytes, bytes]:
    """Return the first stored key that may lie below a prefix of whole segments, and the end of them."""
    folder, slash, _ = prefix.partition("/")
    if folder in _CODES and (not slash or folder in HASHED):
        return _CODES[folder], bytes((_CODES[folder][0] + 1,))
    begin = packed_key(prefix)
    return (begin + b"/", begin + b"0") if prefix else (b"", b"\xff" * 9)


def folder_of(stored: bytes) -> str:
    """Return the first segment of a stored key."""
    found = _FOLDERS.get(stored[0]) if stored else None
    return found or stored.partition(b"/")[0].decode("ascii", "replace")


@lru_cache(maxsize=4096)
def key_of(packed: bytes) -> str:
    """Undo `packed_key`.

    Raises:
        CorruptError: The bytes are of no key.
    """
    folder = _FOLDERS.get(packed[0]) if packed else None
    at = 0 if folder is None else 1
    out = [] if folder is None else [folder.encode(), b"/"]
    for place, byte in enumerate(packed):
        if place < at or byte < _RUN_MARK:
            continue
        end = place + 1 + byte - _RUN_MARK
        out += [packed[at:place], hexlify(packed[place + 1 : end])]
        at = end
    try:
        return check_key(b"".join([*out, packed[at:]]).decode("ascii"))
    except ValueError as error:
        raise CorruptError("blobs.db", f"it has a blob without a key: {packed[:80]!r}") from error


def name_of(key: str) -> int:
    """Return the 8 bytes by which ``blobs.head`` names a key."""
    return as_int(digest(key.encode())[:8])


def short_digest(data: bytes) -> bytes:
    """Return the digest of bytes as commits have it."""
    return digest(data)[:DIGEST_BYTES]


def as_int(some: bytes) -> int:
    """Return the first 8 bytes as the signed number that the database stores."""
    return int.from_bytes(some[:8], "little", signed=True)


# --- records


def records_of(blobs: Iterable[NewBlob]) -> tuple[list[list[NewBlob]], list[NewBlob]]:
    """Distribute blobs to records: small ones share records, with the packs last; each other one has its own."""
    others: list[NewBlob] = []
    packs: list[NewBlob] = []
    alone: list[NewBlob] = []
    for blob in blobs:
        is_pack = blob.key.startswith(_PACKS)
        most = MOST_SHARED_BYTES if is_pack else _MOST_SHARED_OTHERS
        (alone if len(blob.data) > most else packs if is_pack else others).append(blob)
    shared: list[list[NewBlob]] = []
    n_bytes = 0
    for blob in (*others, *packs):
        if not shared or n_bytes + len(blob.data) > _MOST_TOGETHER_BYTES or len(shared[-1]) == _MOST_TOGETHER:
            shared.append([])
            n_bytes = 0
        shared[-1].append(blob)
        n_bytes += len(blob.data)
    return shared, alone


def content_of(blobs: Sequence[NewBlob]) -> bytes:
    """Lay out the content of a record: its table, the keys and the blobs, without the digests that follow from them.

    Returns:
        The content, shrunk.
    """
    kinds, keys, stored = [], [], []
    known: list[bytes] = []
    names: list[bytes] = []
    n_others = 0
    for blob in blobs:
        kind, data, key = _PLAIN, None, blob.key.encode()
        if blob.key.startswith(_PACKS):
            if len(blob.data) <= MOST_SHARED_BYTES and (data := without_digests(PACK, blob.data)) is not None:
                kind = PACK
                known += raw_digests(blob.data)
        else:
            begin = len(_MANIFESTS)
            if blob.key.startswith(_MANIFESTS) and key[begin : begin + _NAME_DIGITS] == (name := _name(blob.data)):
                kind, key = _MANIFEST, key.replace(name, b"0" * _NAME_DIGITS)
                names.append(name)
            elif len(blob.data) <= MOST_SHARED_BYTES and (data := without_digests(JSON, blob.data)) is not None:
                kind = JSON
            n_others += len(blob.data)
        kinds.append(kind)
        keys.append(key)
        stored.append(blob.data if data is None else data)
    joined = b"".join(stored)
    others, packs = joined[:n_others], joined[n_others:]
    others, of_known = without_known(others, known[:_MOST_PLACES], bytes(32)) if known else (others, [])
    others, of_names = _without_names(others, names, kinds, stored) if names else (others, [])
    rows = map(_ROW.pack, kinds, map(len, keys), map(len, stored))
    places = starmap(_PLACE.pack, (*of_known, *of_names))
    counts = _COUNTS.pack(len(blobs), len(of_known), len(of_names))
    return _shrunk(b"".join([counts, *rows, *places, *keys, others]), packs)


def _without_names(
    others: bytes, names: Sequence[bytes], kinds: Sequence[int], stored: Sequence[bytes]
) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Replace the names of manifests, unless one lies in a manifest: a reader hashes that before it has the names."""
    rest, places = without_known(others, names, b"0" * _NAME_DIGITS)
    ends = accumulate(map(len, stored))
    spans = [(end - len(data), end) for kind, data, end in zip(kinds, stored, ends, strict=True) if kind == _MANIFEST]
    if any(at < end and begin < at + n * _NAME_DIGITS for at, _, n in places for begin, end in spans):
        return others, []
    return rest, places


def _name(manifest: bytes) -> bytes:
    return hexlify(digest(manifest))


def blobs_of(content: bytes) -> list[NewBlob]:
    """Read the blobs of a record.

    Raises:
        CorruptError: It is none.
    """
    try:
        return _blobs_of(content)
    except (struct.error, ValueError, OverflowError) as error:
        raise CorruptError("blobs.db", f"a record cannot be read: {error}") from error


def _blobs_of(content: bytes) -> list[NewBlob]:
    n_blobs, *n_places = _COUNTS.unpack_from(content)
    at = _COUNTS.size + n_blobs * _ROW.size
    rows = list(_ROW.iter_unpack(content[_COUNTS.size : at]))
    places = [list(_PLACE.iter_unpack(content[at : (at := at + n * _PLACE.size)])) for n in n_places]
    keys = [content[at : (at := at + n_bytes)].decode("ascii") for _, n_bytes, _ in rows]
    stored = bytearray(content[at:])
    ends = list(accumulate(size for _, _, size in rows))
    if len(stored) != (ends[-1] if ends else 0):
        raise ValueError("it is not as long as its table says")
    spans = [slice(end - size, end) for end, (_, _, size) in zip(ends, rows, strict=True)]
    known: list[bytes] = []
    for (kind, _, _), span in zip(rows, spans, strict=True):
        if kind == PACK:
            stored[span] = with_digests(PACK, bytes(stored[span]))
            known += raw_digests(bytes(stored[span]))
    _fill(stored, places[0], known)
    names = [_name(bytes(stored[span])) for (kind, _, _), span in zip(rows, spans, strict=True) if kind == _MANIFEST]
    _fill(stored, places[1], names)
    blobs = []
    of_manifests = iter(names)
    for key, (kind, _, _), span in zip(keys, rows, spans, strict=True):
        data = bytes(stored[span])
        if kind == _MANIFEST:
            key = key.replace("0" * _NAME_DIGITS, next(of_manifests).decode())
        elif kind == JSON:
            data = with_digests(JSON, data)
        elif kind not in (_PLAIN, PACK):
            raise ValueError(f"a blob of kind {kind}")
        blobs.append(NewBlob(check_key(key), data))
    return blobs


def _fill(stored: bytearray, places: Iterable[tuple[int, int, int]], digests: Sequence[bytes]) -> None:
    """Write digests back where `without_known` has found them."""
    for place, first, n in places:
        some = b"".join(digests[first : first + n])
        if first + n > len(digests) or place + len(some) > len(stored):
            raise ValueError("a place outside of it")
        stored[place : place + len(some)] = some


def _shrunk(content: bytes, rest: bytes) -> bytes:
    """Write the runs of hex digits in a content as bytes, two digits each, with the places of the runs in front.

    Args:
        content: The content.
        rest: What follows, in which no run is looked for.
    """
    runs, out, at = [], [], 0
    for found in _HEX.finditer(content):
        begin, end = found.span()
        end -= (end - begin) % 2
        runs.append(_RUN.pack(begin - at, end - begin))
        out += [content[at:begin], bytes.fromhex(content[begin:end].decode())]
        at = end
        if len(runs) == _MOST_RUNS:
            break
    return b"".join([_N_RUNS.pack(len(runs)), *runs, *out, content[at:], rest])


def grown(small: bytes) -> bytes:
    """Undo `_shrunk`.

    Raises:
        CorruptError: It is too short.
    """
    try:
        (n_runs,) = _N_RUNS.unpack_from(small)
        at = _N_RUNS.size + n_runs * _RUN.size
        out: list[bytes] = []
        for gap, n_digits in _RUN.iter_unpack(small[_N_RUNS.size : at]):
            begin = at + gap
            out += (small[at:begin], hexlify(small[begin : (at := begin + n_digits // 2)]))
    except struct.error as error:
        raise CorruptError("blobs.db", f"a record cannot be read: {error}") from error
    return b"".join([*out, small[at:]])


def encode(small: bytes, base: bytes | None) -> bytes:
    """Encode the shrunk content of a record: one Zstandard frame, or as it is if that is no longer.

    Args:
        small: The content.
        base: That of the record that it is a difference from.
    """
    if base is None and len(small) > MOST_SHARED_BYTES and _is_noise(small):
        return small
    parameters = _PARAMETERS[len(small) >= _LEAST_FOR_MORE_LEVELS]
    packed = zstandard.ZstdCompressor(
        compression_params=parameters, dict_data=None if base is None else _as_dict(base)
    ).compress(small)
    return packed if len(packed) < len(small) else small


def _is_noise(content: bytes) -> bool:
    """Tell whether a sample of some content does not shrink: most large packs are compressed already."""
    sample = content[len(content) // 2 :][:4096]
    return len(zstandard.ZstdCompressor(compression_params=_PARAMETERS[0]).compress(sample)) > 0.95 * len(sample)


def decode(data: bytes, size: int, base: bytes | None) -> bytes:
    """Decode the data of a record, whose digest the caller has checked, to its shrunk content.

    Raises:
        CorruptError: It is no data of such a record.
    """
    if not 0 < size <= _MOST_CONTENT_BYTES:
        raise CorruptError("blobs.db", f"a record says that it has {size} bytes")
    if len(data) == size:
        return data
    try:
        # `decompress` believes the size that a frame claims.
        reader = zstandard.ZstdDecompressor(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
            dict_data=None if base is None else _as_dict(base),
            max_window_size=_MOST_CONTENT_BYTES,
        ).stream_reader(data)
        small: bytes = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise CorruptError("blobs.db", f"a record cannot be unpacked: {error}") from error
    if len(small) != size:
        raise CorruptError("blobs.db", f"a record has {len(small)} bytes and not {size}")
    return small


def _as_dict(base: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def record_check(number: int, base: int | None, size: int, data: bytes) -> int:
    """Return the check of the data in a row of the table ``records``: the first 8 bytes of a BLAKE3 hash."""
    hash_ = digest(b"%d %d %d\n" % (number, base or 0, size) + data)
    return int.from_bytes(hash_[:8], "little", signed=True)


# --- digests that a record leaves out of a blob, since its other bytes give them

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
        hashed = blake3.blake3(pack[start : start + n_stored]).digest()
        found.append((at + 32, hashed[:16]) if codec != _RAW else (at, hashed + hashed[:16]))
    # The last digest covers the others.
    table = bytearray(pack[entries.start : -_LONG_DIGEST_BYTES])
    for at, hashed in found:
        table[at - entries.start : at - entries.start + len(hashed)] = hashed
    found.append((len(pack) - _LONG_DIGEST_BYTES, blake3.blake3(table).digest()))
    return found


def _check_digest(record: bytes) -> list[_Digest]:
    """Compute the check of a JSON record."""
    at = len(record) - _CHECK_DIGITS - len(_CHECK_END)
    before = at - len(_CHECK)
    if before < 0 or record[before:at] != _CHECK or not record.endswith(_CHECK_END):
        raise ValueError("no record with a check")
    return [(at, blake3.blake3(record[:before]).hexdigest(length=_CHECK_DIGITS // 2).encode())]


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
    for at, hashed in _DIGESTS[kind](data):
        out[at : at + len(hashed)] = hashed
    return bytes(out)


def without_digests(kind: int, data: bytes) -> bytes | None:
    """Replace the digests of a blob by zero bytes; None unless `with_digests` gives exactly these bytes back."""
    out = bytearray(data)
    try:
        for at, hashed in _DIGESTS[kind](data):
            if out[at : at + len(hashed)] != hashed:
                return None
            out[at : at + len(hashed)] = bytes(len(hashed))
    except ValueError:
        return None
    return bytes(out)


def raw_digests(pack: bytes) -> list[bytes]:
    """Return the digests of the chunks that lie in a whole pack as they are, in the order of its table."""
    entries = (_PACK_ENTRY.unpack_from(pack, at) for at in _pack_table(pack))
    return [entry[0] for entry in entries if entry[5] == _RAW]


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

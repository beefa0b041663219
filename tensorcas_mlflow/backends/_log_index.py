"""Index of a log: a cache of the places of its blobs (``docs/design/caches.md``, Index of a log)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import blake3
import numpy as np
import zstandard

from tensorcas_mlflow.backends._contract import check_key
from tensorcas_mlflow.backends._log_digests import WORD_BYTES
from tensorcas_mlflow.backends._log_records import HEADER_BYTES, LogRow, key_hash
from tensorcas_mlflow.base.threads import Lazy

MAGIC = b"\x89TCLX\r\n\x01"
_HEAD = struct.Struct("<8s16sQ")
_COUNTS = struct.Struct("<IIII")
_LEVEL = 3
_MAX_BYTES = 1 << 30
_MAX_START = 1 << 62
_COMMIT = np.dtype(
    [
        ("record", "<u4"),
        ("number", "<u4"),
        ("version", "<u4"),
        ("size", "<u4"),
        ("kind", "<u4"),
        ("start", "<u8"),
        ("written_ms", "<u8"),
    ]
)


_Sorted = tuple[Any, Any]
"""Values, ascending; and for each the offset of its record."""


class IndexedBlob(NamedTuple):
    """One live blob of a log."""

    record: int
    """Offset of its record."""
    row: LogRow
    written_s: float
    check: bytes
    """Begin of the digest of its record."""
    words: bytes = b""
    """Words of a pack."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogIndex:
    """Places of the live blobs in the first part of a log."""

    end: int
    """End of that part."""
    records: Any
    """Offset of each record with live blobs, ascending."""
    checks: Any
    """Begin of the digest of each of these records."""
    keys: Any
    """Hash of the key of each blob that no commit created."""
    n_keys: Any
    """Number of such blobs of each record."""
    words: Any
    """Words of all packs."""
    n_words: Any
    """Number of words of each record."""
    commits: Any
    """Blobs created by commits, of dtype `_COMMIT`."""
    commit_keys: Sequence[str]
    consumed: Sequence[str]
    """Keys of consumed intents that existed when the index was written."""

    def with_key(self, key: str) -> list[int]:
        """Return the records that may have a blob that no commit created."""
        return _records_of(self._keys, np.array([_hash(key)], "<u4"))

    def with_words(self, words: Any) -> list[int]:
        """Return the records with packs of some words."""
        return _records_of(self._words, words)

    @Lazy
    def _keys(self) -> _Sorted:
        return self._sorted(self.keys, self.n_keys)

    @Lazy
    def _words(self) -> _Sorted:
        return self._sorted(self.words, self.n_words)

    def _sorted(self, values: Any, counts: Any) -> _Sorted:
        order = np.argsort(values, kind="stable")
        return values[order], np.repeat(self.records, counts)[order]

    def committed(self) -> Iterable[IndexedBlob]:
        """Yield the blobs created by commits."""
        offsets = self.records[self.commits["record"]].tolist()
        checks = list(map(bytes, self.checks[self.commits["record"]].view("V8")))
        for key, offset, check, row in zip(self.commit_keys, offsets, checks, self.commits.tolist(), strict=True):
            _, number, version, size, kind, start, written_ms = row
            yield IndexedBlob(offset, LogRow(number, key, True, version, size, kind, start), written_ms / 1000, check)

    def extended(self, blobs: Iterable[IndexedBlob], consumed: Iterable[str], end: int) -> LogIndex:
        """Return the index of a longer part of the log.

        Args:
            blobs: The live blobs in the rest of that part, by record.
            consumed: Keys of all consumed intents that still exist.
            end: End of that part.
        """
        offsets: dict[int, int] = {}
        checks: list[bytes] = []
        keys: list[tuple[int, int]] = []
        words: list[tuple[int, bytes]] = []
        commits: list[tuple[int, ...]] = []
        commit_keys: list[str] = []
        for blob in blobs:
            record, row = offsets.setdefault(blob.record, len(offsets)), blob.row
            checks[record:] = [blob.check]
            if row.is_commit:
                facts = (row.number, row.version, row.size, row.kind, row.start, round(blob.written_s * 1000))
                commits.append((record + len(self.records), *facts))
                commit_keys.append(row.key)
            else:
                keys.append((record, _hash(row.key)))
                words.append((record, blob.words))
        n_keys, n_words = np.zeros((2, len(offsets)), np.uint32)
        for record, _ in keys:
            n_keys[record] += 1
        for record, some in words:
            n_words[record] += len(some) // WORD_BYTES
        new_words = np.frombuffer(b"".join([some for _, some in words]), "<u4")
        return LogIndex(
            end=end,
            records=np.concatenate([self.records, np.array(list(offsets), np.uint64)]),
            checks=np.concatenate([self.checks, np.frombuffer(b"".join(checks), "<u8")]),
            keys=np.concatenate([self.keys, np.array([each for _, each in keys], "<u4")]),
            n_keys=np.concatenate([self.n_keys, n_keys]),
            words=np.concatenate([self.words, new_words]),
            n_words=np.concatenate([self.n_words, n_words]),
            commits=np.concatenate([self.commits, np.array(commits, _COMMIT)]),
            commit_keys=[*self.commit_keys, *commit_keys],
            consumed=tuple(consumed),
        )


EMPTY = LogIndex(
    end=HEADER_BYTES,
    records=np.empty(0, np.uint64),
    checks=np.empty(0, "<u8"),
    keys=np.empty(0, "<u4"),
    n_keys=np.empty(0, np.uint32),
    words=np.empty(0, "<u4"),
    n_words=np.empty(0, np.uint32),
    commits=np.empty(0, _COMMIT),
    commit_keys=(),
    consumed=(),
)


def index_bytes(log_id: str, index: LogIndex) -> bytes:
    """Write an index."""
    names = "\n".join([*index.commit_keys, *index.consumed]).encode()
    counts = _COUNTS.pack(len(index.records), len(index.keys), len(index.words), len(index.commits))
    gaps = np.diff(index.records, prepend=np.uint64(0)).astype("<u8")
    columns = [index.commits[name] for name in _COMMIT.names or ()]
    columns[-1] = np.diff(columns[-1].astype(np.int64), prepend=0)
    counts_of = (index.n_keys.astype("<u4"), index.n_words.astype("<u4"))
    parts = [gaps, index.checks, *counts_of, index.keys, index.words, *columns]
    payload = counts + b"".join([_planes(part) for part in parts]) + names
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
    head = _HEAD.pack(MAGIC, bytes.fromhex(log_id), index.end)
    return head + blake3.blake3(head + packed).digest() + packed


def read_index(log_id: str, data: bytes) -> LogIndex | None:
    """Read an index; None if it is damaged, of another log or of a later version."""
    head, packed = data[: _HEAD.size], data[_HEAD.size + 32 :]
    if len(data) < _HEAD.size + 32 or data[_HEAD.size : _HEAD.size + 32] != blake3.blake3(head + packed).digest():
        return None
    magic, found, end = _HEAD.unpack(head)
    if magic != MAGIC or found.hex() != log_id:
        return None
    try:
        payload = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_BYTES)
        return _parsed(payload, end)
    except (zstandard.ZstdError, struct.error, ValueError, IndexError, UnicodeDecodeError):
        return None


def _parsed(payload: bytes, end: int) -> LogIndex:
    """Parse the payload of an index.

    Raises:
        ValueError: Its columns do not fit together.
    """
    n_records, n_keys, n_words, n_commits = _COUNTS.unpack_from(payload)
    at = _COUNTS.size

    def column(n: int, dtype: Any) -> Any:
        nonlocal at
        size = n * np.dtype(dtype).itemsize
        planes = np.frombuffer(payload, np.uint8, size, at).reshape(-1, n) if size else np.empty((0, 0), np.uint8)
        at += size
        return np.ascontiguousarray(planes.T).view(dtype).ravel() if size else np.empty(0, dtype)

    records = np.cumsum(column(n_records, "<u8"), dtype=np.uint64)
    checks = column(n_records, "<u8")
    per_record = [column(n_records, "<u4") for _ in range(2)]
    keys, words = column(n_keys, "<u4"), column(n_words, "<u4")
    commits = np.empty(n_commits, _COMMIT)
    for name in (_COMMIT.names or ())[:-1]:
        commits[name] = column(n_commits, _COMMIT[name])
    commits["written_ms"] = np.cumsum(column(n_commits, "<i8"))
    names = payload[at:].decode("ascii").split("\n")
    commit_keys = names[:n_commits]
    sums = [int(each.sum()) for each in per_record]
    if len(commit_keys) != n_commits or sums != [n_keys, n_words] or (commits["record"] >= n_records).any():
        raise ValueError("its columns do not fit together")
    if (commits["start"] > _MAX_START).any():
        raise ValueError("a blob starts behind the end of any log")
    for key in commit_keys:
        check_key(key)
    return LogIndex(
        end=end,
        records=records,
        checks=checks,
        keys=keys,
        n_keys=per_record[0],
        words=words,
        n_words=per_record[1],
        commits=commits,
        commit_keys=commit_keys,
        consumed=[name for name in names[n_commits:] if name],
    )


def _planes(column: Any) -> bytes:
    """Write numbers, the bytes of one significance of all of them together."""
    data = np.ascontiguousarray(column)
    return np.ascontiguousarray(data.view(np.uint8).reshape(len(data), -1).T).tobytes() if len(data) else b""


def _records_of(column: _Sorted, wanted: Any) -> list[int]:
    """Return the offsets of the records with some values, ascending."""
    values, records = column
    begins, ends = (np.searchsorted(values, wanted, side=side) for side in ("left", "right"))
    return sorted({at for begin, end in zip(begins, ends, strict=True) for at in records[begin:end].tolist()})


def _hash(key: str) -> int:
    """Return the hash of a key, as the column of keys has it."""
    return int.from_bytes(key_hash(key), "little")

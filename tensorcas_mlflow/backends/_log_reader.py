"""Records of an open log: reading them one by one, with the records that they need (``docs/format.md``, Logs)."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import blake3
import zstandard

from tensorcas_mlflow.backends._log_records import (
    HEADER_BYTES,
    LEAST_BYTES,
    MAGIC,
    MAX_META_BYTES,
    MAX_PREFIXES,
    VERSION,
    Front,
    Record,
    SkippedRecord,
    as_dict,
    check_header,
    front_bytes,
    grown,
    most_shrunk_bytes,
    parse_meta,
    read_front,
)
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

_GUESSED_BYTES = 4096
"""Bytes to read at the start of a record: they hold the meta of most."""
_AHEAD_BYTES = 256 << 10
"""Bytes to read at the start of a record after a small one."""
_KEPT_METAS = 20
"""Metas that a reader keeps: nearly all prefixes are among them."""
_KEPT_META_BYTES = 256 << 10
"""Bound of the metas that are kept between two readings of a log."""
_NO_END = 1 << 63


def read_summaries(log_id: str, descriptor: int, start: int, size: int) -> tuple[list[SkippedRecord], int]:
    """Read the summaries of the first records that may be skipped and have no body; damage and other records end them.

    Args:
        log_id: Name of the log.
        descriptor: The open log.
        start: End of the last known record that counts.
        size: Size of the log.

    Returns:
        The summaries, and the end of the last record.
    """
    data, named = os.pread(descriptor, min(size - start, _AHEAD_BYTES), start), bytes.fromhex(log_id)
    found: list[SkippedRecord] = []
    at = 0
    while (n_bytes := front_bytes(data[at : at + LEAST_BYTES])) is not None and at + n_bytes <= len(data):
        front = read_front(named, start + at, size, data[at : at + n_bytes])
        if front is None or not front.may_be_skipped or front.has_body:
            break
        found.append(front.summary())
        at += n_bytes
    return found, start + at


class LogReader:
    """Records of one open log, by their places."""

    def __init__(
        self, log_id: str, descriptor: int, key: str, *, metas: Mapping[int, bytes] | None = None, durable: int = 0
    ) -> None:
        """Read from an open file, which the caller closes.

        Args:
            log_id: Name of the log.
            descriptor: The file.
            key: Name of the log in errors.
            metas: Metas of records that count, as `metas` returned them before.
            durable: Every byte before this one was durable.
        """
        self._id = log_id
        self._descriptor = descriptor
        self._key = key
        self._durable = durable
        self._metas: OrderedDict[int, bytes] = OrderedDict(metas or {})
        """Metas of the last records that were read, by offset."""
        self._decompressors: OrderedDict[int, zstandard.ZstdDecompressor] = OrderedDict()
        """Decompressors by the offset of their prefix."""
        self._window = b""
        self._window_at = 0

    def records(
        self, start: int, size: int, *, skips: bool = False
    ) -> tuple[list[Record | SkippedRecord], int, CorruptError | None]:
        """Read the records that count, from a known end on.

        Args:
            start: End of the last known record that counts; 0 for the start of the log.
            size: Size of the file, or less.
            skips: Whether to return the summaries of records that may be skipped.

        Returns:
            The records, and the end of the last one; and the damage after it, if a broken record is known to have been
            durable.

        Raises:
            CorruptError: The header is damaged, or a record has impossible contents.
            NewerFormatError: A later release wrote a record.
        """
        if start == 0:
            if not check_header(self._id, os.pread(self._descriptor, HEADER_BYTES, 0), self._key):
                return [], 0, CorruptError(self._key, "its header is damaged")  # it was durable before the log's name
            start = HEADER_BYTES
        records: list[Record | SkippedRecord] = []
        at = start
        durable = max(start, self._durable)
        n_ahead = _AHEAD_BYTES
        while at < size and (front := self._front(at, size, min(n_ahead, size - at))) is not None:
            record = front.summary() if skips and front.may_be_skipped else self._record(front, MAX_PREFIXES)
            records.append(record)
            n_ahead = _AHEAD_BYTES if record.end - at <= _GUESSED_BYTES else _GUESSED_BYTES
            durable = max(durable, record.durable_before)
            at = record.end
        for number, record in enumerate(records):
            if record.end > durable and not self._has_body(record):
                del records[number:]
                at = record.offset
                break
        is_damaged = at < size and not self._is_torn(at, size)
        return records, at, CorruptError(self._key, f"the record at byte {at} is damaged") if is_damaged else None

    def metas(self, end: int) -> dict[int, bytes]:
        """Return the metas of the last records before a byte, by offset: those after it may need them as prefixes."""
        found: dict[int, bytes] = {}
        n_bytes = 0
        for at, meta in reversed(self._metas.items()):
            n_bytes += len(meta)
            if n_bytes > _KEPT_META_BYTES:
                break
            if at < end:
                found[at] = meta
        return dict(reversed(found.items()))

    def salvage(self, size: int) -> tuple[list[Record], list[tuple[int, int]]]:
        """Read every whole record, also behind damage.

        Returns:
            The records; and for each lost part its first byte and one past its last.

        Raises:
            NewerFormatError: A later release wrote a record.
        """
        records: list[Record] = []
        lost: list[tuple[int, int]] = []
        at = HEADER_BYTES
        while at < size:
            record = self._whole(at, size)
            if record is None:
                if self._is_torn(at, size):
                    break
                found = (self._whole(place, size) for place in self._magics(at + 1, size))
                record = next((each for each in found if each is not None), None)
                if record is None:
                    break
                lost.append((at, record.offset))
            records.append(record)
            at = record.end
        if at < size and not self._is_torn(at, size):
            lost.append((at, size))
        durable = max((record.durable_before for record in records), default=self._durable)
        return [record for record in records if record.end <= durable or self._has_body(record)], lost

    def _whole(self, at: int, size: int) -> Record | None:
        """Return the record at a place; None if it is torn or damaged."""
        try:
            return self.record(at, size)
        except CorruptError:
            return None

    def record(
        self, at: int, size: int, *, n_ahead: int = _GUESSED_BYTES, most_prefixes: int = MAX_PREFIXES
    ) -> Record | None:
        """Read one record, without its body; None if it is not whole."""
        front = self._front(at, size, n_ahead)
        return None if front is None else self._record(front, most_prefixes)

    def _front(self, at: int, size: int, n_ahead: int) -> Front | None:
        """Read the front of a record; None if it is not whole."""
        data = self._bytes(at, min(LEAST_BYTES, size - at), n_ahead)
        n_bytes = front_bytes(data)
        if n_bytes is None or n_bytes > size - at:
            return None
        data = self._bytes(at, n_bytes, 0)
        # Its process may take a record back that it could not write whole.
        front = read_front(bytes.fromhex(self._id), at, size, data) if len(data) == n_bytes else None
        if front is None:
            return None
        if front.version > VERSION:
            raise NewerFormatError(self._key, front.version, VERSION)
        if front.durable_before < 0 or front.prefix < 0:
            raise self._impossible(at)
        return front

    def _record(self, front: Front, most_prefixes: int) -> Record:
        """Read the meta of a record."""
        at, meta = front.offset, front.stored[front.summary_bytes :]
        if front.is_packed:
            meta = self._unpacked(front, meta, most_prefixes)
        try:
            record = parse_meta(meta, front)
        except ValueError:
            raise self._impossible(at) from None
        self._metas[at] = meta
        if len(self._metas) > _KEPT_METAS:
            self._metas.popitem(last=False)
        return record

    def _bytes(self, at: int, n_bytes: int, n_ahead: int) -> bytes:
        """Read bytes, and some behind them for the next call."""
        skipped = at - self._window_at
        if skipped < 0 or skipped + n_bytes > len(self._window):
            self._window = os.pread(self._descriptor, max(n_bytes, n_ahead), at)
            self._window_at, skipped = at, 0
        return self._window[skipped : skipped + n_bytes]

    def _unpacked(self, front: Front, stored: bytes, most_prefixes: int) -> bytes:
        """Return the meta of a record from its stored bytes."""
        at, prefix = front.offset, front.prefix
        if front.meta_bytes > MAX_META_BYTES:
            raise self._impossible(at)
        decompressor = self._decompressors.get(prefix)
        if decompressor is None:
            decompressor = self._decompressors[prefix] = self._decompressor(at, prefix, most_prefixes)
            if len(self._decompressors) > MAX_PREFIXES:
                self._decompressors.popitem(last=False)
        try:
            return grown(decompressor.decompress(stored, max_output_size=most_shrunk_bytes(front.meta_bytes)))
        except struct.error:
            raise self._impossible(at) from None
        except zstandard.ZstdError as error:
            if "memory" in str(error):
                raise MemoryError(f"Zstandard: {error}") from error
            raise self._impossible(at) from None

    def _decompressor(self, at: int, prefix: int, most_prefixes: int) -> zstandard.ZstdDecompressor:
        """Return the decompressor for a record with a prefix, which may need an earlier record."""
        if not prefix:
            return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        meta = self._metas.get(prefix)
        if meta is None:
            if prefix < HEADER_BYTES or most_prefixes == 0:
                raise self._impossible(at)
            window = self._window, self._window_at
            found = self.record(prefix, at, most_prefixes=most_prefixes - 1)
            self._window, self._window_at = window
            if found is None:
                raise CorruptError(self._key, f"the record at byte {at} needs the damaged one at byte {prefix}")
            meta = found.meta
        return zstandard.ZstdDecompressor(dict_data=as_dict(meta), format=zstandard.FORMAT_ZSTD1_MAGICLESS)

    def _impossible(self, at: int) -> CorruptError:
        """Return the error for a record with right digests and contents that no writer writes."""
        return CorruptError(self._key, f"the record at byte {at} has impossible contents")

    def _has_body(self, record: Record | SkippedRecord) -> bool:
        """Tell whether the body of a record hashes to its digest."""
        if record.body_start == record.end:
            return True
        hasher = blake3.blake3()
        at = record.body_start
        while at < record.end:
            piece = os.pread(self._descriptor, min(1 << 20, record.end - at), at)
            if not piece:
                return False
            hasher.update(piece)
            at += len(piece)
        return hasher.digest(length=len(record.body_digest)) == record.body_digest

    def _is_torn(self, at: int, size: int) -> bool:
        """Tell whether a broken record is not known to have been durable: no whole record behind it says so."""
        if at < self._durable:
            return False
        ends = (self._sound(place, size) for place in self._magics(at + 1, size))
        return not any(end is not None and end > at for end in ends)

    def _magics(self, begin: int, size: int) -> Iterator[int]:
        """Yield the places at which a record may begin."""
        rest = b""
        while begin < size:
            piece = os.pread(self._descriptor, 1 << 20, begin)
            if not piece:
                break
            window, origin = rest + piece, begin - len(rest)
            found = window.find(MAGIC)
            while found >= 0:
                yield origin + found
                found = window.find(MAGIC, found + 1)
            begin += len(piece)
            rest = window[-3:]

    def _sound(self, at: int, size: int) -> int | None:
        """Return the first byte that may not have been durable before a record, if its head is whole."""
        n_bytes = front_bytes(os.pread(self._descriptor, LEAST_BYTES, at))
        if n_bytes is None or n_bytes > size - at:
            return None
        data = os.pread(self._descriptor, n_bytes, at)
        # A cut body does not matter here.
        front = read_front(bytes.fromhex(self._id), at, _NO_END, data) if len(data) == n_bytes else None
        return None if front is None else front.durable_before

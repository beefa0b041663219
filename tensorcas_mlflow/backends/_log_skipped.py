"""Skipped records of logs: those of which a process has read the summaries alone."""

from __future__ import annotations

from collections.abc import Iterable

from tensorcas_mlflow.backends._log_digests import WORD_BYTES
from tensorcas_mlflow.backends._log_records import HASH_BYTES, SkippedRecord

LogPlace = tuple[str, int]
"""Name of a log, and the offset of a record in it."""
_Table = dict[bytes, list[LogPlace]]
_LEAST_PURGED = 1 << 12


class SkippedRecords:
    """Places of skipped records, by the hashes in their summaries. Not for several threads at once."""

    def __init__(self) -> None:
        self.n = 0
        """Number of skipped records."""
        self._of_log: dict[str, set[int]] = {}
        """Offsets of the records that are still skipped."""
        self._by_key: _Table = {}
        """Places by the hashes of keys; those of records that have been read since stay until a purge."""
        self._by_word: _Table = {}
        self._n_listed = 0
        """Number of places in both tables."""
        self._purged_at = _LEAST_PURGED

    def note(self, log: str, summary: SkippedRecord) -> None:
        """Add a record."""
        place = log, summary.offset
        offsets = self._of_log.setdefault(log, set())
        self.n += summary.offset not in offsets
        offsets.add(summary.offset)
        for table, hashes, size in (
            (self._by_key, summary.keys, HASH_BYTES),
            (self._by_word, summary.words, WORD_BYTES),
        ):
            for at in range(0, len(hashes), size):
                table.setdefault(hashes[at : at + size], []).append(place)
            self._n_listed += len(hashes) // size
        if self._n_listed > self._purged_at:
            self._purge()

    def with_keys(self, hashes: Iterable[bytes]) -> list[LogPlace]:
        """Return the records that may have keys of some hashes."""
        return self._in(self._by_key, hashes)

    def with_words(self, words: Iterable[bytes]) -> list[LogPlace]:
        """Return the records that may have packs of some words."""
        return self._in(self._by_word, words)

    def all(self) -> list[LogPlace]:
        """Return all records."""
        return [(log, at) for log in self._of_log for at in self._of_log[log]]

    def in_log(self, log: str) -> list[LogPlace]:
        """Return the records of one log."""
        return [(log, at) for at in self._of_log.get(log, ())]

    def remove(self, place: LogPlace) -> None:
        """Remove a record, since it has been read."""
        log, at = place
        if self._has(place):
            self._of_log[log].remove(at)
            self.n -= 1

    def forget(self, log: str) -> set[int]:
        """Remove all records of a log, and return their offsets for `restore`."""
        offsets = self._of_log.pop(log, set())
        self.n -= len(offsets)
        return offsets

    def restore(self, log: str, offsets: set[int]) -> None:
        """Undo `forget`."""
        self.forget(log)
        self._of_log[log] = offsets
        self.n += len(offsets)

    def _in(self, table: _Table, hashes: Iterable[bytes]) -> list[LogPlace]:
        if not table:
            return []
        return [place for each in table.keys() & hashes for place in table[each] if self._has(place)]

    def _has(self, place: LogPlace) -> bool:
        log, at = place
        return at in self._of_log.get(log, ())

    def _purge(self) -> None:
        """Drop the places of records that are no longer skipped: most, in a process that looks for its own blobs."""
        self._n_listed = 0
        for table in (self._by_key, self._by_word):
            for each in list(table):
                places = list(filter(self._has, table[each]))
                if places:
                    table[each] = places
                    self._n_listed += len(places)
                else:
                    del table[each]
        self._purged_at = max(_LEAST_PURGED, 2 * self._n_listed)

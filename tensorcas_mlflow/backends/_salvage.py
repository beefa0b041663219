"""Reading a damaged database page by page, without SQLite.

https://www.sqlite.org/fileformat2.html gives the layout. Each row has a check, so a wrong guess at it does no harm.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tensorcas_mlflow.backends._checks import FAILURES
from tensorcas_mlflow.backends._records import HASHED, NewBlob, blobs_of, decode, folder_of, grown, key_of, stored_key
from tensorcas_mlflow.backends._rows import MAX_BASES, PAGE_BYTES, Commit, Row, commit_of, is_record, row_of, with_ref

_FRAME = struct.Struct(">II8s8x")
_WAL_HEADER_BYTES = 32
_POINTERS_PER_PAGE = PAGE_BYTES // 5
_FREE = 2
"""Kind of a page in the map of pages: it holds what was deleted."""
_LEAF_OF_TABLE, _LEAF_OF_INDEX, _INNER_OF_INDEX = 13, 10, 2
_INTEGER_BYTES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 8: 0, 9: 0}


class Salvage:
    """The whole rows of a database, by their own checks, wherever they lie."""

    def __init__(self, path: str, *logs: str) -> None:
        """Read all of it.

        Args:
            path: Path of the database.
            logs: Paths of write-ahead logs whose pages count instead of earlier ones; a missing one is empty.
        """
        self._commits: list[tuple[Any, ...]] = []
        self.n_commits = 0
        """Number of the last one that the state names."""
        self._rows: dict[bytes, Row] = {}
        self._folders: dict[str, tuple[int, int]] = {}
        self._records: dict[int, list[Any]] = {}
        # The logs first: a process that ends meanwhile may copy its log into the database, and remove it.
        in_logs = [page for log in logs for page in _pages_of_log(_read(log))]
        data = _read(path)
        pages = [(at // PAGE_BYTES + 1, data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
        pages += in_logs
        self._pages = dict(pages)
        for number, page in pages:
            is_last = page is self._pages[number]
            if not is_last or self._kind(number) != _FREE:
                for rowid, values in self._values_in(page, 100 if number == 1 else 0):
                    self._take(rowid, values, is_last=is_last)
        self.commits = self._whole_commits()
        """By their numbers; the caller knows the right ones by their hashes."""
        self.records = sorted(self._records, key=lambda number: self._records[number][0])
        self._rows = {row.stored: row for row in self._rows.values() if self._may_be(row)}

    def row(self, key: str) -> Row | None:
        """Return the row of a key."""
        return self._rows.get(stored_key(key))

    def keys(self) -> dict[bytes, str]:
        """Return the stored keys of all rows, with their keys, as far as anybody knows these."""
        names = {stored_key(key): key for number in self.records for key, _ in self.blobs(number)}
        return {stored: names.get(stored) or name_of_row(stored) for stored in self._rows}

    def is_whole(self, folder: str) -> bool:
        """Tell whether no row is missing among those with a first segment."""
        rows = [row for row in self._rows.values() if folder_of(row.stored) == folder]
        return self._folders.get(folder, (0, 0)) == (len(rows), sum(row.check for row in rows))

    def _may_be(self, row: Row) -> bool:
        """Tell whether a row has its blob, or a damaged record might have it."""
        if row.record not in self._records or not (blobs := self.blobs(row.record)):
            return True
        return row.position < len(blobs) and stored_key(blobs[row.position].key) == row.stored

    def time_of(self, number: int) -> int:
        """Return the time of writing of a record."""
        return int(self._records[number][0])

    def blobs(self, number: int) -> list[NewBlob]:
        """Return the blobs in a record, deleted ones too; none if it is damaged."""
        try:
            return blobs_of(grown(self._small(number, MAX_BASES)))
        except (*FAILURES, KeyError):
            return []

    def _whole_commits(self) -> dict[int, list[Commit]]:
        commits: dict[int, list[Commit]] = {}
        for number, *facts, is_alone in self._commits:
            try:
                row = (number, *facts)
                commits.setdefault(number, []).append(commit_of(row if is_alone else with_ref(row, self.blobs(number))))
            except FAILURES:
                continue
        return commits

    def _small(self, number: int, depth: int) -> bytes:
        _, base, size, _, data = self._records[number]
        return decode(data, size, self._small(base, depth - 1) if base and depth else None)

    def _take(self, rowid: int | None, values: list[Any], *, is_last: bool) -> None:
        """Keep a row if it is one of the tables' and whole. Records and commits of earlier pages never change."""
        try:
            if len(values) == 11 and rowid is not None:
                if is_record(rowid, *values[7:]) and type(values[1]) is int:
                    self._records[rowid] = [values[1], *values[7:]]
                if rowid > 0:
                    self._commits.append((rowid, *values[1:7], values[-1] is None))
            elif len(values) == 4 and rowid is None and is_last:
                key, place, size, commit = values
                row = row_of(key, place, size, commit, None)
                if name_of_row(row.stored):
                    self._rows[row.stored] = row
            elif len(values) == 3 and rowid is None and is_last:
                name, n, total = values
                if name:
                    self._folders[folder_of(name)] = n, total
                else:
                    self.n_commits = int(n)
        except FAILURES:
            pass

    def _kind(self, number: int) -> int:
        """Return the kind of a page as the map of pages has it."""
        place = (number - 2) % (_POINTERS_PER_PAGE + 1)
        page = self._pages.get(number - place, b"")
        return page[5 * (place - 1)] if number > 2 and place and len(page) == PAGE_BYTES else 0

    def _values_in(self, page: bytes, begin: int) -> Iterator[tuple[int | None, list[Any]]]:
        """Yield the row number, if the table has some, and the values of each row that a page may hold."""
        for kind in (_LEAF_OF_TABLE, _LEAF_OF_INDEX, _INNER_OF_INDEX):
            array = begin + (12 if kind == _INNER_OF_INDEX else 8)
            n_cells = min(int.from_bytes(page[begin + 3 : begin + 5]), (len(page) - array) // 2)
            for at in range(array, array + 2 * n_cells, 2):
                try:
                    place = int.from_bytes(page[at : at + 2]) + (4 if kind == _INNER_OF_INDEX else 0)
                    n_bytes, place = _varint(page, place)
                    rowid = None
                    if kind == _LEAF_OF_TABLE:
                        rowid, place = _varint(page, place)
                    yield rowid, _values(self._payload(page, place, n_bytes, kind))
                except (IndexError, KeyError, ValueError):
                    continue

    def _payload(self, page: bytes, place: int, n_bytes: int, kind: int) -> bytes:
        least = (PAGE_BYTES - 12) * 32 // 255 - 23
        most = PAGE_BYTES - 35 if kind == _LEAF_OF_TABLE else (PAGE_BYTES - 12) * 64 // 255 - 23
        n_here = least + (n_bytes - least) % (PAGE_BYTES - 4)
        if n_bytes <= most:
            return page[place : place + n_bytes]
        n_here = n_here if n_here <= most else least
        pieces, left = [page[place : place + n_here]], n_bytes - n_here
        following = page[place + n_here : place + n_here + 4]
        while left > 0:
            page = self._pages[int.from_bytes(following)]
            pieces.append(page[4 : 4 + min(left, PAGE_BYTES - 4)])
            left -= len(pieces[-1]) or left
            following = page[:4]
        return b"".join(pieces)


def name_of_row(stored: bytes) -> str:
    """Return the key of a row, or what the row says of it: the hash of the key."""
    folder = folder_of(stored)
    return f"{folder}/{stored[1:].hex()}" if folder in HASHED else key_of(stored)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _pages_of_log(log: bytes) -> list[tuple[int, bytes]]:
    """Return the numbers and pages in a write-ahead log up to its last whole transaction, damaged ones too."""
    frames = [
        (*_FRAME.unpack_from(log, at), at + _FRAME.size)
        for at in range(_WAL_HEADER_BYTES, len(log) - PAGE_BYTES - _FRAME.size + 1, PAGE_BYTES + _FRAME.size)
    ]
    salts = Counter(salt for _, _, salt, _ in frames)
    salt = log[16:24] if log[16:24] in salts else max(salts, key=salts.__getitem__, default=b"")
    frames = [frame for frame in frames if frame[2] == salt]
    while frames and not frames[-1][1]:  # the size of the database stands in the last frame of each transaction
        frames.pop()
    return [(number, log[at : at + PAGE_BYTES]) for number, _, _, at in frames]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number, and return it and the place behind it."""
    value = 0
    for n_read in range(8):
        byte = data[at + n_read]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + n_read + 1
    value = value << 8 | data[at + 8]
    return value - (1 << 64) if value >> 63 else value, at + 9


def _values(payload: bytes) -> list[Any]:
    """Read the values of a row.

    Raises:
        ValueError: It is none.
    """
    end, at = _varint(payload, 0)
    kinds: list[int] = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Any] = []
    for kind in kinds:
        n_bytes = (kind - 12) // 2 if kind >= 12 else _INTEGER_BYTES[kind]
        stored = payload[at : at + n_bytes]
        if kind >= 12:
            values.append(stored)
        elif kind == 0:
            values.append(None)
        else:
            values.append(kind - 8 if kind >= 8 else int.from_bytes(stored, signed=True))
        at += n_bytes
    if at != len(payload):
        raise ValueError("a row of another length")
    return values

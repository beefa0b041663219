"""Segments of the index: what was written is found, what was changed is not, and merging loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import BlobInfo, LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout.packs import (
    EMPTY,
    Segment,
    Table,
    list_segments,
    make_table,
    merge_segments,
    merge_tables,
    only_packs,
    open_segment,
    read_segment,
    segment_bytes,
    segment_key,
    to_merge,
)
from tensorcas_mlflow.layout.packs import _index as segments
from tests.layout.test_index import MIXED, TABLE, as_deltas, digests, entries, name

KEY = segment_key("0" * 32)
MANY = make_table({name(n): entries(list(range(40 * n, 40 * n + 60))) for n in range(12)})
"""Twelve packs of 60 chunks; each shares 20 with the next one."""
COPIES = merge_tables([make_table({name(100 + n): entries([1, 2]) for n in range(300)}), MANY])
"""More copies of two chunks than there are rows in a block."""
DELTAS = make_table(
    {name(70): entries(list(range(200))), name(80): as_deltas(entries(list(range(100, 300))), name(70))}
)


@pytest.fixture(autouse=True)
def _every_segment_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_SMALL_BYTES", 0)


@pytest.fixture(params=["file", "memory", "bucket"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> LocalBackend | MemoryBackend:
    if request.param == "file":
        return LocalBackend(tmp_path)
    return MemoryBackend(is_remote=request.param == "bucket")


def opened(backend: Any, table: Table) -> Segment:
    backend.put_new(KEY, [segment_bytes(table)])
    segment = open_segment(backend, KEY)
    assert isinstance(segment, Segment)
    return segment


def found(searched: Table | Segment, numbers: list[int], **options: Any) -> dict[int, tuple[str, bytes]]:
    """The number of each found digest, with its pack and its entry."""
    hits = searched.look_up(digests(numbers), **options)
    packs = [hits.packs[at] for at in hits.pack.tolist()]
    return {at: (pack, entry.tobytes()) for at, pack, entry in zip(hits.at.tolist(), packs, hits.entries, strict=True)}


@pytest.mark.parametrize("table", [TABLE, MIXED, EMPTY, MANY, DELTAS], ids=["few", "mixed", "none", "many", "deltas"])
def test_a_segment_is_read_back_as_the_table_it_was_written_from(table: Table) -> None:
    read = read_segment(KEY, segment_bytes(table))

    assert read.packs == table.packs
    assert (read.pack == table.pack).all()
    assert (read.entries == table.entries).all()
    assert (read.prefix == table.prefix).all()


@pytest.mark.parametrize("table", [TABLE, EMPTY, MANY, COPIES, DELTAS], ids=["few", "none", "many", "copies", "deltas"])
def test_a_search_by_ranges_finds_what_a_search_in_memory_finds(backend: Any, table: Table) -> None:
    segment = opened(backend, table)
    wanted = [*range(0, 700, 3), 5000, 1, 2]

    assert found(segment, wanted).keys() == found(table, wanted).keys()
    assert found(segment, []) == {}
    rows = {entry.tobytes() for entry in table.entries}
    assert all(entry in rows for _, entry in found(segment, wanted).values())
    for packs in ([name(0), name(105)], [name(3), name(4), name(200)]):
        got, expected = (found(each, wanted, usable=each.without(packs)) for each in (segment, table))
        assert got.keys() == expected.keys()
        assert not {pack for pack, _ in got.values()} & set(packs)


def test_a_chunk_is_found_in_the_one_pack_that_is_asked_for(backend: Any) -> None:
    segment = opened(backend, COPIES)
    for pack in (name(100), name(255), name(399)):
        number = segment.numbers[pack]
        hits = found(segment, [1, 2, 3], packs=np.array([number] * 3))

        assert {at: pack for at, (pack, _) in hits.items()} == dict.fromkeys([0, 1], pack)


def test_digests_with_one_beginning_are_told_apart(backend: Any) -> None:
    rows = entries(list(range(300)))
    rows["digest"][:, :10] = 255
    segment = opened(backend, make_table({name(0): rows}))

    hits = segment.look_up(np.ascontiguousarray(rows["digest"]))

    assert dict(zip(hits.at.tolist(), hits.entries["offset"].tolist(), strict=True)) == {n: n for n in range(300)}


@pytest.mark.long
def test_a_search_reads_a_few_hundred_bytes_for_each_digest_however_large_the_segment_is() -> None:
    n_read = []
    for n in (30_000, 120_000):
        random = np.random.default_rng(n)
        rows = np.zeros(n, TABLE.entries.dtype)
        rows["digest"] = random.integers(0, 256, (n, 32), np.uint8)
        backend = _Counted()
        segment = opened(backend, make_table({name(0): rows}))
        backend.n_bytes = 0
        missing = random.integers(0, 256, (20, 32), np.uint8)
        hits = segment.look_up(np.concatenate([rows["digest"][:20], missing]))

        assert sorted(hits.at.tolist()) == list(range(20))
        n_read.append(backend.n_bytes)

    assert max(n_read) < 40 * 2 * 8192
    assert n_read[1] < 1.5 * n_read[0]


class _Counted(MemoryBackend):
    n_bytes = 0

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.n_bytes += len(out)
        super().read_into(key, start, out)


@pytest.mark.parametrize("table", [TABLE, MIXED], ids=["in full", "deltas"])
def test_every_changed_byte_of_a_segment_is_seen(table: Table) -> None:
    whole = segment_bytes(table)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8

        with pytest.raises(FormatError):
            read_segment(KEY, bytes(changed))


@pytest.mark.long
@settings(max_examples=150)
@given(st.data())
def test_a_search_in_changed_bytes_finds_no_other_place(data: st.DataObject) -> None:
    whole = segment_bytes(DELTAS)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    backend = MemoryBackend()
    backend.put_new(KEY, [bytes(changed[: data.draw(st.sampled_from([len(whole), len(whole) - 1, 63, 0]))])])
    true = {(DELTAS.packs[pack], entry.tobytes()) for pack, entry in zip(DELTAS.pack, DELTAS.entries, strict=True)}
    try:
        segment = open_segment(backend, KEY)
    except FormatError:
        return

    assert set(found(segment, list(range(0, 300, 7))).values()) <= true


def with_foot(**changes: int) -> bytes:
    """A segment whose foot says other numbers, with the right digest."""
    whole = segment_bytes(MANY)
    magic, version, n_packs, n_rows, row_bytes, zero, _ = segments._FOOT.unpack(whole[-64:])
    said = {"version": version, "n_packs": n_packs, "n_rows": n_rows, "row_bytes": row_bytes, **changes}
    head = segments._FOOT.pack(magic, *said.values(), zero, b"")[:32]
    known = whole[n_rows * (row_bytes + 2) : -64]
    return whole[:-64] + head + segments.digest_of([known, head])


@pytest.mark.parametrize(
    "changes",
    [
        {"n_rows": 0},
        {"n_rows": 2**63},
        {"n_rows": len(MANY) - 1},
        {"n_packs": 0},
        {"n_packs": 2**31},
        {"row_bytes": 0},
        {"row_bytes": 128},
    ],
    ids=repr,
)
def test_a_segment_that_lies_about_its_size_is_damage(changes: dict[str, int]) -> None:
    assert len(read_segment(KEY, with_foot())) == len(MANY)
    with pytest.raises(CorruptError):
        read_segment(KEY, with_foot(**changes))
    backend = MemoryBackend()
    backend.put_new(KEY, [with_foot(**changes)])
    with pytest.raises(CorruptError):
        open_segment(backend, KEY)


def test_a_segment_of_a_later_release_is_refused_with_its_version() -> None:
    with pytest.raises(NewerFormatError, match="version 9"):
        read_segment(KEY, with_foot(version=9))


@pytest.mark.parametrize("fields", [{"pack": 2}, {"offset": 1 << 60}, {"depth": 65}, {"codec": 0}], ids=repr)
def test_an_impossible_row_is_damage_and_never_found(fields: dict[str, int]) -> None:
    at = int(np.flatnonzero(DELTAS.entries["codec"])[0])
    made, pack = DELTAS.entries.copy(), DELTAS.pack.copy()
    for field, value in fields.items():
        (pack if field == "pack" else made[field])[at] = value
    data = b"".join(segments.segment_pieces(DELTAS.packs, [(made, pack)], has_deltas=True))
    with pytest.raises(CorruptError):
        read_segment(KEY, data)
    backend = MemoryBackend()
    backend.put_new(KEY, [data])
    hits = open_segment(backend, KEY).look_up(np.ascontiguousarray(made["digest"][at : at + 1]))

    assert made[at].tobytes() not in {entry.tobytes() for entry in hits.entries}


# --- merging


def test_merged_segments_find_what_each_found_but_packs_that_are_gone(backend: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "_PART_ROWS", 64)
    for number, table in enumerate([MANY, DELTAS, MANY]):
        backend.put_new(segment_key(f"{number:032x}"), [segment_bytes(table)])
    there = [name(n) for n in (0, 1, 3, 5, 70, 80)]
    merge_segments(backend, [info.key for info in list_segments(backend)], set(there))

    [info] = list_segments(backend)
    merged = open_segment(backend, info.key)
    assert isinstance(merged, Segment)
    assert sum(len(rows) for rows, _ in merged.parts()) == len(merged)
    assert set(merged.packs) == set(there)
    whole = merge_tables([DELTAS, only_packs(MANY, set(there))])
    assert found(merged, list(range(500))).keys() == found(whole, list(range(500))).keys()
    assert len(merged) == len(whole)
    assert len(read_segment(info.key, backend.get(info.key))) == len(merged)


def test_a_merge_without_a_pack_left_removes_the_segments(backend: Any) -> None:
    backend.put_new(KEY, [segment_bytes(TABLE)])
    merge_segments(backend, [KEY], set())

    assert list_segments(backend) == []


def test_a_merge_of_a_damaged_segment_changes_nothing(backend: Any) -> None:
    changed = bytearray(segment_bytes(MANY))
    changed[1000] ^= 1
    backend.put_new(KEY, [bytes(changed)])
    backend.put_new(segment_key("1" * 32), [segment_bytes(TABLE)])
    with pytest.raises(CorruptError):
        merge_segments(backend, [KEY, segment_key("1" * 32)])

    assert {info.key for info in list_segments(backend)} == {KEY, segment_key("1" * 32)}


def test_a_search_ends_with_an_error_or_the_result_when_the_segment_is_removed_under_it(backend: Any) -> None:
    segment = opened(backend, MANY)
    before = found(segment, [1, 2])
    backend.delete(KEY)
    try:
        assert found(segment, [1, 2]) == before
        assert isinstance(backend, LocalBackend)
    except BlobNotFoundError:
        assert isinstance(backend, MemoryBackend)


def test_few_segments_remain_and_rows_move_a_few_times() -> None:
    sizes: dict[str, int] = {}
    n_moved = 0
    for number in range(1000):
        sizes[f"{number:05}"] = 100
        infos = [BlobInfo(key, size, 0.0, "") for key, size in sizes.items()]
        chosen = to_merge(infos, most_bytes=1 << 40)
        if chosen:
            size = sum(sizes.pop(key) for key in chosen)
            n_moved += size
            sizes[f"{number:05}m"] = size

        assert len(sizes) <= 2 + np.log2(number + 1)
    assert n_moved <= 100 * 1000 * np.log2(1000) * 1.5


def test_segments_above_the_bound_are_left_alone() -> None:
    infos = [BlobInfo(f"{size}", size, 0.0, "") for size in (100, 150, 900, 1000)]

    assert to_merge(infos, most_bytes=500) == ["100", "150"]
    assert to_merge(infos[2:], most_bytes=500) == []


class _Dying(MemoryBackend):
    """Fails from its n-th change on."""

    n_left = 1 << 30

    def _live(self) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            raise BackendError("change", KEY, "the process has died")

    def put_new(self, key: str, pieces: Any, *, durable: bool = True) -> str:
        self._live()
        return super().put_new(key, pieces, durable=durable)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._live()
            super().delete(key)


@pytest.mark.parametrize("n_changes", range(4))
def test_a_merge_that_dies_anywhere_leaves_every_chunk_in_the_index(n_changes: int) -> None:
    backend = _Dying()
    tables = [MANY, DELTAS]
    for number, table in enumerate(tables):
        backend.put_new(segment_key(f"{number:032x}"), [segment_bytes(table)])
    backend.n_left = n_changes
    try:
        merge_segments(backend, [info.key for info in list_segments(backend)])
        assert n_changes == 3
    except BackendError:
        assert n_changes < 3
    backend.n_left = 1 << 30
    left = [open_segment(backend, info.key) for info in list_segments(backend)]

    for table in tables:
        wanted = found(table, list(range(500))).keys()
        assert wanted <= set().union(*(found(segment, list(range(500))) for segment in left))
    merge_segments(backend, [info.key for info in list_segments(backend)])
    [info] = list_segments(backend)
    assert len(read_segment(info.key, backend.get(info.key))) == len(MANY) + len(DELTAS)

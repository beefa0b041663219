from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import stat
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.base import config
from tensorcas_mlflow.chunk_io import CachedPack, ExtentCache
from tensorcas_mlflow.chunk_io._cache_files import BLOCK_BYTES, Room

STORE = "9f1c0e5a7b3d4c2e8f6a1b0c9d8e7f60"
PACK = "00112233445566778899aabbccddeeff"
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> ExtentCache:
    return ExtentCache(folder, max_bytes=256 * MIB)


def content(start: int, n_bytes: int, pack: str = PACK) -> bytes:
    """The bytes of a pack at a place: any two stretches differ."""
    first, last = start // 4 * 4, -(-(start + n_bytes) // 4) * 4
    words = np.arange(first // 4, last // 4, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(
        len(pack) + ord(pack[-1])
    )
    return words.tobytes()[start - first : start - first + n_bytes]


def put(cache: ExtentCache, *places: tuple[int, int], pack: str = PACK) -> None:
    cache.put(STORE, pack, [(start, content(start, n_bytes, pack)) for start, n_bytes in places])


def held(pack: CachedPack, *places: tuple[int, int]) -> list[bool]:
    offsets, lengths = np.array(places, dtype=np.int64).reshape(-1, 2).T
    answer: list[bool] = pack.find(offsets, lengths).held.tolist()
    return answer


def read(pack: CachedPack, *places: tuple[int, int]) -> list[bytes | None]:
    """Return the bytes of each chunk from the cache; None for a miss."""
    out: list[bytes | None] = [None] * len(places)
    offsets, lengths = np.array(places, dtype=np.int64).reshape(-1, 2).T
    for each in pack.find(offsets, lengths).reads:
        block = each.read()
        if block is not None:
            for member, begin in zip(each.members.tolist(), each.begins.tolist(), strict=True):
                out[member] = bytes(block[begin : begin + places[member][1]])
    return out


def files(folder: Path, pattern: str = "*.extents") -> list[Path]:
    return sorted(folder.rglob(pattern))


def n_bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


# What is found


def test_cache_gives_back_the_bytes_that_were_put(cache: ExtentCache) -> None:
    put(cache, (8, 100_000), (5_000_000, 300_000))

    pack = cache.open_pack(STORE, PACK)
    wanted = [(8, 100), (50_000, 50_008), (5_100_000, 200_000), (8, 100_000)]
    assert read(pack, *wanted) == [content(*place) for place in wanted]


def test_a_cache_that_does_not_exist_yet_holds_nothing(cache: ExtentCache, folder: Path) -> None:
    assert held(cache.open_pack(STORE, PACK), (0, 1)) == [False]
    assert not folder.exists()


def test_only_what_lies_wholly_inside_an_extent_is_held(cache: ExtentCache) -> None:
    put(cache, (1_000, 1_000))

    places = [(1_000, 1_000), (1_999, 1), (999, 2), (1_999, 2), (2_000, 1), (900, 1_200), (0, 10), (1_500, 0)]
    assert held(cache.open_pack(STORE, PACK), *places) == [True, True, False, False, False, False, False, False]


def test_farthest_reaching_of_overlapping_extents_serves(cache: ExtentCache) -> None:
    put(cache, (0, 10_000))
    put(cache, (2_000, 100))
    put(cache, (9_000, 5_000))

    pack = cache.open_pack(STORE, PACK)
    wanted = [(2_050, 1_000), (9_500, 500), (9_500, 4_500), (0, 10_000)]
    assert read(pack, *wanted) == [content(*place) for place in wanted]
    assert held(pack, (8_000, 3_000)) == [False]


def test_places_no_pack_has_are_not_held(cache: ExtentCache) -> None:
    put(cache, (0, 1_000))

    pack = cache.open_pack(STORE, PACK)
    assert (
        pack.find(np.array([2**64 - 1, 2**63 - 1], dtype=np.uint64), np.array([2**32 - 1, 2**32 - 1])).held.sum() == 0
    )
    assert held(pack, (-5, 3), (2**62, 2**62), (5, -3)) == [False] * 3


def test_the_columns_of_a_packs_table_can_be_asked_for_as_they_are(cache: ExtentCache) -> None:
    put(cache, (0, 1_000))

    found = cache.open_pack(STORE, PACK).find(np.array([0, 900], dtype="<u8"), np.array([5, 200], dtype="<u4"))
    assert found.held.tolist() == [True, False]


def test_cache_keeps_packs_and_stores_apart(cache: ExtentCache) -> None:
    put(cache, (0, 1_000))

    assert held(cache.open_pack(STORE, "another"), (0, 1)) == [False]
    assert held(cache.open_pack("another", PACK), (0, 1)) == [False]


def test_names_with_slashes_and_dots_stay_inside_the_folder(cache: ExtentCache, tmp_path: Path) -> None:
    cache.put("../../s", "../../../p\0", [(0, b"x")])

    assert read(cache.open_pack("../../s", "../../../p\0"), (0, 1)) == [b"x"]
    assert os.listdir(tmp_path) == ["cache"]


def test_near_chunks_are_read_together_and_in_bounded_reads(cache: ExtentCache) -> None:
    put(cache, *[(at * MIB, MIB) for at in range(40)])

    offsets = np.arange(40 * 16) * (64 * KIB)
    reads = cache.open_pack(STORE, PACK).find(offsets, np.full(len(offsets), 64 * KIB)).reads
    assert len(reads) <= 6
    assert all(len(each.read() or b"") <= 8 * MIB for each in reads)


def test_scattered_chunks_are_found_whatever_their_order(cache: ExtentCache) -> None:
    rng = random.Random(7)
    places = [(at * 5_000, rng.randrange(1, 4_000)) for at in range(3_000)]
    put(cache, *places)
    rng.shuffle(places)

    assert read(cache.open_pack(STORE, PACK), *places) == [content(*place) for place in places]


def test_a_chunk_wanted_twice_is_given_twice(cache: ExtentCache) -> None:
    put(cache, (0, 1_000))

    assert read(cache.open_pack(STORE, PACK), (10, 5), (10, 5)) == [content(10, 5)] * 2


def test_random_puts_and_looks_agree_with_a_list_of_extents(cache: ExtentCache) -> None:
    rng = random.Random(11)
    extents: list[tuple[int, int]] = []
    for _ in range(60):
        extent = (rng.randrange(5_000), rng.randrange(1, 900))
        extents.append(extent)
        put(cache, extent)
        wanted = [(rng.randrange(5_500), rng.randrange(1, 300)) for _ in range(50)]
        expected = [any(b <= o and o + n <= b + m for b, m in extents) for o, n in wanted]

        pack = cache.open_pack(STORE, PACK)
        assert held(pack, *wanted) == expected
        bytes_of = [content(*place) if is_held else None for place, is_held in zip(wanted, expected, strict=True)]
        assert read(pack, *wanted) == bytes_of


# Damage


def some_file(cache: ExtentCache, folder: Path) -> Path:
    put(cache, (0, 300 * KIB), (MIB, 300 * KIB))
    [path] = files(folder)
    return path


@pytest.mark.parametrize(
    "part", ["magic", "counts", "label", "table", "digests", "first block", "last block", "last byte"]
)
def test_a_flipped_bit_makes_a_miss_and_removes_the_file(cache: ExtentCache, folder: Path, part: str) -> None:
    path = some_file(cache, folder)
    size = path.stat().st_size
    at = {
        "magic": 3,
        "counts": 9,
        "label": 40,
        "table": 66,
        "digests": 64 + 32 + 5,
        "first block": size - 600 * KIB + 9,
        "last block": size - 600 * KIB + 2 * BLOCK_BYTES + 1,
        "last byte": size - 1,
    }[part]
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)

    got = read(cache.open_pack(STORE, PACK), (0, 300 * KIB), (MIB, 300 * KIB))
    assert None in got
    assert all(each is None or each == content(start, 300 * KIB) for start, each in zip((0, MIB), got, strict=True))
    assert files(folder) == []


def test_no_flipped_byte_of_a_small_file_gives_wrong_bytes(cache: ExtentCache, folder: Path) -> None:
    put(cache, (7, 40), (100, 9))
    [path] = files(folder)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])

        assert read(cache.open_pack(STORE, PACK), (7, 40), (100, 9)) == [None, None]
        assert not path.exists()


def test_a_file_cut_short_anywhere_is_a_miss(cache: ExtentCache, folder: Path) -> None:
    put(cache, (7, 40))
    [path] = files(folder)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])

        assert read(cache.open_pack(STORE, PACK), (7, 40)) == [None]
        assert not path.exists()


def test_bytes_after_the_end_of_a_cache_file_are_damage(cache: ExtentCache, folder: Path) -> None:
    path = some_file(cache, folder)
    path.write_bytes(path.read_bytes() + b"\0")

    assert held(cache.open_pack(STORE, PACK), (0, 1)) == [False]


def test_a_file_damaged_after_it_was_looked_at_is_a_miss(cache: ExtentCache, folder: Path) -> None:
    path = some_file(cache, folder)
    pack = cache.open_pack(STORE, PACK)
    os.truncate(path, path.stat().st_size - 1)

    assert read(pack, (0, 10)) == [content(0, 10)]
    assert read(pack, (MIB, 300 * KIB)) == [None]
    assert not path.exists()


def test_a_file_of_another_pack_in_the_place_of_one_is_a_miss(cache: ExtentCache, folder: Path) -> None:
    path = some_file(cache, folder)
    put(cache, (0, 300 * KIB), (MIB, 300 * KIB), pack="other")
    [other] = [each for each in files(folder) if each != path]

    shutil.copy(other, path)
    assert read(cache.open_pack(STORE, PACK), (0, 10)) == [None]
    shutil.copy(other, path.parent / other.name)
    assert read(cache.open_pack(STORE, PACK), (0, 10)) == [None]
    assert read(cache.open_pack(STORE, "other"), (0, 10)) == [content(0, 10, "other")]


def test_caller_can_discard_wrong_extents(cache: ExtentCache) -> None:
    cache.put(STORE, PACK, [(0, b"came damaged from the storage")])
    [wrong] = cache.open_pack(STORE, PACK).find([0], [4]).reads
    wrong.discard()

    assert held(cache.open_pack(STORE, PACK), (0, 4)) == [False]


def test_a_file_of_somebody_else_is_not_read(cache: ExtentCache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_file(cache, folder)
    pack = cache.open_pack(STORE, PACK)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    assert read(pack, (0, 10)) == [None]
    assert held(cache.open_pack(STORE, PACK), (0, 10)) == [False]


# Deleted, unwritable, full


def test_the_folder_may_be_deleted_between_a_look_and_a_read(cache: ExtentCache, folder: Path) -> None:
    put(cache, (0, 1_000))
    pack = cache.open_pack(STORE, PACK)
    shutil.rmtree(folder)

    assert read(pack, (0, 10)) == [None]


def test_the_folder_may_be_deleted_between_two_puts(cache: ExtentCache, folder: Path) -> None:
    put(cache, (0, 1_000))
    shutil.rmtree(folder)
    put(cache, (5_000, 10))

    assert read(cache.open_pack(STORE, PACK), (0, 10), (5_000, 10)) == [None, content(5_000, 10)]


def test_deleting_everything_all_the_time_disturbs_nobody(cache: ExtentCache, folder: Path) -> None:
    over = threading.Event()

    def delete() -> None:
        while not over.is_set():
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for at in range(150):
            put(cache, (at, 5_000))
            cache._pause_until = 0.0
            assert read(cache.open_pack(STORE, PACK), (at, 5_000))[0] in (None, content(at, 5_000))
    finally:
        over.set()
        thread.join()


FAULTS = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO, errno.EMFILE]


@pytest.mark.parametrize(
    "call", ["mkdir", "open", "replace", "write", "fchmod", "listdir", "scandir", "preadv", "utime"]
)
def test_no_fault_of_the_disk_reaches_the_caller(
    cache: ExtentCache, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(cache, (0, 1_000))
    os.utime(files(folder)[0], (0, 0))
    pack = cache.open_pack(STORE, PACK)
    for code in FAULTS:

        def fail(*_: object, code: int = code, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            cache._pause_until = 0.0
            put(cache, (code * 10_000, 1_000))
            put(cache, (code * 10_000, 1_000), pack="new")

            assert read(pack, (0, 10))[0] in (None, content(0, 10))
            assert read(cache.open_pack(STORE, PACK), (0, 10))[0] in (None, content(0, 10))
    if call != "unlink":
        assert files(folder, "*.staging") == []


def _put_with_small_files(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    put(ExtentCache(folder, max_bytes=256 * MIB), (0, 4 * MIB))


@pytest.mark.long
def test_a_write_that_ends_half_way_leaves_nothing(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_put_with_small_files, args=(folder,))
    process.start()
    process.join()

    assert process.exitcode == 0
    assert files(folder, "*.extents") + files(folder, "*.staging") == []


def test_a_file_where_the_folder_should_be_is_a_cache_that_holds_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_bytes(b"mine")
    cache = ExtentCache(folder, max_bytes=256 * MIB)
    put(cache, (0, 1_000))

    assert held(cache.open_pack(STORE, PACK), (0, 1)) == [False]
    assert folder.read_bytes() == b"mine"


def test_the_log_says_once_that_the_cache_does_less(
    cache: ExtentCache, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        for at in range(5):
            put(cache, (at, 10))
            cache._pause_until = 0.0

    assert [record.message.split(" at ")[0] for record in caplog.records] == ["The chunk cache"]


def test_cache_pauses_writes_after_a_failure(cache: ExtentCache, folder: Path) -> None:
    folder.write_bytes(b"")
    put(cache, (0, 10))
    folder.unlink()
    put(cache, (0, 10))

    assert not folder.exists()


# Hostile names


def hostile(parent: Path, outside: Path) -> Iterator[Path]:
    """Put what does not belong there into a folder of the cache."""
    name = "ab" * 16
    (parent / f"{name}.extents").mkdir()
    (parent / f"{name[::-1]}.extents").symlink_to(outside)
    os.mkfifo(parent / ("cd" * 16 + ".extents"))
    (parent / ("ef" * 16 + ".staging")).symlink_to(outside)
    (parent / "..extents").write_bytes(b"x")
    (parent / "note.txt").write_bytes(b"x")
    (parent / f"{name}.extents.bak").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(parent) + b"/\xff\n.extents")).write_bytes(b"x")
    return parent.iterdir()


def test_foreign_names_are_neither_read_nor_removed(cache: ExtentCache, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"not the cache's")
    small = ExtentCache(folder, max_bytes=MIB)
    put(small, (0, 1_000))
    parent = files(folder)[0].parent
    foreign = set(hostile(parent, outside)) - set(files(parent))
    (parent.parent / ("0" * 32)).symlink_to(tmp_path)
    (tmp_path / ("1" * 32 + ".extents")).write_bytes(b"no cache lies here")
    for at in range(30):
        put(small, (at * MIB, 100 * KIB), pack=str(at % 3))

    assert outside.read_bytes() == b"not the cache's"
    assert (tmp_path / ("1" * 32 + ".extents")).exists()
    assert all(os.path.lexists(path) for path in foreign)
    assert held(small.open_pack(STORE, "2"), (29 * MIB, 1)) == [True]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"x" * 37), Path.touch])
def test_invalid_tally_is_rebuilt_or_the_cache_does_less(folder: Path, make: Callable[[Path], object]) -> None:
    (folder / "extents-1").mkdir(parents=True)
    make(folder / "extents-1" / "tally")
    cache = ExtentCache(folder, max_bytes=MIB)
    for at in range(30):
        put(cache, (at * MIB, 100 * KIB))

    assert n_bytes_of(folder) <= MIB


# The bound


def test_the_bound_is_kept_and_what_was_used_last_stays(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=2 * MIB)
    for at in range(100):
        put(cache, (at * MIB, 100 * KIB))
        for age, path in enumerate(sorted(files(folder), key=lambda path: -path.stat().st_mtime)):
            os.utime(path, (time.time() - 10 * (age + 1),) * 2)

        assert n_bytes_of(folder) <= 2 * MIB
    assert held(cache.open_pack(STORE, PACK), (99 * MIB, 1), (90 * MIB, 1), (0, 1)) == [True, True, False]


def test_reading_makes_a_cache_file_young(cache: ExtentCache, folder: Path) -> None:
    path = some_file(cache, folder)
    os.utime(path, (1_000, 1_000))
    read(cache.open_pack(STORE, PACK), (0, 10))

    assert path.stat().st_mtime > time.time() - 60


def test_a_file_used_within_the_last_minute_is_not_touched_again(cache: ExtentCache, folder: Path) -> None:
    path = some_file(cache, folder)
    before = time.time() - 30
    os.utime(path, (before, before))
    read(cache.open_pack(STORE, PACK), (0, 10))

    assert path.stat().st_mtime == pytest.approx(before, abs=0.01)


def test_a_file_from_the_future_goes_first(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=MIB)
    put(cache, (0, 100 * KIB))
    [path] = files(folder)
    os.utime(path, (time.time() + 1e6,) * 2)
    for at in range(1, 11):
        put(cache, (at * MIB, 100 * KIB))

    assert not path.exists()


def test_cache_refuses_an_extent_larger_than_an_eighth_of_its_bound(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=MIB)
    put(cache, (0, 100 * KIB))
    put(cache, (MIB, 200 * KIB))

    assert held(cache.open_pack(STORE, PACK), (0, 1), (MIB, 1)) == [True, False]


def test_a_file_under_way_while_a_new_tally_is_begun_is_counted(tmp_path: Path) -> None:
    room = Room(str(tmp_path))
    mark = room.reserve(100 * KIB, MIB)
    assert mark is not None
    (tmp_path / "tally").unlink()
    room.reserve(100 * KIB, MIB)
    room.settle(mark, 100 * KIB, MIB)

    assert room.total() == 200 * KIB


def test_small_bound_makes_small_cache_files(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=16 * MIB)
    put(cache, *[(at * MIB, 100 * KIB) for at in range(60)])

    assert held(cache.open_pack(STORE, PACK), *[(at * MIB, 100 * KIB) for at in range(60)]) == [True] * 60
    assert len(files(folder)) == 5


def test_a_smaller_bound_holds_from_the_next_put_on(folder: Path) -> None:
    big, small = ExtentCache(folder, max_bytes=256 * MIB), ExtentCache(folder, max_bytes=2 * MIB)
    for at in range(40):
        put(big, (at * MIB, 100 * KIB))
    put(small, (50 * MIB, 10))

    assert n_bytes_of(folder) <= 2 * MIB


def test_cache_takes_a_tenth_of_the_free_space_when_no_bound_is_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    free = [100 * MIB]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, free[0]))
    cache = ExtentCache(folder)
    for at in range(60):
        put(cache, (at * MIB, 200 * KIB))
    assert 8 * MIB < n_bytes_of(folder) <= 10 * MIB

    free[0] = 20 * MIB
    put(cache, (70 * MIB, 200 * KIB))

    assert n_bytes_of(folder) <= 2 * MIB


def test_a_dead_writers_file_goes_and_a_living_ones_stays(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=MIB)
    put(cache, (0, 10))
    parent = files(folder)[0].parent
    dead, living = parent / ("a" * 32 + ".staging"), parent / ("b" * 32 + ".staging")
    dead.write_bytes(b"x")
    living.write_bytes(b"x")
    os.utime(dead, (time.time() - 7_200,) * 2)
    for at in range(12):
        put(cache, (at * MIB, 100 * KIB))

    assert not dead.exists()


def test_folders_of_packs_that_hold_nothing_go(folder: Path) -> None:
    cache = ExtentCache(folder, max_bytes=MIB)
    for at in range(60):
        put(cache, (0, 100 * KIB), pack=str(at))

    assert len(list((folder / "extents-1").iterdir())) <= 14


# Few files


def test_a_load_of_many_small_extents_makes_one_file_a_pack(cache: ExtentCache, folder: Path) -> None:
    with cache.filling(STORE) as filling:
        for at in range(2_000):
            filling.add("p" if at % 2 else "q", at * 10_000, content(at * 10_000, 100, "p"))

    assert len(files(folder)) == 2
    assert read(cache.open_pack(STORE, "p"), (30_000, 100)) == [content(30_000, 100, "p")]


def test_large_extents_do_not_wait_for_the_end_of_the_load(cache: ExtentCache) -> None:
    with cache.filling(STORE) as filling:
        filling.add(PACK, 0, content(0, 8 * MIB))

        assert held(cache.open_pack(STORE, PACK), (0, 8 * MIB)) == [True]


def test_failed_load_drops_the_extents_that_wait_in_memory(cache: ExtentCache) -> None:
    def load() -> None:
        with cache.filling(STORE) as filling:
            filling.add(PACK, 0, b"abc")
            raise KeyError

    with pytest.raises(KeyError):
        load()

    assert held(cache.open_pack(STORE, PACK), (0, 3)) == [False]


@pytest.mark.long
def test_cache_holds_a_bounded_amount_in_memory_before_writing(cache: ExtentCache, folder: Path) -> None:
    with cache.filling(STORE) as filling:
        for at in range(200):
            filling.add(str(at), 0, bytes(MIB))

        assert n_bytes_of(folder) > 130 * MIB


def test_many_threads_fill_the_cache_at_once(cache: ExtentCache) -> None:
    with cache.filling(STORE) as filling:

        def fill(part: int) -> None:
            for at in range(part, 800, 4):
                filling.add(PACK, at * 50_000, content(at * 50_000, 40_000))

        threads = [threading.Thread(target=fill, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    places = [(at * 50_000, 40_000) for at in range(800)]
    assert read(cache.open_pack(STORE, PACK), *places) == [content(*place) for place in places]


def test_extents_put_one_by_one_become_few_files(cache: ExtentCache, folder: Path) -> None:
    places = [(at * 5_000, 4_000) for at in range(400)]
    for place in places:
        put(cache, place)

    assert len(files(folder)) < 30
    assert read(cache.open_pack(STORE, PACK), *places) == [content(*place) for place in places]


def test_merging_leaves_out_what_others_hold(cache: ExtentCache, folder: Path) -> None:
    put(cache, (0, 2_000))
    for at in range(7):
        put(cache, (at, 1_000))

    [path] = files(folder)
    assert path.stat().st_size < 2_500
    assert read(cache.open_pack(STORE, PACK), (0, 2_000)) == [content(0, 2_000)]


def test_a_merge_leaves_out_what_is_damaged(cache: ExtentCache, folder: Path) -> None:
    for at in range(7):
        put(cache, (at * 5_000, 1_000))
    damaged = files(folder)[0]
    os.truncate(damaged, 1_050)
    put(cache, (50_000, 1_000))

    got = read(cache.open_pack(STORE, PACK), *[(at * 5_000, 1_000) for at in range(7)], (50_000, 1_000))
    assert got.count(None) == 1
    assert got[-1] == content(50_000, 1_000)


# Processes


def _work(folder: Path, seed: int, failed: multiprocessing.sharedctypes.Synchronized[int]) -> None:  # type: ignore[name-defined]
    rng = random.Random(seed)
    cache = ExtentCache(folder, max_bytes=2 * MIB)
    for _ in range(150):
        pack = str(rng.randrange(4))
        place = (rng.randrange(10) * MIB, rng.randrange(1, 200 * KIB))
        put(cache, place, pack=pack)
        wanted = [(at * MIB, 1_000) for at in range(10)]
        for chunk, got in zip(wanted, read(cache.open_pack(STORE, pack), *wanted), strict=True):
            if got not in (None, content(*chunk, pack)):
                failed.value += 1


@pytest.mark.long
def test_processes_put_read_and_evict_at_once_without_wrong_bytes(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    failed = context.Value("i", 0)
    processes = [context.Process(target=_work, args=(folder, seed, failed)) for seed in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0]
    assert failed.value == 0
    assert n_bytes_of(folder) <= 2 * MIB + 2 * 200 * KIB
    assert files(folder, "*.staging") == []


def test_the_same_extents_put_twice_are_one_file(cache: ExtentCache, folder: Path) -> None:
    put(cache, (0, 1_000), (9_000, 50))
    put(cache, (9_000, 50), (0, 1_000))

    assert len(files(folder)) == 1


def test_a_forked_child_uses_the_cache_its_parent_was_filling(cache: ExtentCache) -> None:
    filling = cache.filling(STORE)
    filling.add(PACK, 0, b"parent")
    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        with filling._lock:
            ready.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    child = os.fork()
    if child == 0:
        os.close(0)
        with filling:
            filling.add(PACK, 100, b"child")
        os._exit(0 if read(cache.open_pack(STORE, PACK), (100, 5)) == [b"child"] else 1)
    over.set()
    thread.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(cache.open_pack(STORE, PACK), (100, 5)) == [b"child"]


# Who may read it


@pytest.mark.parametrize("umask", [0, 0o777])
def test_only_the_user_may_read_whatever_the_umask(cache: ExtentCache, folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        put(cache, (0, 1_000))
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})


# The environment


def test_the_environment_names_the_folder_and_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "here"))
    for value, n_bytes in (("1000000", 1_000_000), ("10GB", 10**10), ("16GiB", 1 << 34)):
        monkeypatch.setenv("TENSORCAS_CACHE_BYTES", value)

        assert config.cache_bytes() == n_bytes
    assert config.cache_folder() == tmp_path / "here"
    assert ExtentCache.of_environment() is not None


def test_the_cache_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")

    assert ExtentCache.of_environment() is None


def test_cache_lies_in_the_users_cache_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORCAS_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, expected in [("/x/y", Path("/x/y/tensorcas")), ("relative", tmp_path / ".cache/tensorcas")]:
        monkeypatch.setenv("XDG_CACHE_HOME", named)

        assert config.cache_folder() == expected


@pytest.mark.parametrize("value", ["0", "-1", "16 gigabytes", "²"])
def test_invalid_bound_of_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE_BYTES", value)

    with pytest.raises(ValueError, match="TENSORCAS_CACHE_BYTES"):
        config.cache_bytes()


def test_packs_of_many_saves_that_wait_for_a_slow_disk_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ExtentCache.put
    n_held = n_most = 0
    lock = threading.Lock()

    def count(n_bytes: int) -> None:
        nonlocal n_held, n_most
        with lock:
            n_held += n_bytes
            n_most = max(n_most, n_held)

    def slow(self: ExtentCache, store_id: str, pack: str, extents: Iterable[tuple[int, bytes]]) -> None:
        time.sleep(0.002)
        put(self, store_id, pack, extents)
        count(-sum(len(data) for _, data in extents))

    monkeypatch.setattr(ExtentCache, "put", slow)
    cache = ExtentCache(tmp_path)
    block = bytes(4 << 20)
    for number in range(50):
        count(sum(len(piece) for piece in cache.kept("store", f"pack {number}", [block])))

    assert cache.open_pack("store", "pack 49").n_extents == 1
    assert n_most <= 64 << 20

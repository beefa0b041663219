from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import Places
from tensorcas_mlflow.chunk_io._decode import Batch, ChainLinks
from tensorcas_mlflow.chunk_io._fetch import parts_of
from tensorcas_mlflow.codecs import ZSTD
from tensorcas_mlflow.layout.packs import ENTRY

KIB = 1 << 10
MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([100 * MIB], [1]),
        ([100] * 7, [7]),
        ([256 * KIB] * 8, [4, 4]),
        ([1, 80 * MIB, 1], [2, 1]),
    ],
)
def test_deltas_are_read_in_parts_of_a_bounded_size(sizes: list[int], parts: list[int]) -> None:
    deltas = np.arange(len(sizes)) * 2
    found = parts_of(deltas, np.array(sizes, dtype=np.int64), MIB)

    assert [len(part) for part in found] == parts
    assert [delta for part in found for delta in part.tolist()] == deltas.tolist()


def places_at(where: list[tuple[int, int, int]]) -> Places:
    entries = np.zeros(len(where), dtype=ENTRY)
    pack = np.array([pack for pack, _, _ in where])
    entries["offset"] = [offset for _, offset, _ in where]
    entries["stored_bytes"] = [n_bytes for _, _, n_bytes in where]
    entries["codec"] = ZSTD.number
    return Places(found=np.ones(len(where), dtype=bool), pack=pack, packs=["a", "b"], entries=entries)


def test_places_of_several_levels_name_each_pack_once() -> None:
    places = Places.joined([places_at([(0, 0, 1), (1, 0, 1)]), places_at([(1, 8, 1)])])

    assert places.packs == ["a", "b"]
    assert places.pack.tolist() == [0, 1, 1]


def batch_of(where: list[tuple[int, int, int]], begins: list[int], part: list[int]) -> Batch:
    links = ChainLinks(places=places_at(where), begins=np.array(begins))
    return Batch.of(links, np.arange(len(begins) - 1), np.array(part), gap_bytes=16)


def test_near_links_of_one_part_are_one_read() -> None:
    batch = batch_of([(1, 512, 10), (0, 70, 30), (0, 8, 50), (0, 200, 1)], [0, 2, 4], [0, 0])

    assert batch.read_pack.tolist() == [0, 0, 1]
    assert batch.read_start.tolist() == [8, 200, 512]
    assert batch.read_stop.tolist() == [100, 201, 522]
    assert batch.link_read.tolist() == [2, 0, 0, 1]
    assert batch.link_begin.tolist() == [0, 62, 0, 0]


def test_a_place_that_two_chunks_need_is_read_once_in_a_part_and_again_in_another() -> None:
    batch = batch_of([(0, 64, 40)] * 3, [0, 1, 2, 3], [0, 0, 1])

    assert batch.part_read.tolist() == [0, 1, 2]
    assert batch.link_read.tolist() == [0, 0, 1]


def test_some_parts_of_a_batch_are_a_batch() -> None:
    where = [(0, 100 * n, 40) for n in range(6)]
    part = batch_of(where, [0, 1, 3, 4, 6], [0, 0, 1, 2]).some(1, 3)

    assert part.chunks.tolist() == [2, 3]
    assert part.links.tolist() == [3, 4, 5]
    assert part.read_start.tolist() == [300, 400, 500]
    assert part.link_read.tolist() == [0, 1, 2]
    assert part.part_chunk.tolist() == [0, 1, 2]
    assert part.part_read.tolist() == [0, 1, 3]

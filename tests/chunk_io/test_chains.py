from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import Places, _read
from tensorcas_mlflow.chunk_io._read import _layout
from tensorcas_mlflow.codecs import RAW, ZSTD
from tensorcas_mlflow.layout import ENTRY

KIB = 1 << 10
MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([100 * MIB], [1]),
        ([100] * 7, [7]),
        ([64 * KIB] * 8, [8]),
        ([64 * KIB] * 24, [8, 8, 8]),
        ([512 * KIB] * 20, [2] * 10),
        ([1, 80 * MIB, 1], [2, 1]),
    ],
)
def test_deltas_are_read_in_parts_of_a_bounded_size_that_keep_all_threads_busy(
    sizes: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "2")
    deltas = np.arange(len(sizes)) * 2
    found = _read._parts(deltas, np.array(sizes, dtype=np.int64))

    assert [len(part) for part in found] == parts
    assert [delta for part in found for delta in part.tolist()] == deltas.tolist()


def places_at(where: list[tuple[int, int, int]]) -> Places:
    entries = np.zeros(len(where), dtype=ENTRY)
    pack = np.array([pack for pack, _, _ in where])
    entries["offset"] = [offset for _, offset, _ in where]
    entries["stored_bytes"] = [n_bytes for _, _, n_bytes in where]
    entries["codec"] = ZSTD.number
    return Places(found=np.ones(len(where), dtype=bool), pack=pack, packs=["a", "b"], entries=entries)


def test_near_chunks_of_a_pack_keep_their_distance_in_memory() -> None:
    start, slack, n_bytes = _layout(places_at([(1, 512, 10), (0, 70, 30), (0, 8, 50), (0, 200, 1)]))

    assert start.tolist() == [192, 70, 8, 128 + 8]
    assert slack.tolist() == [0, 0, 12, 0]
    assert n_bytes == 256


def test_a_place_that_is_wanted_twice_has_memory_for_both() -> None:
    start, _, n_bytes = _layout(places_at([(0, 64, 40), (0, 64, 40)]))

    assert sorted(start.tolist()) == [0, 64]
    assert n_bytes == 128


def test_places_of_several_levels_name_each_pack_once() -> None:
    places = Places.joined([places_at([(0, 0, 1), (1, 0, 1)]), places_at([(1, 8, 1)])])

    assert places.packs == ["a", "b"]
    assert places.pack.tolist() == [0, 1, 1]


def test_bytes_are_read_as_they_are_stored() -> None:
    entries = places_at([(0, 0, 5)]).as_bytes().entries

    assert (entries["codec"] == RAW.number).all()
    assert entries["raw_bytes"].tolist() == [5]

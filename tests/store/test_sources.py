"""Sources of a save's bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import ChunkNotFoundError, FencedError
from tensorcas_mlflow.store import _sources
from tensorcas_mlflow.store._sources import NoSource, Source, TensorCopy, TensorSource

CHUNK = 8192


def some_array(n_bytes: int) -> np.ndarray:
    return np.random.default_rng(n_bytes).integers(0, 256, n_bytes, dtype=np.uint8)


ARRAYS = {
    "small": some_array(4000).view(np.float32),
    "large": some_array(5 * CHUNK + 8).view(np.float64),
    "empty": np.zeros((0, 3)),
    "small, not in C order": some_array(600).reshape(20, 30).T,
    "large, not in C order": some_array(6 * CHUNK).reshape(3, -1).T,
    "small, cut": some_array(40).reshape(10, 4),
    "text": np.array(["a", "bcd"]),
    "scalar": np.float32(3.5),
    SKELETON: some_array(CHUNK + 1),
}
CUTS = {"small, cut": [3, 10], "large": [5121 - 4096, 5121]}


@pytest.fixture
def source() -> TensorSource:
    return TensorSource(ARRAYS, CUTS, CHUNK)


def everything(source: Source) -> np.ndarray:
    return np.arange(len(source.sizes))


def test_the_pieces_of_arrays_are_their_bytes(source: TensorSource) -> None:
    pieces = [piece for group in source.pieces(everything(source)) for piece in group.data]

    assert b"".join(map(bytes, pieces)) == b"".join(np.asarray(array).tobytes() for array in ARRAYS.values())
    assert [digest(piece) for piece in pieces] == [each.tobytes() for each in source.columns.digests]


@pytest.mark.parametrize("most_bytes", [1, 5000, 3 * CHUNK, 1 << 30])
@pytest.mark.parametrize("most", [1, 4, 1000])
def test_pieces_are_the_same_chunks_many_at_a_time(source: TensorSource, most_bytes: int, most: int) -> None:
    wanted = everything(source)[1::2] if most == 4 else everything(source)
    groups = list(source.pieces(wanted, most_bytes=most_bytes, most=most))

    assert np.concatenate([group.chunks for group in groups]).tolist() == wanted.tolist()
    for group in groups:
        sizes = source.sizes[group.chunks]
        assert len(sizes) == 1 or (sizes.sum() <= most_bytes and len(sizes) <= most)
        assert [memoryview(piece).nbytes for piece in group.data] == sizes.tolist()
        assert [digest(piece) for piece in group.data] == [each.tobytes() for each in group.digests]
        assert group.rows.tolist() == source.columns.rows_of(group.chunks).tolist()
        assert group.itemsizes.tolist() == source.columns.codec_itemsizes[group.rows].tolist()
    begins = np.concatenate([group.begins_row for group in groups])
    assert np.flatnonzero(begins).tolist() == np.unique(source.columns.rows_of(wanted), return_index=True)[1].tolist()


def test_no_pieces_are_given_of_no_chunks(source: TensorSource) -> None:
    assert list(source.pieces([])) == []


def test_small_arrays_and_those_not_in_c_order_are_copied_and_others_viewed(source: TensorSource) -> None:
    copied = {
        name
        for group in source.pieces(everything(source))
        for name, piece in zip([list(ARRAYS)[row] for row in group.rows.tolist()], group.data, strict=True)
        if not np.may_share_memory(np.frombuffer(piece, np.uint8), np.asarray(ARRAYS[name]))
    }

    assert source.is_live
    assert copied == {"small", "small, not in C order", "large, not in C order", "text", "scalar"}


def bytes_in(source: Source, chunks: np.ndarray) -> list[bytes]:
    return [bytes(piece) for group in source.pieces(chunks) for piece in group.data]


def test_small_arrays_of_any_dtype_are_hashed_and_kept() -> None:
    numbers = np.arange(1, 13)
    dtypes = ["M8[s]", "m8[ns]", "bfloat16", "float8_e4m3fn", "int4", "S3", "U2", ">i4", "c16", "bool"]
    arrays = {name: numbers.astype(getattr(ml_dtypes, name, name)) for name in dtypes}
    arrays |= {"record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "backwards": numbers[::-1]}
    source = TensorSource(arrays, {}, CHUNK)

    [pieces] = source.pieces(everything(source))

    assert pieces.are_hashed
    assert [bytes(piece) for piece in pieces.data] == [array.tobytes() for array in arrays.values()]
    assert [digest(piece) for piece in pieces.data] == [each.tobytes() for each in source.columns.digests]


def test_a_copy_has_the_rows_and_bytes_of_its_arrays(source: TensorSource) -> None:
    copy = TensorCopy(ARRAYS, CUTS, CHUNK)

    assert copy.columns.digests.tolist() == source.columns.digests.tolist()
    assert copy.sizes.tolist() == source.sizes.tolist()
    assert [copy.columns.name(row) for row in range(len(copy.rows))] == list(ARRAYS)
    assert bytes_in(copy, everything(copy)) == bytes_in(source, everything(source))
    assert copy.n_copied_bytes == source.sizes.sum()
    assert not copy.is_live
    assert all(group.are_hashed for group in copy.pieces(everything(copy)))


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20])
def test_a_copy_keeps_its_bytes_when_its_arrays_change(chunk: int) -> None:
    arrays = {"a": some_array(100), "b": some_array(3 << 19)}
    copy = TensorCopy(arrays, {}, chunk)
    before = b"".join(array.tobytes() for array in arrays.values())
    for array in arrays.values():
        array += 1

    assert b"".join(bytes_in(copy, everything(copy))) == before


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20])
def test_a_copy_holds_changed_chunks_and_finds_the_others_in_the_copy_before(chunk: int) -> None:
    arrays = {"small": some_array(100), "same": some_array(9 << 18), "other": some_array(5 << 18)}
    first = TensorCopy(arrays, {}, chunk)
    arrays["other"][-1] ^= 1
    second = TensorCopy(arrays, {}, chunk, before=first)

    assert second.n_copied_bytes == (5 << 18) % chunk or chunk
    assert second.holds(everything(second)).all()
    assert b"".join(bytes_in(second, everything(second))) == b"".join(each.tobytes() for each in arrays.values())


def test_a_stored_copy_holds_nothing_and_the_next_one_holds_what_changed() -> None:
    arrays = {"same": some_array(3 * CHUNK), "other": some_array(CHUNK)}
    first = TensorCopy(arrays, {}, CHUNK)
    first.note_stored()
    arrays["other"][0] ^= 1
    second = TensorCopy(arrays, {}, CHUNK, before=first)

    assert not first.holds(everything(first)).any()
    assert second.holds(everything(second)).tolist() == [False, False, False, True]
    assert bytes_in(second, np.array([3])) == [arrays["other"].tobytes()]
    with pytest.raises(FencedError):
        bytes_in(second, everything(second))


def test_a_copy_of_another_layout_than_the_one_before_copies_everything() -> None:
    first = TensorCopy({"a": some_array(3 * CHUNK)}, {}, CHUNK)
    second = TensorCopy({"a": some_array(3 * CHUNK), "b": some_array(5)}, {}, CHUNK, before=first)

    assert second.n_copied_bytes == 3 * CHUNK + 5


def test_source_without_bytes_raises_chunk_not_found(source: TensorSource) -> None:
    nowhere = NoSource(source.rows, CHUNK)

    assert nowhere.sizes.tolist() == source.sizes.tolist()
    with pytest.raises(ChunkNotFoundError):
        list(nowhere.pieces(everything(nowhere)))


@pytest.mark.parametrize("keeps", [True, False])
def test_small_arrays_are_stored_as_they_were_hashed_unless_they_are_many(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sources, "_MOST_KEPT_BYTES", 100 if keeps else 99)
    small = some_array(100)
    before = small.tobytes()
    source = TensorSource({"small": small}, {}, CHUNK)
    small[0] ^= 1
    [pieces] = source.pieces(everything(source))

    assert pieces.are_hashed == keeps
    assert (digest(pieces.data[0]) == pieces.digests[0].tobytes()) == keeps
    assert (bytes(pieces.data[0]) == before) == keeps


def test_large_arrays_are_not_taken_for_what_was_hashed(source: TensorSource) -> None:
    [pieces] = source.pieces(everything(source))

    assert not pieces.are_hashed


def test_states_of_one_layout_share_their_description() -> None:
    weights = {"a": np.zeros((3, 5)), "b": np.zeros(7)}
    first = TensorSource(weights, {}, 4096).columns
    later = TensorCopy({name: array + 1 for name, array in weights.items()}, {}, 4096).columns

    assert later.is_laid_out_like(first)
    assert [later.spec(row) for row in range(2)] == [first.spec(row) for row in range(2)]


@pytest.mark.parametrize(
    ("tensors", "chunk_bytes"),
    [
        ({"a": np.zeros((3, 5)), "c": np.zeros(7)}, 4096),
        ({"b": np.zeros(7), "a": np.zeros((3, 5))}, 4096),
        ({"a": np.zeros((5, 3)), "b": np.zeros(7)}, 4096),
        ({"a": np.zeros((3, 5)), "b": np.zeros(7, np.int64)}, 4096),
        ({"a": np.zeros((3, 5)), "b": np.zeros(7)}, 8192),
    ],
)
def test_states_of_different_layouts_share_nothing(tensors: dict[str, Array], chunk_bytes: int) -> None:
    first = TensorSource({"a": np.zeros((3, 5)), "b": np.zeros(7)}, {}, 4096).columns

    assert not TensorSource(tensors, {}, chunk_bytes).columns.is_laid_out_like(first)

"""Chunks on their way into packs: encoded in groups, on all threads, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import PLANES, RAW, ZSTD
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.layout.packs import PackWriter, PayloadGroup, decode_chunk, read_table
from tensorcas_mlflow.store import Policy
from tensorcas_mlflow.store._encode import GROUP_BYTES, GROUP_PIECES, encode_chunks, encode_pieces, groups_of
from tensorcas_mlflow.store._sources import Pieces, TensorSource

Data = bytes | memoryview
SIZES = [1, 40, 5000, GROUP_BYTES - 1, 30, GROUP_BYTES, 7, 3 * GROUP_BYTES, *[8] * (GROUP_PIECES + 3)]


@pytest.fixture(autouse=True, params=["1", "3"])
def n_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", request.param)


def pieces(data: Sequence[Data], *, itemsize: int = 4, begins_row: Sequence[bool] | None = None) -> Pieces:
    return Pieces(
        chunks=np.arange(len(data)),
        rows=np.arange(len(data)),
        data=list(data),
        digests=np.frombuffer(b"".join(map(digest, data)), np.uint8).reshape(-1, 32),
        itemsizes=np.full(len(data), itemsize),
        begins_row=np.ones(len(data), dtype=bool) if begins_row is None else np.array(begins_row),
    )


def grouped(contents: Sequence[bytes]) -> Iterator[Pieces]:
    for part in groups_of([len(content) for content in contents]):
        yield pieces(contents[part])


def test_last_groups_of_a_save_are_smaller_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", "2")
    chunk = 256 << 10
    alike = [part.stop - part.start for part in groups_of([chunk] * 64)]
    before_others = [part.stop - part.start for part in groups_of([chunk] * 64, n_after=8 << 20)]
    last = [part.stop - part.start for part in groups_of([chunk] * 64, n_after=0)]

    assert alike == before_others == [8] * 8
    assert last == [8, 8, 8, 8, 8, 6, 4, 3, 2, 2, 2, 2, 2, 1]
    assert list(groups_of([chunk] * 3, chunk, n_after=0)) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def packed(groups: Sequence[PayloadGroup]) -> tuple[bytes, list[bytes], list[int]]:
    """The bytes of a pack, and of each entry what is stored there and its codec; all are right."""
    blob = b"".join(bytes(piece) for piece in PackWriter().pieces(groups))
    entries = read_table("packs/x.pack", len(blob), lambda start, stop: blob[start:stop])
    stored = [blob[int(e["offset"]) : int(e["offset"]) + int(e["stored_bytes"])] for e in entries]
    assert all(
        len(decode_chunk(entry, data)) == entry["raw_bytes"] for entry, data in zip(entries, stored, strict=True)
    )
    for entry, data in zip(entries, stored, strict=True):
        assert entry["stored_digest"].tobytes() == digest(data)[:16]
    return blob, stored, entries["codec"].tolist()


def weights(n: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * 0.02).astype(np.float32)


@pytest.mark.parametrize("policy", Policy)
def test_chunks_come_in_their_order_whatever_their_sizes(policy: Policy) -> None:
    contents = [np.random.default_rng(nth).bytes(size) for nth, size in enumerate(SIZES)]

    groups = list(encode_pieces(grouped(contents), policy))

    entries = np.concatenate([group.entries for group in groups])
    assert [row.tobytes() for row in entries["digest"]] == [digest(content) for content in contents]
    assert entries["raw_bytes"].tolist() == SIZES
    packed(groups)


def test_groups_are_drawn_only_as_results_are_taken() -> None:
    n_drawn = 0

    def groups() -> Iterator[Pieces]:
        nonlocal n_drawn
        for nth in range(100_000):
            n_drawn += 1
            yield pieces([b"%1000d" % nth])

    next(encode_pieces(groups(), Policy.BALANCED))

    assert n_drawn < 100


@pytest.mark.parametrize("n_bytes", [100, 2 * GROUP_BYTES])
def test_bytes_that_are_not_those_that_were_hashed_are_refused(n_bytes: int) -> None:
    data = bytearray(n_bytes)
    group = pieces([b"before", memoryview(data), b"after"])
    data[7] = 1

    with pytest.raises(ConflictError, match="tensor '1' was changed while it was saved"):
        list(encode_pieces([group], Policy.BALANCED, origin=lambda row: f"tensor '{row}'"))


@pytest.mark.parametrize("n_bytes", [100, 2 * GROUP_BYTES])
def test_save_stores_a_copy_of_a_live_array(n_bytes: int) -> None:
    data = bytearray(n_bytes)
    [group] = encode_pieces([pieces([memoryview(data)])], Policy.FAST, origin=str)
    data[7] = 1

    assert packed([group])[1] == [bytes(n_bytes)]


def test_raw_tensors_begin_at_multiples_of_64_and_their_chunks_lie_adjacent() -> None:
    contents = [np.random.default_rng(nth).bytes(size) for nth, size in enumerate([10, 70, 100, 3, 64, 1])]
    begins_row = [True, False, True, True, False, True]

    [group] = encode_pieces([pieces(contents, begins_row=begins_row)], Policy.FAST)

    assert group.entries["offset"].tolist() == [0, 10, 128, 256, 259, 384]
    assert group.is_aligned
    assert group.n_bytes == 385


def test_chunks_of_a_tensor_lie_next_to_each_other() -> None:
    first, second = np.random.default_rng(0).bytes(100), np.random.default_rng(1).bytes(100)
    groups = list(encode_pieces([pieces([first]), pieces([second], begins_row=[False])], Policy.FAST))

    blob, _, _ = packed(groups)

    assert blob[64:264] == first + second


def test_continuation_of_a_tensor_stays_beside_its_beginning() -> None:
    first, second, third = (np.random.default_rng(nth).bytes(100) for nth in range(3))
    groups = list(
        encode_pieces([pieces([first]), pieces([second, third], begins_row=[False, True])], Policy.FAST, origin=str)
    )

    blob, _, _ = packed(groups)

    assert blob[64:264] == first + second
    assert blob[320:420] == third


def test_a_fast_save_leaves_tensors_as_they_are_and_compresses_text() -> None:
    tensors = {"w": weights(70_000), "n": np.zeros(5000, np.int8), "t": np.array(["some text"] * 100)}
    source = TensorSource(tensors, {}, 1 << 18)

    groups = list(encode_chunks(source, np.arange(len(source.sizes)), Policy.FAST))

    assert packed(groups)[2] == [RAW.number, RAW.number, RAW.number, ZSTD.number]


def test_a_balanced_save_compresses_tensors() -> None:
    source = TensorSource({"w": weights(70_000)}, {}, 1 << 18)

    groups = list(encode_chunks(source, np.arange(2), Policy.BALANCED))

    assert packed(groups)[2] == [PLANES.number] * 2


def test_small_chunks_of_which_samples_do_not_shrink_are_left_raw() -> None:
    gained, lost = [weights(200, nth) for nth in range(100)], [bytes(100)] * 100

    codecs = [
        packed(list(encode_pieces([pieces([bytes(memoryview(each).cast("B")) for each in many])], Policy.BALANCED)))[2]
        for many in (gained, lost)
    ]

    assert set(codecs[0]) == {RAW.number}
    assert set(codecs[1]) == {ZSTD.number}


def test_a_policy_is_named_by_the_caller_or_else_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORCAS_POLICY", raising=False)
    default = Policy.of(None)
    monkeypatch.setenv("TENSORCAS_POLICY", "fast")

    assert default is Policy.BALANCED
    assert Policy.of(None) is Policy.FAST
    assert Policy.of("small") is Policy.SMALL
    with pytest.raises(ValueError, match="a policy is one of 'fast', 'balanced', 'small', not 'tiny'"):
        Policy.of("tiny")

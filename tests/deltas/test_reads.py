"""Reading chunks that are deltas, where some copy of what they take is gone or damaged."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store
from tests.deltas.made import CHUNK_BYTES, a_chunk, flip, lose, put_pack, save_chunks

A, B, C, D, E = (a_chunk(seed) for seed in range(5))


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


def load(store: Store, ref: Ref) -> dict[str, Any]:
    return dict(store.read_tensors(store.manifest(ref)))


def is_right(found: dict[str, Any], *chunks: bytes) -> bool:
    return [each.tobytes() for each in found.values()] == list(chunks)


def fresh(store: Store) -> Store:
    return Store.open_backend(store.backend)


@pytest.mark.parametrize("first", ["deltas", "full copies"])
def test_reader_finds_a_full_copy_beside_a_delta_without_its_base(
    store: Store, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A collection leaves deltas without their bases where the chunk has another copy."""
    gone = put_pack(store, C)
    packs: dict[int, list[bytes | tuple[bytes, bytes, str]]] = {0: [(A, C, gone)], 1: [A, (B, C, gone)], 2: [B]}
    for number in packs if first == "deltas" else reversed(packs):
        name = f"{number:032x}"  # the whole index lists packs by name, the latest packs are read by age
        monkeypatch.setattr("tensorcas_mlflow.store._save.new_pack_name", lambda backend, name=name: name)
        put_pack(store, *packs[number])
    ref = save_chunks(store, 1, A, B)
    lose(store, gone)
    with_all_tables = fresh(store)
    with_all_tables.catalog.refresh()

    assert is_right(load(with_all_tables, ref), A, B)
    assert is_right(load(fresh(store), ref), A, B)


def test_a_delta_is_read_whose_base_has_a_damaged_copy_elsewhere(store: Store) -> None:
    bases = put_pack(store, A)
    other = put_pack(store, A)
    ref = save_chunks(store, 1, B) if put_pack(store, (B, A, bases)) else None
    flip(store, other, A)

    assert ref is not None
    assert is_right(load(fresh(store), ref), B)


def test_reader_takes_the_delta_whose_base_is_whole(store: Store) -> None:
    bases = [put_pack(store, A), put_pack(store, C)]
    for base, pack in zip((A, C), bases, strict=True):
        put_pack(store, (B, base, pack))
    ref = save_chunks(store, 1, B)

    for base, pack in zip((A, C), bases, strict=True):
        flip(store, pack, base)
        assert is_right(load(fresh(store), ref), B)
        flip(store, pack, base)


@pytest.mark.parametrize("how", [flip, lambda store, pack, chunk: lose(store, pack)], ids=["damaged", "lost"])
def test_reader_takes_the_delta_whose_chain_is_whole(store: Store, how: Any) -> None:
    first = put_pack(store, A)
    second = put_pack(store, (B, A, first))
    others = put_pack(store, D)
    put_pack(store, (C, B, second))
    put_pack(store, (C, D, others))
    ref = save_chunks(store, 1, C)

    how(store, first, A)
    assert is_right(load(fresh(store), ref), C)


def a_chain(store: Store) -> tuple[list[str], Ref]:
    """Four chunks, each a delta against the one before, and a checkpoint of the last; the packs."""
    packs = [put_pack(store, A)]
    for chunk, base in ((B, A), (C, B), (D, C)):
        packs.append(put_pack(store, (chunk, base, packs[-1])))
    return packs, save_chunks(store, 1, D)


@pytest.mark.parametrize("at", range(4))
def test_error_names_the_pack_in_which_a_chain_is_damaged(store: Store, at: int) -> None:
    packs, ref = a_chain(store)
    flip(store, packs[at], (A, B, C, D)[at])
    with pytest.raises(CorruptChunkError) as caught:
        load(fresh(store), ref)

    assert caught.value.key == f"packs/{packs[at]}.pack"
    assert caught.value.tensors == ("0",)


@pytest.mark.parametrize("at", range(3))
def test_next_save_writes_a_chunk_again_that_could_not_be_read(store: Store, at: int) -> None:
    packs, ref = a_chain(store)
    flip(store, packs[at], (A, B, C)[at])
    with pytest.raises(CorruptChunkError):
        load(store, ref)
    again = save_chunks(store, 2, A, B, C, D)

    assert is_right(load(fresh(store), again), A, B, C, D)


def test_a_base_that_another_thread_finds_gone_meanwhile_is_a_chunk_that_has_moved(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = put_pack(store, A)
    put_pack(store, (B, A, bases))
    ref = save_chunks(store, 1, B)
    reader = fresh(store)
    follow = reader.catalog.follow
    calls: list[int] = []

    def moved_meanwhile(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            put_pack(store, B)
            lose(store, bases)
            reader.catalog.miss([bases])
        return follow(*args, **more)

    monkeypatch.setattr(reader.catalog, "follow", moved_meanwhile)

    assert is_right(load(reader, ref), B)
    assert calls


def test_error_names_a_base_that_is_gone_for_good(store: Store) -> None:
    packs, ref = a_chain(store)
    reader = fresh(store)
    assert is_right(load(reader, ref), D)
    lose(store, packs[1])
    with pytest.raises(ChunkNotFoundError) as caught:
        load(reader, ref)

    assert f"packs/{packs[1]}.pack" in caught.value.suspects

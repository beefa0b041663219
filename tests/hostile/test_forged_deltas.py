"""Packs and segments in which somebody has forged what deltas are to be added to: digests are right and lie."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.backends import BlobInfo, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Codec
from tensorcas_mlflow.errors import CorruptError, FormatError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.layout.packs import (
    MAX_DEPTH,
    Base,
    PackWriter,
    Payload,
    make_table,
    pack_key,
    read_segment,
    read_table,
    segment_bytes,
)
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, plan_repair, read_source, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import parse_intent

CHUNK_BYTES = 4096
MIB = 1 << 20
NAMES = [f"{number:032x}" for number in range(1, 200)]
A, B, C = (np.random.default_rng(seed).bytes(CHUNK_BYTES) for seed in range(3))


@dataclass(frozen=True)
class Said:
    """An entry as it is forged."""

    raw: bytes
    base: Base | None = None
    of: bytes = b""
    """The bytes that the delta was encoded against."""
    raw_bytes: int | None = None
    data: bytes | None = None
    codec: Codec = RAW
    """The codec of a chunk without a base."""


def pack(*said: Said) -> bytes:
    made = []
    for each in said:
        data = each.data
        if data is None:
            data = bytes(each.codec.encode(each.raw, 4) if each.base is None else DELTA.encode(each.raw, 4, each.of))
        made.append(
            Payload(
                digest=digest(each.raw),
                raw_bytes=len(each.raw) if each.raw_bytes is None else each.raw_bytes,
                codec=each.codec if each.base is None else DELTA,
                typesize=4,
                data=data,
                begins_row=False,
                base=each.base,
            )
        )
    return b"".join(bytes(piece) for piece in PackWriter().pieces(made))


def base(at: int, raw: bytes, depth: int) -> Base:
    """A base in one of the packs; ``depth`` is what its delta says of it."""
    return Base(pack=NAMES[at], digest=digest(raw), depth=depth)


def ring(depth: int) -> list[bytes]:
    """Two packs, each of which has the base of the other's delta."""
    return [pack(Said(B, base(1, C, depth), C)), pack(Said(C, base(0, B, depth), B))]


def chain_of_nothing(n_deltas: int, codec: Codec) -> list[bytes]:
    """A chunk of 0 bytes, and deltas against it and each other, in packs of their own."""
    deltas = [Said(b"", base(at, b"", at), b"") for at in range(n_deltas)]
    return [pack(Said(b"", codec=codec)), *(pack(each) for each in deltas)]


def bomb() -> bytes:
    """Ones, of which a few bytes make many."""
    return bytes([ZSTD.number, 0x20]) + bytes(ZSTD.encode(b"\1" * (64 * MIB), 4))


FORGED: dict[str, Callable[[], Sequence[bytes]]] = {
    "a ring": lambda: ring(3),
    "a ring of the deepest": lambda: ring(7),
    "a delta that is its own base": lambda: [pack(Said(B, base(0, B, 2), B))],
    "a base that is as deep": lambda: [pack(Said(A)), pack(Said(C, base(0, A, 2), A)), pack(Said(B, base(1, C, 2), C))],
    "a base that is deeper": lambda: [pack(Said(A)), pack(Said(C, base(0, A, 6), A)), pack(Said(B, base(1, C, 0), C))],
    "a base of another size": lambda: [pack(Said(A[:100])), pack(Said(B, base(0, A[:100], 0), A))],
    "a base that says another size": lambda: [pack(Said(A, raw_bytes=64 * MIB)), pack(Said(B, base(0, A, 0), A))],
    "a base that claims 4 GiB": lambda: [pack(Said(A, raw_bytes=(1 << 32) - 1)), pack(Said(B, base(0, A, 0), A))],
    "a delta that claims 4 GiB": lambda: [pack(Said(A)), pack(Said(B, base(0, A, 0), A, raw_bytes=(1 << 32) - 1))],
    "a base that is nowhere": lambda: [pack(Said(B, base(9, A, 0), A))],
    "a base that its pack does not hold": lambda: [pack(Said(C)), pack(Said(B, base(0, A, 0), A))],
    "another base": lambda: [pack(Said(C)), pack(Said(B, base(0, C, 0), A))],
    "a payload that is too long when unpacked": lambda: [pack(Said(A)), pack(Said(B, base(0, A, 0), data=bomb()))],
    "a payload without an end": lambda: [pack(Said(A)), pack(Said(B, base(0, A, 0), data=b"\4\x21\xff"))],
    "no payload": lambda: [pack(Said(A)), pack(Said(B, base(0, A, 0), data=b""))],
    **{
        f"{n_deltas} deltas of 0 bytes over {codec.name}": partial(chain_of_nothing, n_deltas, codec)
        for n_deltas in (0, 1, 2, 3, 9)
        for codec in (RAW, ZSTD, SHUFFLE_ZSTD, PLANES)
    },
    "a base of no stored bytes": lambda: [pack(Said(A, data=b"", codec=ZSTD)), pack(Said(B, base(0, A, 0), A))],
    "a delta in a delta": lambda: [pack(Said(A)), pack(Said(B, base(0, A, 0), data=b"\3\x20" + bytes(4096)))],
}


def forged(name: str, *, folded: bool = False) -> Store:
    """A store with a checkpoint of the chunk B, and forged packs in the place of its own."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    with store.write_checkpoint({"w": np.frombuffer(B, np.uint8)}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    backend = store.backend
    for prefix in ("packs", "index"):
        for info in list(backend.list(prefix)):
            backend.delete(info.key)
    packs = dict(zip(NAMES, FORGED[name](), strict=False))
    for pack_, blob in packs.items():
        backend.put_new(pack_key(pack_), [blob])
        if not folded:
            backend.put_new(f"index/{pack_}.loose", [])
    if folded:
        tables = {each: read_table(each, len(blob), lambda a, b, blob=blob: blob[a:b]) for each, blob in packs.items()}
        backend.put_new(f"index/{'f' * 32}.segment", [segment_bytes(make_table(tables))])
    return Store.open_backend(backend)


def load(store: Store) -> None:
    [ref] = store.checkpoints()
    store.read_tensors(store.manifest(ref))


def copy(store: Store) -> None:
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    refs, _ = read_source(store)
    assert copy_refs(store, other, refs).failed


def save_again(store: Store) -> None:
    with store.write_checkpoint({"w": np.frombuffer(B + C, np.uint8)}) as save:
        save.commit(RefTarget(run_id="r", step=2))


OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "verify": lambda store: verify(store, full=True),
    "verify quickly": verify,
    "verify a sample": lambda store: verify(store, sample=1.0),
    "collect": lambda store: plan_gc(store, grace_s=0, max_waste=0).execute(),
    "repair": lambda store: plan_repair(store).execute(),
    "copy": copy,
    "save again": save_again,
}


@pytest.mark.parametrize("folded", [False, True], ids=["loose", "folded"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_delta_is_never_given_out_and_costs_little(name: str, *, folded: bool) -> None:
    store = forged(name, folded=folded)
    tracemalloc.start()
    try:
        with pytest.raises(TensorCasError):
            load(store)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 8 * MIB


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_reader_of_forged_deltas_terminates(name: str, operation: str) -> None:
    store = forged(name)
    tracemalloc.start()
    try:
        told = OPERATIONS[operation](store)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 8 * MIB
    if operation == "verify":
        assert told.problems


# --- tables


def table(blob: bytes) -> Any:
    return read_table("packs/x.pack", len(blob), lambda start, stop: blob[start:stop])


HONEST = pack(Said(A), Said(B, base(0, A, 0), A), Said(C, base(0, A, 0), A))


def changed(at: int, value: int, *, width: int = 1) -> bytes:
    """The honest pack with other bytes in its table, its bases or its footer, and a digest that fits."""
    begin = int.from_bytes(HONEST[-48:-40], "little")
    blob = bytearray(HONEST)
    at = len(blob) + at if at < 0 else begin + at
    blob[at : at + width] = value.to_bytes(width, "little")
    return bytes(blob[:-32]) + digest(bytes(blob[begin:-32]))


@pytest.mark.parametrize(
    ("at", "value", "width"),
    [
        (68 + 66, 0, 1),  # a delta of depth 0
        (68 + 66, MAX_DEPTH + 1, 1),
        (68 + 66, 255, 1),
        (64, 3, 1),  # a delta more than there are bases
        (68 + 64, 0, 1),  # and one less
        (3 * 68, 0, 4),  # the first base is of an entry that is none
        (3 * 68, 2, 4),  # two bases are of one entry
        (3 * 68, (1 << 32) - 1, 4),
        (-64 + 24, 1, 4),
        (-64 + 24, 3, 4),
        (-64 + 24, (1 << 32) - 1, 4),
        (-64 + 12, (1 << 32) - 1, 4),
        (-64 + 7, 1, 1),  # version 1, in which nothing is a delta
    ],
)
def test_a_table_that_lies_about_its_bases_is_damage(at: int, value: int, width: int) -> None:
    assert len(table(HONEST)) == 3
    with pytest.raises(CorruptError):
        table(changed(at, value, width=width))


def chain_of_depth(n: int) -> Any:
    """Entries of a chain as long as a segment can say, one a pack."""
    tables = {}
    for number in range(n):
        made = table(HONEST)[:1].copy()
        made["digest"][0] = np.frombuffer(digest(bytes([number])), np.uint8)
        if number:
            made["codec"], made["depth"] = DELTA.number, number
            made["base_pack"][0] = np.frombuffer(bytes.fromhex(NAMES[number - 1]), np.uint8)
            made["base_digest"][0] = np.frombuffer(digest(bytes([number - 1])), np.uint8)
        tables[NAMES[number]] = made
    return make_table(tables)


def test_a_segment_that_tells_of_a_longer_chain_than_there_can_be_is_damage() -> None:
    assert len(read_segment("index/x.segment", segment_bytes(chain_of_depth(MAX_DEPTH + 1)))) == MAX_DEPTH + 1
    with pytest.raises(CorruptError, match="row"):
        read_segment("index/x.segment", segment_bytes(chain_of_depth(MAX_DEPTH + 2)))


@pytest.mark.parametrize("name", ["../../x", "A" * 32, "", "g" * 32, 7, None])
def test_intent_that_names_an_invalid_pack_is_damage(name: Any) -> None:
    said = record_bytes({"format": 2, "manifest": "0" * 64, "n_digests": 0, "bases": [name]})
    info = BlobInfo(key="intents/x", size=len(said), modified_s=0.0, token="")

    with pytest.raises(CorruptError):
        parse_intent(info, said + b"\n")


# --- payloads


@pytest.mark.long
@settings(max_examples=150)
@given(data=st.data())
def test_any_payload_fills_its_buffer_or_is_refused(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from([DELTA, PLANES]))
    n_bytes = data.draw(st.integers(0, 200))
    head = data.draw(st.sampled_from([b"", b"\0\x21", b"\4\x21", b"\1\x20", b"\4\x11", b"\0\x30", b"\2", b"\4"]))
    stored = head + data.draw(st.binary(max_size=260))
    of = data.draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    out = bytearray(b"\xa5" * (n_bytes + 128))
    with suppress(FormatError):
        codec.decode_into(stored, memoryview(out)[64 : 64 + n_bytes], of)

    assert out[:64] == out[64 + n_bytes :] == b"\xa5" * 64


@given(st.integers(0, 7), st.lists(st.integers(0, 255), max_size=7), st.lists(st.integers(0, 1 << 32), max_size=8))
def test_groups_that_claim_any_sizes_are_refused(n_groups: int, ends: list[int], sizes: list[int]) -> None:
    said = b"".join(min(size, (1 << 32) - 1).to_bytes(4, "little") for size in sizes)
    stored = bytes([RAW.number, 0x21, n_groups, *ends]) + said + bytes(50)
    with pytest.raises(FormatError):
        DELTA.decode_into(stored, memoryview(bytearray(4_000)), bytes(4_000))


def test_a_plane_that_unpacks_to_more_than_it_may_costs_nothing() -> None:
    plane = bytes(ZSTD.encode(bytes(64 * MIB), 1))
    stored = bytes([1]) + len(plane).to_bytes(4, "little") + plane
    out = memoryview(bytearray(MIB))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            PLANES.decode_into(stored, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 4 * MIB

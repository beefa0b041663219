"""Hints come back as they were written, and whatever else is found in their place is passed over."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import DIGEST_BYTES, digest, unique_rows
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.layout.manifests import (
    Manifest,
    Row,
    hint_bytes,
    pack_hint_bytes,
    read_hints,
    read_pack_hints,
    split_hints,
)
from tensorcas_mlflow.layout.manifests._hints import MAGIC
from tensorcas_mlflow.layout.packs import ENTRY, Entries

PACKS = ("a" * 32, "b" * 32, "c" * 32)


def entries(n: int, seed: int = 0) -> Entries:
    draw = np.random.default_rng(seed)
    made = np.zeros(n, dtype=ENTRY)
    made["digest"] = unique_rows(draw.integers(0, 256, (n, DIGEST_BYTES), dtype=np.uint8))[0]
    made["offset"] = draw.integers(0, 1 << 40, n)
    for name, least, most in (
        ("stored_bytes", 1, 1 << 20),
        ("raw_bytes", 1 << 19, 1 << 20),
        ("codec", 0, 3),
        ("typesize", 0, 9),
    ):
        made[name] = draw.integers(least, most, n)
    made["stored_bytes"] = np.where(made["codec"] == RAW.number, made["raw_bytes"], made["stored_bytes"])
    return made


def manifest(digests: object) -> Manifest:
    spec = Spec(name="w", dtype=None, shape=(4096 * 7,))
    rows = [Row(spec=spec, cuts=None, digests=digests)]  # type: ignore[arg-type]
    return Manifest(kind="checkpoint", chunk_bytes=4096, store_id="0" * 32, flavor=None, rows=rows)


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
def test_hints_come_back_as_they_were_written(n: int) -> None:
    written = entries(n)
    pack = np.arange(n) % 2 * 2  # the second pack is not used
    found = read_hints(hint_bytes(PACKS, pack, written), written["digest"])

    assert found is not None
    assert found.packs == tuple(PACKS[at] for at in np.unique(pack))
    assert [found.packs[at] for at in found.pack] == [PACKS[at] for at in pack]
    for name in ("digest", "offset", "stored_bytes", "raw_bytes", "codec", "typesize"):
        assert (found.entries[name] == written[name]).all(), name


def test_hints_come_back_in_the_order_of_a_manifest_that_repeats_chunks() -> None:
    written = entries(9)
    pack = np.arange(9) % 2
    digests = written["digest"][[4, 8, 4, 0, 1, 7, 8, 6, 2, 3, 5, 5]]
    order = [4, 8, 0, 1, 7, 6, 2, 3, 5]
    found = read_hints(hint_bytes(PACKS[:2], pack, written, order), digests)

    assert found is not None
    assert found.pack.tolist() == pack.tolist()
    for name in ("digest", "offset", "stored_bytes", "raw_bytes", "codec", "typesize"):
        assert (found.entries[name] == written[name]).all(), name


def test_hints_of_a_save_take_three_bytes_for_each_chunk() -> None:
    n = 1000
    order = np.random.default_rng(1).permutation(n)
    written = entries(n)
    sizes = np.random.default_rng(0).integers(170_000, 180_000, n)
    written["stored_bytes"][order] = sizes
    written["offset"][order] = 64 + np.cumsum(sizes) - sizes
    written["raw_bytes"], written["codec"], written["typesize"] = 1 << 18, 4, 2

    assert len(hint_bytes(PACKS[:1], np.zeros(n, int), written, order)) < 3 * n


@pytest.mark.parametrize("n", [0, 1, 9, 1024])
def test_hints_of_deltas_come_back_as_they_were_written(n: int) -> None:
    names = [f"{number:032x}" for number in range(n)]
    plain = manifest(entries(7)["digest"])
    found = Manifest.from_blob(plain.to_blob() + pack_hint_bytes(names), plain.digest)

    assert read_pack_hints(found.hints) == set(names)
    assert read_hints(found.hints, entries(7)["digest"]) is None


def test_hints_of_deltas_name_a_bounded_number_of_packs() -> None:
    found = read_pack_hints(pack_hint_bytes([f"{number:032x}" for number in range(3000)]))

    assert found is not None
    assert len(found) == 1024


@given(at=st.integers(0, 59), bit=st.integers(0, 7))
def test_damaged_hints_of_deltas_are_passed_over(at: int, bit: int) -> None:
    hints = bytearray(pack_hint_bytes(PACKS[:2]))
    hints[at] ^= 1 << bit

    assert read_pack_hints(bytes(hints)) is None


def test_manifest_is_the_same_with_and_without_hints() -> None:
    written = entries(7)
    plain = manifest(written["digest"])
    blob = plain.to_blob() + hint_bytes(PACKS, np.zeros(7, int), written)
    found = Manifest.from_blob(blob, plain.digest)

    assert found.stream == plain.stream
    assert found.to_blob() == plain.to_blob()
    assert read_hints(found.hints, written["digest"]) is not None
    assert split_hints(plain.to_blob()) == (plain.to_blob(), b"")


def test_hints_for_other_chunks_are_passed_over() -> None:
    written = entries(7)

    assert read_hints(hint_bytes(PACKS, np.zeros(7, int), written), written["digest"][:6]) is None


@pytest.mark.parametrize("at", [0, 10, -1, -10, -20, -28, -29])
def test_damaged_hints_are_passed_over_and_spoil_no_manifest(at: int) -> None:
    written = entries(7)
    plain = manifest(written["digest"])
    hints = bytearray(hint_bytes(PACKS, np.zeros(7, int), written))
    hints[at] ^= 1
    stream, rest = split_hints(plain.to_blob() + hints)

    assert rest == b"" or read_hints(rest, written["digest"]) is None or len(rest) != len(hints)
    if stream == plain.to_blob():
        assert Manifest.from_blob(plain.to_blob() + hints, plain.digest).stream == plain.stream


@pytest.mark.parametrize(
    ("column", "value"), [("stored_bytes", (1 << 32) - 1), ("raw_bytes", 1 << 30), ("offset", 1 << 60)]
)
def test_hints_of_chunks_that_cannot_be_are_passed_over(column: str, value: int) -> None:
    written = entries(7)
    written[column][3] = value

    assert read_hints(hint_bytes(PACKS, np.zeros(7, int), written), written["digest"]) is None


def test_hints_that_claim_to_be_long_take_no_memory() -> None:
    packed = zstandard.ZstdCompressor().compress(b'{"packs": [], "n": 3}\n' + bytes(64 << 20))
    data = packed + struct.pack("<I16s8s", len(packed), digest(packed)[:16], MAGIC)
    tracemalloc.start()
    found = read_hints(data, entries(3)["digest"])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found is None
    assert most_bytes < 1 << 20


@given(st.binary(max_size=200))
def test_any_bytes_in_place_of_hints_are_read_or_passed_over(data: bytes) -> None:
    digests = entries(3)["digest"]
    for blob in (data, data + MAGIC, data + bytes(20) + MAGIC):
        stream, rest = split_hints(blob)

        assert stream + rest == blob
        assert rest == b"" or read_hints(rest, digests) is None

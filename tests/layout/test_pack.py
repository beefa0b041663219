from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import RAW, ZSTD, Codec
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout.packs import (
    DELTA,
    PACK_MAGIC,
    TABLE_ENTRY,
    Base,
    Entries,
    PackWriter,
    Payload,
    bases_of,
    is_delta,
    read_table,
)
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES


def payload(raw: bytes, codec: Codec = RAW, *, begins_row: bool = True) -> Payload:
    data = codec.encode(raw, 1)
    return Payload(digest=digest(raw), raw_bytes=len(raw), codec=codec, typesize=1, data=data, begins_row=begins_row)


def write(payloads: list[Payload]) -> bytes:
    return b"".join(bytes(piece) for piece in PackWriter().pieces(payloads))


def table_of(blob: bytes) -> Entries:
    return read_table("packs/x.pack", len(blob), lambda start, stop: blob[start:stop])


def with_table(blob: bytes, entries: Entries) -> bytes:
    """Give a pack another table, with footer and digest as a hostile author would."""
    (offset,) = struct.unpack_from("<Q", blob, len(blob) - FOOTER_BYTES + 16)
    table = np.ascontiguousarray(entries[list(TABLE_ENTRY.names or ())].astype(TABLE_ENTRY)).tobytes()
    head = struct.pack("<8sIIQQ", b"TCPTBL\r\x01", TABLE_ENTRY.itemsize, len(entries), offset, 0)
    return blob[:offset] + table + head + digest(table + head)


PACK = write([payload(b"a" * 100), payload(b"b" * 70), payload(b"c" * 5_000, ZSTD), payload(b"d", begins_row=False)])


def test_a_pack_is_read_back_by_its_table() -> None:
    entries = table_of(PACK)

    assert [entry["raw_bytes"] for entry in entries] == [100, 70, 5_000, 1]
    for entry, raw in zip(entries, [b"a" * 100, b"b" * 70, b"c" * 5_000, b"d"], strict=True):
        begin = int(entry["offset"])
        stored = PACK[begin : begin + int(entry["stored_bytes"])]
        assert entry["digest"].tobytes() == digest(raw)
        assert entry["stored_digest"].tobytes() == digest(stored)[:16]
        if entry["codec"] == RAW.number:
            assert stored == raw


def test_a_raw_tensor_begins_at_a_multiple_of_64_and_its_chunks_lie_adjacent() -> None:
    blob = write([payload(b"x" * 10), payload(b"y" * 10, begins_row=False), payload(b"z" * 10)])

    assert table_of(blob)["offset"].tolist() == [64, 74, 128]
    assert blob[:8] == PACK_MAGIC
    assert blob[8:64] == bytes(56)


def test_a_writer_knows_its_size_and_entries_when_all_is_drawn() -> None:
    writer = PackWriter()
    blob = b"".join(bytes(piece) for piece in writer.pieces([payload(b"abc")]))

    assert writer.n_bytes == len(blob)
    assert (writer.entries() == table_of(blob)).all()


def test_an_empty_pack_has_an_empty_table() -> None:
    assert len(table_of(write([]))) == 0


def test_a_reader_takes_the_first_68_bytes_of_a_longer_entry() -> None:
    entries = table_of(PACK)
    (offset,) = struct.unpack_from("<Q", PACK, len(PACK) - FOOTER_BYTES + 16)
    table = b"".join(entry.tobytes()[: TABLE_ENTRY.itemsize] + b"later" for entry in entries)
    head = struct.pack("<8sIIQQ", b"TCPTBL\r\x01", TABLE_ENTRY.itemsize + 5, len(entries), offset, 0)
    blob = PACK[:offset] + table + head + digest(table + head)

    assert (table_of(blob) == entries).all()


def test_a_pack_cut_short_anywhere_is_corrupt() -> None:
    for size in range(len(PACK)):
        with pytest.raises(CorruptError):
            table_of(PACK[:size])


def test_any_flipped_bit_of_table_or_footer_is_seen() -> None:
    (offset,) = struct.unpack_from("<Q", PACK, len(PACK) - FOOTER_BYTES + 16)
    for at in range(offset, len(PACK)):
        for bit in (1, 128):
            damaged = bytearray(PACK)
            damaged[at] ^= bit

            with pytest.raises(CorruptError):
                table_of(bytes(damaged))


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", 0), ("offset", 7), ("offset", 2**64 - 1), ("offset", 2**63), ("stored_bytes", 2**32 - 1)],
)
def test_a_hostile_table_that_points_outside_of_its_pack_is_corrupt(field: str, value: int) -> None:
    entries = table_of(PACK).copy()
    entries[field][1] = value

    with pytest.raises(CorruptError, match="outside"):
        table_of(with_table(PACK, entries))


@pytest.mark.parametrize(
    ("entry_bytes", "n_entries", "offset"),
    [(67, 1, 8), (0, 0, 8), (68, 2**32 - 1, 8), (2**32 - 1, 2**24, 8), (68, 0, 2**64 - 1), (68, 1, 2**63)],
)
def test_a_hostile_footer_costs_no_memory(entry_bytes: int, n_entries: int, offset: int) -> None:
    head = struct.pack("<8sIIQQ", b"TCPTBL\r\x01", entry_bytes, n_entries, offset, 0)
    reads: list[int] = []

    def read(start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return (PACK + head + digest(head))[start:stop]

    with pytest.raises(CorruptError):
        read_table("packs/x.pack", len(PACK) + FOOTER_BYTES, read)
    assert max(reads) <= len(PACK)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_junk_in_place_of_a_pack_is_corrupt(junk: bytes) -> None:
    with pytest.raises(CorruptError):
        table_of(junk)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans()), max_size=20))
def test_every_packed_chunk_is_found(chunks: list[tuple[bytes, bool, bool]]) -> None:
    blob = write([payload(raw, ZSTD if small else RAW, begins_row=begins) for raw, small, begins in chunks])

    entries = table_of(blob)

    assert entries["raw_bytes"].tolist() == [len(raw) for raw, _, _ in chunks]
    assert np.all(np.diff(entries["offset"].astype(np.int64)) > 0)


# --- packs with deltas

BASE = Base(pack="ab" * 16, digest=digest(b"base"))


class Delta(Codec):
    """Stands for any encoding that needs a base: a pack asks for its number only."""

    number = DELTA
    name = "delta"

    def encode(self, raw: Any, typesize: int) -> Any:
        raise NotImplementedError

    def decode_into(self, stored: Any, out: memoryview) -> None:
        raise NotImplementedError


def delta(raw: bytes, stored: bytes, base: Base = BASE) -> Payload:
    return payload(raw)._replace(codec=Delta(), data=stored, base=base)


OTHER = Base(pack="cd" * 16, digest=digest(b"d"))
WITH_DELTAS = write([payload(b"a" * 100), delta(b"b" * 70, b"less"), delta(b"c", b"?", OTHER)])


def test_a_pack_names_the_base_of_each_delta_and_of_nothing_else() -> None:
    entries = table_of(WITH_DELTAS)

    assert is_delta(entries).tolist() == [False, True, True]
    assert bases_of(entries[1:]) == [BASE, OTHER]
    assert not entries["base_pack"][0].any()
    assert not entries["base_digest"][0].any()


def test_only_a_pack_with_deltas_is_of_version_2() -> None:
    versions = [blob[-FOOTER_BYTES + 7] for blob in (PACK, WITH_DELTAS)]

    assert versions == [1, 2]


def test_a_writer_knows_the_entries_of_deltas_when_all_is_drawn() -> None:
    writer = PackWriter()
    blob = b"".join(bytes(piece) for piece in writer.pieces([payload(b"a"), delta(b"b" * 70, b"less")]))

    assert writer.n_bytes == len(blob)
    assert (writer.entries() == table_of(blob)).all()


def test_any_flipped_bit_of_a_table_with_deltas_is_seen() -> None:
    (offset,) = struct.unpack_from("<Q", WITH_DELTAS, len(WITH_DELTAS) - FOOTER_BYTES + 16)
    for at in range(offset, len(WITH_DELTAS)):
        blob = bytearray(WITH_DELTAS)
        blob[at] ^= 1 << at % 8
        with pytest.raises(CorruptError):
            table_of(bytes(blob))


def forged(rows: list[int], n_bases: int, version: int = 2) -> bytes:
    """The pack with deltas, its bases named as a hostile author would."""
    (offset,) = struct.unpack_from("<Q", WITH_DELTAS, len(WITH_DELTAS) - FOOTER_BYTES + 16)
    table = WITH_DELTAS[offset:][: 3 * TABLE_ENTRY.itemsize]
    table += b"".join(struct.pack("<I16s32s", row, b"p" * 16, b"d" * 32) for row in rows)
    head = struct.pack("<8sIIQII", b"TCPTBL\r" + bytes([version]), TABLE_ENTRY.itemsize, 3, offset, n_bases, 0)
    return WITH_DELTAS[:offset] + table + head + digest(table + head)


def test_true_table_of_the_forger_is_read() -> None:
    assert len(table_of(forged([1, 2], 2))) == 3


@pytest.mark.parametrize(
    ("rows", "n_bases", "version"),
    [
        ([1], 1, 2),
        ([2, 1], 2, 2),
        ([0, 1], 2, 2),
        ([1, 1], 2, 2),
        ([0, 1, 2], 3, 2),
        ([1, 2, 3], 3, 2),
        ([1, 2, 2, 2], 4, 2),
        ([1, 2], 1, 2),
        ([1, 2], 0xFFFFFFFF, 2),
        ([], 0, 2),
        ([], 0, 1),
    ],
)
def test_a_table_that_does_not_name_a_base_for_each_delta_is_corrupt(
    rows: list[int], n_bases: int, version: int
) -> None:
    with pytest.raises(CorruptError):
        table_of(forged(rows, n_bases, version))

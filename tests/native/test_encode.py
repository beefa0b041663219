"""Tests of the core's encoder: it decides as the reference does, and the reference decodes its payloads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tensorcas_mlflow import codecs
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io import StoredChunks
from tensorcas_mlflow.chunk_io._decode import CHUNK, FILE, LINK, PART, READ
from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    SHUFFLE_ZSTD,
    Effort,
    Transform,
    choose_codings,
    codec_numbered,
    encode_best,
)
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.layout.packs import ENTRY, PackWriter, PayloadGroup, decode_chunk, is_delta
from tensorcas_mlflow.native import core
from tensorcas_mlflow.store import Policy
from tensorcas_mlflow.store._choose import EncodingChoice, PossibleBase, choose
from tensorcas_mlflow.store._encode import ChunkEncodings, _encode
from tensorcas_mlflow.store._sources import Pieces
from tests.pairs import pairs_of
from tests.reference import choose as reference_choose
from tests.reference.choose import CODECS
from tests.reference.groups import encode_group
from tests.reference.zstd import CONTEXTS

rng = np.random.default_rng(0)
WEIGHTS = (rng.standard_normal(70_000) * 0.02).astype(np.float32)
STEPPED = WEIGHTS + rng.normal(0, 1e-5, len(WEIGHTS)).astype(np.float32)
DECAYED = WEIGHTS.copy()
for _ in range(40):
    DECAYED *= np.float32(1 - 3 * 2**-24)
CONTENTS: dict[str, bytes] = {
    "weights": STEPPED.tobytes(),
    "halves": (STEPPED.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    "doubles": STEPPED.astype(np.float64).tobytes(),
    "noise": rng.bytes(280_000),
    "zeros": bytes(280_000),
    "indices": np.arange(70_000, dtype=np.int32).tobytes(),
    "text": b"the quick brown fox jumps over the lazy dog " * 6_000,
}
BASES: dict[str, bytes] = {
    "weights": WEIGHTS.tobytes(),
    "halves": (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    "doubles": WEIGHTS.astype(np.float64).tobytes(),
    "decayed": WEIGHTS.tobytes(),
}
SPARSE = np.where(rng.random(len(WEIGHTS)) < np.repeat([0, 0.002, 0.02, 0.2, 0.4, 0.02, 0], 10_000), STEPPED, WEIGHTS)
BASES["sparse"] = WEIGHTS.tobytes()
STEPS = {name: CONTENTS[name] for name in BASES if name in CONTENTS}
STEPS |= {"decayed": DECAYED.tobytes(), "sparse": SPARSE.tobytes()}
SIZES = [0, 1, 3, 31, 32, 33, 511, 512, 4_095, 4_096, 32 << 10, (32 << 10) + 5, (64 << 10) + 1, 256 << 10]


class CoresZstandard:
    """A compressor of the Python code that calls the release of Zstandard in the core."""

    def __init__(self, level: int) -> None:
        self._level = level

    def compress(self, data: Any) -> bytes:
        """Compress bytes into one frame."""
        frame: bytes = core.compress(data, self._level)
        return frame

    def compressobj(self, size: int) -> Any:
        """Begin a frame of several blocks, with the release of the package `zstandard`."""
        return zstandard.ZstdCompressor(level=self._level).compressobj(size=size)


@pytest.fixture(autouse=True)
def one_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference call the core's Zstandard: releases differ in the matches that they find."""
    monkeypatch.setattr(CONTEXTS, "level", CoresZstandard)
    monkeypatch.setattr(CONTEXTS, "entropy", lambda: CoresZstandard(0))


def decoded(number: int, payload: Any, n_bytes: int, base: bytes | None = None) -> bytes:
    """Decode with the core and with the reference; no chunk is empty, and the core refuses one."""
    if n_bytes == 0:
        return b""
    made = [bytearray(n_bytes), bytearray(n_bytes)]
    for codec, out in zip((codec_numbered(number), CODECS[number]), made, strict=True):
        codec.decode_into(payload, memoryview(out), base)
    assert made[0] == made[1]
    return bytes(made[0])


@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 12, 73, 255, 256, 300, 65_535, 70_000])
@pytest.mark.parametrize("content", CONTENTS)
def test_core_and_python_choose_the_same_codec_for_a_chunk(content: str, itemsize: int) -> None:
    for raw in (CONTENTS[content][:n_bytes] for n_bytes in SIZES):
        codec, typesize, payload = encode_best(raw, itemsize)

        expected, expected_typesize, expected_payload = reference_choose.encode_best(raw, itemsize)
        assert decoded(codec.number, payload, len(raw)) == raw
        assert (codec.number, typesize) == (expected.number, expected_typesize)
        if codec is not SHUFFLE_ZSTD:
            assert payload == expected_payload
        assert len(payload) <= 1.01 * len(expected_payload)


@pytest.mark.parametrize("effort", Effort)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("content", ["weights", "zeros", "noise"])
def test_planes_of_the_core_are_those_of_python(content: str, itemsize: int, effort: Effort) -> None:
    codings = choose_codings(CONTENTS[content], itemsize) if itemsize in (1, 2, 4, 8) else None

    for n_bytes, given in itertools.product(SIZES, (None, codings)):
        raw = CONTENTS[content][:n_bytes]
        payload = PLANES.encode_as(raw, itemsize, given, effort)
        expected = CODECS[4].encode_as(raw, itemsize, given, effort)

        assert decoded(PLANES.number, payload, len(raw)) == raw
        assert payload == expected


@pytest.mark.parametrize(
    ("content", "itemsize", "transform", "effort"), pairs_of(BASES, (1, 2, 4, 8, 12), Transform, Effort)
)
def test_deltas_of_the_core_are_those_of_python(
    content: str, itemsize: int, transform: Transform, effort: Effort
) -> None:
    for n_bytes, unit in itertools.product(SIZES, (None, 1)):
        raw, base = STEPS[content][:n_bytes], BASES[content][:n_bytes]
        payload = DELTA.encode_as(raw, itemsize, base, transform, effort, unit=unit)
        expected = CODECS[3].encode_as(raw, itemsize, base, transform, effort, unit=unit)

        assert decoded(DELTA.number, payload, len(raw), base) == raw
        assert payload == expected


def test_core_finds_the_decay_that_python_finds() -> None:
    payload = DELTA.encode_as(DECAYED.tobytes(), 4, WEIGHTS.tobytes(), Transform.DECAYED)

    expected = CODECS[3].encode_as(DECAYED.tobytes(), 4, WEIGHTS.tobytes(), Transform.DECAYED)
    assert payload[1] & 15 == Transform.DECAYED
    assert payload[:8] == expected[:8]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("content", BASES)
def test_core_and_python_estimate_and_choose_alike(content: str, width: int) -> None:
    def choices(by: Any, raw: bytes, base: bytes) -> tuple[Any, ...]:
        codings = by.choose_codings(raw, width, base=base)
        ways = [by.choose_transform(raw, width, base, codings, at_any_cost=any_cost) for any_cost in (False, True)]
        return by.choose_codings(raw, width), codings, *ways

    for n_bytes in SIZES:
        raw, base = STEPS[content][:n_bytes], BASES[content][:n_bytes]
        assert choices(codecs, raw, base) == choices(reference_choose, raw, base)
        mine, others = (
            [by.estimate_share(raw, width), by.estimate_share(raw, width, base=base)]
            for by in (codecs, reference_choose)
        )
        assert mine == pytest.approx(others)


def pieces_of(data: Sequence[bytes], itemsize: int, begins_row: Sequence[bool]) -> Pieces:
    return Pieces(
        chunks=np.arange(len(data)),
        rows=np.arange(len(data)),
        data=[memoryview(each) for each in data],
        digests=np.frombuffer(b"".join(map(digest, data)), np.uint8).reshape(-1, 32),
        itemsizes=np.full(len(data), itemsize),
        begins_row=np.array(begins_row),
    )


def choices_of(
    data: Sequence[bytes], bases: Sequence[bytes | None], itemsize: int, effort: Effort
) -> list[EncodingChoice]:
    return [
        choose(
            raw,
            itemsize,
            is_float=True,
            bases=[] if base is None else [PossibleBase(0, base)],
            max_depth=2,
            effort=effort,
        )
        for raw, base in zip(data, bases, strict=True)
    ]


def encodings_of(data: Sequence[bytes], bases: Sequence[bytes | None], itemsize: int, effort: Effort) -> ChunkEncodings:
    choices = choices_of(data, bases, itemsize, effort)
    encodings = replace(ChunkEncodings.new(choices, np.arange(len(data), dtype=np.int32)), bases=bases)
    for number, base in enumerate(bases):
        if base is not None:
            encodings.has_base[number] = True
            encodings.named[number] = (np.full(16, 0xAB), np.frombuffer(digest(base), np.uint8), 1)
    return encodings


def encoded(pieces: Pieces, encodings: ChunkEncodings | None, policy: Policy, *, is_live: bool) -> list[PayloadGroup]:
    made = _encode(
        (pieces, encodings), policy=policy, is_text=None, leaves_text=False, origin=str if is_live else None, keep=None
    )
    assert not isinstance(made, Pieces)
    return made


def check(groups: list[PayloadGroup], data: Sequence[bytes], bases: Sequence[bytes | None]) -> None:
    """Decode a pack of the groups."""
    writer = PackWriter()
    blob = b"".join(map(bytes, writer.pieces(groups)))
    for entry, raw, base in zip(writer.entries(), data, bases, strict=True):
        stored = blob[int(entry["offset"]) :][: int(entry["stored_bytes"])]
        assert digest(stored)[:16] == entry["stored_digest"].tobytes()
        assert bytes(decode_chunk(entry, stored, base if is_delta(entry) else None)) == raw


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("effort", Effort)
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("content", BASES)
def test_groups_of_the_core_are_those_of_python(content: str, policy: Policy, effort: Effort, is_live: bool) -> None:
    itemsize = {"halves": 2, "doubles": 8}.get(content, 4)
    ends = [(begin, begin + size) for begin, size in [(0, 65_536), (65_536, 33_000), (98_536, 5_003), (103_539, 90)]]
    data = [STEPS[content][begin:end] for begin, end in ends] + [CONTENTS["noise"][:100], CONTENTS["noise"][:70_001]]
    bases: list[bytes | None] = [*(BASES[content][begin:end] for begin, end in ends), None, None]
    pieces = pieces_of(data, itemsize, [False, True, False, True, True, True])
    given = None if policy is Policy.FAST else encodings_of(data, bases, itemsize, effort)

    groups = encoded(pieces, given, policy, is_live=is_live)

    expected = encode_group(pieces, given, choices_of(data, bases, itemsize, effort), policy)
    check(groups, data, bases)
    assert [len(group.entries) for group in groups] == [len(group.entries) for group in expected]
    assert [group.is_aligned for group in groups] == [group.is_aligned for group in expected]
    for group, other in zip(groups, expected, strict=True):
        assert group.entries.tobytes() == other.entries.tobytes()
        assert b"".join(map(bytes, group.parts)) == b"".join(map(bytes, other.parts))
        assert sum(map(len, group.parts)) == group.n_bytes


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("content", ["noise", "weights"])
@pytest.mark.parametrize("n_chunks", [32, 33, 300])
def test_many_small_chunks_are_sampled_as_python_samples_them(content: str, n_chunks: int, is_live: bool) -> None:
    data = [CONTENTS[content][900 * at :][:900] for at in range(n_chunks)]
    pieces = pieces_of(data, 4, [True] * n_chunks)

    groups = encoded(pieces, None, Policy.BALANCED, is_live=is_live)

    expected = encode_group(pieces, None, (), Policy.BALANCED)
    check(groups, data, [None] * n_chunks)
    assert (groups[0].entries["codec"] == expected[0].entries["codec"]).all()
    assert (groups[0].entries["offset"] == expected[0].entries["offset"]).all()


def small_chunks(kind: str) -> list[bytes]:
    noise = np.random.default_rng(7)
    odd = [bytes(4096), np.arange(1024, dtype=np.int32).tobytes(), np.tile(WEIGHTS[:128], 8).tobytes()]
    makers: dict[str, Any] = {
        "floats": lambda at: noise.standard_normal(1024).astype(np.float32).tobytes(),
        "halves": lambda at: CONTENTS["halves"][4096 * (at % 30) :][:4096],
        "doubles of few values": lambda at: noise.integers(0, 9, 512).astype(np.float64).tobytes(),
        "zeros, indices and repeats": lambda at: odd[at % 3],
        "rectified": lambda at: np.maximum(noise.standard_normal(1024), 0).astype(np.float32).tobytes(),
    }
    if kind == "floats, and a few others":
        return [odd[at % 3] if at % 32 in (5, 9) else makers["floats"](at) for at in range(200)]
    return [makers[kind](at) for at in range(200)]


@pytest.mark.parametrize(
    "kind",
    [
        "floats",
        "halves",
        "doubles of few values",
        "zeros, indices and repeats",
        "rectified",
        "floats, and a few others",
    ],
)
def test_small_chunks_like_their_samples_take_as_little_room_as_chunks_alone(kind: str) -> None:
    data = small_chunks(kind)
    itemsize = {"halves": 2, "doubles of few values": 8}.get(kind, 4)
    pieces = pieces_of(data, itemsize, [True] * len(data))

    groups = encoded(pieces, None, Policy.BALANCED, is_live=True)

    alone = sum(len(encode_best(raw, itemsize)[2]) for raw in data)
    expected = encode_group(pieces, None, (), Policy.BALANCED)
    check(groups, data, [None] * len(data))
    assert [group.entries.tobytes() for group in groups] == [group.entries.tobytes() for group in expected]
    assert b"".join(bytes(part) for group in groups for part in group.parts) == b"".join(
        bytes(part) for group in expected for part in group.parts
    )
    assert sum(group.n_bytes for group in groups) <= 1.005 * alone


@pytest.mark.parametrize("policy", Policy)
def test_a_chunk_that_does_not_hash_to_its_digest_is_refused(policy: Policy) -> None:
    data = [CONTENTS["weights"][:50_000], CONTENTS["noise"][:50_000]]
    pieces = pieces_of(data, 4, [True, True])
    pieces.data[1] = memoryview(CONTENTS["noise"][1:50_001])

    with pytest.raises(ConflictError, match="1 was changed while it was saved"):
        encoded(pieces, None, policy, is_live=True)


def call(**changed: Any) -> tuple[int, int, Any, int, int]:
    """Encode two chunks, with some arguments changed."""
    data = [STEPS["weights"][:40_000], STEPS["weights"][40_000:80_003]]
    digests = np.frombuffer(b"".join(map(digest, data)), np.uint8)
    arguments: dict[str, Any] = {
        "data": data,
        "bases": [BASES["weights"][:40_000], None],
        "itemsizes": np.array([4, 4], np.uint32),
        "how": np.array([-1, -1], np.int32),
        "is_sampled": np.zeros(2, bool),
        "begins_row": np.ones(2, bool),
        "digests": digests,
        "encodings": b"",
        "checks": True,
        "entries": np.empty(2, ENTRY).view(np.uint8),
        "named": None,
        "tables": None,
    }
    result: tuple[int, int, Any, int, int] = core.encode_group(*{**arguments, **changed}.values())
    return result


def stored_bases(bases: Sequence[bytes | None], payloads: Sequence[bytes], path: Path) -> StoredChunks:
    """Return the tables of bases that are stored as planes, each in a part of its own, in one open file."""
    path.write_bytes(b"".join(payloads))
    ends = np.cumsum([len(each) for each in payloads])
    reads = np.zeros(len(bases), READ)
    reads["n_bytes"] = [len(each) for each in payloads]
    reads["start"], reads["kind"] = ends - reads["n_bytes"].astype(np.int64), FILE
    links = np.zeros(len(bases), LINK)
    links["n_stored"], links["read"], links["codec"] = reads["n_bytes"], np.arange(len(bases)), PLANES.number
    chunks = np.zeros(len(bases), CHUNK)
    links["n_bytes"] = chunks["n_bytes"] = [len(each or b"") for each in bases]
    chunks["first_link"], chunks["n_links"] = np.arange(len(bases)), 1
    chunks["digest"] = np.frombuffer(b"".join(digest(each or b"") for each in bases), np.uint8).reshape(-1, 32)
    parts = np.zeros(len(bases), PART)
    for name in ("read", "chunk"):
        parts[f"first_{name}"], parts[f"last_{name}"] = np.arange(len(bases)), np.arange(len(bases)) + 1
    return StoredChunks(tables=(reads, links, chunks, parts))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[StoredChunks], StoredChunks]]:
    """Return a function that opens the file of some tables."""
    with (tmp_path / "bases").open("a+b") as file:

        def open_file(stored: StoredChunks) -> StoredChunks:
            stored.tables[0]["source"] = file.fileno()
            return stored

        yield open_file


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("content", BASES)
def test_bases_that_the_encoder_decodes_give_the_payloads_of_bases_in_memory(
    content: str, is_live: bool, tmp_path: Path, opened: Callable[[StoredChunks], StoredChunks]
) -> None:
    itemsize = {"halves": 2, "doubles": 8}.get(content, 4)
    data, bases = [[each[content][at:][:40_003] for at in (0, 40_003, 80_006)] for each in (STEPS, BASES)]
    payloads = [PLANES.encode_as(base, itemsize, None) for base in bases]
    stored = opened(stored_bases(bases, payloads, tmp_path / "bases"))
    pieces = pieces_of(data, itemsize, [True, False, True])
    known = encodings_of(data, bases, itemsize, Effort.BALANCED)
    encodings = replace(known, bases=[None] * 3, stored=stored, number=np.arange(3, dtype=np.int32))

    groups = encoded(pieces, encodings, Policy.BALANCED, is_live=is_live)

    expected = encoded(pieces, known, Policy.BALANCED, is_live=is_live)
    check(groups, data, bases)
    assert any(is_delta(group.entries).any() for group in groups)
    for group, other in zip(groups, expected, strict=True):
        assert group.entries.tobytes() == other.entries.tobytes()
        assert b"".join(map(bytes, group.parts)) == b"".join(map(bytes, other.parts))


@pytest.mark.parametrize("fault", ["in memory", "of a file", "beside it", "truncated"])
def test_no_delta_is_encoded_against_a_base_with_other_bytes(
    fault: str, tmp_path: Path, opened: Callable[[StoredChunks], StoredChunks]
) -> None:
    raw, base = STEPS["weights"][:40_000], BASES["weights"][:40_000]
    payload = PLANES.encode_as(BASES["weights"][4:40_004] if fault == "of a file" else base, 4, None)
    stored = opened(stored_bases([base], [payload], tmp_path / "bases"))
    encodings = encodings_of([raw], [base], 4, Effort.BALANCED)
    if fault == "in memory":
        encodings = replace(encodings, bases=[BASES["weights"][4:40_004]])
    else:
        encodings = replace(encodings, bases=[None], stored=stored, number=np.zeros(1, dtype=np.int32))
    if fault == "beside it":
        stored.tables[2]["digest"][0, 31] ^= 1
    elif fault == "truncated":
        os.truncate(tmp_path / "bases", len(payload) - 1)
    pieces = pieces_of([raw], 4, [True])

    assert (
        _encode((pieces, encodings), policy=Policy.BALANCED, is_text=None, leaves_text=False, origin=str, keep=None)
        is pieces
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"data": [b"one"]},
        {"data": 3},
        {"data": [b"one", None]},
        {"data": [b"one", 3]},
        {"bases": [b"one", None]},
        {"bases": [None]},
        {"bases": 3},
        {"itemsizes": np.array([4], np.uint32)},
        {"itemsizes": np.array([4, 0], np.uint32)},
        {"how": np.array([0, -1], np.int32)},
        {"how": np.array([-3, -1], np.int32)},
        {"how": np.array([-1], np.int32)},
        {"is_sampled": np.zeros(3, bool)},
        {"begins_row": np.zeros(1, bool)},
        {"digests": bytes(63)},
        {"encodings": bytes(39)},
        {"entries": np.empty(231, np.uint8)},
        {"entries": b"read-only"},
        {"named": bytes(97)},
        {"tables": 3},
        {"tables": (b"", b"", b"", b"")},
        {"tables": (b"", b"", b"", b"", bytes(4))},
        {"tables": (b"", b"", b"", b"", np.array([0, -1], np.int32))},
        {"tables": (b"", b"", b"1", b"", np.array([-1, -1], np.int32))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    assert call()[0] == -1

    with pytest.raises((ValueError, TypeError, BufferError)):
        call(**changed)


@pytest.mark.parametrize(
    "place", [("transform", 5), ("unit", 3), ("unit", 8), ("unit", 0), ("itemsize", 3), ("itemsize", 0)], ids=str
)
def test_an_encoding_that_no_chooser_writes_is_refused(place: tuple[str, int]) -> None:
    row = encodings_of([STEPS["weights"][:40_000]], [BASES["weights"][:40_000]], 4, Effort.BALANCED).table
    assert call(encodings=row, how=np.zeros(2, np.int32))[0] == -1
    row[place[0]] = place[1]

    with pytest.raises(ValueError, match="do not fit each other"):
        call(encodings=row, how=np.zeros(2, np.int32))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("encode_best", (b"1234", 0)),
        ("encode_planes", (b"1234", 0, None, 1)),
        ("encode_planes", (b"1234", 4, b"123", 1)),
        ("encode_delta", (b"1234", 4, b"123", 0, 1, None, 1)),
        ("encode_delta", (b"1234", 4, b"1234", 5, 1, None, 1)),
        ("encode_delta", (b"1234", 4, b"1234", -1, 1, None, 1)),
        ("encode_delta", (b"1234", 4, b"1234", 1, 4, None, 1)),
        ("encode_delta", (b"1234", 4, b"1234", 1, 0, None, 1)),
        ("encode_delta", (b"1234", 4, b"1234", 1, 2, b"1", 1)),
        ("choose_codings", (b"1234", 3, None)),
        ("choose_codings", (b"1234", 4, b"123")),
        ("choose_transform", (b"1234", 4, b"1234", b"1", False)),
        ("choose_transform", (b"1234", 4, b"123", bytes(4), False)),
        ("choose_transform", (b"1234", 5, b"1234", bytes(5), False)),
        ("estimate_share", (b"1234", 0, None)),
        ("estimate_share", (b"1234", 4, b"")),
    ],
)
def test_arguments_of_one_chunk_that_do_not_fit_are_refused(function: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit each other"):
        getattr(core, function)(*arguments)


def test_payloads_stay_as_long_as_somebody_views_them() -> None:
    first = memoryview(call()[2])
    expected = bytes(first)

    others = [memoryview(call(data=[bytes(40_000), bytes(40_003)], bases=None, checks=False)[2]) for _ in range(20)]

    assert first == expected
    assert all(bytes(other) == bytes(others[0]) for other in others)
    with pytest.raises(TypeError):
        first[0] = 1


def test_payloads_without_a_view_leave_their_memory_to_the_next_group() -> None:
    def address() -> int:
        return int(np.frombuffer(call()[2], np.uint8).ctypes.data)

    assert len({address() for _ in range(10)}) == 1

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.codecs import CODECS, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Codec, codec_numbered, encode_best
from tensorcas_mlflow.errors import FormatError
from tests.reference.both import decode

rng = np.random.default_rng(0)
WEIGHTS = rng.normal(size=20_000).astype(np.float32).tobytes()
CONTENTS = {
    "weights": WEIGHTS,
    "zeros": bytes(100_000),
    "counting": np.arange(9_000, dtype=np.int64).tobytes(),
    "noise": rng.bytes(50_000),
    "nan": np.full(5_000, np.nan, np.float32).tobytes(),
    "one value": np.full(5_000, 3.0, np.float32).tobytes(),
    "odd end": WEIGHTS[:1_001],
    "small": WEIGHTS[:64],
    "one byte": b"x",
}


def base_of(n_bytes: int) -> bytes:
    """Make a base for a codec that takes one: bytes that differ from the weights in a few places."""
    base = bytearray((WEIGHTS * -(-n_bytes // len(WEIGHTS)))[:n_bytes])
    base[::7] = bytes(len(base[::7]))
    return bytes(base)


def decoded(codec: Codec, stored: bytes, n_bytes: int) -> bytes:
    return decode(codec, stored, n_bytes, base_of(n_bytes) if codec.takes_base else None)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16, 255, 608, 65_535, 65_536])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_codec_restores_the_chunk(codec: Codec, itemsize: int, content: str) -> None:
    raw = CONTENTS[content]

    stored = codec.encode(memoryview(raw), itemsize, base_of(len(raw)))

    assert decoded(codec, bytes(stored), len(raw)) == raw


@given(st.binary(min_size=1, max_size=3_000), st.integers(1, 1_000))
def test_the_chosen_codec_restores_the_chunk_and_never_takes_more_room(raw: bytes, itemsize: int) -> None:
    codec, typesize, stored = encode_best(raw, itemsize)

    assert decoded(codec, bytes(stored), len(raw)) == raw
    assert len(stored) <= len(raw)
    assert 1 <= typesize <= 255


def test_floats_become_planes_text_a_zstd_frame_and_noise_stays_raw() -> None:
    assert encode_best(WEIGHTS, 4)[0] is PLANES
    assert encode_best(b"some text, some more text, " * 100, 1)[0] is ZSTD
    assert encode_best(CONTENTS["noise"], 4)[0] is RAW


@pytest.mark.parametrize(
    ("content", "codec"),
    [
        (np.repeat([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]], 400, axis=0), ZSTD),  # values of a tree's leaves
        (rng.normal(size=1_000).cumsum(), PLANES),
        (np.repeat(rng.normal(size=60), 40), ZSTD),
    ],
)
def test_a_small_chunk_of_doubles_gets_the_codec_that_takes_less_room(content: np.ndarray, codec: Codec) -> None:
    raw = content.tobytes()

    chosen, _, stored = encode_best(raw, 8)

    assert chosen is codec
    assert len(stored) == min(len(each.encode(raw, 8)) for each in (ZSTD, PLANES))


RECORDS = np.zeros(4_000, [("id", "<i8"), ("time", "<f8"), ("value", "<f4"), ("kind", "<i4")])
RECORDS["id"] = np.arange(4_000)
RECORDS["time"] = rng.exponential(size=4_000).cumsum()
RECORDS["value"] = rng.normal(size=4_000)
PIXELS = (np.array([80, 120, 200]) + rng.integers(0, 6, (20_000, 3))).astype(np.uint8)


@pytest.mark.parametrize(
    ("itemsize", "raw"),
    [(3, PIXELS.tobytes()), (24, RECORDS.tobytes()), *((itemsize, WEIGHTS) for itemsize in (12, 16, 608))],
)
def test_records_that_shrink_most_when_shuffled_are_shuffled(itemsize: int, raw: bytes) -> None:
    codec, typesize, stored = encode_best(raw, itemsize)

    assert codec is SHUFFLE_ZSTD
    assert typesize == min(itemsize, 255)
    assert len(stored) < len(ZSTD.encode(raw, 1))
    assert decoded(codec, stored, len(raw)) == raw


@pytest.mark.parametrize("n_records", [200, 4_000])
def test_records_that_repeat_whole_are_not_shuffled(n_records: int) -> None:
    raw = RECORDS[rng.integers(0, 50, n_records)].tobytes()

    codec, _, stored = encode_best(raw, 24)

    assert codec is ZSTD
    assert len(stored) < len(SHUFFLE_ZSTD.encode(raw, 24))


def test_shuffled_records_are_as_the_format_page_says() -> None:
    shuffled = b"adgjbehkcfil" + b"mn"
    stored = b"\x03\x00" + zstandard.ZstdCompressor().compress(shuffled)

    assert decoded(SHUFFLE_ZSTD, stored, 14) == b"abcdefghijklmn"


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x03",
        b"\x00\x00" + ZSTD.encode(bytes(14), 1),  # records of no bytes
        b"\x03\x00",
        b"\x03\x00" + bytes(14),
        b"\x03\x00" + ZSTD.encode(bytes(13), 1),
        b"\x03\x00" + ZSTD.encode(bytes(15), 1),
        b"\x03\x00" + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(14)),
    ],
)
def test_shuffled_records_refuse_a_malformed_payload(stored: bytes) -> None:
    with pytest.raises(FormatError):
        decoded(SHUFFLE_ZSTD, stored, 14)


def test_shuffled_records_longer_than_the_chunk_are_decoded_as_a_tail() -> None:
    assert decoded(SHUFFLE_ZSTD, b"\xff\xff" + ZSTD.encode(b"short", 1), 5) == b"short"


def test_a_few_numbers_become_a_zstd_frame() -> None:
    few = np.arange(100, dtype=np.float32).tobytes()

    assert encode_best(few, 4)[0] is ZSTD
    assert encode_best(np.arange(1000, dtype=np.float32).tobytes(), 4)[0] is PLANES


def test_the_codec_of_a_later_release_raises_a_format_error() -> None:
    with pytest.raises(FormatError, match="200"):
        codec_numbered(200)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_a_payload_of_another_size_raises_a_format_error(codec: Codec) -> None:
    stored = bytes(codec.encode(WEIGHTS, 4, base_of(len(WEIGHTS))))

    for n_bytes in (0, 1, len(WEIGHTS) - 1, len(WEIGHTS) + 1):
        with pytest.raises(FormatError):
            decoded(codec, stored, n_bytes)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@given(junk=st.binary(max_size=200), n_bytes=st.integers(0, 300))
def test_junk_raises_a_format_error_or_fills_the_buffer(codec: Codec, junk: bytes, n_bytes: int) -> None:
    base = base_of(n_bytes) if codec.takes_base else None
    with contextlib.suppress(FormatError):
        codec.decode_into(junk, memoryview(bytearray(n_bytes)), base)


@pytest.mark.long
@pytest.mark.parametrize("codec", [ZSTD, SHUFFLE_ZSTD], ids=lambda codec: codec.name)
@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_payload_raises_a_format_error_or_fills_the_buffer(codec: Codec, data: st.DataObject) -> None:
    raw = b"tensor " * 200
    stored = bytearray(codec.encode(raw, 7))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))

    with contextlib.suppress(FormatError):
        codec.decode_into(stored[: data.draw(st.integers(1, len(stored)))], memoryview(bytearray(len(raw))))


@pytest.mark.parametrize(("codec", "head"), [(ZSTD, b""), (SHUFFLE_ZSTD, b"\x07\x00")])
def test_a_zstd_bomb_costs_no_memory(codec: Codec, head: bytes) -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
    sized = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    tracemalloc.start()
    for bomb in (unsized, sized, sized[:5] + struct.pack("<Q", 1 << 60) + sized[13:]):
        with pytest.raises(FormatError):
            decoded(codec, head + bomb, 1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 << 20

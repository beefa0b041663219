from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.codecs import (
    CODECS,
    PLANES,
    RAW,
    SHUFFLE_ZSTD,
    ZSTD,
    Codec,
    codec_numbered,
    encode_best,
    typesize_of,
)
from tensorcas_mlflow.errors import FormatError

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


WITHOUT_BASE = [codec for codec in CODECS.values() if not codec.takes_base]


def base_of(n_bytes: int) -> bytes:
    """What a codec that takes a base is given: bytes that differ from weights in a few places."""
    base = bytearray((WEIGHTS * -(-n_bytes // len(WEIGHTS)))[:n_bytes])
    base[::7] = bytes(len(base[::7]))
    return bytes(base)


def decoded(codec: Codec, stored: bytes, n_bytes: int) -> bytes:
    out = bytearray(n_bytes)
    codec.decode_into(stored, memoryview(out), base_of(n_bytes) if codec.takes_base else None)
    return bytes(out)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("typesize", [1, 2, 3, 4, 8, 16, 255])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_codec_gives_back_what_it_was_given(codec: Codec, typesize: int, content: str) -> None:
    raw = CONTENTS[content]

    stored = codec.encode(memoryview(raw), typesize, base_of(len(raw)))

    assert decoded(codec, bytes(stored), len(raw)) == raw


@given(st.binary(min_size=1, max_size=3_000), st.integers(1, 1_000))
def test_the_chosen_codec_gives_back_the_chunk_and_never_takes_more_room(raw: bytes, itemsize: int) -> None:
    codec, typesize, stored = encode_best(raw, itemsize)

    assert decoded(codec, bytes(stored), len(raw)) == raw
    assert len(stored) <= len(raw)
    assert 1 <= typesize <= 255


def test_floats_are_taken_apart_text_is_not_and_noise_is_left_raw() -> None:
    assert encode_best(WEIGHTS, 4)[0] is PLANES
    assert encode_best(b"some text, some more text, " * 100, 1)[0] is ZSTD
    assert encode_best(CONTENTS["noise"], 4)[0] is RAW


@pytest.mark.parametrize(
    ("content", "codec"),
    [
        (np.repeat([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]], 400, axis=0), ZSTD),  # what a tree's leaves say
        (rng.normal(size=1_000).cumsum(), PLANES),
        (np.repeat(rng.normal(size=60), 40), ZSTD),
    ],
)
def test_a_small_chunk_of_doubles_is_encoded_as_it_takes_less_room(content: np.ndarray, codec: Codec) -> None:
    raw = content.tobytes()

    chosen, _, stored = encode_best(raw, 8)

    assert chosen is codec
    assert len(stored) == min(len(each.encode(raw, 8)) for each in (ZSTD, PLANES))


def test_elements_that_are_no_words_are_shuffled() -> None:
    assert encode_best(WEIGHTS[: 3 * 8_000], 12)[0] is SHUFFLE_ZSTD


def test_a_few_numbers_are_not_taken_apart() -> None:
    few = np.arange(100, dtype=np.float32).tobytes()

    assert encode_best(few, 4)[0] is ZSTD
    assert encode_best(np.arange(1000, dtype=np.float32).tobytes(), 4)[0] is PLANES


@pytest.mark.parametrize(("itemsize", "typesize"), [(1, 1), (8, 8), (255, 255), (256, 128), (257, 1), (1_000, 250)])
def test_long_records_are_shuffled_by_their_largest_divisor(itemsize: int, typesize: int) -> None:
    assert typesize_of(itemsize) == typesize


def test_a_codec_of_a_later_release_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="200"):
        codec_numbered(200)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_a_payload_of_another_size_is_a_format_error(codec: Codec) -> None:
    stored = bytes(codec.encode(WEIGHTS, 4, base_of(len(WEIGHTS))))

    for n_bytes in (0, 1, len(WEIGHTS) - 1, len(WEIGHTS) + 1):
        with pytest.raises(FormatError):
            decoded(codec, stored, n_bytes)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@given(junk=st.binary(max_size=200), n_bytes=st.integers(0, 300))
def test_junk_is_a_format_error_or_fills_the_buffer(codec: Codec, junk: bytes, n_bytes: int) -> None:
    try:
        out = decoded(codec, junk, n_bytes)
    except FormatError:
        return

    assert len(out) == n_bytes


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_zstd_frame_is_a_format_error_or_fills_the_buffer(data: st.DataObject) -> None:
    raw = b"tensor " * 200
    stored = bytearray(ZSTD.encode(raw, 1))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))

    try:
        out = decoded(ZSTD, bytes(stored[: data.draw(st.integers(1, len(stored)))]), len(raw))
    except FormatError:
        return

    assert len(out) == len(raw)


def test_a_zstd_bomb_costs_no_memory() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20))
    sized = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    tracemalloc.start()
    for bomb in (unsized, sized, sized[:5] + struct.pack("<Q", 1 << 60) + sized[13:]):
        with pytest.raises(FormatError):
            decoded(ZSTD, bomb, 1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (2, 0xC5),  # a codec by number: plugins are found by starting a Python
        (2, 0xA5),
        (2, 0x81),  # no extended header
        (16, 0),  # no shuffle
        (17, 35),  # a plugin's filter
        (22, 37),  # a plugin's codec
        (24, 1),
        (30, 1),
        (31, 0x08),  # lazy: would read a file
        (31, 0x01),  # with a dictionary
        (31, 0x40),  # left uninitialised: would show what was in memory before
    ],
)
def test_a_blosc2_chunk_that_asks_for_anything_but_shuffle_and_zstd_is_refused(at: int, value: int) -> None:
    stored = bytearray(SHUFFLE_ZSTD.encode(WEIGHTS, 4))
    stored[at] = value

    with pytest.raises(FormatError, match="another way"):
        decoded(SHUFFLE_ZSTD, bytes(stored), len(WEIGHTS))


# Every buffer ends at a page that must not be touched, so that one byte too far is a crash and not luck.
FUZZ = """
import ctypes, mmap, random, sys
from tensorcas_mlflow.codecs import SHUFFLE_ZSTD
from tensorcas_mlflow.errors import FormatError
import numpy as np

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(n_bytes):
    size = -(-n_bytes // PAGE) * PAGE
    area = mmap.mmap(-1, size + PAGE)
    assert libc.mprotect(ctypes.addressof(ctypes.c_char.from_buffer(area)) + size, PAGE, 0) == 0
    return lambda n: memoryview(area)[size - n : size]

source, dest = guarded(1 << 19), guarded(1 << 19)
chance = random.Random(int(sys.argv[1]))
rng = np.random.default_rng(1)
raws = [
    (rng.normal(size=40_000).astype("f4").tobytes(), 4),
    (rng.normal(size=512).astype("f4").tobytes(), 4),
    (bytes(100_000), 8),
    (np.arange(9_000).astype("i8").tobytes(), 8),
    (bytes(range(250)) * 40, 255),
    (bytes(range(250)) * 40, 3),
]
chunks = [(bytes(SHUFFLE_ZSTD.encode(raw, typesize)), len(raw)) for raw, typesize in raws]
free = [0, 1, 2, 3, 8, 9, 10, 11, 31]
n_decoded = n_refused = 0
for _ in range(int(sys.argv[2])):
    chunk, n_bytes = chance.choice(chunks)
    stored = bytearray(chunk)
    how = chance.random()
    near = range(32, min(len(stored), 112))
    if how < 0.3:
        for _ in range(chance.randint(1, 3)):
            stored[chance.choice(free)] = chance.choice([0, 1, 2, 4, 16, 32, 48, 127, 128, 255, chance.randrange(256)])
    elif how < 0.6 and near:
        for _ in range(chance.randint(1, 4)):
            stored[chance.choice(near)] = chance.choice([0, 127, 128, 255, chance.randrange(256)])
    elif how < 0.8 and near:
        for _ in range(chance.randint(1, 8)):
            stored[chance.randrange(32, len(stored))] = chance.randrange(256)
    else:
        del stored[chance.randint(32, len(stored)) :]
        stored[12:16] = len(stored).to_bytes(4, "little")
    place = source(len(stored))
    place[:] = bytes(stored)
    try:
        SHUFFLE_ZSTD.decode_into(place, dest(n_bytes))
        n_decoded += 1
    except FormatError:
        n_refused += 1
print(n_decoded, n_refused)
"""


def test_thousands_of_damaged_blosc2_chunks_never_crash_the_process_or_touch_other_memory() -> None:
    done = subprocess.run([sys.executable, "-c", FUZZ, "7", "8000"], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr[-2_000:]
    n_decoded, n_refused = map(int, done.stdout.split())
    assert n_decoded > 100
    assert n_refused > 1_000

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.codecs import PLANES, SHUFFLE_ZSTD, Effort, PlaneCoding
from tensorcas_mlflow.errors import FormatError
from tests.reference.both import decode

rng = np.random.default_rng(0)
WEIGHTS = rng.normal(0, 0.02, 65_536).astype(np.float32)
BFLOATS = (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16)


def decoded(stored: bytes, n_bytes: int) -> bytes:
    return decode(PLANES, stored, n_bytes)


@pytest.mark.parametrize(("words", "itemsize"), [(WEIGHTS, 4), (BFLOATS, 2), (rng.normal(size=20_000), 8)])
def test_planes_of_floats_take_less_room_than_shuffled_floats(words: np.ndarray, itemsize: int) -> None:
    raw = words.tobytes()

    stored = PLANES.encode(raw, itemsize)

    assert decoded(stored, len(raw)) == raw
    assert len(stored) < len(SHUFFLE_ZSTD.encode(raw, itemsize))


@pytest.mark.parametrize("coding", PlaneCoding)
@pytest.mark.parametrize("effort", Effort)
def test_planes_of_every_coding_and_effort_are_decoded(coding: PlaneCoding, effort: Effort) -> None:
    raw = np.arange(40_001, dtype=np.uint16).tobytes()

    stored = PLANES.encode_as(raw, 2, [coding, coding], effort)

    assert decoded(stored, len(raw)) == raw


def test_more_effort_takes_no_more_room() -> None:
    raw = np.repeat(WEIGHTS[:9_000], 3).tobytes()

    assert len(PLANES.encode_as(raw, 4, None, Effort.SMALL)) <= len(PLANES.encode_as(raw, 4, None))


def test_planes_of_noise_are_kept_and_cost_a_few_bytes() -> None:
    raw = rng.bytes(100_000)

    assert len(PLANES.encode(raw, 4)) == len(raw) + 1 + 4 * 4


def test_a_plane_of_zeros_takes_next_to_no_room() -> None:
    assert len(PLANES.encode(np.arange(256, dtype=np.int64).repeat(400).tobytes(), 8)) < 3_000


def test_planes_take_buffers_of_any_kind_and_alignment() -> None:
    raw = b"x" + WEIGHTS[:1_000].tobytes()
    out = bytearray(len(raw) + 3)

    stored = PLANES.encode(memoryview(raw)[1:], 4)
    PLANES.decode_into(np.frombuffer(stored, np.uint8), memoryview(out)[3:-1])

    assert bytes(out[3:-1]) == raw[1:]
    assert out[:3] + out[-1:] == bytes(4)


def payload(width: int, sizes: list[int], rest: bytes) -> bytes:
    return bytes([width]) + struct.pack(f"<{len(sizes)}I", *sizes) + rest


def frame(data: bytes, *, is_sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=is_sized).compress(data)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x02",
        payload(3, [4, 4, 4], bytes(12)),  # three bytes are no word
        payload(16, [1] * 16, bytes(16)),
        payload(2, [4, 5], bytes(9)),  # a plane with more bytes than words
        payload(2, [4, 4], bytes(7)),
        payload(2, [4, 4], bytes(9)),
        payload(2, [0xFFFFFFFF, 4], bytes(8)),
        payload(2, [4, 3], bytes(7)),  # no frame
        payload(2, [4, 0], bytes(4)),
        payload(1, [len(frame(bytes(7)))], frame(bytes(7))),  # of another size than the words
        payload(1, [len(frame(bytes(9)))], frame(bytes(9))),
    ],
)
def test_planes_refuse_a_malformed_payload(stored: bytes) -> None:
    with pytest.raises(FormatError):
        decoded(stored, 8)


def test_a_bomb_in_a_plane_costs_no_memory() -> None:
    n_bytes = 1 << 16
    bombs = [frame(bytes(200 << 20)), frame(bytes(200 << 20), is_sized=False), frame(bytes(200 << 20))[:40]]
    tracemalloc.start()
    for bomb in bombs:
        with pytest.raises(FormatError):
            decoded(payload(1, [len(bomb)], bomb), n_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 << 20


@pytest.mark.long
@settings(max_examples=300)
@given(st.data())
def test_damaged_planes_raise_a_format_error_or_fill_the_buffer(data: st.DataObject) -> None:
    raw = BFLOATS[:700].tobytes() + b"z"
    stored = bytearray(PLANES.encode(raw, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))

    with contextlib.suppress(FormatError):
        PLANES.decode_into(stored[: data.draw(st.integers(1, len(stored)))], memoryview(bytearray(len(raw))))


def test_damaged_planes_are_decompressed_or_refused() -> None:
    raw = (np.arange(9_000, dtype=np.uint32) // 7).tobytes()
    stored = bytes(PLANES.encode(raw, 4))
    out = bytearray(len(raw))
    PLANES.decode_into(stored, memoryview(out))

    assert out == raw
    for at in range(17, len(stored), 5):
        damaged = bytearray(stored)
        damaged[at] ^= 0xFF
        with contextlib.suppress(FormatError):
            PLANES.decode_into(bytes(damaged), memoryview(out))


def test_planes_refuse_a_frame_of_another_size_than_their_words() -> None:
    frames = [zstandard.ZstdCompressor().compress(bytes(size)) for size in (5_000, 5_001)]
    stored = struct.pack("<B2I", 2, *map(len, frames)) + b"".join(frames)

    with pytest.raises(FormatError, match="do not decode"):
        PLANES.decode_into(stored, memoryview(bytearray(10_000)))

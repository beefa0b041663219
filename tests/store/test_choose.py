from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Buffer, Codec, Effort, Transform
from tensorcas_mlflow.store._choose import Chooser, choose, encode_chosen, sample_number

rng = np.random.default_rng(0)
BEFORE = rng.normal(0, 0.02, 65_536).astype(np.float32)
AFTER = BEFORE + rng.normal(0, 1e-5, len(BEFORE)).astype(np.float32)
OTHER = rng.normal(0, 0.02, len(BEFORE)).astype(np.float32)
NOISE = rng.bytes(1 << 18)


def chosen(raw: Buffer, itemsize: int, base: Buffer | None) -> tuple[Codec, int, Buffer]:
    return encode_chosen(raw, choose(raw, itemsize, is_float=itemsize > 1, base=base), base)


def decoded(encoded: tuple[Codec, int, Buffer], n_bytes: int, base: Buffer | None) -> bytes:
    codec, _, stored = encoded
    out = bytearray(n_bytes)
    codec.decode_into(stored, memoryview(out), base if codec.takes_base else None)
    return bytes(out)


@pytest.mark.parametrize(
    ("raw", "itemsize", "base", "codec"),
    [
        (AFTER.tobytes(), 4, None, PLANES),
        (AFTER.tobytes(), 4, BEFORE.tobytes(), DELTA),
        (AFTER.tobytes(), 4, OTHER.tobytes(), PLANES),
        (NOISE, 4, None, RAW),
        (NOISE, 4, bytes(len(NOISE)), RAW),
        (NOISE, 4, NOISE[:-4] + bytes(4), DELTA),
        (b"some text, some more text, " * 2_000, 1, None, ZSTD),
        (AFTER[: 3 * 10_000].tobytes(), 12, BEFORE[: 3 * 10_000].tobytes(), SHUFFLE_ZSTD),
        (AFTER[:2_000].tobytes(), 4, BEFORE[:2_000].tobytes(), DELTA),
        (AFTER[:2_000].tobytes(), 4, OTHER[:2_000].tobytes(), PLANES),
        (AFTER[:500].tobytes(), 4, BEFORE[:500].tobytes(), PLANES),
        (b"", 4, b"", RAW),
    ],
    ids=[
        "weights",
        "a step",
        "other weights",
        "noise",
        "noise with zeros before it",
        "noise that was there",
        "text",
        "records",
        "a step of a small tensor",
        "other small weights",
        "too small for a base",
        "nothing",
    ],
)
def test_the_codec_fits_the_tensor(raw: bytes, itemsize: int, base: bytes | None, codec: Codec) -> None:
    encoded = chosen(raw, itemsize, base)

    assert encoded[0] is codec
    assert decoded(encoded, len(raw), base) == raw
    assert len(encoded[2]) <= len(raw)


def test_floats_are_subtracted_in_groups_and_whole_numbers_as_they_are() -> None:
    numbers = rng.integers(-(1 << 20), 1 << 20, 65_536, dtype=np.int32)
    floats = choose(AFTER.tobytes(), 4, is_float=True, base=BEFORE.tobytes()).delta
    whole = choose((numbers + 1).tobytes(), 4, is_float=False, base=numbers.tobytes()).delta

    assert floats is not None
    assert floats.transform is Transform.GROUPED
    assert whole is not None
    assert whole.transform is Transform.MODULAR


def test_a_chunk_whose_base_is_not_as_the_sample_was_is_stored_without_it() -> None:
    choice = choose(AFTER.tobytes(), 4, is_float=True, base=BEFORE.tobytes())

    codec, typesize, stored = encode_chosen(AFTER.tobytes(), choice, OTHER.tobytes())

    assert (codec, typesize) == (PLANES, 4)
    assert stored == PLANES.encode_as(AFTER.tobytes(), 4, choice.codings)


def test_a_chunk_without_a_base_is_stored_without_one() -> None:
    choice = choose(AFTER.tobytes(), 4, is_float=True, base=BEFORE.tobytes())

    assert encode_chosen(AFTER.tobytes(), choice)[0] is PLANES


def test_noise_in_a_tensor_of_weights_is_left_raw() -> None:
    choice = choose(AFTER.tobytes(), 4, is_float=True)

    assert encode_chosen(NOISE, choice) == (RAW, 1, NOISE)


def test_more_effort_takes_no_more_room() -> None:
    weights = np.repeat(AFTER[:20_000], 3)[:65_536].tobytes()
    sizes = [
        len(encode_chosen(weights, choose(weights, 4, is_float=True, effort=effort))[2])
        for effort in (Effort.SMALL, Effort.BALANCED)
    ]

    assert sizes[0] <= sizes[1]


def test_tensors_of_one_role_have_one_choice_and_are_looked_at_once() -> None:
    chooser, looked_at = Chooser(), []

    def sample(name: str) -> tuple[Buffer, Buffer | None]:
        looked_at.append(name)
        return AFTER.tobytes(), BEFORE.tobytes()

    for name in ("blocks.0.up", "blocks.1.up", "blocks.11.up", "blocks.1.down"):
        chooser.choice(name, "float32", 4, partial(sample, name), based=True)
    chooser.choice("blocks.0.up", "float16", 2, lambda: sample("half"), based=True)
    chooser.choice("blocks.0.up", "float32", 4, lambda: (AFTER.tobytes(), None), based=False)

    assert looked_at == ["blocks.0.up", "blocks.1.down", "half"]


def test_a_tensor_too_small_to_tell_decides_for_no_other() -> None:
    chooser = Chooser()

    small = chooser.choice("a.0", "float32", 4, lambda: (AFTER[:100].tobytes(), None), based=False)
    large = chooser.choice("a.1", "float32", 4, lambda: (AFTER.tobytes(), None), based=False)

    assert small.codings is None
    assert large.codings is not None


@pytest.mark.parametrize(("n_chunks", "number"), [(1, 0), (2, 0), (3, 1), (10, 4)])
def test_the_sample_is_from_the_middle_and_not_the_short_end(n_chunks: int, number: int) -> None:
    assert sample_number(n_chunks) == number

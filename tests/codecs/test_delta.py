from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    RAW,
    ZSTD,
    Codec,
    Effort,
    Transform,
    choose_codings,
    choose_transform,
)
from tensorcas_mlflow.codecs._delta import _UNIT_WORDS
from tensorcas_mlflow.codecs._words import WORDS
from tensorcas_mlflow.errors import FormatError
from tests.reference.both import decode
from tests.reference.choose import CODECS

rng = np.random.default_rng(0)
BEFORE = rng.normal(0, 0.02, 65_536).astype(np.float32)
AFTER = BEFORE + rng.normal(0, 1e-5, len(BEFORE)).astype(np.float32)
ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 3e38, -3e38], np.float32)


def half(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def decoded(stored: bytes, base: bytes) -> bytes:
    return decode(DELTA, stored, len(base), base)


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("effort", Effort)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 12])
def test_a_delta_and_its_base_restore_the_chunk(transform: Transform, effort: Effort, itemsize: int) -> None:
    raw, base = AFTER[:9_000].tobytes() + b"end", BEFORE[:9_000].tobytes() + b"END"

    stored = DELTA.encode_as(raw, itemsize, base, transform, effort)

    assert decoded(stored, base) == raw


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@given(data=st.data())
def test_a_delta_restores_any_bytes(transform: Transform, itemsize: int, data: st.DataObject) -> None:
    base = data.draw(st.binary(min_size=1, max_size=300))
    raw = data.draw(st.binary(min_size=len(base), max_size=len(base)))

    assert decoded(DELTA.encode_as(raw, itemsize, base, transform), base) == raw


@pytest.mark.parametrize("transform", Transform)
def test_a_delta_restores_signed_zeros_infinities_and_nans(transform: Transform) -> None:
    raw, base = (each.tobytes() for each in np.meshgrid(ODD, ODD))

    assert decoded(DELTA.encode_as(raw, 4, base, transform), base) == raw
    assert decoded(DELTA.encode_as(raw, 2, base, transform), base) == raw


@pytest.mark.parametrize("n_words", [65_535, 65_536, 65_537, 200_001])
def test_a_delta_restores_chunks_longer_than_one_block(n_words: int) -> None:
    raw, base = (rng.integers(0, 9, n_words, dtype=np.uint8).tobytes() for _ in range(2))

    for transform in Transform:
        assert decoded(DELTA.encode_as(raw, 1, base, transform), base) == raw


@pytest.mark.parametrize(("before", "after", "itemsize"), [(BEFORE, AFTER, 4), (half(BEFORE), half(AFTER), 2)])
def test_a_small_step_takes_less_room_in_order_and_still_less_in_groups(
    before: np.ndarray, after: np.ndarray, itemsize: int
) -> None:
    raw, base = after.tobytes(), before.tobytes()
    plain = len(PLANES.encode(raw, itemsize))
    in_order, grouped = (
        len(DELTA.encode_as(raw, itemsize, base, each)) for each in (Transform.PLAIN, Transform.GROUPED)
    )

    assert in_order < 0.75 * plain
    assert grouped < 0.98 * in_order


def decayed(words: np.ndarray, n_steps: int = 40) -> np.ndarray:
    out = words.copy()
    for _ in range(n_steps):
        out *= np.float32(1 - 2e-7)
    return out


def test_words_that_only_decayed_take_next_to_no_room_as_decayed() -> None:
    raw, base = decayed(BEFORE).tobytes(), BEFORE.tobytes()
    in_order, of_decayed = (len(DELTA.encode_as(raw, 4, base, each)) for each in (Transform.PLAIN, Transform.DECAYED))

    assert in_order > 0.025 * len(raw)
    assert of_decayed < 0.003 * len(raw)


@pytest.mark.parametrize("n_steps", [1, 7, 500])
def test_the_decayed_transform_gains_where_a_third_of_the_rows_has_a_gradient(n_steps: int) -> None:
    after = decayed(BEFORE, n_steps).reshape(512, 128)
    after[::3] = AFTER.reshape(512, 128)[::3]
    raw, base = after.tobytes(), BEFORE.tobytes()
    in_order, of_decayed = (DELTA.encode_as(raw, 4, base, each) for each in (Transform.PLAIN, Transform.DECAYED))

    assert len(of_decayed) < len(in_order) - 0.015 * len(raw)
    assert decoded(of_decayed, base) == raw


def test_a_chunk_without_decay_is_stored_in_the_plain_transform() -> None:
    raw, base = AFTER.tobytes(), BEFORE.tobytes()

    stored = DELTA.encode_as(raw, 4, base, Transform.DECAYED)

    assert stored == DELTA.encode_as(raw, 4, base, Transform.PLAIN)


def test_the_delta_of_an_unchanged_chunk_takes_next_to_no_room() -> None:
    raw = BEFORE.tobytes()

    assert len(DELTA.encode(raw, 4, raw)) < 600


@pytest.mark.parametrize("inner", [RAW, ZSTD, PLANES], ids=lambda codec: codec.name)
def test_the_residual_of_every_inner_codec_is_as_the_format_page_says(inner: Codec) -> None:
    x, b = np.array([5, 0, 300, 7], "<u2"), np.array([3, 1, 65_000, 7], "<u2")
    residual = np.array([4, 1, 2 * ((300 - 65_000) % 65_536), 0], "<u2").tobytes()

    stored = bytes([inner.number, 0x10]) + bytes(inner.encode(residual, 2))

    assert decoded(stored, b.tobytes()) == x.tobytes()


def test_groups_of_a_delta_are_as_the_format_page_says() -> None:
    b = np.array([3 << 7, 1 << 7, 3 << 7 | 0x8000, 0], "<u2")
    x = b + np.array([0, 1, 2, 3], "<u2")
    small, large = np.array([2, 6], "<u2").tobytes(), np.array([0, 4], "<u2").tobytes()

    stored = bytes([RAW.number, 0x11, 2, 1]) + (4).to_bytes(4, "little") * 2 + small + large

    assert decoded(stored, b.tobytes()) == x.tobytes()


def test_the_decay_of_a_delta_is_as_the_format_page_says() -> None:
    b = np.array([0x3F80_0000, 0xBFC0_00FF, 5, 0xFFFF_FFFF], "<u4")
    # Their mantissas begin with 8000, c000, 8000 and ffff; times 1000, in 2^-24ths, these round to 2, 3, 2 and 4.
    lost = np.array([2, 3, 2, 4], "<u4") * 7
    x = b - lost + np.array([0, 1, 2, 0], "<u4")

    said = (7).to_bytes(4, "little") + (1000).to_bytes(2, "little")
    stored = bytes([RAW.number, 0x22]) + said + np.array([0, 2, 4, 0], "<u4").tobytes() + b"end"

    assert decoded(stored, b.tobytes() + b"END") == x.tobytes() + b"end"


def test_the_sparse_words_of_a_delta_are_as_the_format_page_says() -> None:
    b = np.arange(1_000, dtype="<u2")
    x = b.copy()
    x[[0, 3, 514]] += np.array([1, 65_535, 300], "<u2")  # gaps of 0, 2 and 510 words
    gaps, residual = bytes([0, 2, 255, 255, 0]), np.array([2, 1, 600], "<u2").tobytes()

    said = b"".join(number.to_bytes(4, "little") for number in (3, len(gaps), len(gaps)))
    stored = bytes([RAW.number, 0x13]) + said + gaps + residual + b"!"

    assert decoded(stored, b.tobytes() + b"?") == x.tobytes() + b"!"


def some_changed(share: float) -> tuple[bytes, bytes]:
    """Return a chunk in which a share of the words differs from its base, and the base."""
    is_changed = np.random.default_rng(4).random(len(BEFORE)) < share
    return np.where(is_changed, AFTER, BEFORE).tobytes(), BEFORE.tobytes()


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.2, 0.3])
def test_changes_of_few_words_take_least_room_in_the_sparse_transform(share: float) -> None:
    raw, base = some_changed(share)

    stored = DELTA.encode_as(raw, 4, base, Transform.SPARSE)

    assert stored[1] & 15 == Transform.SPARSE
    assert decoded(stored, base) == raw
    dense = set(Transform) - {Transform.SPARSE, Transform.NUDGED}
    assert len(stored) < 0.8 * min(len(DELTA.encode_as(raw, 4, base, each)) for each in dense)


def test_changes_of_many_words_are_grouped_in_place_of_the_sparse_transform() -> None:
    raw, base = some_changed(0.6)

    for transform in (Transform.SPARSE, Transform.NUDGED):
        assert DELTA.encode_as(raw, 4, base, transform) == DELTA.encode_as(raw, 4, base, Transform.GROUPED)


def test_nudged_words_are_sparse_in_a_chunk_with_more_of_them() -> None:
    raw, base = some_changed(0.4)

    assert DELTA.encode_as(raw, 4, base, Transform.NUDGED) == DELTA.encode_as(raw, 4, base, Transform.SPARSE)
    assert DELTA.encode_as(raw, 4, base, Transform.SPARSE)[1] & 15 == Transform.SPARSE


def test_one_byte_words_whose_places_take_more_than_the_rest_are_not_sparse() -> None:
    """An encoder has room for little more than the chunk."""
    rng = np.random.default_rng(0)
    n = 64 << 10
    gaps = np.zeros(n // 2, np.int64)
    gaps[:: len(gaps) // (n // 510) + 1] = 255  # each takes two bytes
    places = np.cumsum(gaps + 1) - 1
    base = rng.integers(0, 256, n, np.uint8)
    raw = base.copy()
    raw[places] += rng.integers(1, 256, len(places), np.uint8)
    stored = DELTA.encode_as(raw.tobytes(), 1, base.tobytes(), Transform.SPARSE)
    raw[places[-1000:]] = base[places[-1000:]]
    fewer = DELTA.encode_as(raw.tobytes(), 1, base.tobytes(), Transform.SPARSE)

    assert stored[1] & 15 == Transform.GROUPED
    assert fewer[1] & 15 == Transform.SPARSE


def sparse(n_words: int, gaps: bytes, words: bytes, *, n_of_gaps: int | None = None) -> bytes:
    """Return a sparse delta of four-byte words, stored as they are."""
    said = (n_words, len(gaps), len(gaps) if n_of_gaps is None else n_of_gaps)
    return bytes([RAW.number, 0x23]) + b"".join(each.to_bytes(4, "little") for each in said) + gaps + words


@pytest.mark.parametrize(
    "stored",
    [
        b"\x00\x23",
        b"\x00\x23" + bytes(11),
        sparse(1, b"\x02", bytes(4)),  # a place behind the last word
        sparse(1, b"\xff\x00", bytes(4)),
        sparse(3, bytes(3), bytes(12)),  # more words than the chunk has
        sparse(2, bytes(1), bytes(8)),  # fewer gaps than words
        sparse(1, bytes(2), bytes(4)),  # more
        sparse(1, b"\x00\xff", bytes(4)),  # a gap without an end
        sparse(0, b"\xff", b""),
        sparse(0, bytes(9), b""),  # more gaps than the chunk has bytes
        sparse(1, bytes(1), bytes(3)),
        sparse(1, bytes(1), bytes(5)),
        sparse(1, bytes(1), bytes(4), n_of_gaps=0),
        sparse(1, bytes(1), bytes(4), n_of_gaps=6),
        sparse(1, bytes(1), bytes(4), n_of_gaps=(1 << 32) - 1),
    ],
)
def test_a_sparse_delta_refuses_places_and_sizes_outside_of_its_chunk(stored: bytes) -> None:
    with pytest.raises(FormatError):
        decoded(stored, bytes(8))


def test_the_nudged_words_of_a_delta_are_as_the_format_page_says() -> None:
    b = np.arange(100, dtype="<u2")
    x = b.copy()
    x[[1, 7, 8, 20]] += np.array([1, 65_535, 7, 65_534], "<u2")  # gaps of 1, 5, 0 and 11 words; 7 is 1 + 2^2 + 2
    # Two low bits of a gap: upper parts 0, 1, 0 and 2 in unary; signs 0, 1, 0 and 1 below low bits 1, 1, 0 and 3.
    gaps, low = 0b100_1_10_1, 0b111_000_011_010
    # The third and the fourth are large, with gaps of 2 and 0, and exponents 2 and 0; one low bit, and two bits of 7.
    of_large, low_of_large, rest = 0b1_1_100_10, 0b00, 0b10
    said = bytes([2, 1, 4, 2, 1, 1, gaps, low & 255, low >> 8, of_large, low_of_large, rest])

    assert decoded(bytes([RAW.number, 0x14]) + said + b"!", b.tobytes() + b"?") == x.tobytes() + b"!"
    assert DELTA.encode_as(x.tobytes(), 2, b.tobytes(), Transform.NUDGED)[:2] == bytes([RAW.number, 0x14])


def some_nudged(width: int, share: float, large: float, seed: int = 4) -> tuple[bytes, bytes]:
    """Return a chunk in which a share of the words is one unit off, a share of those further, and its base."""
    rng = np.random.default_rng(seed)
    n, dtype = 60_000, np.dtype(f"<u{width}")
    base = rng.integers(0, 1 << 8 * width - 1, n, dtype)
    step = np.where(rng.random(n) < large, rng.integers(-100, 101, n), rng.choice([-1, 1], n))
    return (base + (step * (rng.random(n) < share)).astype(dtype)).tobytes() + b"e", base.tobytes() + b"t"


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("large", [0, 0.05, 1])
@pytest.mark.parametrize("share", [0, 0.0001, 0.014, 0.2])
def test_nudged_words_restore_the_chunk_and_are_alike_in_core_and_numpy(width: int, large: float, share: float) -> None:
    raw, base = some_nudged(width, share, large)
    stored = DELTA.encode_as(raw, width, base, Transform.NUDGED)

    assert CODECS[DELTA.number].encode_as(raw, width, base, Transform.NUDGED) == stored
    assert stored[1] & 15 == Transform.NUDGED
    assert decoded(stored, base) == raw


@pytest.mark.parametrize("share", [0.014, 0.03])
def test_steps_of_single_units_take_a_tenth_more_than_their_entropy(share: float) -> None:
    raw, base = some_nudged(2, share, 0)
    entropy = 60_000 / 8 * (share - share * np.log2(share) - (1 - share) * np.log2(1 - share))

    assert len(DELTA.encode_as(raw, 2, base, Transform.NUDGED)) < 1.1 * entropy
    codings = choose_codings(raw, 2, base=base)
    assert choose_transform(raw, 2, base, codings) == (Transform.NUDGED, 1)


def test_words_that_move_far_are_not_nudged_for_a_few_percent_of_room() -> None:
    rng = np.random.default_rng(4)
    before = rng.integers(0, 1 << 15, 60_000, np.uint16)
    moves = rng.geometric(0.72, 60_000) * rng.choice([-1, *[0] * 8, 1], 60_000)
    raw, base = (before + moves.astype(np.uint16)).tobytes(), before.tobytes()
    sizes = [len(DELTA.encode_as(raw, 2, base, each)) for each in (Transform.NUDGED, Transform.SPARSE)]
    assert 0.94 < sizes[0] / sizes[1] < 1
    codings = choose_codings(raw, 2, base=base)

    assert choose_transform(raw, 2, base, codings) == (Transform.SPARSE, 1)
    assert choose_transform(raw, 2, base, codings, at_any_cost=True) == (Transform.NUDGED, 1)


NUDGED = bytes([RAW.number, 0x14, 0, 0])


@pytest.mark.parametrize(
    "stored",
    [
        NUDGED[:2],
        NUDGED[:3],
        NUDGED,
        NUDGED + b"\x00\x00\x00",  # three sizes of four
        NUDGED + b"\xff\xff\xff\xff\xff\x00\x00\x00",  # a varint without an end
        NUDGED + b"\x80\x80\x80\x80\x80",
        bytes([PLANES.number, 0x14, 0, 0, 0, 0, 0, 0]),  # an inner codec
        bytes([RAW.number, 0x14, 32, 0, 0, 0, 0, 0]),
        bytes([RAW.number, 0x14, 0, 32, 0, 0, 0, 0]),
        NUDGED + b"\x05\x00\x01\x00\x1f\x00",  # more words than the chunk has
        NUDGED + b"\x01\x02\x01\x01\x01\x00\x0f",  # more large words than changed ones
        NUDGED + b"\x01\x00\x00\x00\x00",  # no gap
        NUDGED + b"\x01\x00\x01\x00\x00\x00",  # a gap without an end
        NUDGED + b"\x01\x00\x01\x00\x03\x00",  # two gaps for one word
        NUDGED + b"\x01\x00\x01\x00\x10\x00",  # a place behind the last word
        NUDGED + b"\x01\x00\x02\x00\x01\x00",  # a field longer than the payload
        NUDGED + b"\x01\x00\x01\x00\x01\x00\x00",  # a byte too many
        NUDGED + b"\x01\x01\x01\x00\x01\x00",  # no exponent
        NUDGED + b"\x01\x01\x01\x01\x01\x00\x01",
        NUDGED + b"\x01\x01\x01\x01\x01\x00\x07",  # two
        NUDGED + b"\x01\x01\x01\x01\x01\x00\x06",  # a large word that is not among the changed ones
        NUDGED + b"\x01\x01\x01\x01\x01\x00\x05",  # an exponent of one, and no bit
        NUDGED + b"\x01\x01\x01\x03\x01\x00\x01\x00\x02\x00\x00",  # an exponent of sixteen
        # The second of two large words lies 2^32 words behind the first.
        NUDGED[:3] + b"\x1f\x02\x02\x01\x01\x03\x00\x33" + bytes(8),
    ],
)
def test_a_nudged_delta_refuses_places_and_sizes_outside_of_its_chunk(stored: bytes) -> None:
    with pytest.raises(FormatError):
        decoded(stored, bytes(8))


@pytest.mark.parametrize(
    ("width", "n_bytes", "share", "step"), [(1, 403, 0.05, 1), (2, 403, 0.05, 1), (8, 403, 0.05, 1), (2, 9003, 0.2, 11)]
)
def test_damage_to_a_nudged_delta_is_refused_or_makes_other_bytes_alike_in_core_and_numpy(
    width: int, n_bytes: int, share: float, step: int
) -> None:
    """The core moves 512 words at a time."""
    raw, base = (each[-n_bytes:] for each in some_nudged(width, share, 0.3))
    stored = bytes(DELTA.encode_as(raw, width, base, Transform.NUDGED))
    assert stored[1] & 15 == Transform.NUDGED
    damaged = [stored[:n] for n in range(0, len(stored), step)]
    for bit in range(0, 8 * len(stored), step):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    n_refused = 0
    for each in damaged:
        try:
            decoded(each, base)
        except FormatError:
            n_refused += 1
    assert n_refused >= len(stored) // step


def test_units_of_a_delta_are_as_the_format_page_says() -> None:
    low, high = 1 << 7, 3 << 7
    # The units are high low, low high, low low and high low; by their classes they come as 2, 0 and 3, 1.
    b = np.array([high, low, low, high, low, low, high, low, 7], "<u2")
    x = b + np.arange(1, 10, dtype="<u2")
    lows, highs = np.array([5, 3, 6, 2, 8], "<u2") * 2, np.array([1, 7, 4], "<u2") * 2

    said = bytes([2 | 1 << 4, 1]) + (10).to_bytes(4, "little") + (6).to_bytes(4, "little")
    stored = bytes([RAW.number, 0x11]) + said + lows.tobytes() + highs.tobytes() + x[8:].tobytes()

    assert decoded(stored, b.tobytes()) == x.tobytes()


@pytest.mark.parametrize("unit", [1, 2, 4])
@given(data=st.data())
def test_a_delta_of_any_unit_restores_the_chunk(unit: int, data: st.DataObject) -> None:
    base = data.draw(st.binary(min_size=1, max_size=300))
    raw = data.draw(st.binary(min_size=len(base), max_size=len(base)))

    assert decoded(DELTA.encode_as(raw, 2, base, Transform.GROUPED, unit=unit), base) == raw


GROUPINGS = [
    (width, unit, thresholds)
    for width, unit in itertools.product(WORDS, WORDS)
    for thresholds in ([], [7], [3, 200], [0, 1, 254, 255], [10 * at for at in range(1, 15)])
    if (len(thresholds) + 1) ** unit <= 256 and width * unit <= 8
]


@pytest.mark.parametrize(("width", "unit", "thresholds"), GROUPINGS)
def test_a_delta_of_any_groups_restores_the_chunk(
    width: int, unit: int, thresholds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rng.integers(0, 1 << 8 * width, 9_000, dtype=WORDS[width])
    raw = (base + rng.integers(-9, 9, len(base)).astype(base.dtype)).tobytes()
    monkeypatch.setattr("tests.reference.delta.thresholds_for", lambda _: thresholds)

    stored = CODECS[DELTA.number].encode_as(raw, width, base, Transform.GROUPED, unit=unit)

    assert decoded(stored, base.tobytes()) == raw


def test_no_unit_of_a_delta_is_longer_than_eight_bytes() -> None:
    assert all(width * unit <= 8 for width, unit in _UNIT_WORDS.items())


@pytest.mark.parametrize("base", [None, b"", bytes(7), bytes(9)])
def test_a_delta_without_a_base_of_its_size_is_refused(base: bytes | None) -> None:
    stored = DELTA.encode(bytes(8), 4, bytes(8))

    with pytest.raises(FormatError, match="base"):
        DELTA.decode_into(stored, memoryview(bytearray(8)), base)
    with pytest.raises(ValueError, match="base"):
        DELTA.encode(bytes(8), 4, base)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x04",
        b"\x03\x20",  # a delta in a delta
        b"\x02\x20",  # shuffled records
        b"\x05\x20",
        b"\xff\x20",
        b"\x00\x25",  # a transform of a later release
        b"\x00\x2f",
        b"\x00\x40",  # words of 16 bytes
        b"\x00\xf0",
    ],
)
def test_a_delta_refuses_an_unknown_inner_codec_transform_or_word_size(head: bytes) -> None:
    with pytest.raises(FormatError, match="do not decode"):
        decoded(head + bytes(8) * (len(head) == 2), bytes(8))


@pytest.mark.parametrize(
    "groups",
    [
        b"",
        b"\x00",
        b"\x01",
        b"\x11" + (8).to_bytes(4, "little") + bytes(9),
        b"\x21" + (8).to_bytes(4, "little") + bytes(8),  # units of 16 bytes
        b"\xf1" + (8).to_bytes(4, "little") + bytes(8),
        bytes([3, 5, 5]) + bytes(12) + bytes(8),  # thresholds out of order
        bytes([3, 6, 5]) + bytes(12) + bytes(8),
        b"\x01" + (8).to_bytes(4, "little") + bytes(7),
        b"\x01" + (8).to_bytes(4, "little") + bytes(9),
        b"\x01" + b"\xff" * 4 + bytes(8),
        b"\x02\x00" + (4).to_bytes(4, "little") * 2 + bytes(8),  # all words of this base are in the first group
    ],
)
def test_a_delta_refuses_malformed_groups(groups: bytes) -> None:
    with pytest.raises(FormatError):
        decoded(b"\x00\x21" + groups, bytes(8))


@pytest.mark.parametrize(
    "stored", [b"\x00\x22", b"\x00\x22" + bytes(5), b"\x00\x12" + bytes(14), b"\x00\x32" + bytes(14)]
)
def test_a_delta_refuses_decay_that_is_cut_short_or_not_of_single_precision(stored: bytes) -> None:
    with pytest.raises(FormatError, match="do not decode"):
        decoded(stored, bytes(8))


def test_a_delta_refuses_more_classes_of_units_than_a_byte_holds() -> None:
    stored = bytes([RAW.number, 0x11, 5 | 2 << 4, *range(4)]) + (8).to_bytes(4, "little") + bytes(16) + bytes(8)

    with pytest.raises(FormatError, match="do not decode"):
        decoded(stored, bytes(8))


@pytest.mark.long
@settings(max_examples=300)
@given(st.data())
def test_a_damaged_delta_raises_a_format_error_or_fills_the_buffer(data: st.DataObject) -> None:
    base, raw = half(BEFORE[:700]).tobytes() + b"z", half(AFTER[:700]).tobytes() + b"y"
    stored = bytearray(DELTA.encode_as(raw, 2, base, data.draw(st.sampled_from(Transform))))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))

    with contextlib.suppress(FormatError):
        DELTA.decode_into(stored[: data.draw(st.integers(1, len(stored)))], memoryview(bytearray(len(raw))), base)

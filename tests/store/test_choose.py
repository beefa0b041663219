from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import RAW, Codec, Effort, Transform
from tensorcas_mlflow.store._choose import (
    _STEPS_OF_CHOICE,
    MAX_PASSES,
    MAX_SAVED_DEPTH,
    Chooser,
    DeltaChoice,
    EncodingChoice,
    PossibleBase,
    RecentChoices,
    SeriesChoices,
    choose,
    choose_base,
    sample_number,
)
from tests.reference.choose import encode_chosen
from tests.reference.delta import DELTA
from tests.reference.planes import PLANES
from tests.reference.zstd import SHUFFLE_ZSTD, ZSTD

rng = np.random.default_rng(0)
BEFORE = rng.normal(0, 0.02, 65_536).astype(np.float32)
AFTER = BEFORE + rng.normal(0, 1e-5, len(BEFORE)).astype(np.float32)
OTHER = rng.normal(0, 0.02, len(BEFORE)).astype(np.float32)
NOISE = rng.bytes(1 << 18)


def against(raw: Buffer, itemsize: int, base: Buffer | None, *, is_float: bool = True) -> EncodingChoice:
    bases = [] if base is None else [PossibleBase(0, base)]
    return choose(raw, itemsize, is_float=is_float, bases=bases, max_depth=1)


def chosen(raw: Buffer, itemsize: int, base: Buffer | None) -> tuple[Codec, int, Buffer]:
    return encode_chosen(raw, against(raw, itemsize, base, is_float=itemsize > 1), base)


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
        (AFTER[:200].tobytes(), 4, BEFORE[:200].tobytes(), PLANES),
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
    ],
)
def test_the_codec_fits_the_tensor(raw: bytes, itemsize: int, base: bytes | None, codec: Codec) -> None:
    encoded = chosen(raw, itemsize, base)

    assert encoded[0] is codec
    assert decoded(encoded, len(raw), base) == raw
    assert len(encoded[2]) <= len(raw)


def test_floats_are_subtracted_in_groups_and_whole_numbers_as_they_are() -> None:
    numbers = rng.integers(-(1 << 20), 1 << 20, 65_536, dtype=np.int32)
    floats = against(AFTER.tobytes(), 4, BEFORE.tobytes()).delta
    whole = against((numbers + 1).tobytes(), 4, numbers.tobytes(), is_float=False).delta

    assert floats is not None
    assert (floats.transform, floats.unit) == (Transform.GROUPED, 2)
    assert whole is not None
    assert whole.transform is Transform.PLAIN


def test_groups_are_left_out_where_they_spare_nothing() -> None:
    alike = np.ldexp(rng.uniform(1, 2, 65_536), -6).astype(np.float32)
    choice = against((alike + rng.normal(0, 1e-6, len(alike)).astype(np.float32)).tobytes(), 4, alike.tobytes())

    assert choice.delta is not None
    assert choice.delta.transform is Transform.PLAIN


def test_rows_that_only_weight_decay_moves_are_subtracted_from_what_it_makes_of_them() -> None:
    after = BEFORE.copy()
    for _ in range(40):
        after *= np.float32(1 - 2e-7)
    after[:8_000] = AFTER[:8_000]
    choice = against(after.tobytes(), 4, BEFORE.tobytes())
    _, _, stored = encode_chosen(after.tobytes(), choice, BEFORE.tobytes())

    assert choice.delta is not None
    assert choice.delta.transform is Transform.DECAYED
    assert len(stored) < len(DELTA.encode_as(after.tobytes(), 4, BEFORE.tobytes(), Transform.PLAIN)) - 5_000


def test_a_step_that_changes_few_words_stores_their_places_and_differences() -> None:
    after = np.where(rng.random(len(BEFORE)) < 0.05, AFTER, BEFORE)
    choice = against(after.tobytes(), 4, BEFORE.tobytes())

    assert choice.delta is not None
    assert choice.delta.transform is Transform.SPARSE


def test_words_stay_in_their_order_where_whole_columns_do_not_change() -> None:
    step = rng.normal(0, 1e-5, (256, 256)).astype(np.float32) * (rng.random(256) < 0.3).repeat(8)[:256]
    choice = against((BEFORE + step.ravel()).tobytes(), 4, BEFORE.tobytes())

    assert choice.delta is not None
    assert choice.delta.unit == 1


def test_a_chunk_whose_base_is_not_as_the_sample_was_is_stored_without_it() -> None:
    choice = against(AFTER.tobytes(), 4, BEFORE.tobytes())

    codec, typesize, stored = encode_chosen(AFTER.tobytes(), choice, OTHER.tobytes())

    assert (codec, typesize) == (PLANES, 4)
    assert stored == PLANES.encode_as(AFTER.tobytes(), 4, choice.codings)


def test_a_chunk_without_a_base_is_stored_without_one() -> None:
    choice = against(AFTER.tobytes(), 4, BEFORE.tobytes())

    assert encode_chosen(AFTER.tobytes(), choice)[0] is PLANES


def test_noise_in_a_tensor_of_weights_is_left_raw() -> None:
    choice = choose(AFTER.tobytes(), 4, is_float=True)

    assert encode_chosen(NOISE, choice) == (RAW, 1, NOISE)


def test_more_effort_never_stores_more_bytes() -> None:
    weights = np.repeat(AFTER[:20_000], 3)[:65_536].tobytes()
    sizes = [
        len(encode_chosen(weights, choose(weights, 4, is_float=True, effort=effort))[2])
        for effort in (Effort.SMALL, Effort.BALANCED)
    ]

    assert sizes[0] <= sizes[1]


def test_tensors_of_one_role_have_one_choice_and_are_looked_at_once() -> None:
    chooser = Chooser(max_depth=1)
    looked_at: list[str] = []

    def sample(name: str, depth: int | None) -> tuple[Buffer, list[PossibleBase]]:
        looked_at.append(name)
        return AFTER.tobytes(), [PossibleBase(0, BEFORE.tobytes())]

    for name in ("blocks.0.up", "blocks.1.up", "blocks.11.up", "blocks.1.down"):
        chooser.choice(name, "float32", 4, partial(sample, name), n_bytes=AFTER.nbytes, depths=[0])
    chooser.choice("blocks.0.up", "float16", 2, partial(sample, "half"), n_bytes=AFTER.nbytes, depths=[0])
    chooser.choice("blocks.0.up", "float32", 4, lambda depth: (AFTER.tobytes(), ()), n_bytes=AFTER.nbytes, depths=[])

    assert looked_at == ["blocks.0.up", "blocks.1.down", "half"]


FIRST, SECOND = (
    EncodingChoice(itemsize=size, codings=None, plain_share=1.0, delta=None, effort=Effort.BALANCED) for size in (2, 4)
)


def test_a_choice_serves_some_steps_of_its_series_and_is_then_made_anew() -> None:
    recent = RecentChoices()
    made = iter([FIRST, SECOND, FIRST])
    taken = [recent.of("run").of("up", lambda: next(made)) for _ in range(_STEPS_OF_CHOICE + 1)]

    assert taken == [FIRST] * _STEPS_OF_CHOICE + [SECOND]
    assert recent.of("run").of("down", lambda: next(made)) == FIRST
    assert recent.of("other run").of("up", lambda: SECOND) == SECOND


@pytest.mark.parametrize(("share", "taken"), [(0.73, FIRST), (0.67, FIRST), (0.8, SECOND), (0.6, SECOND)])
def test_a_choice_is_made_anew_if_a_save_takes_another_share_of_its_bytes(share: float, taken: EncodingChoice) -> None:
    choices = SeriesChoices()
    choices.of("up", lambda: FIRST)
    choices.note_share(0, 0.7)
    choices.note_share(None, 0.9)  # a save without bases is not compared with one with bases
    choices.note_share(0, share)

    assert choices.of("up", lambda: SECOND) == taken


@pytest.mark.parametrize(
    "other",
    [
        {"name": "down"},
        {"dtype": "float16", "itemsize": 2},
        {"itemsize": 8},
        {"depths": [0]},
        {"depths": []},
    ],
    ids=str,
)
def test_a_tensor_of_another_kind_takes_no_choice_of_an_earlier_step(other: dict[str, Any]) -> None:
    recent = SeriesChoices()
    looked_at: list[int | None] = []

    def sample(depth: int | None) -> tuple[Buffer, list[PossibleBase]]:
        looked_at.append(depth)
        return AFTER.tobytes(), [PossibleBase(1, BEFORE.tobytes()), PossibleBase(0, BEFORE.tobytes())]

    facts: dict[str, Any] = {"name": "up", "dtype": "float32", "itemsize": 4, "depths": [1, 0], "n_bytes": AFTER.nbytes}
    for each in (facts, facts, facts | other):
        chooser = Chooser(max_depth=3, recent=recent)
        chooser.choice(sample=sample, **facts | {"name": "largest"})
        chooser.choice(sample=sample, **each)

    assert looked_at[:4] == [None, 1, None, None]
    assert len(looked_at) == 5


def test_every_save_decides_anew_whether_its_series_restarts() -> None:
    recent = SeriesChoices()
    near, far = (AFTER - 1e-6).astype(np.float32), rng.normal(0, 1, len(AFTER)).astype(np.float32)

    def depth(base: np.ndarray) -> int | None:
        bases = [PossibleBase(0, base.tobytes())]
        chooser = Chooser(max_depth=3, recent=recent)
        chooser.choice("up", "float32", 4, lambda _: (AFTER.tobytes(), bases), n_bytes=AFTER.nbytes, depths=[0])
        return chooser.depth

    assert [depth(base) for base in (near, near, far, near)] == [0, 0, None, 0]


def test_choice_of_the_depth_keeps_its_codings_for_some_steps() -> None:
    recent = SeriesChoices()
    sparse = AFTER.copy()
    sparse[::50] += 1e-3

    def delta(raw: np.ndarray, base: np.ndarray) -> DeltaChoice | None:
        bases = [PossibleBase(0, base.tobytes())]
        chooser = Chooser(max_depth=3, recent=recent)
        choice = chooser.choice("up", "float32", 4, lambda _: (raw.tobytes(), bases), n_bytes=raw.nbytes, depths=[0])
        return choice.delta

    steps = [delta(AFTER, BEFORE), *(delta(sparse, AFTER) for _ in range(_STEPS_OF_CHOICE))]
    found = [(each.codings, each.transform, each.unit) for each in steps if each is not None]

    assert len(found) == len(steps)
    assert found[:-1] == [found[0]] * _STEPS_OF_CHOICE
    assert found[-1] != found[0]
    assert steps[1] is not None
    assert steps[0] is not None
    assert steps[1].passes < steps[0].passes


def test_a_tensor_too_small_to_tell_decides_for_no_other() -> None:
    chooser = Chooser()

    small = chooser.choice("a.0", "float32", 4, lambda depth: (AFTER[:100].tobytes(), ()), n_bytes=400, depths=[])
    large = chooser.choice("a.1", "float32", 4, lambda depth: (AFTER.tobytes(), ()), n_bytes=AFTER.nbytes, depths=[])

    assert small.codings is None
    assert large.codings is not None


@pytest.mark.parametrize(("n_chunks", "number"), [(1, 0), (2, 0), (3, 1), (10, 4)])
def test_the_sample_is_from_the_middle_and_not_the_short_end(n_chunks: int, number: int) -> None:
    assert sample_number(n_chunks) == number


def chosen_depth(shares: list[tuple[int, float]], max_depth: int) -> int | None:
    """Return the depth of the chosen base, given depths and shares."""
    number = choose_base(0.67, [(share, max_depth - depth - 1) for depth, share in shares], max_depth)
    return None if number is None else shares[number][0]


@pytest.mark.parametrize(
    ("shares", "max_depth", "depth"),
    [
        ([], 3, None),
        ([(0, 0.5)], 3, 0),
        ([(0, 0.66)], 3, None),  # next to nothing is gained
        ([(1, 0.4), (0, 0.5)], 3, 1),
        ([(0, 0.5)], 0, None),  # no deltas at all
        ([(1, 0.3), (0, 0.35)], 1, 0),  # the step before is no base any more, its own base is
        ([(1, 0.3), (0, 0.6)], 1, None),  # that is far behind: begin anew
        ([(3, 0.3), (2, 0.55), (1, 0.6), (0, 0.62)], 3, None),
        ([(3, 0.3), (2, 0.55), (1, 0.42), (0, 0.38)], 3, 0),
        ([(3, 0.3), (2, 0.31), (1, 0.4), (0, 0.6)], 3, 2),
    ],
)
def test_a_base_is_taken_as_deep_as_serves_this_step_and_the_next_ones(
    shares: list[tuple[int, float]], max_depth: int, depth: int | None
) -> None:
    assert chosen_depth(shares, max_depth) == depth


def test_a_series_of_equal_steps_never_gets_deeper_than_allowed() -> None:
    chain: list[int] = []
    for _ in range(50):
        shares = [(depth, 0.3 + 0.05 * far) for far, depth in enumerate(range(chain[-1], -1, -1))] if chain else []
        depth = chosen_depth(shares, 3)
        chain.append(0 if depth is None else depth + 1)

    assert set(chain) == {0, 1, 2, 3} or set(chain) == {0, 1, 3, 2}
    assert max(chain) == 3


def test_the_base_is_the_one_behind_where_the_last_step_is_as_deep_as_allowed() -> None:
    near = [PossibleBase(depth, (AFTER - (3 - depth) * 1e-6).tobytes()) for depth in (2, 1)]
    bases = [*near, PossibleBase(0, BEFORE.tobytes())]

    depths = [choose(AFTER.tobytes(), 4, is_float=True, bases=bases, max_depth=most).delta for most in (3, 2)]

    assert [delta and delta.depth for delta in depths] == [2, 1]


def test_a_chain_of_dense_deltas_ends_where_one_of_sparse_ones_goes_on() -> None:
    few = np.where(rng.random(len(BEFORE)) < 0.005, AFTER, BEFORE)

    def delta(step: np.ndarray, passes: float) -> DeltaChoice | None:
        bases = [PossibleBase(2, BEFORE.tobytes(), passes)]
        return choose(
            step.tobytes(), 4, is_float=True, bases=bases, max_depth=MAX_SAVED_DEPTH, max_passes=MAX_PASSES
        ).delta

    assert [delta(AFTER, passes) is None for passes in (0.5, 1.5, 2)] == [False, True, True]
    assert [delta(few, passes) is None for passes in (0.5, 1.5, 2)] == [False, False, True]


def test_all_tensors_of_a_save_go_back_to_bases_of_one_depth() -> None:
    asked: list[int | None] = []
    bases = [PossibleBase(1, (AFTER - 1e-6).tobytes()), PossibleBase(0, BEFORE.tobytes())]

    def sample(depth: int | None) -> tuple[Buffer, list[PossibleBase]]:
        asked.append(depth)
        return AFTER.tobytes(), bases if depth is None else bases[-1 - depth :][:1]

    chooser = Chooser(max_depth=3)
    choices = [
        chooser.choice(name, "float32", 4, sample, n_bytes=AFTER.nbytes, depths=[1, 0]) for name in ("a", "b", "c")
    ]

    assert asked == [None, 1, 1]
    assert [choice.delta and choice.delta.depth for choice in choices] == [1, 1, 1]


def test_a_series_begins_anew_with_all_tensors() -> None:
    chooser = Chooser(max_depth=1)
    far = (AFTER + rng.normal(0, 1e-3, len(AFTER)).astype(np.float32)).tobytes()
    bases = [PossibleBase(1, (AFTER - 1e-7).tobytes()), PossibleBase(0, far)]

    size = AFTER.nbytes
    first = chooser.choice("a", "float32", 4, lambda _: (AFTER.tobytes(), bases), n_bytes=size, depths=[1, 0])
    second = chooser.choice("b", "float32", 4, lambda _: (AFTER.tobytes(), bases[1:]), n_bytes=size, depths=[1, 0])

    assert first.gains
    assert first.delta is None
    assert second.delta is None

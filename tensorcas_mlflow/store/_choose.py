"""Choice of an encoding for each tensor: policies, samples, and the correction for atypical chunks."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    RAW,
    WORD_BYTES,
    Codec,
    Effort,
    PlaneCoding,
    Transform,
    choose_codings,
    choose_transform,
    encode_best,
    estimate_share,
)


class Policy(Enum):
    """Encoding effort of a save. It does not change the loaded data."""

    FAST = "fast"
    """Tensors are stored raw, and can be memory-mapped; text is compressed."""
    BALANCED = "balanced"
    """Data that shrinks at the speed of a disk is compressed."""
    SMALL = "small"
    """Like `BALANCED`, with more time for fewer bytes if there is something to gain."""

    @classmethod
    def of(cls, given: str | Policy | None) -> Policy:
        """Return the policy of a name; by default the environment's (TENSORCAS_POLICY).

        Raises:
            ValueError: No policy has this name.
        """
        if isinstance(given, Policy):
            return given
        name = given or config.policy()
        policy = _POLICIES.get(name)
        if policy is None:
            raise ValueError(f"a policy is {', '.join(_POLICIES)}, not {name!r}")
        return policy


_POLICIES = {policy.value: policy for policy in Policy}

LEAST_DELTA_BYTES = 4096
"""A smaller chunk is not stored as a delta: reading its base costs more than the saved space is worth."""
CLEARLY_SMALLER = 0.97
"""A delta is stored only if it takes less than this share of the chunk's size without a base, and `planes` only if
they take less than this share of the chunk: raw chunks can be memory-mapped."""
_LEAST_SAMPLE_BYTES = 32 << 10
"""A shorter sample proves nothing; every chunk is tried."""
_LEAST_GROUPED_BYTES = 32 << 10
"""Groups have headers and codes of their own, too expensive for fewer bytes."""
_GROUPED_SHARE = 0.96
"""If a delta takes more than this share of the chunk's size without a base, groups save nothing and take time."""
_MOST_CHOICES = 4096
_STEPS_OF_ARRANGEMENT = 8
_MOST_SERIES = 64
_NUMBERS = re.compile(r"\d+")

Sample = Callable[[int | None], tuple[Buffer, Sequence[tuple[int, Buffer]]]]
"""Returns one chunk of a tensor, and its possible bases: `sample` and `bases` of `choose`.

With a depth, only the nearest base of at most this depth is wanted; with None all are."""

Arrangement = tuple[Transform, int]
"""Arrangement of differences: the transform, and the number of words grouped together."""
ArrangementOf = Callable[[int, Callable[[], Arrangement]], Arrangement]
"""Returns the arrangement for bases of a depth: a known one, or the result of the slow function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChoice:
    """Encoding of chunks with a base."""

    transform: Transform
    """Encoding of their differences, unless they are too few for groups."""
    unit: int
    """Number of words grouped together."""
    codings: tuple[PlaneCoding, ...] | None
    """Codings of the planes of the differences, the least significant bytes first; None to look at each chunk."""
    depth: int
    """Maximum depth of a base: a deeper chunk is replaced by the nearest one behind it within this depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingChoice:
    """Encoding of a tensor's chunks."""

    itemsize: int
    codings: tuple[PlaneCoding, ...] | None
    """Codings of the planes, the least significant bytes first; None to look at each chunk."""
    plain_share: float
    """Estimated share of its size a chunk takes without a base; 0 if unknown."""
    delta: DeltaChoice | None
    """None if a base is of no use."""
    effort: Effort
    gains: bool = False
    """True if a delta against one of the bases would take clearly less room; a series may still start anew."""


def choose(
    sample: Buffer,
    itemsize: int,
    *,
    is_float: bool,
    bases: Sequence[tuple[int, Buffer]] = (),
    max_depth: int = 0,
    effort: Effort = Effort.BALANCED,
    arrangement_of: ArrangementOf = lambda _depth, find: find(),
) -> EncodingChoice:
    """Choose the encoding of a tensor.

    Args:
        sample: One of its chunks, best from the middle; some 16 KiB of it are examined.
        itemsize: Size of an element; 1 for text.
        is_float: Whether the elements are floating point numbers, sign and magnitude.
        bases: The chunk at the sample's place at the last step, and the bases behind it up to one stored
            in full: the depth of each, and its bytes, as many as the sample's.
        max_depth: Maximum number of other chunks needed to decode one.
        effort: Encoding effort.
        arrangement_of: Source of arrangements.
    """
    n_bytes = memoryview(sample).nbytes
    if itemsize not in WORD_BYTES or (itemsize == 1 and not is_float):
        return EncodingChoice(itemsize=itemsize, codings=None, plain_share=0.0, delta=None, effort=effort)
    delta = None
    if n_bytes < _LEAST_SAMPLE_BYTES:
        if bases and max_depth > 0:
            delta = DeltaChoice(transform=Transform.PLAIN, unit=1, codings=None, depth=min(bases[0][0], max_depth - 1))
        return EncodingChoice(itemsize=itemsize, codings=None, plain_share=0.0, delta=delta, effort=effort)
    plain = estimate_share(sample, itemsize)
    shares = {depth: estimate_share(sample, itemsize, base=base) for depth, base in bases}
    depth = choose_depth(plain, list(shares.items()), max_depth)
    if depth is not None:
        base = dict(bases)[depth]
        codings = choose_codings(sample, itemsize, base=base)
        transform, unit = Transform.PLAIN, 1
        if is_float and shares[depth] < _GROUPED_SHARE * plain:
            at_any_cost = effort is Effort.SMALL
            find = partial(choose_transform, sample, itemsize, base, codings, at_any_cost=at_any_cost)
            transform, unit = arrangement_of(depth, find)
        delta = DeltaChoice(transform=transform, unit=unit, codings=codings, depth=depth)
    return EncodingChoice(
        itemsize=itemsize,
        codings=choose_codings(sample, itemsize),
        plain_share=min(plain, 1.0),
        delta=delta,
        effort=effort,
        gains=min(shares.values(), default=1.0) < CLEARLY_SMALLER * plain,
    )


def share_against(sample: Buffer, base: Buffer, itemsize: int) -> float:
    """Estimate the share of its size a chunk takes as a delta; 1 if its elements cannot be subtracted."""
    if itemsize not in WORD_BYTES or memoryview(sample).nbytes != memoryview(base).nbytes:
        return 1.0
    return estimate_share(sample, itemsize, base=base)


def choose_depth(plain: float, shares: Sequence[tuple[int, float]], max_depth: int) -> int | None:
    """Choose the distance to a tensor's base, and so the restart of a series of deltas.

    A chunk of little depth serves the next steps as a near base; a chunk at the end of the longest allowed chain does
    not. So the function judges each choice by the mean of this step's size and the sizes of the later steps it leaves
    room for, assuming they are as near each other as this one is to the last.

    Args:
        plain: The share of its size the tensor takes without a base.
        shares: For the last step, and the bases behind it up to one stored in full: the depth of each, and
            the share of a delta against it.
        max_depth: Maximum number of other chunks needed to decode one.

    Returns:
        The depth of the base to use, or None to store the tensor in full.
    """
    if not shares or min(share for _, share in shares) >= CLEARLY_SMALLER * plain:
        return None
    near = min(shares[0][1], plain)
    chosen: int | None = None
    least = (plain + max_depth * near) / (max_depth + 1)
    for depth, share in shares:
        left = max_depth - depth - 1
        if left >= 0 and share < CLEARLY_SMALLER * plain:
            mean = (share + left * near) / (left + 1)
            if mean < least:
                chosen, least = depth, mean
    return chosen


def encode_chosen(raw: Buffer, choice: EncodingChoice, base: Buffer | None = None) -> tuple[Codec, int, Buffer]:
    """Encode a chunk by its tensor's choice, or differently if the choice takes clearly more room.

    Args:
        raw: The chunk.
        choice: The choice of its tensor.
        base: The chunk's base, decoded, if it has one; as long as the chunk.

    Returns:
        The codec, which takes a base only if there is one; its typesize; and the payload, no longer than
        the chunk.
    """
    n_bytes = memoryview(raw).nbytes
    if base is None or choice.delta is None or n_bytes < LEAST_DELTA_BYTES:
        return _encode_plain(raw, choice)
    transform = choice.delta.transform if n_bytes >= _LEAST_GROUPED_BYTES else Transform.PLAIN
    codings, unit = choice.delta.codings, choice.delta.unit
    delta = DELTA.encode_as(raw, choice.itemsize, base, transform, choice.effort, codings, unit)
    if len(delta) < CLEARLY_SMALLER * choice.plain_share * n_bytes:
        return DELTA, choice.itemsize, delta
    plain = _encode_plain(raw, choice)
    if len(delta) < CLEARLY_SMALLER * memoryview(plain[2]).nbytes:
        return DELTA, choice.itemsize, delta
    return plain


def _encode_plain(raw: Buffer, choice: EncodingChoice) -> tuple[Codec, int, Buffer]:
    if choice.codings is None:
        return encode_best(raw, choice.itemsize)
    stored = PLANES.encode_as(raw, choice.itemsize, choice.codings, choice.effort)
    if len(stored) > CLEARLY_SMALLER * memoryview(raw).nbytes:
        return RAW, 1, raw
    return PLANES, choice.itemsize, stored


class Arrangements:
    """The arrangements chosen at the last steps of one series.

    Finding one, by trying all, takes longer than the rest of the choice, and one that serves a step serves the next.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Arrangement | None, int]] = {}

    def of(self, role: Hashable, depth: int, find: Callable[[], Arrangement]) -> Arrangement:
        """Return the arrangement for a role and bases of a depth; it is searched anew every few steps."""
        found, n_left = self._known.get((role, depth), (None, 0))
        if found is None or n_left == 0:
            found, n_left = find(), _STEPS_OF_ARRANGEMENT
            if len(self._known) >= _MOST_CHOICES:
                self._known.clear()
        self._known[role, depth] = found, n_left - 1
        return found


class RecentArrangements:
    """The arrangements of the series this process has recently saved in one store. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_series: OrderedDict[Hashable, Arrangements] = OrderedDict()

    def of(self, series: Hashable) -> Arrangements:
        """Return those of a series; if there are too many, the least recently used is forgotten."""
        with self._lock:
            arrangements = self._by_series.setdefault(series, Arrangements())
            self._by_series.move_to_end(series)
            if len(self._by_series) > _MOST_SERIES:
                self._by_series.popitem(last=False)
            return arrangements


class Chooser:
    """The choices of one save.

    Tensors of one dtype and one role share one choice, so most need no look: the role is the name without its
    numbers, for example `blocks.3.up.weight` of all blocks. All tensors use bases of one depth, decided by the first
    tensor that gains by a base: a series starts anew with all its tensors. So ask for the largest tensor
    first. For one thread.
    """

    def __init__(
        self, *, max_depth: int = 0, effort: Effort = Effort.BALANCED, arrangements: Arrangements | None = None
    ) -> None:
        """Begin without any choice.

        Args:
            max_depth: See `choose`.
            effort: See `choose`.
            arrangements: Those of the save's series; None to find all anew.
        """
        self._max_depth = max_depth
        self._effort = effort
        self._arrangements = arrangements or Arrangements()
        self._choices: dict[tuple[str, str, bool], EncodingChoice] = {}
        self._depth: int | None = None
        """Depth of all bases, once decided; -1 for no bases."""

    def choice(self, name: str, dtype: str, itemsize: int, sample: Sample, *, has_bases: bool) -> EncodingChoice:
        """Choose the encoding of a tensor.

        Args:
            name: The tensor's name.
            dtype: Its dtype's name in manifests.
            itemsize: Size of an element; 1 for text.
            sample: Called if no choice is known yet.
            has_bases: Whether there is a possible base.
        """
        key = (dtype, _NUMBERS.sub("#", name), has_bases)
        choice = self._choices.get(key)
        if choice is None:
            raw, bases = sample(self._depth) if has_bases and self._depth != -1 else (sample(-1)[0], ())
            # Once the depth is decided, this tensor need not have one of its own.
            most = self._max_depth if self._depth is None or not bases else bases[0][0] + 1
            choice = choose(
                raw,
                itemsize,
                is_float=is_float(dtype),
                bases=bases,
                max_depth=most,
                effort=self._effort,
                arrangement_of=partial(self._arrangements.of, key),
            )
            if memoryview(raw).nbytes >= _LEAST_SAMPLE_BYTES:
                if self._depth is None and bases and choice.gains:
                    self._depth = -1 if choice.delta is None else choice.delta.depth
                if len(self._choices) < _MOST_CHOICES:
                    self._choices[key] = choice
        return choice


def is_float(dtype: str) -> bool:
    """Tell whether a manifest's dtype is one of floating point numbers, alone or in pairs."""
    return dtype.startswith(("float", "bfloat", "complex"))


def sample_number(n_chunks: int) -> int:
    """Return the number of a tensor's sample chunk: the last one may be short, and the first is often padding."""
    return max(0, (n_chunks - 1) // 2)

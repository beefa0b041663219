"""Choice of an encoding for each tensor: policies, samples, and the correction for atypical chunks."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.codecs import (
    PLANES,
    WORD_BYTES,
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
            raise ValueError(f"a policy is one of {', '.join(map(repr, _POLICIES))}, not {name!r}")
        return policy


_POLICIES = {policy.value: policy for policy in Policy}

LEAST_DELTA_BYTES = 1024
"""A smaller chunk is not stored as a delta: reading its base costs more than the saved space is worth."""
CLEARLY_SMALLER = 0.97
"""A delta is stored only if it takes less than this share of the chunk's size without a base, and `planes` only if
they take less than this share of the chunk: raw chunks can be memory-mapped."""
_LEAST_SAMPLE_BYTES = 32 << 10
"""A shorter sample proves nothing; every chunk is tried."""
_GROUPED_SHARE = 0.96
"""If a delta takes more than this share of the chunk's size without a base, groups save nothing and take time."""
MAX_SAVED_DEPTH = 32
"""Maximum number of other chunks needed to decode one that a save stores; the format allows 64. Each delta also costs
the lookup and the read of one more pack (``docs/design/codecs.md``)."""
MAX_PASSES = 2 + 1e-9
"""Maximum cost of decoding a chunk besides its base in full, in deltas of many words: each is one pass over a chunk. It
leaves room for the rounding of sums."""
_PASSES_OF_SHARE = 20.0
"""Passes that a sparse delta takes for each share of its chunk, measured (``docs/design/codecs.md``)."""
_MOST_CHOICES = 4096
_STEPS_OF_CHOICE = 3
"""More steps cost bytes: transforms and codings get out of date (``docs/design/codecs.md``)."""
_CHANGED_SHARE = 0.1
"""If a save takes so much more or less of its bytes than one with the same choices, the next save chooses anew."""
_MOST_SERIES = 64
_NUMBERS = re.compile(r"\d+")


class PossibleBase(NamedTuple):
    """A chunk that may be the base of a sample."""

    depth: int
    data: Buffer
    """Its bytes."""
    passes: float = 0.0
    """Cost of decoding its own deltas; see `MAX_PASSES`."""


Chosen = TypeVar("Chosen")

Sample = Callable[[int | None], tuple[Buffer, Sequence[PossibleBase]]]
"""Returns one chunk of a tensor, and its possible bases: `sample` and `bases` of `choose`.

With a depth, only the nearest base of at most this depth is wanted; with None all are."""


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
    passes: float
    """Estimated cost of decoding one of them; see `MAX_PASSES`."""


Codings = tuple["tuple[PlaneCoding, ...] | None", "tuple[PlaneCoding, ...] | None", Transform, int]
"""Codings of chunks without a base; codings, transform and unit of their deltas."""


def _make(_: Hashable, make: Callable[[], Codings]) -> Codings:
    return make()


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
    bases: Sequence[PossibleBase] = (),
    max_depth: int = 0,
    max_passes: float | None = None,
    effort: Effort = Effort.BALANCED,
    codings_for: Callable[[Hashable, Callable[[], Codings]], Codings] = _make,
) -> EncodingChoice:
    """Choose the encoding of a tensor.

    Args:
        sample: One of its chunks, best from the middle; some 16 KiB of it are examined.
        itemsize: Size of an element; 1 for text.
        is_float: Whether the elements are floating point numbers, sign and magnitude.
        bases: The chunk at the sample's place at the last step, and bases behind it, with as many bytes as the sample.
        max_depth: Maximum number of other chunks needed to decode one.
        max_passes: Maximum cost of decoding the deltas of one chain; None if the bases are known to fit.
        effort: Encoding effort.
        codings_for: Returns kept codings for the chosen base, or makes them. The base itself is chosen anew.
    """
    if memoryview(sample).nbytes < _LEAST_SAMPLE_BYTES or itemsize not in WORD_BYTES:
        depth = bases[0].depth if bases else None
        return _unsampled(itemsize, depth=depth, max_depth=max_depth, effort=effort)
    # Bytes may be of anything, such as images, and Zstandard finds more in them than their entropy tells.
    is_bytes = itemsize == 1 and not is_float
    plain, bytes_codings = _bytes_in_full(sample, effort) if is_bytes else (estimate_share(sample, itemsize), None)
    shares = [estimate_share(sample, itemsize, base=base.data) for base in bases]
    passes = [passes_of(share) if is_float else 1.0 for share in shares]
    left = [max_depth - base.depth - 1 for base in bases]
    if bases and max_passes is not None:
        near = max(passes[0], max_passes / max_depth)
        room = [max_passes - base.passes - mine for base, mine in zip(bases, passes, strict=True)]
        left = [min(most, math.floor(each / near)) for most, each in zip(left, room, strict=True)]
        max_depth = int(max_passes / near)
    number = choose_base(plain, list(zip(shares, left, strict=True)), max_depth)
    base = None if number is None else bases[number]
    is_grouped = number is not None and is_float and shares[number] < _GROUPED_SHARE * plain

    def make() -> Codings:
        codings, transform, unit = None, Transform.PLAIN, 1
        if base is not None:
            codings = choose_codings(sample, itemsize, base=base.data)
            if is_grouped:
                at_any_cost = effort is Effort.SMALL
                transform, unit = choose_transform(sample, itemsize, base.data, codings, at_any_cost=at_any_cost)
        return bytes_codings if is_bytes else choose_codings(sample, itemsize), codings, transform, unit

    plain_codings, codings, transform, unit = codings_for((None if base is None else base.depth, is_grouped), make)
    delta = None
    if base is not None and number is not None:
        delta = DeltaChoice(transform=transform, unit=unit, codings=codings, depth=base.depth, passes=passes[number])
    return EncodingChoice(
        itemsize=itemsize,
        codings=plain_codings,
        plain_share=min(plain, 1.0),
        delta=delta,
        effort=effort,
        gains=min(shares, default=1.0) < CLEARLY_SMALLER * plain,
    )


def _bytes_in_full(sample: Buffer, effort: Effort) -> tuple[float, tuple[PlaneCoding, ...] | None]:
    """Encode a part of a chunk of bytes: return the share of its size, and codings unless Zstandard's matches win."""
    data = memoryview(sample).cast("B")
    begin = max(0, len(data) - _LEAST_SAMPLE_BYTES) // 2
    part = data[begin : begin + _LEAST_SAMPLE_BYTES]
    codings = choose_codings(part, 1)
    best, planes = memoryview(encode_best(part, 1)[2]).nbytes, len(PLANES.encode_as(part, 1, codings, effort))
    return min(best, planes) / len(part), codings if planes < best else None


def _unsampled(
    itemsize: int, *, depth: int | None, max_depth: int, effort: Effort, passes: float = 1.0
) -> EncodingChoice:
    """Return the choice for a tensor without words, or with chunks too small for a sample; see `choose`.

    Args:
        depth: Depth of the nearest base; None if there is none.
        passes: See `DeltaChoice`.
    """
    delta = None
    if depth is not None and max_depth > 0 and itemsize in WORD_BYTES:
        depth = min(depth, max_depth - 1)
        delta = DeltaChoice(transform=Transform.PLAIN, unit=1, codings=None, depth=depth, passes=passes)
    return EncodingChoice(itemsize=itemsize, codings=None, plain_share=0.0, delta=delta, effort=effort)


def passes_of(share: Any) -> Any:
    """Estimate the cost of decoding one delta, in deltas of many words.

    A sparse delta takes time for each changed word, and its size tells how many there are.

    Args:
        share: The share of its size that a chunk takes as the delta; one, or an array.
    """
    return np.minimum(1.0, _PASSES_OF_SHARE * share)


def share_against(sample: Buffer, base: Buffer, itemsize: int) -> float:
    """Estimate the share of its size a chunk takes as a delta; 1 if its elements cannot be subtracted."""
    if itemsize not in WORD_BYTES or memoryview(sample).nbytes != memoryview(base).nbytes:
        return 1.0
    return estimate_share(sample, itemsize, base=base)


def gain_of(sample: Buffer, base: Buffer, itemsize: int) -> float:
    """Estimate the share of its size that a chunk saves as a delta."""
    plain = min(1.0, estimate_share(sample, itemsize)) if itemsize in WORD_BYTES else 1.0
    return max(0.0, plain - share_against(sample, base, itemsize))


def choose_base(plain: float, shares: Sequence[tuple[float, int]], n_steps: int) -> int | None:
    """Choose the distance to a tensor's base, and so the restart of a series of deltas.

    A chunk of little depth serves the next steps as a near base; a chunk at the end of the longest allowed chain does
    not. So the function judges each choice by the mean of this step's size and the sizes of the later steps it leaves
    room for, assuming they are as near each other as this one is to the last.

    Args:
        plain: The share of its size the tensor takes without a base.
        shares: For the last step, and bases behind it: the share of a delta against it, and the number of later steps
            such a delta leaves room for; negative if it is itself too many.
        n_steps: The number of later steps that a tensor stored in full leaves room for.

    Returns:
        The number of the base to use, or None to store the tensor in full.
    """
    if not shares or min(share for share, _ in shares) >= CLEARLY_SMALLER * plain:
        return None
    near = min(shares[0][0], plain)
    chosen: int | None = None
    least = (plain + n_steps * near) / (n_steps + 1)
    for number, (share, left) in enumerate(shares):
        if left >= 0 and share < CLEARLY_SMALLER * plain:
            mean = (share + left * near) / (left + 1)
            if mean < least:
                chosen, least = number, mean
    return chosen


class SeriesChoices:
    """The choices made for the last steps of one series.

    A choice takes longer than the encoding of a small tensor, and one that serves a step serves the next. A kept choice
    costs at most some bytes: the encoder compares each delta with the chunk without a base, unless the delta is smaller
    than the chunk was at the choice. The choice of a save's depth is never kept, only its codings; see `Chooser`.
    """

    def __init__(self) -> None:
        self.has_gained = False
        """Whether deltas of large tensors took clearly less room in the last save."""
        self._known: dict[Hashable, tuple[Any, int]] = {}
        self._shares: dict[int | None, float] = {}

    def of(self, situation: Hashable, find: Callable[[], Chosen]) -> Chosen:
        """Return the choice for a situation, or a part of it; it is made anew every few steps.

        Args:
            situation: Everything a choice depends on, except the bytes.
            find: Makes the choice.
        """
        kept = self._known.get(situation)
        if kept is None or kept[1] == 0:
            if len(self._known) >= _MOST_CHOICES:
                self._known.clear()
            kept = find(), _STEPS_OF_CHOICE
        self._known[situation] = kept[0], kept[1] - 1
        return kept[0]

    def note_share(self, depth: int | None, share: float) -> None:
        """Note the share of its bytes a save took; forget all choices if it differs from that of a save like it.

        Args:
            depth: Depth of the save's bases; see `Chooser.depth`.
            share: The share.
        """
        self.has_gained = depth is not None
        known = self._shares.setdefault(depth, share)
        if abs(share - known) > _CHANGED_SHARE * known:
            self._known.clear()
            self._shares = {depth: share}


class RecentChoices:
    """The choices of the series this process has recently saved in one store. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_series: OrderedDict[Hashable, SeriesChoices] = OrderedDict()

    def of(self, series: Hashable) -> SeriesChoices:
        """Return those of a series; if there are too many, the least recently used is forgotten."""
        with self._lock:
            choices = self._by_series.get(series)
            if choices is None:
                choices = self._by_series[series] = SeriesChoices()
            self._by_series.move_to_end(series)
            if len(self._by_series) > _MOST_SERIES:
                self._by_series.popitem(last=False)
            return choices


class Chooser:
    """The choices of one save.

    Tensors of one dtype and one role share one choice, so most need no look: the role is the name without its
    numbers, for example `blocks.3.up.weight` of all blocks. All tensors use bases of one depth, decided by the first
    tensor that gains by a base: a series starts anew with all its tensors. So ask for the largest tensor
    first. For one thread.
    """

    def __init__(
        self,
        *,
        max_depth: int = 0,
        max_passes: float | None = None,
        effort: Effort = Effort.BALANCED,
        recent: SeriesChoices | None = None,
    ) -> None:
        """Begin without any choice.

        Args:
            max_depth: See `choose`.
            max_passes: See `choose`.
            effort: See `choose`.
            recent: The choices for the last steps of the save's series; None to make all anew.
        """
        self.depth: int | None = None
        """Depth of all bases, once decided; -1 for no bases."""
        self._max_depth = max_depth
        self._max_passes = max_passes
        self._effort = effort
        self._recent = recent
        self._choices: dict[tuple[str, str, bool], EncodingChoice] = {}
        self.passes = 1.0
        """Cost of decoding a delta of the tensor that decided the depth, below 1 for a sparse one; the others' chains
        are as long."""

    def choice(
        self, name: str, dtype: str, itemsize: int, sample: Sample, *, n_bytes: int, depths: Sequence[int]
    ) -> EncodingChoice:
        """Choose the encoding of a tensor.

        Args:
            name: The tensor's name.
            dtype: Its dtype's name in manifests.
            itemsize: Size of an element; 1 for text.
            sample: Called if no choice is known yet.
            n_bytes: Size of the sample.
            depths: Depths of the sample's possible bases, the deepest first; empty if there is none.
        """
        key = (dtype, _NUMBERS.sub("#", name), bool(depths))
        choice = self._choices.get(key)
        if choice is not None:
            return choice
        if self.depth is not None:
            depths = [depth for depth in depths if depth <= self.depth][:1]
        # Once the depth is decided, this tensor need not have one of its own.
        most = self._max_depth if self.depth is None or not depths else depths[0] + 1
        passes = self._max_passes if self.depth is None else None
        if n_bytes < _LEAST_SAMPLE_BYTES or itemsize not in WORD_BYTES:
            depth = depths[0] if depths else None
            return _unsampled(itemsize, depth=depth, max_depth=most, effort=self._effort, passes=self.passes)

        decides = self.depth is None and bool(depths)

        def codings_for(situation: Hashable, make: Callable[[], Codings]) -> Codings:
            assert self._recent is not None
            return self._recent.of((key, itemsize, situation), make)

        def find() -> EncodingChoice:
            raw, bases = sample(self.depth) if depths else (sample(-1)[0], ())
            return choose(
                raw,
                itemsize,
                is_float=is_float(dtype),
                bases=bases,
                max_depth=most,
                max_passes=passes,
                effort=self._effort,
                codings_for=codings_for if decides and self._recent is not None else _make,
            )

        # With a kept choice for the depth of all bases, a series would restart some steps too late.
        if self._recent is None or decides:
            choice = find()
        else:
            choice = self._recent.of((key, itemsize, most, tuple(depths)), find)
        if decides and choice.gains:
            self.depth = -1 if choice.delta is None else choice.delta.depth
            self.passes = 1.0 if choice.delta is None else choice.delta.passes
        if len(self._choices) < _MOST_CHOICES:
            self._choices[key] = choice
        return choice

    def note_share(self, share: float) -> None:
        """Note the share of its bytes the save took."""
        if self._recent is not None:
            self._recent.note_share(self.depth, share)


def is_float(dtype: str) -> bool:
    """Tell whether a manifest's dtype is one of floating point numbers, alone or in pairs."""
    return dtype.startswith(("float", "bfloat", "complex"))


def sample_number(n_chunks: int) -> int:
    """Return the number of a tensor's sample chunk: the last one may be short, and the first is often padding."""
    return max(0, (n_chunks - 1) // 2)

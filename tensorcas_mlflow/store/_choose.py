"""How each tensor's chunks are encoded: chosen from a sample, and made good where a chunk is not as the sample was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    RAW,
    WORD_BYTES,
    Buffer,
    Codec,
    Effort,
    PlaneCoding,
    Transform,
    choose_codings,
    encode_best,
    estimate_share,
)

LEAST_DELTA_BYTES = 4096
"""A chunk of fewer bytes is not stored as a delta: to read its base takes longer than what is spared is worth."""
CLEARLY_SMALLER = 0.97
"""A delta is stored only if it takes less than this share of what the chunk takes without a base, and `planes` only if
they take less than this share of the chunk: what is raw can be mapped."""
_LEAST_SAMPLE_BYTES = 32 << 10
"""From a shorter sample nothing is concluded; every chunk is tried."""
_LEAST_GROUPED_BYTES = 32 << 10
"""Groups have headers and codes of their own, for which fewer bytes do not pay."""
_MOST_CHOICES = 4096
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChoice:
    """How chunks are stored for which there is a base."""

    transform: Transform
    codings: tuple[PlaneCoding, ...] | None
    """Of the planes of the differences, the least significant bytes first; None to look at each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a tensor's chunks are stored."""

    itemsize: int
    codings: tuple[PlaneCoding, ...] | None
    """Of the planes, the least significant bytes first; None to look at each chunk."""
    plain_share: float
    """What share of its size a chunk is likely to take without a base; 0 where nothing is known."""
    delta: DeltaChoice | None
    """None if a base is of no use."""
    effort: Effort


def choose(
    sample: Buffer, itemsize: int, *, is_float: bool, base: Buffer | None = None, effort: Effort = Effort.BALANCED
) -> Choice:
    """Choose how a tensor is to be stored.

    Args:
        sample: One of its chunks, best from the middle; some 16 KiB of it are looked at.
        itemsize: Size of an element; 1 for text.
        is_float: Whether the elements are floating point numbers, sign and magnitude.
        base: What stood in the place of the sample earlier, if it is known, as long as the sample.
        effort: What encoding may cost.
    """
    n_bytes = memoryview(sample).nbytes
    if itemsize not in WORD_BYTES or (itemsize == 1 and not is_float):
        return Choice(itemsize=itemsize, codings=None, plain_share=0.0, delta=None, effort=effort)
    subtract = Transform.ORDERED if is_float else Transform.MODULAR
    if n_bytes < _LEAST_SAMPLE_BYTES:
        tried = DeltaChoice(transform=subtract, codings=None) if base is not None else None
        return Choice(itemsize=itemsize, codings=None, plain_share=0.0, delta=tried, effort=effort)
    plain = estimate_share(sample, itemsize)
    delta = None
    if base is not None:
        least = estimate_share(sample, itemsize, base=base, transform=subtract)
        if least < CLEARLY_SMALLER * plain:
            transform = subtract
            if is_float:
                grouped = estimate_share(sample, itemsize, base=base, transform=Transform.GROUPED)
                transform = Transform.GROUPED if grouped < CLEARLY_SMALLER * least else subtract
            codings = choose_codings(sample, itemsize, base=base, transform=subtract)
            delta = DeltaChoice(transform=transform, codings=codings)
    return Choice(
        itemsize=itemsize,
        codings=choose_codings(sample, itemsize),
        plain_share=min(plain, 1.0),
        delta=delta,
        effort=effort,
    )


def encode_chosen(raw: Buffer, choice: Choice, base: Buffer | None = None) -> tuple[Codec, int, Buffer]:
    """Encode a chunk as it was chosen for its tensor, or otherwise where that takes clearly more room.

    Args:
        raw: The chunk.
        choice: Of its tensor.
        base: The chunk's base, decoded, if it has one; as long as the chunk.

    Returns:
        The codec, which takes a base only if there is one; the typesize it was told; and the payload, no longer than
        the chunk.
    """
    n_bytes = memoryview(raw).nbytes
    if base is None or choice.delta is None or n_bytes < LEAST_DELTA_BYTES:
        return _encode_plain(raw, choice)
    transform = choice.delta.transform
    if transform is Transform.GROUPED and n_bytes < _LEAST_GROUPED_BYTES:
        transform = Transform.ORDERED
    delta = DELTA.encode_as(raw, choice.itemsize, base, transform, choice.effort, choice.delta.codings)
    if len(delta) < CLEARLY_SMALLER * choice.plain_share * n_bytes:
        return DELTA, choice.itemsize, delta
    plain = _encode_plain(raw, choice)
    if len(delta) < CLEARLY_SMALLER * memoryview(plain[2]).nbytes:
        return DELTA, choice.itemsize, delta
    return plain


def _encode_plain(raw: Buffer, choice: Choice) -> tuple[Codec, int, Buffer]:
    if choice.codings is None:
        return encode_best(raw, choice.itemsize)
    stored = PLANES.encode_as(raw, choice.itemsize, choice.codings, choice.effort)
    if len(stored) > CLEARLY_SMALLER * memoryview(raw).nbytes:
        return RAW, 1, raw
    return PLANES, choice.itemsize, stored


class Chooser:
    """The choices of one save. Tensors of one dtype and one role have one choice, so that most are not looked at.

    The role is the name without its numbers: `blocks.3.up.weight` of all blocks is one. For one thread.
    """

    def __init__(self, effort: Effort = Effort.BALANCED) -> None:
        self._effort = effort
        self._choices: dict[tuple[str, str, bool], Choice] = {}

    def choice(
        self, name: str, dtype: str, itemsize: int, sample: Callable[[], tuple[Buffer, Buffer | None]], *, based: bool
    ) -> Choice:
        """Choose for a tensor.

        Args:
            name: The tensor's.
            dtype: As a manifest says it.
            itemsize: Size of an element; 1 for text.
            sample: Gives one of its chunks, and the base of that or None; called where no choice is known yet.
            based: Whether the tensor has a base.
        """
        key = (dtype, _NUMBERS.sub("#", name), based)
        choice = self._choices.get(key)
        if choice is None:
            raw, base = sample()
            choice = choose(raw, itemsize, is_float=is_float(dtype), base=base, effort=self._effort)
            if memoryview(raw).nbytes >= _LEAST_SAMPLE_BYTES and len(self._choices) < _MOST_CHOICES:
                self._choices[key] = choice
        return choice


def is_float(dtype: str) -> bool:
    """Say whether a manifest's dtype is one of floating point numbers, alone or in pairs."""
    return dtype.startswith(("float", "bfloat", "complex"))


def sample_number(n_chunks: int) -> int:
    """Say which of a tensor's chunks is its sample: the last one may be short, and the first is often padding."""
    return max(0, (n_chunks - 1) // 2)

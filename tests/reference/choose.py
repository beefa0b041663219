"""Choice of a codec, a coding and a transform: by element size alone, or from a sample of the chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import RAW, Codec, PlaneCoding, Transform, can_shuffle, is_sparse, typesize_of
from tensorcas_mlflow.store._choose import CLEARLY_SMALLER, LEAST_DELTA_BYTES, EncodingChoice
from tests.reference.delta import DELTA, fit_decay
from tests.reference.planes import PLANES, Alike, codings_for, note_sample
from tests.reference.words import UNIT_WORDS, WORDS, stretches_of, subtract, words_in
from tests.reference.zstd import SHUFFLE_ZSTD, SMALL_BYTES, ZSTD

_LEAST_GROUPED_BYTES = 32 << 10

CODECS: Mapping[int, Codec] = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, DELTA, PLANES)}


LEAST_GAIN = 0.97
"""A chunk that does not shrink below this share is stored raw, and can then be memory-mapped."""
_MAX_TYPESIZE = 255
_LEAST_SHUFFLED_BYTES = 512
"""In fewer bytes shuffling gains less than its header takes (``docs/design/codecs.md``)."""
_MIXED_ITEMSIZE = 8
"""Elements of this size are often whole numbers or repeat, and plain zstd may be smaller."""
_MIXED_TRIED_LEVEL = 3
_MOST_BEHIND = 0.02
"""If the trial takes more than the planes and this share of the chunk, the slow level for small chunks rarely takes
less than the planes. It takes three times as long as they do, and a hundred times as long if many bytes repeat."""
_RECORDS_TRIED_BYTES = 16 << 10
_RECORDS_TRIED_LEVEL = 1
"""Trial of both codecs for records, which takes a tenth to a fifth of the time of encoding."""

SAMPLE_WORDS = 2048
"""Words in a sample; the entropies of its bytes are right to about 1 %."""
_TRIED_BYTES = 64 << 10
_WORTH_SLOWER = 0.99
"""A transform that decodes more slowly is chosen only below this share of the room."""
_NUDGED_WORTH = 0.94
"""`Transform.NUDGED` is chosen only below this share of the room of `Transform.SPARSE`: where many words move by more
than one unit, it takes twice the time to decode."""
_SPARSE_WORTH = 1024
"""`Transform.SPARSE` decodes fastest, and may take one byte more in so many."""
_ENOUGH = 0.96
"""Single words are not tried if units take less than this share of words in order: single words decode slowest, and
units gain little from order."""


def encode_best(raw: Buffer, itemsize: int, alike: Sequence[Alike] | None = None) -> tuple[Codec, int, Buffer]:
    """Encode one chunk with the codec that fits its elements, or leave it raw where that gains less than 3 %.

    Args:
        raw: The chunk.
        itemsize: Size of one element; 1 for text and skeletons.
        alike: The planes of samples of its group, for a small chunk encoded in Python.

    Returns:
        The codec, the element size for the pack's table, and the payload.
    """
    if len(raw) < 32:
        return RAW, 1, raw
    codec = _codec_for(raw, itemsize)
    stored = PLANES.encode_alike(raw, itemsize, alike) if codec is PLANES and alike else codec.encode(raw, itemsize)
    if codec is PLANES and itemsize >= _MIXED_ITEMSIZE and len(raw) <= SMALL_BYTES:
        tried = ZSTD.encode_at(raw, _MIXED_TRIED_LEVEL)
        if len(tried) < len(stored) + _MOST_BEHIND * len(raw):
            plain = ZSTD.encode(raw, itemsize)
            if len(plain) < len(stored):
                codec, stored = ZSTD, plain
    if len(stored) > LEAST_GAIN * len(raw):
        return RAW, 1, raw
    return codec, typesize_of(itemsize), stored


def samples_alike(samples: Iterable[tuple[Buffer, int]]) -> Mapping[int, Sequence[Alike]]:
    """Try the codings of all planes on samples of small chunks, given with the sizes of their elements.

    Returns:
        For each size of words the planes of its samples.
    """
    alike: dict[int, list[Alike]] = {}
    for raw, itemsize in samples:
        if itemsize in WORDS and can_shuffle(len(raw), itemsize):
            note_sample(alike.setdefault(itemsize, [Alike() for _ in range(itemsize)]), raw, itemsize)
    return alike


def _codec_for(raw: Buffer, itemsize: int) -> Codec:
    if not can_shuffle(len(raw), itemsize):
        return ZSTD
    if itemsize in WORDS:
        return PLANES
    # Tree nodes repeat whole and shrink most as they are; records of measurements shrink most when shuffled.
    sample = memoryview(raw)[:_RECORDS_TRIED_BYTES]
    plain = ZSTD.encode_at(sample, _RECORDS_TRIED_LEVEL)
    return ZSTD if len(plain) < len(SHUFFLE_ZSTD.encode_sample(sample, itemsize)) else SHUFFLE_ZSTD


def estimate_share(raw: Buffer, width: int, *, base: Buffer | None = None) -> float:
    """Estimate the share of its size that a chunk takes as `planes`, or as a `delta`.

    The estimate is the entropy of each plane's bytes (Shannon) with the correction of Miller and Madow, because few
    bytes look more alike than they are. It does not see repetitions: a chunk with many takes less.

    Args:
        raw: The chunk; four stretches of it, 2,048 words together, are sampled.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk; None for `planes`.

    Returns:
        0 to 1; 1 for no words at all.
    """
    words = _sample(raw, width)
    if len(words) == 0:
        return 1.0
    if base is not None:
        words = _differences(words, _sample(base, width))
    return _entropy_bits(words) / (8 * width * len(words))


def choose_codings(raw: Buffer, width: int, *, base: Buffer | None = None) -> tuple[PlaneCoding, ...]:
    """Choose codings for the planes of a chunk, or of its differences from a base; see `estimate_share`."""
    words = _sample(raw, width)
    if base is not None:
        words = _differences(words, _sample(base, width))
    return tuple(codings_for(words))


def choose_transform(
    raw: Buffer, width: int, base: Buffer, codings: Sequence[PlaneCoding], *, at_any_cost: bool = False
) -> tuple[Transform, int]:
    """Choose the transform of a chunk's differences from its base, by trying them on up to 64 KiB.

    Where rows or columns are zero, losing the order of the words may cost more than groups save: only a trial tells.

    Args:
        raw: The chunk, of floating point numbers.
        width: Size of its words: 1, 2, 4 or 8.
        base: As long as the chunk.
        codings: Codings of the planes of the differences.
        at_any_cost: Whether to accept slower decoding for any gain.

    Returns:
        The transform, and the words per unit.
    """
    piece = _middle(raw, _TRIED_BYTES), width, _middle(base, _TRIED_BYTES)
    worth = 1.0 if at_any_cost else _WORTH_SLOWER
    ways = [(Transform.GROUPED, UNIT_WORDS[width]), (Transform.GROUPED, 1)]
    if fit_decay(_sample(raw, width), _sample(base, width)) is not None:
        ways.insert(0, (Transform.DECAYED, 1))
    chosen, plain = (Transform.PLAIN, 1), len(DELTA.encode_as(*piece, Transform.PLAIN, codings=codings))
    least = plain
    if is_sparse(*piece):
        size = len(DELTA.encode_as(*piece, Transform.SPARSE))
        if size < least + memoryview(piece[0]).nbytes // _SPARSE_WORTH:
            chosen, least = (Transform.SPARSE, 1), size
            # The tables of Zstandard's codes take a larger share of a part than of the chunk.
            whole = (raw, width, base) if is_sparse(raw, width, base) else piece
            few = [len(DELTA.encode_as(*whole, each)) for each in (Transform.NUDGED, Transform.SPARSE)]
            if few[0] <= (1.0 if at_any_cost else _NUDGED_WORTH) * few[1]:
                chosen, least = (Transform.NUDGED, 1), min(least, len(DELTA.encode_as(*piece, Transform.NUDGED)))
    for transform, unit in ways:
        if (transform, unit) == ways[-1] and least < _ENOUGH * plain and not at_any_cost:
            break
        size = len(DELTA.encode_as(*piece, transform, codings=codings, unit=unit))
        if size < worth * least:
            chosen, least = (transform, unit), size
    return chosen


def _middle(data: Buffer, n_bytes: int) -> Buffer:
    data = memoryview(data)
    begin = max(0, data.nbytes - n_bytes) // 16 * 8
    return data[begin : begin + n_bytes]


def _sample(raw: Buffer, width: int) -> Any:
    words, _ = words_in(np.frombuffer(raw, np.uint8), width)
    return stretches_of(words, SAMPLE_WORDS)


def _differences(words: Any, base: Any) -> Any:
    out = np.empty_like(words)
    subtract(words, base, out)
    return out


def _entropy_bits(words: Any) -> float:
    """Return the bits that words take if each byte has the code of its plane; no plane takes more than its size."""
    n_words, width = len(words), words.itemsize
    if n_words == 0:
        return 0.0
    numbered = words.view(np.uint8).reshape(n_words, width) + (256 * np.arange(width, dtype=np.uint16))
    counts = np.bincount(numbered.ravel(), minlength=256 * width).reshape(width, 256)
    used = np.count_nonzero(counts, axis=1)
    logs = np.log2(counts, where=counts > 0, out=np.zeros(counts.shape))
    entropy = math.log2(n_words) - (counts * logs).sum(axis=1) / n_words + (used - 1) / (2 * n_words * math.log(2))
    return float(np.clip(entropy, 0, 8).sum() * n_words)


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

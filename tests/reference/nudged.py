"""Deltas of few words, most of which move by one unit: Golomb-Rice codes in fields of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import FormatError
from tests.reference.words import subtract, words_in

_LEAST_WORDS = 4
"""Changed words are nudged if at most one word in so many differs."""
_MOST_LOW_BITS = 31
_MOST_VARINT_BYTES = 5


def encode_nudged(data: Any, base: Any, width: int) -> bytes | None:
    """Encode the changed words of a chunk.

    Args:
        data: The chunk's bytes, an array.
        base: As many.
        width: Size of a word.

    Returns:
        The payload of a delta from behind its first two bytes on. None if many words differ, or if the whole payload
        would be longer than the chunk.
    """
    words, tail = words_in(data, width)
    base_words, _ = words_in(base, width)
    places = np.flatnonzero(words != base_words)
    if len(places) > len(words) // _LEAST_WORDS:
        return None
    signs, magnitudes = _differences(words[places], base_words[places])
    gaps = np.diff(places, prepend=-1) - 1
    large = np.flatnonzero(magnitudes > 1)
    gaps_of_large = np.diff(large, prepend=-1) - 1
    rest = magnitudes[large] - np.uint64(1)
    exponents = _exponents(rest)
    low_bits, low_bits_of_large = _choose_low_bits(gaps), _choose_low_bits(gaps_of_large)
    unary = np.stack([gaps_of_large >> low_bits_of_large, exponents], axis=1).ravel()
    low = signs.astype(np.int64) | (gaps & ((1 << low_bits) - 1)) << 1
    of_gaps, of_large = _in_unary(gaps >> low_bits), _in_unary(unary)
    numbers = (len(places), len(large), len(of_gaps), len(of_large))
    parts = [
        bytes([low_bits, low_bits_of_large]),
        *map(_varint, numbers),
        of_gaps,
        _packed(low, np.full(len(low), low_bits + 1)),
        of_large,
        _packed(gaps_of_large, np.full(len(large), low_bits_of_large)),
        _packed(rest, exponents),
        tail.tobytes(),
    ]
    payload = b"".join(parts)
    return payload if len(payload) + 2 <= len(data) else None


def decode_nudged(stored: memoryview, width: int, out: memoryview, base: Buffer) -> None:
    """Decode a payload of `encode_nudged`, which may be forged.

    Raises:
        FormatError: The payload is malformed, or is one of a chunk of another size.
    """
    words, tail = words_in(np.frombuffer(out, np.uint8), width)
    base_words, _ = words_in(np.frombuffer(base, np.uint8), width)
    if len(stored) < 2 or max(stored[:2]) > _MOST_LOW_BITS:
        raise FormatError("a nudged delta does not state its bits")
    low_bits, low_bits_of_large = stored[0], stored[1]
    at, numbers = 2, [0, 0, 0, 0]
    for number in range(4):
        numbers[number], at = _read_varint(stored, at)
    n_changed, n_large, n_gaps, n_of_large = numbers
    if n_changed > len(words) or n_large > n_changed:
        raise FormatError(f"a nudged delta does not have the sizes of a chunk of {len(out)} bytes")
    sizes = (n_gaps, (n_changed * (low_bits + 1) + 7) // 8, n_of_large, (n_large * low_bits_of_large + 7) // 8)
    end = len(stored) - len(tail)
    if at + sum(sizes) > end:
        raise FormatError(f"a nudged delta does not have the sizes of a chunk of {len(out)} bytes")
    fields = []
    for size in sizes:
        fields.append(stored[at : at + size])
        at += size
    ones, ones_of_large = _ones(fields[0]), _ones(fields[2])
    if len(ones) != n_changed or len(ones_of_large) != 2 * n_large:
        raise FormatError("a nudged delta does not place its words in the chunk")
    low = _unpacked(fields[1], n_changed, low_bits + 1)
    places = _places(ones, low_bits, (low >> np.uint64(1)).astype(np.int64))
    if (places[-1:] >= len(words)).any():
        raise FormatError("a nudged delta does not place its words in the chunk")
    unary = np.diff(ones_of_large, prepend=-1) - 1
    exponents = unary[1::2]
    upper = np.cumsum(unary[0::2]) + np.arange(n_large)
    large = _places(upper, low_bits_of_large, _unpacked(fields[3], n_large, low_bits_of_large).astype(np.int64))
    n_bits = int(exponents.sum())
    if (exponents >= 8 * width).any() or (large[-1:] >= n_changed).any() or (n_bits + 7) // 8 != end - at:
        raise FormatError("a nudged delta does not state how far its words move")
    magnitudes = np.ones(n_changed, np.uint64)
    rest = _unpacked_by(stored[at:end], exponents)
    magnitudes[large] = rest + (np.uint64(1) << exponents.astype(np.uint64)) + np.uint64(1)
    differences = np.where(low & np.uint64(1), np.uint64(0) - magnitudes, magnitudes).astype(words.dtype)
    words[:] = base_words
    words[places] = base_words[places] + differences
    tail[:] = stored[end:]


def _differences(words: Any, base: Any) -> tuple[Any, Any]:
    """Return the signs of differences, and their magnitudes as 64 bits."""
    zigzag = np.empty_like(words)
    subtract(words, base, zigzag)
    signs = (zigzag & 1).astype(np.uint64)
    return signs, (zigzag >> 1).astype(np.uint64) + signs


def _exponents(numbers: Any) -> Any:
    """Return the logarithms of 64-bit numbers from 1 on, rounded down."""
    left, exponents = numbers.copy(), np.zeros(len(numbers), np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        is_large = left >> np.uint64(shift) > 0
        exponents += shift * is_large
        left = np.where(is_large, left >> np.uint64(shift), left)
    return exponents


def _choose_low_bits(gaps: Any) -> int:
    if len(gaps) == 0:
        return 0
    middle = (int(gaps.sum()) // len(gaps)).bit_length()
    choices = range(max(0, middle - 2), min(middle, _MOST_LOW_BITS) + 1)
    return min(choices, key=lambda bits: int((gaps >> bits).sum()) + bits * len(gaps))


def _in_unary(numbers: Any) -> bytes:
    """Return as many zeros for each number as it says, and a one."""
    bits = np.zeros(int(numbers.sum()) + len(numbers), np.uint8)
    bits[np.cumsum(numbers + 1) - 1] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _ones(field: memoryview) -> Any:
    return np.flatnonzero(np.unpackbits(np.frombuffer(field, np.uint8), bitorder="little"))


def _places(ones: Any, low_bits: int, low: Any) -> Any:
    """Return the places that gaps lead to, from the ends of their upper parts and their low bits."""
    n = np.arange(len(ones))
    return ((ones - n) << low_bits) + np.cumsum(low) + n


def _in_order(counts: Any) -> Any:
    """Return the numbers from 0 to each count, one after the other."""
    return (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)


def _packed(numbers: Any, counts: Any) -> bytes:
    """Return the lowest bits of numbers, so many of each."""
    bits = np.repeat(numbers.astype(np.uint64), counts) >> _in_order(counts) & np.uint64(1)
    return np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def _unpacked(field: memoryview, n: int, count: int) -> Any:
    return _unpacked_by(field, np.full(n, count))


def _unpacked_by(field: memoryview, counts: Any) -> Any:
    """Reverse `_packed`."""
    bits = np.unpackbits(np.frombuffer(field, np.uint8), bitorder="little")[: int(counts.sum())]
    numbers = np.zeros(len(counts), np.uint64)
    np.bitwise_or.at(numbers, np.repeat(np.arange(len(counts)), counts), bits.astype(np.uint64) << _in_order(counts))
    return numbers


def _varint(number: int) -> bytes:
    """Encode a number, seven bits a byte, the least significant first."""
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(stored: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for place, byte in enumerate(stored[at : at + _MOST_VARINT_BYTES]):
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, at + place + 1
    raise FormatError("a nudged delta does not state its sizes")

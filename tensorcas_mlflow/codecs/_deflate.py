"""DEFLATE as zlib writes it, bit for bit on every machine (``docs/format.md``, Deflate).

The compiled core does the work where it is built, and Python does it elsewhere, a hundred times slower. The library
zlib itself would not do: its later releases, and other libraries under its name, may write other streams of the same
bytes.

Positions count from the first byte of the data. zlib counts from the first byte of its window, which it moves by
32 KiB, and its hash table cannot name position 0 of the window: ``window_start`` tells which positions zlib has lost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.native import core

LEVELS = range(1, 10)
"""Levels of compression."""
IS_FAST = core is not None
"""True if the compiled core compresses."""

_WINDOW = 1 << 15
_LEAST_MATCH, _MOST_MATCH = 3, 258
_LEAST_AHEAD = _MOST_MATCH + _LEAST_MATCH + 1
"""Bytes that zlib keeps in its window before it looks for a match."""
_MOST_DISTANCE = _WINDOW - _LEAST_AHEAD
_TOO_FAR = 4096
"""A match of three bytes farther away costs more than three literals."""
_MOST_SYMBOLS = (1 << 14) - 1
_N_LITERALS, _N_DISTANCES, _N_LENGTHS = 286, 30, 19
_END_OF_BLOCK = 256
_MOST_BITS, _MOST_BITS_OF_LENGTHS = 15, 7
_REPEAT, _ZEROS, _MANY_ZEROS = 16, 17, 18
_EXTRA_BITS = {_REPEAT: 2, _ZEROS: 3, _MANY_ZEROS: 7}
_LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0]
_DISTANCE_BITS = [0, 0, *(n for n in range(14) for _ in range(2))]
_ORDER_OF_LENGTHS = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15]
_FIRST_LENGTHS = [sum(1 << bits for bits in _LENGTH_BITS[:code]) for code in range(28)] + [255]
_FIRST_DISTANCES = [sum(1 << bits for bits in _DISTANCE_BITS[:code]) for code in range(_N_DISTANCES)]


class _Effort(NamedTuple):
    """How long a search for a match goes on (zlib's ``configuration_table``)."""

    good: int
    """After a match of this length, a search tries a quarter of the chain."""
    lazy: int
    """Levels 4 to 9 look for no better match than one of this length. Levels 1 to 3 enter no position within a longer
    one into the table."""
    nice: int
    """A match of this length ends the search."""
    chain: int
    """Most positions tried."""


_EFFORTS = (
    *(_Effort(4, 4, 8, 4), _Effort(4, 5, 16, 8), _Effort(4, 6, 32, 32), _Effort(4, 4, 16, 16), _Effort(8, 16, 32, 32)),
    *(_Effort(8, 16, 128, 128), _Effort(8, 32, 128, 256), _Effort(32, 128, 258, 1024), _Effort(32, 258, 258, 4096)),
)
_FIRST_LAZY_LEVEL = 4
_WORD_BITS = 64
"""Bits that are written at once; no value has more."""


def deflate(data: Buffer, level: int, out: Any) -> int | None:
    """Compress bytes into a raw stream (RFC 1951).

    Args:
        data: The bytes, fewer than 2 GiB.
        level: One of `LEVELS`.
        out: Writable buffer for the stream.

    Returns:
        The size of the stream; None if it does not fit. Then ``out`` has any bytes.
    """
    if core is not None:
        n_bytes = core.deflate(data, level, out)
        return None if n_bytes < 0 else n_bytes
    made = _Stream(data, level).deflated()
    if len(made) > len(out):
        return None
    out[: len(made)] = made
    return len(made)


def deflates_to(data: Buffer, level: int, stream: Buffer) -> bool:
    """Tell whether `deflate` makes a stream of some bytes; a wrong level mostly shows after some 16 KiB."""
    if core is not None:
        return bool(core.deflates_to(data, level, stream))
    return bytes(_Stream(data, level).deflated()) == bytes(stream)


def _turned(code: int, n_bits: int) -> int:
    """Return a code with its first bit lowest."""
    return int(f"{code:0{n_bits}b}"[::-1], 2) if n_bits else 0


def _codes(lengths: Sequence[int]) -> list[int]:
    """Return the codes of symbols by the lengths of the codes (RFC 1951, 3.2.2), with the first bit lowest."""
    n_of_length = Counter(length for length in lengths if length)
    following = [0] * (_MOST_BITS + 1)
    for bits in range(1, _MOST_BITS + 1):
        following[bits] = (following[bits - 1] + n_of_length[bits - 1]) << 1
    codes = []
    for length in lengths:
        codes.append(_turned(following[length], length) if length else 0)
        following[length] += 1
    return codes


_FIXED_LENGTHS = [8] * 144 + [9] * 112 + [7] * 24 + [8] * 8
_FIXED_CODES = _codes(_FIXED_LENGTHS)


def _length_code(length: int) -> int:
    return bisect_right(_FIRST_LENGTHS, length - _LEAST_MATCH) - 1


def _distance_code(distance: int) -> int:
    return bisect_left(_FIRST_DISTANCES, distance) - 1


class _Code:
    """The code of one block for one kind of symbols, with codes of limited length, as zlib's ``build_tree`` does."""

    def __init__(self, counts: Sequence[int], most_bits: int) -> None:
        self.counts = counts
        """How often each symbol occurs."""
        n_symbols = len(counts)
        self._count = [*counts, *[0] * (n_symbols + 1)]
        self._depth = [0] * len(self._count)
        used = [symbol for symbol, n in enumerate(counts) if n]
        self.last = used[-1] if used else -1
        """The last symbol with a code."""
        while len(used) < 2:  # a tree has two codes at least
            used.append(self.last + 1 if self.last < 2 else 0)
            self.last = max(used)
            self._count[used[-1]] = 1
        self._heap = [-1, *used]
        for place in range(len(used) // 2, 0, -1):
            self._sift(place)
        parents, order = self._join(n_symbols)
        self.lengths = self._measured(parents, order, n_symbols, most_bits)
        self.codes = _codes(self.lengths[: self.last + 1])

    def _comes_first(self, one: int, other: int) -> bool:
        return (self._count[one], self._depth[one]) <= (self._count[other], self._depth[other])

    def _sift(self, place: int) -> None:
        heap, node = self._heap, self._heap[place]
        while (child := 2 * place) < len(heap):
            if child + 1 < len(heap) and self._comes_first(heap[child + 1], heap[child]):
                child += 1
            if self._comes_first(node, heap[child]):
                break
            heap[place] = heap[child]
            place = child
        heap[place] = node

    def _join(self, node: int) -> tuple[dict[int, int], list[int]]:
        """Join the two rarest nodes until one is left; return the parents, and the nodes, the root first."""
        heap, parents, removed = self._heap, dict[int, int](), list[int]()
        while True:
            one, last = heap[1], heap.pop()
            if len(heap) > 1:
                heap[1] = last
                self._sift(1)
            other = heap[1]
            removed += [one, other]
            self._count[node] = self._count[one] + self._count[other]
            self._depth[node] = max(self._depth[one], self._depth[other]) + 1
            parents[one] = parents[other] = node
            heap[1] = node
            node += 1
            self._sift(1)
            if len(heap) <= 2:
                return parents, [heap[1], *removed[::-1]]

    def _measured(self, parents: dict[int, int], order: list[int], n_symbols: int, most_bits: int) -> list[int]:
        depths = {order[0]: 0}
        n_of_length = [0] * (_MOST_BITS + 2)
        n_too_long = 0
        for node in order[1:]:
            bits = depths[parents[node]] + 1
            n_too_long += bits > most_bits
            depths[node] = min(bits, most_bits)
            if node < n_symbols:
                n_of_length[depths[node]] += 1
        if n_too_long:
            while n_too_long > 0:
                bits = max(each for each in range(1, most_bits) if n_of_length[each])
                n_of_length[bits] -= 1
                n_of_length[bits + 1] += 2
                n_of_length[most_bits] -= 1
                n_too_long -= 2
            leaves = (node for node in reversed(order) if node < n_symbols)
            for bits in range(most_bits, 0, -1):
                for _ in range(n_of_length[bits]):
                    depths[next(leaves)] = bits
        return [depths.get(symbol, 0) for symbol in range(n_symbols)]

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the symbols that describe the lengths of the codes, each with its extra bits."""
        lengths = self.lengths[: self.last + 1]
        before, n = -1, 0
        least, most = (3, 138) if lengths[0] == 0 else (4, 7)
        for length, after in zip(lengths, [*lengths[1:], -1], strict=True):
            n += 1
            if n < most and length == after:
                continue
            if n < least:
                yield from [(length, 0)] * n
            elif length:
                if length != before:
                    yield length, 0
                    n -= 1
                yield _REPEAT, n - 3
            else:
                yield (_ZEROS, n - 3) if n <= 10 else (_MANY_ZEROS, n - 11)
            before, n = length, 0
            least, most = (3, 138) if after == 0 else (3, 6) if length == after else (4, 7)


class _Stream:
    """The stream of some bytes."""

    def __init__(self, data: Buffer, level: int) -> None:
        if level not in LEVELS:
            raise ValueError(f"a level is 1 to 9, not {level}")
        self._data = bytes(data)
        self._effort = _EFFORTS[level - 1]
        self._is_lazy = level >= _FIRST_LAZY_LEVEL
        self._at = self._window_start = self._window_end = self._block_start = 0
        self._heads: dict[int, int] = {}
        self._before = [0] * _WINDOW
        self._symbols: list[tuple[int, int]] = []
        """Distance and length of each match of the block; 0 and a byte for a literal."""
        self._out = bytearray()
        self._bits = self._n_bits = 0

    def deflated(self) -> bytearray:
        """Return the stream."""
        if self._is_lazy:
            self._deflate_lazily()
        else:
            self._deflate_greedily()
        self._end_block(is_last=True)
        return self._out

    # --- matches

    def _deflate_greedily(self) -> None:
        """Take each match."""
        data, n_bytes = self._data, len(self._data)
        while self._at < n_bytes:
            self._fill_window()
            at, length, start = self._at, 0, 0
            found = self._enter(at)
            if found > self._window_start and at - found <= _MOST_DISTANCE:
                length, start = self._find_match(found, _LEAST_MATCH - 1)
            if length >= _LEAST_MATCH:
                self._symbols.append((at - start, length))
                if length <= self._effort.lazy and n_bytes - at - length >= _LEAST_MATCH:
                    for entered in range(at + 1, at + length):
                        self._enter(entered)
                self._at += length
            else:
                self._symbols.append((0, data[at]))
                self._at += 1
            self._end_full_block()

    def _deflate_lazily(self) -> None:
        """Take a match unless the next byte begins a longer one."""
        data, n_bytes = self._data, len(self._data)
        length, start, has_literal = _LEAST_MATCH - 1, 0, False
        while self._at < n_bytes:
            self._fill_window()
            at, length_before, start_before = self._at, length, start
            found = self._enter(at)
            length = _LEAST_MATCH - 1
            may_search = found > self._window_start and length_before < self._effort.lazy
            if may_search and at - found <= _MOST_DISTANCE:
                length, matched = self._find_match(found, length_before)
                start = start if matched < 0 else matched
                if length == _LEAST_MATCH and at - start > _TOO_FAR:
                    length = _LEAST_MATCH - 1
            if length_before >= _LEAST_MATCH and length <= length_before:
                self._symbols.append((at - 1 - start_before, length_before))
                for entered in range(at + 1, at - 1 + length_before):
                    self._enter(entered)
                self._at = at - 1 + length_before
                length, has_literal = _LEAST_MATCH - 1, False
                self._end_full_block()
            else:
                if has_literal:
                    self._symbols.append((0, data[at - 1]))
                    self._end_full_block()
                has_literal = True
                self._at += 1
        if has_literal:
            self._symbols.append((0, data[-1]))

    def _fill_window(self) -> None:
        """Move the window as zlib does, before each search for a match."""
        if self._window_end - self._at >= _LEAST_AHEAD:
            return
        if self._at - self._window_start >= _WINDOW + _MOST_DISTANCE:
            self._window_start += _WINDOW
        self._window_end = min(self._window_start + 2 * _WINDOW, len(self._data))

    def _enter(self, at: int) -> int:
        """Enter a position into the table; return the position before it with the same hash, or 0."""
        if len(self._data) - at < _LEAST_MATCH:
            return 0
        data = self._data
        key = (data[at] << 10 ^ data[at + 1] << 5 ^ data[at + 2]) & 0x7FFF
        found = self._before[at % _WINDOW] = self._heads.get(key, 0)
        self._heads[key] = at
        return found

    def _find_match(self, found: int, best: int) -> tuple[int, int]:
        """Return the length and the start of the longest match; ``best`` and -1 if none is longer."""
        data, at, effort, start = self._data, self._at, self._effort, -1
        ahead = len(data) - at
        most, nice = min(ahead, _MOST_MATCH), min(effort.nice, ahead)
        n_tries = effort.chain >> 2 if best >= effort.good else effort.chain
        limit = at - _MOST_DISTANCE if at - self._window_start > _MOST_DISTANCE else self._window_start
        if best >= most:
            # The match before is as long as the rest of the data: it stays.
            return most, start
        # Most positions of a chain fail the comparison of one byte, and most of the others that of the slices.
        before, wanted, last = self._before, data[at : at + best + 1], data[at + best]
        for _ in range(n_tries):
            if data[found + best] == last and data[found : found + best + 1] == wanted:
                best, start = self._common(found, at, best + 1, most), found
                if best >= nice:
                    return best, start
                wanted, last = data[at : at + best + 1], data[at + best]
            found = before[found % _WINDOW]
            if found <= limit:
                break
        return best, start

    def _common(self, one: int, other: int, known: int, most: int) -> int:
        """Return the length of the common beginning of two positions, of which some bytes are known to be equal."""
        data, n = self._data, known
        while n < most and data[one + n] == data[other + n]:
            n += 1
        return n

    # --- blocks

    def _end_full_block(self) -> None:
        if len(self._symbols) == _MOST_SYMBOLS:
            self._end_block(is_last=False)

    def _end_block(self, *, is_last: bool) -> None:
        """Write the symbols since the last block, in the shortest of three ways."""
        n_literals, n_distances = [0] * _N_LITERALS, [0] * _N_DISTANCES
        n_literals[_END_OF_BLOCK] = 1
        for distance, value in self._symbols:
            if distance:
                n_literals[_END_OF_BLOCK + 1 + _length_code(value)] += 1
                n_distances[_distance_code(distance)] += 1
            else:
                n_literals[value] += 1
        literals, distances = _Code(n_literals, _MOST_BITS), _Code(n_distances, _MOST_BITS)
        runs = [*literals.runs(), *distances.runs()]
        n_lengths = [0] * _N_LENGTHS
        for symbol, _ in runs:
            n_lengths[symbol] += 1
        lengths = _Code(n_lengths, _MOST_BITS_OF_LENGTHS)
        n_written = max([4, *(nth + 1 for nth, each in enumerate(_ORDER_OF_LENGTHS) if lengths.lengths[each])])

        def size(of_literals: Sequence[int], of_distances: Sequence[int]) -> int:
            """Count the bits of the symbols."""
            extra = [0] * (_END_OF_BLOCK + 1) + _LENGTH_BITS
            return sum(n * (of_literals[each] + extra[each]) for each, n in enumerate(n_literals)) + sum(
                n * (of_distances[each] + _DISTANCE_BITS[each]) for each, n in enumerate(n_distances)
            )

        fixed_bytes = (size(_FIXED_LENGTHS, [5] * _N_DISTANCES) + 3 + 7) >> 3
        n_bits = size(literals.lengths, distances.lengths) + 3 * n_written + 5 + 5 + 4
        n_bits += sum(n * (lengths.lengths[each] + _EXTRA_BITS.get(each, 0)) for each, n in enumerate(n_lengths))
        least = min(fixed_bytes, (n_bits + 3 + 7) >> 3)
        raw = self._data[self._block_start : self._at]
        # zlib has lost the first bytes of a block that began before its window.
        if len(raw) + 4 <= least and self._block_start >= self._window_start:
            self._put(is_last, 3)
            self._end_byte()
            self._put(len(raw), 16)
            self._put(len(raw) ^ 0xFFFF, 16)
            self._end_byte()
            self._out += raw
        elif fixed_bytes == least:
            self._put((1 << 1) + is_last, 3)
            turned = [_turned(code, 5) for code in range(_N_DISTANCES)]
            self._put_symbols(_FIXED_CODES, _FIXED_LENGTHS, turned, [5] * _N_DISTANCES)
        else:
            self._put((2 << 1) + is_last, 3)
            self._put(literals.last + 1 - 257, 5)
            self._put(distances.last, 5)
            self._put(n_written - 4, 4)
            for each in _ORDER_OF_LENGTHS[:n_written]:
                self._put(lengths.lengths[each], 3)
            for symbol, more in runs:
                self._put(lengths.codes[symbol], lengths.lengths[symbol])
                self._put(more, _EXTRA_BITS.get(symbol, 0))
            self._put_symbols(literals.codes, literals.lengths, distances.codes, distances.lengths)
        if is_last:
            self._end_byte()
        self._block_start = self._at
        self._symbols.clear()

    def _put_symbols(
        self, codes: Sequence[int], lengths: Sequence[int], of_distances: Sequence[int], distance_bits: Sequence[int]
    ) -> None:
        for distance, value in self._symbols:
            if not distance:
                self._put(codes[value], lengths[value])
                continue
            code = _length_code(value)
            self._put(codes[_END_OF_BLOCK + 1 + code], lengths[_END_OF_BLOCK + 1 + code])
            self._put(value - _LEAST_MATCH - _FIRST_LENGTHS[code], _LENGTH_BITS[code])
            code = _distance_code(distance)
            self._put(of_distances[code], distance_bits[code])
            self._put(distance - 1 - _FIRST_DISTANCES[code], _DISTANCE_BITS[code])
        self._put(codes[_END_OF_BLOCK], lengths[_END_OF_BLOCK])

    # --- bits

    def _put(self, value: int, n_bits: int) -> None:
        self._bits |= value << self._n_bits
        self._n_bits += n_bits
        if self._n_bits >= _WORD_BITS:
            self._out += (self._bits & ((1 << _WORD_BITS) - 1)).to_bytes(_WORD_BITS // 8, "little")
            self._bits >>= _WORD_BITS
            self._n_bits -= _WORD_BITS

    def _end_byte(self) -> None:
        """Write all bits, and zeros up to the next byte."""
        self._out += self._bits.to_bytes((self._n_bits + 7) // 8, "little")
        self._bits = self._n_bits = 0

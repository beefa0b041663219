"""The machine that a pickle is a program for, with nothing behind it: no import, no call, nothing of the file's is run.

What a file may make the machine keep is bounded: stack and memo by the numbers below, what lists and dicts hold by the
machine's user, and everything by how many opcodes the user lets it walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tensorcas_mlflow.containers._pickle_symbols import OPAQUE, Blob, Made, Persistent, Symbol
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_TENSOR_BYTES

LARGE_BYTES = 4096
"""Texts and bytes of this size are not looked at: the machine pauses before them."""

_WORD_BYTES = 16
"""Bytes that may be a word, such as a unit of time, and not an array's."""
_MAX_STACK = 1 << 18
_MAX_MADE = 1 << 20
"""Lists, dicts and results of calls, of some hundred bytes each. A tensor has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a pickle may make its reader do and keep: some 50 bytes an opcode at most."""

    max_ops: int
    max_items: int
    """Of one dict or list; what comes later is not kept."""
    max_memo: int
    """So many things are remembered, and those that come later are not. A pickle names its classes early."""


class Pause(Enum):
    """Why the machine stands still."""

    PAYLOAD = auto()
    """Before text or bytes of at least `LARGE_BYTES`."""
    BUILT = auto()
    """After the state of an object of a watched class was set."""
    STOP = auto()
    """The pickle is over."""


class PausedError(Exception):
    """Leaves the loop over opcodes; nobody else sees it."""

    def __init__(self, at: int, reason: Pause) -> None:
        super().__init__(at, reason)
        self.at = at
        self.reason = reason


class Machine:
    """Stack and memo of one pickle; the opcodes act on it."""

    def __init__(self, limits: Limits, watched: frozenset[str] = frozenset()) -> None:
        """Make one that has walked nothing.

        Args:
            limits: How much it keeps.
            watched: Names of the classes after whose objects there is a pause.
        """
        self.stack: list[Symbol] = []
        self.marks: list[int] = []
        """How high the stack was at each mark."""
        self.persistent: list[Symbol] = []
        """The persistent ids in order, as many as items are kept."""
        self.payload = Blob(0)
        """What comes next, at `Pause.PAYLOAD`."""
        self.payload_is_bytes = False
        """Whether it is bytes, and not text or a number."""
        self.base: int | None = None
        """Where the data that is walked begins in its file, if symbols are to say where bytes lie."""
        self.is_cut = False
        """Whether something was not kept because there was too much of it."""
        self._memo: list[Symbol] = []
        self._far_memo: dict[int, Symbol] = {}
        """What was remembered under numbers that leave a gap: Python 2 counts from 1, and others as they like."""
        self._n_made = 0
        self._max_items = limits.max_items
        self._max_memo = limits.max_memo
        self._watched = watched

    @property
    def is_piled_up(self) -> bool:
        """Whether more stands on the stack, or was made, than of any sane model: each opcode can add to it."""
        return max(len(self.stack), len(self.marks)) > _MAX_STACK or self._n_made > _MAX_MADE

    @property
    def n_made(self) -> int:
        """How many lists, dicts and results of calls there are."""
        return self._n_made

    def make(self, function: Symbol, args: Symbol = ()) -> Made:
        """Make what a call would make, or a list or dict."""
        self._n_made += 1
        return Made(function, args)

    def put(self, index: int) -> None:
        """Remember what is on top."""
        memo = self._memo
        if index == len(memo):
            memo.append(self._kept(self.stack[-1]))
            self._far_memo.pop(index, None)
        elif index < len(memo):
            memo[index] = self.stack[-1]
        elif len(memo) + len(self._far_memo) < self._max_memo:
            self._far_memo[index] = self.stack[-1]
        else:
            self.is_cut = True

    def memoize(self) -> None:
        """Remember what is on top under the number of things remembered so far."""
        if self._far_memo:
            self.put(len(self._memo) + len(self._far_memo))
        else:
            self._memo.append(self._kept(self.stack[-1]))

    def get(self, index: int) -> None:
        """Push what was remembered."""
        memo = self._memo
        self.stack.append(memo[index] if index < len(memo) else self._far_memo.get(index, OPAQUE))

    def _kept(self, symbol: Symbol) -> Symbol:
        if len(self._memo) < self._max_memo:
            return symbol
        self.is_cut = True
        return OPAQUE

    def hold(self, data: bytes, at: int, n_bytes: int) -> Symbol:
        """Give the symbol of short bytes: themselves, or where they lie.

        Args:
            data: The window that they are in.
            at: Where they begin in it.
            n_bytes: How many they are.
        """
        if self.base is None:
            return data[at : at + n_bytes]
        return Blob(n_bytes, self.base + at, data[at : at + n_bytes] if n_bytes <= _WORD_BYTES else b"")

    def pop_to_mark(self) -> list[Symbol]:
        """Take what is above the last mark, and the mark."""
        bottom = self.marks.pop()
        above = self.stack[bottom:]
        del self.stack[bottom:]
        return above

    def add_pairs(self, pairs: list[Symbol]) -> None:
        """Set items of what is on top."""
        target = self.stack[-1]
        if type(target) is Made:
            target.add_pairs(pairs, self._max_items)
            self.is_cut |= len(target.pairs) >= 2 * self._max_items

    def add_elements(self, elements: list[Symbol]) -> None:
        """Append to what is on top."""
        target = self.stack[-1]
        if type(target) is Made:
            target.add_elements(elements, self._max_items)
            self.is_cut |= target.n_elements > self._max_items

    def build(self, at: int) -> None:
        """Set the state of the object below it.

        Raises:
            PausedError: It is of a watched class.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Made:
            target.add_state(state)
            if self._watched and target.is_made_by(*self._watched):
                raise PausedError(at, Pause.BUILT)

    def ask(self, pid: Symbol) -> None:
        """Push what a persistent id stands for."""
        if len(self.persistent) < self._max_items:
            self.persistent.append(pid)
        else:
            self.is_cut = True
        self.stack.append(Persistent(pid))

    def paused_before(self, n_bytes: int, at: int, *, is_bytes: bool) -> PausedError:
        """Say that something large comes, which the machine's user is to pass, and to push `payload` for it.

        Raises:
            FormatError: Nothing is that large.
        """
        if n_bytes > MAX_TENSOR_BYTES:
            raise FormatError(f"a pickle that claims to hold {n_bytes} bytes in one piece")
        self.payload = Blob(n_bytes, -1 if self.base is None else self.base + at, is_text=not is_bytes)
        self.payload_is_bytes = is_bytes
        return PausedError(at, Pause.PAYLOAD)

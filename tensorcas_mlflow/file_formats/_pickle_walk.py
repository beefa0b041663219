"""Pickles on a tape, walked window by window; and the name of the array that a pickle is about to hold."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from tensorcas_mlflow.file_formats._pickle_machine import (
    DICT,
    LIST,
    MALFORMED_PICKLE,
    MARGIN_BYTES,
    Pause,
    PickledObject,
    PickleLimits,
    PickleMachine,
    Symbol,
    global_name,
    run_opcodes,
)
from tensorcas_mlflow.file_formats._tape import FilePart, Skeleton, Tape

_WINDOW_BYTES = 256 << 10


class WalkEnd(Enum):
    """Reasons of a walker to stop, besides the machine's pauses."""

    WINDOW = auto()
    """The window is walked. The walker goes on once its bytes are announced."""
    FILE = auto()
    """The file ends within the pickle."""
    BUDGET = auto()
    """The pickle exceeds a limit of opcodes or of memory."""
    MALFORMED = auto()
    """The next bytes are not a pickle."""


class PickleWalker:
    """Driver of machines over a tape, ahead of the bytes taken from it."""

    def __init__(
        self, tape: Tape, limits: PickleLimits, *, watched: frozenset[str] = frozenset(), positions: bool = False
    ) -> None:
        """Begin a pickle at the tape's position.

        Args:
            tape: The file; it is only peeked.
            limits: The limit of opcodes holds for all pickles together, the others for each.
            watched: Names of classes; the machine pauses after an object of one.
            positions: Whether symbols record the positions of bytes in the file.
        """
        self.at = tape.position
        """Position of the next opcode, payload or other byte, counted from the start of the file."""
        self._tape = tape
        self._limits = limits
        self._watched = watched
        self._positions = positions
        self._n_ops_left = limits.max_ops
        self._data = b""
        self._data_at = tape.position
        self._is_last = False
        self._outer: list[PickleMachine] = []
        self.machine = self._new_machine()

    def go_on(self, max_ops: int | None = None) -> Pause | WalkEnd | None:
        """Walk until the caller has to act; return None after ``max_ops`` opcodes."""
        while True:
            data = self._window(1)
            if self.at >= self._data_at + len(data):
                return WalkEnd.FILE
            stop = len(data) - (0 if self._is_last else MARGIN_BYTES)
            wanted = self._n_ops_left if max_ops is None else min(max_ops, self._n_ops_left)
            if self._positions:
                self.machine.base = self._data_at
            try:
                at, n_ops, pause = run_opcodes(self.machine, data, self.at - self._data_at, stop=stop, max_ops=wanted)
            except MALFORMED_PICKLE:
                return WalkEnd.MALFORMED
            self._n_ops_left -= n_ops
            self.at = self._data_at + at
            if pause is not None:
                return pause
            if self._n_ops_left == 0 or self.machine.is_piled_up:
                return WalkEnd.BUDGET
            if n_ops == wanted:
                return None
            if max_ops is None:
                return WalkEnd.FILE if self._is_last else WalkEnd.WINDOW
            max_ops -= n_ops

    def peek(self, n_bytes: int) -> bytes:
        """Return the next bytes, at most `MARGIN_BYTES`; fewer at the end."""
        data = self._window(n_bytes)
        at = self.at - self._data_at
        return data[at : at + n_bytes]

    def walked(self) -> Iterator[FilePart]:
        """Announce the bytes that were walked and not yet announced."""
        if self.at > self._tape.position:
            yield Skeleton(n_bytes=self.at - self._tape.position)

    def skip(self, n_bytes: int) -> None:
        """Skip bytes that are not opcodes."""
        self.at += n_bytes

    def pass_payload(self) -> None:
        """Skip the payload at which the machine pauses, and push its symbol."""
        self.skip(self.machine.payload.n_bytes)
        self.push(self.machine.payload)

    def push(self, symbol: Symbol) -> None:
        """Push a symbol on the machine's stack."""
        self.machine.stack.append(symbol)

    def begin(self) -> None:
        """Begin another pickle."""
        self.machine = self._new_machine()

    def enter(self) -> None:
        """Begin a pickle within the pickle."""
        self._outer.append(self.machine)
        self.begin()

    def leave(self) -> None:
        """Continue the pickle around the finished one."""
        self.machine = self._outer.pop()

    @property
    def machines(self) -> tuple[PickleMachine, ...]:
        """The machines of the nested pickles, outermost first."""
        return (*self._outer, self.machine)

    def _new_machine(self) -> PickleMachine:
        return PickleMachine(self._limits, self._watched)

    def _window(self, n_bytes: int) -> bytes:
        """Return a window with ``n_bytes`` more bytes and a margin behind them, unless the file ends before."""
        n_left = self._data_at + len(self._data) - self.at
        if n_left < n_bytes + MARGIN_BYTES and not self._is_last:
            n_ahead = self.at - self._tape.position
            self._data = bytes(self._tape.peek(n_ahead + _WINDOW_BYTES)[n_ahead:])
            self._data_at = self.at
            self._is_last = len(self._data) < _WINDOW_BYTES
        return self._data


_MAX_NAME_DEPTH = 50
_MAX_NAME_PART = 200

HIDDEN = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a torch module keeps its tensors; a state dict's names omit them."""


def name_of_next(machine: PickleMachine) -> str:
    """Name the next array of a pickle by the keys, attributes and positions that lead to it.

    Returns:
        A name such as ``steps.scaler.mean_`` or ``estimators_.3.tree_.nodes``; "" for an array that lies too deep. The
        only item of a dict within a dict may lack the part before its own key.
    """
    stack = machine.stack
    bounds = [0, *machine.marks, len(stack)]
    if len(bounds) > 2 * _MAX_NAME_DEPTH:
        return ""
    parts: list[str] = []
    for nth in range(len(bounds) - 1):
        container = stack[bounds[nth] - 1] if nth and bounds[nth] else None
        parts += reversed([*_unfinished_keys(stack, bounds[nth], bounds[nth + 1], container)])
    return ".".join(part for part in parts if part not in HIDDEN and len(part) <= _MAX_NAME_PART)


def _unfinished_keys(stack: list[Symbol], bottom: int, top: int, container: Symbol) -> Iterator[str]:
    """Yield the keys of the unfinished items between two marks, innermost first.

    A dict's finished keys and values, or a list's finished elements, stand before the unfinished item. An object whose
    state is unfinished has a dict above it; a function whose arguments are unfinished has nothing of note.
    """
    in_dict = type(container) is PickledObject and not container.is_made_by(LIST.name)
    in_list = type(container) is PickledObject and container.is_made_by(LIST.name)
    for _ in range(_MAX_NAME_DEPTH):
        at = _value_at(stack, bottom, top - 1)
        key = stack[at - 1] if at > bottom else None
        if type(key) is not str and not (in_dict and type(key) is int):
            if in_list and at >= bottom:
                yield str(container.n_elements + at - bottom)
            return
        yield str(key)
        is_pair = in_dict and (at - 1 - bottom) % 2 == 0
        if is_pair or at - 2 < bottom or not _is_dict(stack[at - 2]):
            return
        top = at - 1


def _value_at(stack: list[Symbol], bottom: int, at: int) -> int:
    """Find the first symbol of a value, given its last: an object below its state, or functions to be called."""
    if at > bottom and _is_dict(stack[at]) and type(stack[at - 1]) is PickledObject:
        at -= 1
    while at > bottom and global_name(stack[at]) and global_name(stack[at - 1]):
        at -= 1
    return at


def _is_dict(symbol: Symbol) -> bool:
    return type(symbol) is PickledObject and symbol.is_made_by(DICT.name)

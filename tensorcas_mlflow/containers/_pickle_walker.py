"""Pickles on a tape, walked window by window."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from tensorcas_mlflow.containers._parts import Part, Skeleton
from tensorcas_mlflow.containers._pickle_machine import Limits, Machine, Pause
from tensorcas_mlflow.containers._pickle_ops import MALFORMED, MARGIN_BYTES, walk
from tensorcas_mlflow.containers._pickle_symbols import Symbol
from tensorcas_mlflow.containers._tape import Tape

_WINDOW_BYTES = 256 << 10


class End(Enum):
    """Why a walker does not go on, besides what the machine pauses for."""

    WINDOW = auto()
    """What was walked can be announced; after that it goes on."""
    FILE = auto()
    """The file is over, and the pickle is not."""
    BUDGET = auto()
    """More was walked, or stands on the stack, than may be."""
    MALFORMED = auto()
    """It is no pickle from here on."""


class Walker:
    """Drives machines over a tape, ahead of what has been taken from it."""

    def __init__(
        self, tape: Tape, limits: Limits, *, watched: frozenset[str] = frozenset(), places: bool = False
    ) -> None:
        """Begin a pickle where the tape stands.

        Args:
            tape: It is peeked at only.
            limits: Of opcodes for all pickles together, else for each.
            watched: Names of the classes after whose objects there is a pause.
            places: Whether symbols are to say where in the file bytes lie.
        """
        self.at = tape.position
        """Position of the next opcode, payload or other byte, counted from the start of the file."""
        self._tape = tape
        self._limits = limits
        self._watched = watched
        self._places = places
        self._n_ops_left = limits.max_ops
        self._data = b""
        self._data_at = tape.position
        self._is_last = False
        self._outer: list[Machine] = []
        self.machine = self._new_machine()

    def go_on(self, max_ops: int | None = None) -> Pause | End | None:
        """Walk until something is to be done; None after ``max_ops`` opcodes."""
        while True:
            data = self._window(1)
            if self.at >= self._data_at + len(data):
                return End.FILE
            stop = len(data) - (0 if self._is_last else MARGIN_BYTES)
            wanted = self._n_ops_left if max_ops is None else min(max_ops, self._n_ops_left)
            if self._places:
                self.machine.base = self._data_at
            try:
                at, n_ops, pause = walk(self.machine, data, self.at - self._data_at, stop=stop, max_ops=wanted)
            except MALFORMED:
                return End.MALFORMED
            self._n_ops_left -= n_ops
            self.at = self._data_at + at
            if pause is not None:
                return pause
            if self._n_ops_left == 0 or self.machine.is_piled_up:
                return End.BUDGET
            if n_ops == wanted:
                return None
            if max_ops is None:
                return End.FILE if self._is_last else End.WINDOW
            max_ops -= n_ops

    def peek(self, n_bytes: int) -> bytes:
        """Look at the next bytes, at most `MARGIN_BYTES`; there may be fewer."""
        data = self._window(n_bytes)
        at = self.at - self._data_at
        return data[at : at + n_bytes]

    def walked(self) -> Iterator[Part]:
        """Announce what was passed and not yet announced."""
        if self.at > self._tape.position:
            yield Skeleton(n_bytes=self.at - self._tape.position)

    def skip(self, n_bytes: int) -> None:
        """Pass bytes that are no opcodes."""
        self.at += n_bytes

    def pass_payload(self) -> None:
        """Pass what the machine stands before."""
        self.skip(self.machine.payload.n_bytes)
        self.push(self.machine.payload)

    def push(self, symbol: Symbol) -> None:
        """Put something on the machine's stack."""
        self.machine.stack.append(symbol)

    def begin(self) -> None:
        """Begin another pickle."""
        self.machine = self._new_machine()

    def enter(self) -> None:
        """Begin a pickle within the pickle."""
        self._outer.append(self.machine)
        self.begin()

    def leave(self) -> None:
        """Go on with the pickle around the one that is over."""
        self.machine = self._outer.pop()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines of the pickles around this one, outermost first, and its own."""
        return (*self._outer, self.machine)

    def _new_machine(self) -> Machine:
        return Machine(self._limits, self._watched)

    def _window(self, n_bytes: int) -> bytes:
        """Have a window in which so many bytes follow, and a margin after them, unless the file ends before."""
        n_left = self._data_at + len(self._data) - self.at
        if n_left < n_bytes + MARGIN_BYTES and not self._is_last:
            n_ahead = self.at - self._tape.position
            self._data = bytes(self._tape.peek(n_ahead + _WINDOW_BYTES)[n_ahead:])
            self._data_at = self.at
            self._is_last = len(self._data) < _WINDOW_BYTES
        return self._data

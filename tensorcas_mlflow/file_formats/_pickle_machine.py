"""A machine for pickles that runs nothing of the file: its symbols, its stack and memo, and the opcodes.

The opcodes of protocols 0 to 5 are specified by ``Lib/pickletools.py`` and ``Lib/pickle.py`` of CPython (see PEP 307,
PEP 3154 and PEP 574). The machine imports no name and calls no function of the file; it records names and calls.

On its stack, ``None``, booleans, numbers, texts, short bytes and tuples stand for themselves. Symbols may nest as
deep as the file is long, and one tuple may hold another a thousand times over: no symbol is ever hashed, compared or
printed, and code that walks symbols remembers its path.

The memory that a file can make the machine use is bounded: stack and memo by the limits below, lists and dicts by the
machine's user, and everything by the number of opcodes that the user allows.
"""

from __future__ import annotations

import codecs
import contextlib
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from tensorcas_mlflow.base.tensors import MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError

Symbol = Any
"""One of the classes below, or what stands for itself."""


class Opaque:
    """A value without meaning here: an extension, or an entry that the memo has dropped."""

    __slots__ = ()


OPAQUE: Final = Opaque()


class GlobalName:
    """A class or function that a pickle names, such as ``numpy.ndarray``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        """Module and qualified name, with a dot between."""


DICT: Final = GlobalName("builtins.dict")
LIST: Final = GlobalName("builtins.list")
SET: Final = GlobalName("builtins.set")


class RawBytes:
    """Bytes or text too long to be kept, or an array that lies in the file."""

    __slots__ = ("at", "data", "is_text", "n_bytes")

    def __init__(self, n_bytes: int, at: int = -1, data: bytes = b"", *, is_text: bool = False) -> None:
        self.n_bytes = n_bytes
        self.at = at
        """Position in the file; -1 if the machine records none."""
        self.data = data
        """The bytes themselves, if they are very few."""
        self.is_text = is_text


class Persistent:
    """An object that a pickle leaves to its reader, by a persistent id."""

    __slots__ = ("id",)

    def __init__(self, pid: Symbol) -> None:
        self.id = pid


_EMPTY: Final[list[Symbol]] = []
"""Shared by all empty lists: most of hundreds of thousands stay empty. It is never changed."""


class PickledObject:
    """The result of a recorded call, with the changes to it since; a list or dict is one, too."""

    __slots__ = ("args", "elements", "function", "n_elements", "pairs", "state")

    def __init__(self, function: Symbol, args: Symbol = ()) -> None:
        self.function = function
        self.args = args
        self.state: Symbol = None
        """Argument of BUILD."""
        self.pairs = _EMPTY
        """Keys and values in turn; only the first ones of too many."""
        self.elements = _EMPTY
        """Appended elements; only the first ones of too many."""
        self.n_elements = 0

    def add_pairs(self, pairs: list[Symbol], max_items: int) -> None:
        """Set items; keep ``max_items`` of them."""
        self.pairs = _joined(self.pairs, pairs, 2 * max_items)

    def add_elements(self, elements: list[Symbol], max_items: int) -> None:
        """Append elements; keep ``max_items`` of them."""
        self.n_elements += len(elements)
        self.elements = _joined(self.elements, elements, max_items)

    def add_state(self, state: Symbol) -> None:
        """Set the state; a second one is added to the first."""
        self.state = state if self.state is None else (self.state, state)

    def is_made_by(self, *names: str) -> bool:
        """Tell whether one of these functions was called."""
        return type(self.function) is GlobalName and self.function.name in names

    def items(self) -> Iterator[tuple[Symbol, Symbol]]:
        """Yield the kept keys and values, in order."""
        pairs = iter(self.pairs)
        return zip(pairs, pairs, strict=False)

    def get(self, key: str) -> Symbol:
        """Return the value of a key; `OPAQUE` if it was not kept."""
        return next((value for name, value in self.items() if type(name) is str and name == key), OPAQUE)


def _joined(there: list[Symbol], more: list[Symbol], max_items: int) -> list[Symbol]:
    if not there:
        return more[:max_items]
    if len(there) < max_items:
        there += more[: max_items - len(there)]
    return there


def global_name(symbol: Symbol) -> str:
    """Return the name of a global; "" for any other symbol."""
    return symbol.name if type(symbol) is GlobalName else ""


LARGE_BYTES = 4096
"""The machine pauses before texts and bytes of this size."""

_WORD_BYTES = 256
"""Longest bytes that may be a word, such as a unit of time or a key."""
_MAX_STACK = 1 << 18
_MAX_MADE = 1 << 20
"""Limit on lists, dicts and results of calls, of some hundred bytes each. A tensor has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """Limits on the work and memory for one pickle: some 50 bytes an opcode at most."""

    max_ops: int
    max_items: int
    """Kept items of one dict or list; later ones are dropped."""
    max_memo: int
    """Kept entries of the memo; later ones are dropped. A pickle names its classes early."""


class Pause(Enum):
    """Reasons of the machine to pause."""

    PAYLOAD = auto()
    """Before text or bytes of at least `LARGE_BYTES`."""
    BUILT = auto()
    """After the state of an object of a watched class was set."""
    STOP = auto()
    """At the end of the pickle."""


class PausedError(Exception):
    """Leaves the loop over opcodes; it is caught there."""

    def __init__(self, at: int, reason: Pause) -> None:
        super().__init__(at, reason)
        self.at = at
        self.reason = reason


class PickleMachine:
    """Stack and memo of one pickle, on which the opcodes act."""

    def __init__(self, limits: PickleLimits, watched: frozenset[str] = frozenset()) -> None:
        """Make a machine before its first opcode.

        Args:
            limits: Limits on memory.
            watched: Names of classes; the machine pauses after an object of one.
        """
        self.stack: list[Symbol] = []
        self.marks: list[int] = []
        """Height of the stack at each mark."""
        self.persistent: list[Symbol] = []
        """The persistent ids in order, up to the limit of items."""
        self.payload = RawBytes(0)
        """Large bytes or text that comes next, at `Pause.PAYLOAD`."""
        self.payload_is_bytes = False
        """True if the payload is bytes, rather than text or a number."""
        self.base: int | None = None
        """Position of the walked data in its file; None if symbols record no positions."""
        self.is_cut = False
        """True if a limit has dropped a symbol."""
        self._memo: list[Symbol] = []
        self._far_memo: dict[int, Symbol] = {}
        """Entries whose numbers leave a gap: Python 2 counts from 1, and other writers as they like."""
        self._n_made = 0
        self._max_items = limits.max_items
        self._max_memo = limits.max_memo
        self._watched = watched

    @property
    def is_piled_up(self) -> bool:
        """True if the stack or the number of objects exceeds that of any sane model: each opcode can add to them."""
        return max(len(self.stack), len(self.marks)) > _MAX_STACK or self._n_made > _MAX_MADE

    @property
    def n_made(self) -> int:
        """Number of lists, dicts and results of calls."""
        return self._n_made

    def make(self, function: Symbol, args: Symbol = ()) -> PickledObject:
        """Record a call, a list or a dict."""
        self._n_made += 1
        return PickledObject(function, args)

    def put(self, index: int) -> None:
        """Remember the top of the stack."""
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
        """Remember the top of the stack under the next number."""
        if self._far_memo:
            self.put(len(self._memo) + len(self._far_memo))
        else:
            self._memo.append(self._kept(self.stack[-1]))

    def get(self, index: int) -> None:
        """Push an entry of the memo."""
        memo = self._memo
        self.stack.append(memo[index] if index < len(memo) else self._far_memo.get(index, OPAQUE))

    def _kept(self, symbol: Symbol) -> Symbol:
        if len(self._memo) < self._max_memo:
            return symbol
        self.is_cut = True
        return OPAQUE

    def hold(self, data: bytes, at: int, n_bytes: int) -> Symbol:
        """Return the symbol of short bytes: themselves, or their position.

        Args:
            data: The window that holds them.
            at: Their position in it.
            n_bytes: Their number.
        """
        if self.base is None:
            return data[at : at + n_bytes]
        return RawBytes(n_bytes, self.base + at, data[at : at + n_bytes] if n_bytes <= _WORD_BYTES else b"")

    def pop_to_mark(self) -> list[Symbol]:
        """Pop the symbols above the last mark, and the mark."""
        bottom = self.marks.pop()
        above = self.stack[bottom:]
        del self.stack[bottom:]
        return above

    def add_pairs(self, pairs: list[Symbol]) -> None:
        """Set items of the top of the stack."""
        target = self.stack[-1]
        if type(target) is PickledObject:
            target.add_pairs(pairs, self._max_items)
            self.is_cut |= len(target.pairs) >= 2 * self._max_items

    def add_elements(self, elements: list[Symbol]) -> None:
        """Append to the top of the stack."""
        target = self.stack[-1]
        if type(target) is PickledObject:
            target.add_elements(elements, self._max_items)
            self.is_cut |= target.n_elements > self._max_items

    def build(self, at: int) -> None:
        """Set the state of the object below it.

        Raises:
            PausedError: The object is of a watched class.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is PickledObject:
            target.add_state(state)
            if self._watched and target.is_made_by(*self._watched):
                raise PausedError(at, Pause.BUILT)

    def ask(self, pid: Symbol) -> None:
        """Push the object of a persistent id."""
        if len(self.persistent) < self._max_items:
            self.persistent.append(pid)
        else:
            self.is_cut = True
        self.stack.append(Persistent(pid))

    def paused_before(self, n_bytes: int, at: int, *, is_bytes: bool) -> PausedError:
        """Return the pause before a large payload, which the machine's user skips and pushes.

        Raises:
            FormatError: No payload is that large.
        """
        if n_bytes > MAX_TENSOR_BYTES:
            raise FormatError(f"a pickle that claims to hold {n_bytes} bytes in one piece")
        self.payload = RawBytes(n_bytes, -1 if self.base is None else self.base + at, is_text=not is_bytes)
        self.payload_is_bytes = is_bytes
        return PausedError(at, Pause.PAYLOAD)


MARGIN_BYTES = 2 * LARGE_BYTES
"""Bytes that must follow in a window, unless the file ends there, so that any opcode finds its argument."""

MALFORMED_PICKLE = (FormatError, ValueError, IndexError, TypeError, OverflowError, struct.error)
"""Exceptions that walking a malformed pickle may raise."""

_MAX_LINE_BYTES = 1024
_MAX_WORD_BYTES = 512

Op = Callable[[PickleMachine, bytes, int], int]
"""Executes one opcode: takes the position of its argument, and returns the position behind it."""


def run_opcodes(
    machine: PickleMachine, data: bytes, at: int, *, stop: int, max_ops: int
) -> tuple[int, int, Pause | None]:
    """Walk opcodes.

    Args:
        machine: The machine.
        data: A window on the pickle, with `MARGIN_BYTES` after ``stop`` unless the file ends there.
        at: Position of the first opcode.
        stop: No opcode begins here or later.
        max_ops: Largest number of opcodes.

    Returns:
        The position of the next opcode (or payload), the number of opcodes walked, and the reason for a pause, if any.

    Raises:
        FormatError: The pickle is malformed. The others of `MALFORMED_PICKLE` say the same.
    """
    table = _TABLE
    n_ops = 0
    try:
        for n_ops in range(max_ops):
            if at >= stop:
                return at, n_ops, None
            at = table[data[at]](machine, data, at + 1)
    except PausedError as pause:
        return pause.at, n_ops + 1, pause.reason
    return at, max_ops, None


# --- numbers, texts and bytes


def _unknown(machine: PickleMachine, data: bytes, at: int) -> int:
    raise FormatError(f"no pickle has an opcode {data[at - 1]:#x}")


def _skips(n_bytes: int) -> Op:
    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        return at + n_bytes

    return op


def _pushes(symbol: Symbol, n_bytes: int = 0) -> Op:
    """Push the same symbol for any argument."""

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        machine.stack.append(symbol)
        return at + n_bytes

    return op


def _byte(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.stack.append(data[at])
    return at + 1


def _pushes_number(layout: str) -> Op:
    reader = struct.Struct(layout)
    unpack, n_bytes = reader.unpack_from, reader.size

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        machine.stack.append(unpack(data, at)[0])
        return at + n_bytes

    return op


def _pushes_bytes(layout: str) -> Op:
    """Push bytes behind their size, or pause."""
    reader = struct.Struct(layout)
    unpack, n_length_bytes = reader.unpack_from, reader.size

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        n_bytes: int = unpack(data, at)[0]
        start = at + n_length_bytes
        if n_bytes >= LARGE_BYTES:
            raise machine.paused_before(n_bytes, start, is_bytes=True)
        machine.stack.append(machine.hold(data, start, n_bytes))
        return start + n_bytes

    return op


def _pushes_string(layout: str) -> Op:
    """Push a string of Python 2: a text if it is short and valid, else bytes."""
    push_bytes = _pushes_bytes(layout)

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        end = push_bytes(machine, data, at)
        n_bytes: int = struct.unpack_from(layout, data, at)[0]
        if n_bytes < _MAX_WORD_BYTES:
            with contextlib.suppress(UnicodeDecodeError):
                machine.stack[-1] = data[end - n_bytes : end].decode()
        return end

    return op


def _pushes_sized(layout: str, read: Callable[[bytes], Symbol]) -> Op:
    """Push a value behind its size, or pause."""
    reader = struct.Struct(layout)
    unpack, n_length_bytes = reader.unpack_from, reader.size

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        n_bytes: int = unpack(data, at)[0]
        start = at + n_length_bytes
        if n_bytes >= LARGE_BYTES:
            raise machine.paused_before(n_bytes, start, is_bytes=False)
        end = start + n_bytes
        machine.stack.append(read(data[start:end]))
        return end

    return op


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        # pickle keeps lone surrogates, which no name can have; it refuses other bytes that are not UTF-8.
        return data.decode("utf-8", "surrogatepass").encode("utf-8", "backslashreplace").decode()


def _quoted(line: bytes) -> Symbol:
    """Read a string of Python 2 as `_pushes_string` does."""
    data = codecs.escape_decode(line[1:-1])[0]
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode()
    return data


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Read a line, and return it with the position of the next one."""
    end = data.index(b"\n", at, at + _MAX_LINE_BYTES)
    return data[at:end], end + 1


def _pushes_line(read: Callable[[bytes], Symbol]) -> Op:
    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        machine.stack.append(read(line))
        return at

    return op


# --- memo, marks and the stack


def _memoize(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.memoize()
    return at


def _numbered(layout: str, act: Callable[[PickleMachine, int], None]) -> Op:
    """PUT and GET."""
    reader = struct.Struct(layout)
    unpack, n_bytes = reader.unpack_from, reader.size

    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        act(machine, unpack(data, at)[0])
        return at + n_bytes

    return op


def _numbered_byte(act: Callable[[PickleMachine, int], None]) -> Op:
    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        act(machine, data[at])
        return at + 1

    return op


def _numbered_line(act: Callable[[PickleMachine, int], None]) -> Op:
    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        act(machine, abs(int(line)))
        return at

    return op


def _mark(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _pop(machine: PickleMachine, data: bytes, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        popped = machine.stack.pop()
        # A function that sets an object's state is called, and its result is dropped (PEP 307).
        args = popped.args if type(popped) is PickledObject else None
        if type(args) is tuple and len(args) == 2 and type(args[0]) is PickledObject:
            args[0].add_state(args[1])
    return at


def _pop_mark(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.pop_to_mark()
    return at


def _dup(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


# --- containers


def _tuple(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.stack.append(tuple(machine.pop_to_mark()))
    return at


def _tuple_1(machine: PickleMachine, data: bytes, at: int) -> int:
    stack = machine.stack
    stack[-1] = (stack[-1],)
    return at


def _tuple_2(machine: PickleMachine, data: bytes, at: int) -> int:
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)
    return at


def _tuple_3(machine: PickleMachine, data: bytes, at: int) -> int:
    stack = machine.stack
    last = stack.pop()
    middle = stack.pop()
    stack[-1] = (stack[-1], middle, last)
    return at


def _starts(function: GlobalName) -> Op:
    def op(machine: PickleMachine, data: bytes, at: int) -> int:
        machine.stack.append(machine.make(function))
        return at

    return op


def _dict(machine: PickleMachine, data: bytes, at: int) -> int:
    pairs = machine.pop_to_mark()
    machine.stack.append(machine.make(DICT))
    machine.add_pairs(pairs)
    return at


def _list(machine: PickleMachine, data: bytes, at: int) -> int:
    elements = machine.pop_to_mark()
    machine.stack.append(machine.make(LIST))
    machine.add_elements(elements)
    return at


def _frozenset(machine: PickleMachine, data: bytes, at: int) -> int:
    elements = machine.pop_to_mark()
    machine.stack.append(machine.make(SET))
    machine.add_elements(elements)
    return at


def _set_item(machine: PickleMachine, data: bytes, at: int) -> int:
    pair = machine.stack[-2:]
    del machine.stack[-2:]
    machine.add_pairs(pair)
    return at


def _set_items(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.add_pairs(machine.pop_to_mark())
    return at


def _append(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.add_elements([machine.stack.pop()])
    return at


def _append_all(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.add_elements(machine.pop_to_mark())
    return at


# --- objects


def _global(machine: PickleMachine, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.stack.append(GlobalName(f"{_text(module)}.{_text(name)}"))
    return at


def _stack_global(machine: PickleMachine, data: bytes, at: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    are_texts = type(name) is str and type(module) is str
    machine.stack.append(GlobalName(f"{module}.{name}") if are_texts else OPAQUE)
    return at


def _call(machine: PickleMachine, data: bytes, at: int) -> int:
    """REDUCE and NEWOBJ: a function or class below its arguments."""
    stack = machine.stack
    args = stack.pop()
    stack[-1] = machine.make(stack[-1], args)
    return at


def _new_object_ex(machine: PickleMachine, data: bytes, at: int) -> int:
    named = machine.stack.pop()
    at = _call(machine, data, at)
    if type(named) is PickledObject:
        machine.add_pairs(named.pairs)
    return at


def _object(machine: PickleMachine, data: bytes, at: int) -> int:
    function, *args = machine.pop_to_mark()
    machine.stack.append(machine.make(function, tuple(args)))
    return at


def _instance(machine: PickleMachine, data: bytes, at: int) -> int:
    args = tuple(machine.pop_to_mark())
    at = _global(machine, data, at)
    machine.stack[-1] = machine.make(machine.stack[-1], args)
    return at


def _build(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.build(at)
    return at


def _persistent_line(machine: PickleMachine, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.ask(_text(line))
    return at


def _persistent(machine: PickleMachine, data: bytes, at: int) -> int:
    machine.ask(machine.stack.pop())
    return at


def _stop(machine: PickleMachine, data: bytes, at: int) -> int:
    raise PausedError(at, Pause.STOP)


_OPS: dict[bytes, Op] = {
    pickle.PROTO: _skips(1),
    pickle.FRAME: _skips(8),
    pickle.STOP: _stop,
    pickle.NONE: _pushes(None),
    pickle.NEWTRUE: _pushes(symbol=True),
    pickle.NEWFALSE: _pushes(symbol=False),
    pickle.INT: _pushes_line(int),  # also False and True: 00 and 01
    pickle.LONG: _pushes_line(lambda line: int(line.rstrip(b"L"))),
    pickle.BININT: _pushes_number("<i"),
    pickle.BININT1: _byte,
    pickle.BININT2: _pushes_number("<H"),
    pickle.LONG1: _pushes_sized("<B", _integer),
    pickle.LONG4: _pushes_sized("<I", _integer),
    pickle.FLOAT: _pushes_line(float),
    pickle.BINFLOAT: _pushes_number(">d"),
    pickle.STRING: _pushes_line(_quoted),
    pickle.UNICODE: _pushes_line(lambda line: line.decode("raw-unicode-escape")),
    pickle.BINUNICODE: _pushes_sized("<I", _text),
    pickle.SHORT_BINUNICODE: _pushes_sized("<B", _text),
    pickle.BINUNICODE8: _pushes_sized("<Q", _text),
    pickle.BINSTRING: _pushes_string("<I"),
    pickle.SHORT_BINSTRING: _pushes_string("<B"),
    pickle.BINBYTES: _pushes_bytes("<I"),
    pickle.SHORT_BINBYTES: _pushes_bytes("<B"),
    pickle.BINBYTES8: _pushes_bytes("<Q"),
    pickle.BYTEARRAY8: _pushes_bytes("<Q"),
    pickle.NEXT_BUFFER: _pushes(OPAQUE),
    pickle.READONLY_BUFFER: _skips(0),
    pickle.MARK: _mark,
    pickle.POP: _pop,
    pickle.POP_MARK: _pop_mark,
    pickle.DUP: _dup,
    pickle.PUT: _numbered_line(PickleMachine.put),
    pickle.BINPUT: _numbered_byte(PickleMachine.put),
    pickle.LONG_BINPUT: _numbered("<I", PickleMachine.put),
    pickle.MEMOIZE: _memoize,
    pickle.GET: _numbered_line(PickleMachine.get),
    pickle.BINGET: _numbered_byte(PickleMachine.get),
    pickle.LONG_BINGET: _numbered("<I", PickleMachine.get),
    pickle.EMPTY_TUPLE: _pushes(()),
    pickle.TUPLE1: _tuple_1,
    pickle.TUPLE2: _tuple_2,
    pickle.TUPLE3: _tuple_3,
    pickle.TUPLE: _tuple,
    pickle.EMPTY_DICT: _starts(DICT),
    pickle.DICT: _dict,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.EMPTY_LIST: _starts(LIST),
    pickle.LIST: _list,
    pickle.APPEND: _append,
    pickle.APPENDS: _append_all,
    pickle.EMPTY_SET: _starts(SET),
    pickle.ADDITEMS: _append_all,
    pickle.FROZENSET: _frozenset,
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.EXT1: _pushes(OPAQUE, 1),
    pickle.EXT2: _pushes(OPAQUE, 2),
    pickle.EXT4: _pushes(OPAQUE, 4),
    pickle.REDUCE: _call,
    pickle.NEWOBJ: _call,
    pickle.NEWOBJ_EX: _new_object_ex,
    pickle.OBJ: _object,
    pickle.INST: _instance,
    pickle.BUILD: _build,
    pickle.PERSID: _persistent_line,
    pickle.BINPERSID: _persistent,
}
_TABLE: list[Op] = [_OPS.get(bytes([byte]), _unknown) for byte in range(256)]

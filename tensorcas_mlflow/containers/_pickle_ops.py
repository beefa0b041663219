"""The opcodes of pickles, protocols 0 to 5, as they act on a machine that runs nothing.

They are specified by ``Lib/pickletools.py`` and ``Lib/pickle.py`` of CPython (see PEP 307, PEP 3154 and PEP 574).
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Callable

from tensorcas_mlflow.containers._pickle_machine import LARGE_BYTES, Machine, Pause, PausedError
from tensorcas_mlflow.containers._pickle_symbols import DICT, LIST, OPAQUE, SET, Global, Made, Symbol
from tensorcas_mlflow.errors import FormatError

MARGIN_BYTES = 2 * LARGE_BYTES
"""What has to follow in a window, unless the file ends there, for any opcode to find its argument."""

MALFORMED = (FormatError, ValueError, IndexError, TypeError, OverflowError, struct.error)
"""What walking something that is no pickle ends in."""

_MAX_LINE_BYTES = 1024
_MAX_WORD_BYTES = 512

Op = Callable[[Machine, bytes, int], int]
"""Does what one opcode says; told where its argument begins, it says where that ends."""


def walk(machine: Machine, data: bytes, at: int, *, stop: int, max_ops: int) -> tuple[int, int, Pause | None]:
    """Walk opcodes.

    Args:
        machine: What they act on.
        data: A window on the pickle, with `MARGIN_BYTES` after ``stop`` if the file does not end there.
        at: Where the next opcode is.
        stop: No opcode is begun here or later.
        max_ops: How many to walk at most.

    Returns:
        Where the next opcode (or payload) is, how many opcodes were walked, and why there is a pause, if there is one.

    Raises:
        FormatError: It is no pickle. So do the others of `MALFORMED` say.
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


def _unknown(machine: Machine, data: bytes, at: int) -> int:
    raise FormatError(f"no pickle has an opcode {data[at - 1]:#x}")


def _skips(n_bytes: int) -> Op:
    def op(machine: Machine, data: bytes, at: int) -> int:
        return at + n_bytes

    return op


def _pushes(symbol: Symbol, n_bytes: int = 0) -> Op:
    """Push what is the same whatever the argument is."""

    def op(machine: Machine, data: bytes, at: int) -> int:
        machine.stack.append(symbol)
        return at + n_bytes

    return op


def _byte(machine: Machine, data: bytes, at: int) -> int:
    machine.stack.append(data[at])
    return at + 1


def _pushes_number(layout: str) -> Op:
    reader = struct.Struct(layout)
    unpack, n_bytes = reader.unpack_from, reader.size

    def op(machine: Machine, data: bytes, at: int) -> int:
        machine.stack.append(unpack(data, at)[0])
        return at + n_bytes

    return op


def _pushes_bytes(layout: str) -> Op:
    """Push bytes that have their size before them, or pause."""
    reader = struct.Struct(layout)
    unpack, n_length_bytes = reader.unpack_from, reader.size

    def op(machine: Machine, data: bytes, at: int) -> int:
        n_bytes: int = unpack(data, at)[0]
        start = at + n_length_bytes
        if n_bytes >= LARGE_BYTES:
            raise machine.paused_before(n_bytes, start, is_bytes=True)
        machine.stack.append(machine.hold(data, start, n_bytes))
        return start + n_bytes

    return op


def _pushes_string(layout: str) -> Op:
    """Push what Python 2 calls a string: a text if it may be one and is short, and else bytes."""
    push_bytes = _pushes_bytes(layout)

    def op(machine: Machine, data: bytes, at: int) -> int:
        end = push_bytes(machine, data, at)
        n_bytes: int = struct.unpack_from(layout, data, at)[0]
        if n_bytes < _MAX_WORD_BYTES:
            with contextlib.suppress(UnicodeDecodeError):
                machine.stack[-1] = data[end - n_bytes : end].decode()
        return end

    return op


def _pushes_sized(layout: str, read: Callable[[bytes], Symbol]) -> Op:
    """Push what has its size before it, or pause."""
    reader = struct.Struct(layout)
    unpack, n_length_bytes = reader.unpack_from, reader.size

    def op(machine: Machine, data: bytes, at: int) -> int:
        n_bytes: int = unpack(data, at)[0]
        start = at + n_length_bytes
        if n_bytes >= LARGE_BYTES:
            raise machine.paused_before(n_bytes, start, is_bytes=False)
        end = start + n_bytes
        machine.stack.append(read(data[start:end]))
        return end

    return op


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Read to the end of a line, and say where the next one begins."""
    end = data.index(b"\n", at, at + _MAX_LINE_BYTES)
    return data[at:end], end + 1


def _pushes_line(read: Callable[[bytes], Symbol]) -> Op:
    def op(machine: Machine, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        machine.stack.append(read(line))
        return at

    return op


# --- memo, marks and the stack


def _memoize(machine: Machine, data: bytes, at: int) -> int:
    machine.memoize()
    return at


def _numbered(layout: str, act: Callable[[Machine, int], None]) -> Op:
    """PUT and GET."""
    reader = struct.Struct(layout)
    unpack, n_bytes = reader.unpack_from, reader.size

    def op(machine: Machine, data: bytes, at: int) -> int:
        act(machine, unpack(data, at)[0])
        return at + n_bytes

    return op


def _numbered_byte(act: Callable[[Machine, int], None]) -> Op:
    def op(machine: Machine, data: bytes, at: int) -> int:
        act(machine, data[at])
        return at + 1

    return op


def _numbered_line(act: Callable[[Machine, int], None]) -> Op:
    def op(machine: Machine, data: bytes, at: int) -> int:
        line, at = _line(data, at)
        act(machine, abs(int(line)))
        return at

    return op


def _mark(machine: Machine, data: bytes, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _pop(machine: Machine, data: bytes, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        popped = machine.stack.pop()
        # A function that sets an object's state is called, and what it gives back is not wanted (PEP 307).
        args = popped.args if type(popped) is Made else None
        if type(args) is tuple and len(args) == 2 and type(args[0]) is Made:
            args[0].add_state(args[1])
    return at


def _pop_mark(machine: Machine, data: bytes, at: int) -> int:
    machine.pop_to_mark()
    return at


def _dup(machine: Machine, data: bytes, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


# --- containers


def _tuple(machine: Machine, data: bytes, at: int) -> int:
    machine.stack.append(tuple(machine.pop_to_mark()))
    return at


def _tuple_1(machine: Machine, data: bytes, at: int) -> int:
    stack = machine.stack
    stack[-1] = (stack[-1],)
    return at


def _tuple_2(machine: Machine, data: bytes, at: int) -> int:
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)
    return at


def _tuple_3(machine: Machine, data: bytes, at: int) -> int:
    stack = machine.stack
    last = stack.pop()
    middle = stack.pop()
    stack[-1] = (stack[-1], middle, last)
    return at


def _starts(function: Global) -> Op:
    def op(machine: Machine, data: bytes, at: int) -> int:
        machine.stack.append(machine.make(function))
        return at

    return op


def _dict(machine: Machine, data: bytes, at: int) -> int:
    pairs = machine.pop_to_mark()
    machine.stack.append(machine.make(DICT))
    machine.add_pairs(pairs)
    return at


def _list(machine: Machine, data: bytes, at: int) -> int:
    elements = machine.pop_to_mark()
    machine.stack.append(machine.make(LIST))
    machine.add_elements(elements)
    return at


def _frozenset(machine: Machine, data: bytes, at: int) -> int:
    elements = machine.pop_to_mark()
    machine.stack.append(machine.make(SET))
    machine.add_elements(elements)
    return at


def _set_item(machine: Machine, data: bytes, at: int) -> int:
    pair = machine.stack[-2:]
    del machine.stack[-2:]
    machine.add_pairs(pair)
    return at


def _set_items(machine: Machine, data: bytes, at: int) -> int:
    machine.add_pairs(machine.pop_to_mark())
    return at


def _append(machine: Machine, data: bytes, at: int) -> int:
    machine.add_elements([machine.stack.pop()])
    return at


def _append_all(machine: Machine, data: bytes, at: int) -> int:
    machine.add_elements(machine.pop_to_mark())
    return at


# --- objects


def _global(machine: Machine, data: bytes, at: int) -> int:
    module, at = _line(data, at)
    name, at = _line(data, at)
    machine.stack.append(Global(f"{_text(module)}.{_text(name)}"))
    return at


def _stack_global(machine: Machine, data: bytes, at: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    are_texts = type(name) is str and type(module) is str
    machine.stack.append(Global(f"{module}.{name}") if are_texts else OPAQUE)
    return at


def _call(machine: Machine, data: bytes, at: int) -> int:
    """REDUCE and NEWOBJ: a function or class below its arguments."""
    stack = machine.stack
    args = stack.pop()
    stack[-1] = machine.make(stack[-1], args)
    return at


def _new_object_ex(machine: Machine, data: bytes, at: int) -> int:
    named = machine.stack.pop()
    at = _call(machine, data, at)
    if type(named) is Made:
        machine.add_pairs(named.pairs)
    return at


def _object(machine: Machine, data: bytes, at: int) -> int:
    function, *args = machine.pop_to_mark()
    machine.stack.append(machine.make(function, tuple(args)))
    return at


def _instance(machine: Machine, data: bytes, at: int) -> int:
    args = tuple(machine.pop_to_mark())
    at = _global(machine, data, at)
    machine.stack[-1] = machine.make(machine.stack[-1], args)
    return at


def _build(machine: Machine, data: bytes, at: int) -> int:
    machine.build(at)
    return at


def _persistent_line(machine: Machine, data: bytes, at: int) -> int:
    line, at = _line(data, at)
    machine.ask(_text(line))
    return at


def _persistent(machine: Machine, data: bytes, at: int) -> int:
    machine.ask(machine.stack.pop())
    return at


def _stop(machine: Machine, data: bytes, at: int) -> int:
    raise PausedError(at, Pause.STOP)


_OPS: dict[bytes, Op] = {
    pickle.PROTO: _skips(1),
    pickle.FRAME: _skips(8),
    pickle.STOP: _stop,
    pickle.NONE: _pushes(None),
    pickle.NEWTRUE: _pushes(symbol=True),
    pickle.NEWFALSE: _pushes(symbol=False),
    pickle.INT: _pushes_line(int),  # False and True too: 00 and 01
    pickle.LONG: _pushes_line(lambda line: int(line.rstrip(b"L"))),
    pickle.BININT: _pushes_number("<i"),
    pickle.BININT1: _byte,
    pickle.BININT2: _pushes_number("<H"),
    pickle.LONG1: _pushes_sized("<B", _integer),
    pickle.LONG4: _pushes_sized("<I", _integer),
    pickle.FLOAT: _pushes_line(lambda line: OPAQUE),
    pickle.BINFLOAT: _pushes(OPAQUE, 8),
    pickle.STRING: _pushes_line(lambda line: _text(line[1:-1])),
    pickle.UNICODE: _pushes_line(_text),
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
    pickle.PUT: _numbered_line(Machine.put),
    pickle.BINPUT: _numbered_byte(Machine.put),
    pickle.LONG_BINPUT: _numbered("<I", Machine.put),
    pickle.MEMOIZE: _memoize,
    pickle.GET: _numbered_line(Machine.get),
    pickle.BINGET: _numbered_byte(Machine.get),
    pickle.LONG_BINGET: _numbered("<I", Machine.get),
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

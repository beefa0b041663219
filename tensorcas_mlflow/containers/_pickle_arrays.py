"""What a pickle's symbols say of numpy arrays: dtype, shape, and which bytes are theirs.

Arrays are pickled by ``ndarray.__reduce__`` (protocols 0 to 4: ``_reconstruct``, then a state of version, shape, dtype,
whether the bytes are in Fortran order, and the bytes) or ``__reduce_ex__`` (protocol 5: ``_frombuffer`` of the bytes,
dtype, shape and order), dtypes by ``dtype.__reduce__``; numpy/_core/src/multiarray/{methods,descriptor}.c.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.containers._pickle_machine import Machine
from tensorcas_mlflow.containers._pickle_symbols import Blob, Made, Symbol, name_of
from tensorcas_mlflow.dtypes import MAX_RECORD_BYTES, DType, dtype_name, parse_dtype
from tensorcas_mlflow.errors import FormatError

FROM_BUFFER = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
"""What is called with an array's bytes in protocol 5."""
ENCODE = "_codecs.encode"
"""What is called with bytes as a text, in protocols up to 2."""
_KIND = re.compile(r"[?bBhHiIlLqQuefdgFDGSUVOMmc][0-9]{0,7}")
_UNIT = re.compile(r"[A-Za-z]{1,2}")
_MAX_DEPTH = 4
_MAX_SIDES = 64
_MAX_SIDE = 1 << 56


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFact:
    """What is known of an array's bytes."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    """In the order in which the bytes are in C order."""


UNKNOWN = ArrayFact()


def fact_of_state(machine: Machine) -> ArrayFact | None:
    """Say of which array the bytes are that come next, if it is pickled as protocols up to 4 do."""
    if not machine.marks:
        return None
    state = machine.stack[machine.marks[-1] :]
    if len(state) != 4 or not is_shape(state[1]) or not is_dtype(state[2]) or type(state[3]) is not bool:
        return None
    return array_fact(state[1], dtype_of(state[2]), machine.payload.n_bytes, is_fortran=state[3])


def comes_from_buffer(machine: Machine) -> bool:
    """Tell whether the bytes that come next are an array's as protocol 5 pickles it, which says more after them."""
    stack, marks = machine.stack, machine.marks
    return bool(marks and marks[-1] == len(stack) and stack and name_of(stack[-1]) in FROM_BUFFER)


def fact_of_call(machine: Machine, blob: Blob) -> ArrayFact | None:
    """Say what the call of ``_frombuffer`` on top says of the bytes it is given; None if there is no such call."""
    made = machine.stack[-1] if machine.stack else None
    if type(made) is not Made or name_of(made.function) not in FROM_BUFFER:
        return None
    args = made.args
    if type(args) is not tuple or len(args) < 4 or args[0] is not blob or not is_shape(args[2]):
        return None
    is_fortran = type(args[3]) is str and args[3] == "F"
    return array_fact(args[2], dtype_of(args[1]), blob.n_bytes, is_fortran=is_fortran)


def array_fact(shape: tuple[int, ...], dtype: DType | None, n_bytes: int, *, is_fortran: bool) -> ArrayFact:
    """Say what fits the size; nothing if it does not. Records that have no name are their bytes, a row each."""
    if dtype is None or math.prod(shape) * dtype.itemsize != n_bytes:
        return UNKNOWN
    try:
        name = dtype_name(dtype)
    except ValueError:
        # A tree's nodes, say. Called bytes, their codec does not look for numbers in them, which costs a fifth.
        is_record = dtype.fields is not None
        return ArrayFact(dtype="uint8", shape=(math.prod(shape), dtype.itemsize)) if is_record else UNKNOWN
    return ArrayFact(dtype=name, shape=shape[::-1] if is_fortran else shape)


def is_shape(symbol: Symbol) -> bool:
    """Tell whether something is an array's shape."""
    if type(symbol) is not tuple or len(symbol) > _MAX_SIDES:
        return False
    for side in symbol:  # noqa: SIM110 -- all() of a generator takes three times as long, for each of 100,000 tensors
        if type(side) is not int or not 0 <= side < _MAX_SIDE:
            return False
    return True


def is_dtype(symbol: Symbol) -> bool:
    """Tell whether something is a dtype."""
    return type(symbol) is Made and symbol.is_made_by("numpy.dtype")


def dtype_of(symbol: Symbol) -> DType | None:
    """Make the dtype that a pickle describes; None if it is not understood."""
    try:
        return _dtype(symbol, _MAX_DEPTH)
    except (FormatError, ValueError, TypeError, OverflowError):
        return None


def _dtype(symbol: Symbol, depth: int) -> DType | None:
    if depth == 0 or not is_dtype(symbol) or type(symbol.args) is not tuple or not symbol.args:
        return None
    kind = symbol.args[0]
    module, _, name = name_of(kind).rpartition(".")
    if module == "ml_dtypes":
        return parse_dtype(name)
    if type(kind) is not str or not _KIND.fullmatch(kind):
        return None
    state = symbol.state if type(symbol.state) is tuple and len(symbol.state) >= 8 else (3, "=", *(None,) * 6)
    if state[4] is not None:
        return _record(state, depth)
    if state[2] is not None:
        return _sub_array(state[2], depth)
    dtype = np.dtype(kind + _unit(state))
    return dtype.newbyteorder(">") if type(state[1]) is str and state[1] == ">" else dtype


def _unit(state: tuple[Symbol, ...]) -> str:
    """Write the unit of a time as numpy does: ``[ns]``, ``[25s]``."""
    if len(state) < 9 or type(state[8]) is not tuple or len(state[8]) != 2:
        return ""
    data = state[8][1]
    if type(data) is not tuple or len(data) != 4 or type(data[1]) is not int:
        return ""
    unit = data[0]
    if type(unit) is Made and name_of(unit.function) == ENCODE and type(unit.args) is tuple and unit.args:
        unit = unit.args[0]
    unit = unit.data if type(unit) is Blob else unit
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    if type(unit) is not str or not _UNIT.fullmatch(unit) or not 0 < data[1] < 1 << 31:
        raise FormatError("a time of no known unit")
    return f"[{data[1] if data[1] > 1 else ''}{unit}]"


def _sub_array(symbol: Symbol, depth: int) -> DType | None:
    """A field that is an array, as records have them."""
    if type(symbol) is not tuple or len(symbol) != 2 or not is_shape(symbol[1]):
        return None
    base = _dtype(symbol[0], depth - 1)
    if base is None or math.prod(symbol[1]) * base.itemsize > MAX_RECORD_BYTES:
        return None
    return np.dtype((base, symbol[1]))


def _record(state: tuple[Symbol, ...], depth: int) -> DType | None:
    names, fields, n_bytes = state[3], state[4], state[5]
    if type(names) is not tuple or type(fields) is not Made or type(n_bytes) is not int:
        return None
    if not 0 < n_bytes <= MAX_RECORD_BYTES or 2 * len(names) != len(fields.pairs):
        return None
    found: dict[str, tuple[DType, int]] = {}
    for name, field in fields.items():
        if type(name) is not str or type(field) is not tuple or len(field) < 2 or type(field[1]) is not int:
            return None
        dtype = _dtype(field[0], depth - 1)
        if dtype is None or not 0 <= field[1] <= n_bytes - dtype.itemsize:
            return None
        found[name] = dtype, field[1]
    if any(type(name) is not str or name not in found for name in names):
        return None
    layout: dict[str, Any] = {
        "names": list(names),
        "formats": [found[name][0] for name in names],
        "offsets": [found[name][1] for name in names],
        "itemsize": n_bytes,
    }
    return np.dtype(layout)  # type: ignore[call-overload, no-any-return]

"""Arrays of numpy in a pickle's symbols: dtype, shape, and the range of their bytes.

- *numpy* pickles an array with ``ndarray.__reduce__`` (protocols 0 to 4: ``_reconstruct``, then a state of version,
  shape, dtype, whether the bytes are in Fortran order, and the bytes) or ``__reduce_ex__`` (protocol 5: ``_frombuffer``
  of bytes, dtype, shape and order), and a dtype with ``dtype.__reduce__``:
  numpy/_core/src/multiarray/{methods,descriptor}.c. Protocols up to 2 hold bytes as a text, one character for each
  (``_codecs.encode``).
- *joblib* writes an array into the file and not into its pickle. The only specification is ``joblib/numpy_pickle.py``:
  in an array's place the pickle has a wrapper, whose state holds shape, order and dtype. Behind the opcode that sets
  the state follow a byte with the size of a padding (since joblib 1.2), the padding, the array's bytes, and the rest of
  the pickle. In place of an array of objects follows a pickle of its own. Compressed files do not begin as pickles do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import MAX_RECORD_BYTES, DType, parse_dtype
from tensorcas_mlflow.base.tensors import MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import name_or_none
from tensorcas_mlflow.file_formats._listing import RecordField, fortran_strides, record_fields
from tensorcas_mlflow.file_formats._pickle_machine import (
    LIST,
    PickledObject,
    PickleMachine,
    RawBytes,
    Symbol,
    global_name,
)

FROM_BUFFER = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
"""Functions that protocol 5 calls with an array's bytes."""
ENCODE = "_codecs.encode"
"""Function that protocols up to 2 call with bytes as a text."""
_KIND = re.compile(r"[?bBhHiIlLqQuefdgFDGSUVOMmc][0-9]{0,7}")
_UNIT = re.compile(r"[A-Za-z]{1,2}")
_MAX_DEPTH = 4
_MAX_SIDES = 64
_MAX_SIDE = 1 << 56


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayInfo:
    """Dtype and shape of an array's bytes, as far as they are known."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    """Sides, in the order that makes the bytes C order."""


UNKNOWN_ARRAY = ArrayInfo()


def array_of_state(machine: PickleMachine) -> ArrayInfo | None:
    """Describe the array whose bytes come next, as protocols up to 4 pickle it; None for other bytes."""
    if not machine.marks:
        return None
    state = machine.stack[machine.marks[-1] :]
    if len(state) != 4 or not is_shape(state[1]) or not is_dtype(state[2]) or type(state[3]) is not bool:
        return None
    return array_info(state[1], dtype_of(state[2]), machine.payload.n_bytes, is_fortran=state[3])


def comes_from_buffer(machine: PickleMachine) -> bool:
    """Tell whether the next bytes are an array of protocol 5, whose dtype and shape follow them."""
    stack, marks = machine.stack, machine.marks
    return bool(marks and marks[-1] == len(stack) and stack and global_name(stack[-1]) in FROM_BUFFER)


def array_of_call(machine: PickleMachine, blob: RawBytes) -> ArrayInfo | None:
    """Describe the array of a finished call of ``_frombuffer`` with these bytes; None if there is no such call."""
    made = machine.stack[-1] if machine.stack else None
    if type(made) is not PickledObject or global_name(made.function) not in FROM_BUFFER:
        return None
    args = made.args
    if type(args) is not tuple or len(args) < 4 or args[0] is not blob or not is_shape(args[2]):
        return None
    is_fortran = type(args[3]) is str and args[3] == "F"
    return array_info(args[2], dtype_of(args[1]), blob.n_bytes, is_fortran=is_fortran)


def array_info(shape: tuple[int, ...], dtype: DType | None, n_bytes: int, *, is_fortran: bool) -> ArrayInfo:
    """Describe an array; nothing is known if its size does not fit. Records without a name become rows of bytes."""
    if dtype is None or math.prod(shape) * dtype.itemsize != n_bytes:
        return UNKNOWN_ARRAY
    name = name_or_none(dtype)
    if name is None:
        # Such as a tree's nodes. The codec of bytes does not search them for numbers, which would cost a fifth.
        is_record = dtype.fields is not None
        return ArrayInfo(dtype="uint8", shape=(math.prod(shape), dtype.itemsize)) if is_record else UNKNOWN_ARRAY
    return ArrayInfo(dtype=name, shape=shape[::-1] if is_fortran else shape)


def is_shape(symbol: Symbol) -> bool:
    """Tell whether a symbol is an array's shape."""
    if type(symbol) is not tuple or len(symbol) > _MAX_SIDES:
        return False
    for side in symbol:  # noqa: SIM110 -- all() of a generator takes three times as long, for each of 100,000 tensors
        if type(side) is not int or not 0 <= side < _MAX_SIDE:
            return False
    return True


def is_dtype(symbol: Symbol) -> bool:
    """Tell whether a symbol is a dtype."""
    return type(symbol) is PickledObject and symbol.is_made_by("numpy.dtype")


def dtype_of(symbol: Symbol) -> DType | None:
    """Make the dtype that a symbol describes; None if it is not understood."""
    try:
        return _dtype(symbol, _MAX_DEPTH)
    except (FormatError, ValueError, TypeError, OverflowError):
        return None


def _dtype(symbol: Symbol, depth: int) -> DType | None:
    if depth == 0 or not is_dtype(symbol) or type(symbol.args) is not tuple or not symbol.args:
        return None
    kind = symbol.args[0]
    module, _, name = global_name(kind).rpartition(".")
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
    """Return the unit of a time in numpy's notation: ``[ns]``, ``[25s]``."""
    if len(state) < 9 or type(state[8]) is not tuple or len(state[8]) != 2:
        return ""
    data = state[8][1]
    if type(data) is not tuple or len(data) != 4 or type(data[1]) is not int:
        return ""
    raw = short_bytes(data[0])
    unit = data[0] if raw is None else raw.decode("ascii")
    if type(unit) is not str or not _UNIT.fullmatch(unit) or not 0 < data[1] < 1 << 31:
        raise FormatError("a time of no known unit")
    return f"[{data[1] if data[1] > 1 else ''}{unit}]"


def _sub_array(symbol: Symbol, depth: int) -> DType | None:
    """Make the dtype of a record's field that is an array."""
    if type(symbol) is not tuple or len(symbol) != 2 or not is_shape(symbol[1]):
        return None
    base = _dtype(symbol[0], depth - 1)
    if base is None or math.prod(symbol[1]) * base.itemsize > MAX_RECORD_BYTES:
        return None
    return np.dtype((base, symbol[1]))


def _record(state: tuple[Symbol, ...], depth: int) -> DType | None:
    names, fields, n_bytes = state[3], state[4], state[5]
    if type(names) is not tuple or type(fields) is not PickledObject or type(n_bytes) is not int:
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


JOBLIB_WRAPPERS = frozenset(
    {
        "joblib.numpy_pickle.NumpyArrayWrapper",
        "sklearn.externals.joblib.numpy_pickle.NumpyArrayWrapper",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedArray:
    """The array behind a wrapper of joblib."""

    dtype: DType
    shape: tuple[int, ...]
    is_fortran: bool
    is_padded: bool

    @property
    def n_bytes(self) -> int:
        """Size of the array's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def wrapped_array(wrapper: PickledObject) -> WrappedArray | None:
    """Read a wrapper's state; None if it is not understood, so the position of the next opcode is unknown."""
    state: Symbol = wrapper.state
    if type(state) is not PickledObject:
        return None
    dtype = dtype_of(state.get("dtype"))
    shape = state.get("shape")
    order = state.get("order")
    if dtype is None or not is_shape(shape) or type(order) is not str:
        return None
    is_padded = type(state.get("numpy_array_alignment_bytes")) is int
    array = WrappedArray(dtype=dtype, shape=shape, is_fortran=order == "F", is_padded=is_padded)
    return array if array.n_bytes <= MAX_TENSOR_BYTES else None


_RECONSTRUCT = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_SCALAR = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
_BYTES = frozenset({"builtins.bytes", "__builtin__.bytes"})
_STATE_LENGTH = 5
_MAX_KIND = 80


class ArrayView(NamedTuple):
    """One array; its dtype is None if it is left out."""

    name: str
    kind: str
    """The dtype in words, or the reason for leaving the array out."""
    dtype: str | None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    """Step of each dimension in elements; None for C order."""
    data: RawBytes | str | None = None
    """Range of the bytes; or a short text that encodes them."""
    n_bytes: int = 0
    is_open: bool = False
    """True if other arrays may lie in it."""
    fields: tuple[RecordField, ...] = ()
    """Fields of records without a name, which are listed instead; ``dtype`` is that of bytes."""


def array_in(symbol: PickledObject | tuple[Symbol, ...]) -> ArrayView | None:
    """Read the array that a symbol makes, without its name; None if it makes none.

    Raises:
        FormatError: The array's bytes have another size than its shape and dtype.
    """
    if isinstance(symbol, tuple):
        return _of_state(symbol, "") if _is_state(symbol) else _unknown(symbol)
    function, args, state = global_name(symbol.function), symbol.args, symbol.state
    if function in FROM_BUFFER:
        return _of_buffer(args)
    if function in JOBLIB_WRAPPERS:
        return None if args else _of_wrapper(symbol)
    if type(state) is tuple and _is_state(state):
        return _of_state(state, _class_of(args) if len(state) > _STATE_LENGTH else "")
    if function in _RECONSTRUCT:
        return _left_out(f"{_class_of(args) or 'an array'} that is not pickled as numpy pickles arrays")
    if function in _SCALAR:
        return None
    if function == ENCODE and type(args) is tuple and args and type(args[0]) is RawBytes:
        return _left_out(f"{args[0].n_bytes} bytes that are no array")
    for part in (args, state):
        found = _unknown(part) if type(part) is tuple else None
        if found is not None:
            return found
    return None


def short_bytes(symbol: Symbol) -> bytes | None:
    """Return short bytes, as any protocol pickles them; None for any other symbol."""
    if type(symbol) is PickledObject and global_name(symbol.function) == ENCODE and type(symbol.args) is tuple:
        text = symbol.args[0] if symbol.args else None
        try:
            return text.encode("latin-1") if type(text) is str else None
        except UnicodeEncodeError:
            return None
    if type(symbol) is RawBytes:
        return symbol.data if len(symbol.data) == symbol.n_bytes else None
    return symbol if type(symbol) is bytes else None


def number_in(symbol: PickledObject) -> Any:
    """Return a number of numpy; None for any other object."""
    args = symbol.args
    if global_name(symbol.function) not in _SCALAR or type(args) is not tuple or len(args) != 2:
        return None
    dtype, data = dtype_of(args[0]), short_bytes(args[1])
    if dtype is None or dtype.kind not in "biufc" or data is None or len(data) != dtype.itemsize:
        return None
    return np.frombuffer(data, dtype)[0]


def _left_out(kind: str, *, is_open: bool = False) -> ArrayView:
    return ArrayView("", kind[:_MAX_KIND], None, is_open=is_open)


def _class_of(args: Symbol) -> str:
    names = [global_name(each) for each in args] if type(args) is tuple else []
    return next(filter(None, names), "")


def _is_state(state: tuple[Symbol, ...]) -> bool:
    """Recognise the tuple of version, shape, dtype, order and bytes."""
    if len(state) < _STATE_LENGTH or type(state[3]) is not bool:
        return False
    return type(state[0]) is int and is_dtype(state[2]) and is_shape(state[1]) and _is_data(state[4])


def _is_data(symbol: Symbol) -> bool:
    return type(symbol) in (RawBytes, str) or (
        type(symbol) is PickledObject and global_name(symbol.function) in (ENCODE, LIST.name, *_BYTES)
    )


def _unknown(symbols: tuple[Symbol, ...]) -> ArrayView | None:
    """Report a dtype with bytes beside it: an array in an unknown form."""
    if any(map(is_dtype, symbols)) and any(type(each) is RawBytes and each.n_bytes for each in symbols):
        return _left_out("a dtype and bytes that are pickled in an unknown way", is_open=True)
    return None


def _of_state(state: tuple[Symbol, ...], subclass: str) -> ArrayView:
    if subclass:
        return _left_out(subclass)
    shape = state[1]
    return _view(state[4], dtype_of(state[2]), shape, fortran_strides(shape) if state[3] else None)


def _of_buffer(args: Symbol) -> ArrayView:
    if type(args) is not tuple or len(args) < 4 or not is_shape(args[2]):
        return _left_out("an array that is not pickled as numpy pickles arrays")
    shape, order = args[2], args[3]
    strides = fortran_strides(shape) if type(order) is str and order == "F" else None
    if type(order) is str and order == "K":
        # The bytes are in C order of this shape; the array has its sides in another order.
        axes: Any = args[4] if len(args) > 4 else None
        if not is_shape(axes) or sorted(axes) != list(range(len(shape))):
            return _left_out("an array of an impossible order")
        steps = [*accumulate(shape[:0:-1], mul, initial=1)][::-1]
        shape, strides = tuple(shape[axis] for axis in axes), tuple(steps[axis] for axis in axes)
    return _view(args[0], dtype_of(args[1]), shape, strides)


def _of_wrapper(wrapper: PickledObject) -> ArrayView:
    state: Any = wrapper.state
    shape: Any = state.get("shape") if type(state) is PickledObject else None
    if not is_shape(shape):
        return _left_out("an array that is not written as joblib writes arrays")
    data = wrapper.elements[0] if wrapper.elements else None
    is_fortran = type(state.get("order")) is str and state.get("order") == "F"
    subclass = global_name(state.get("subclass"))
    if subclass not in ("numpy.ndarray", "numpy.memmap"):
        return _left_out(subclass or "an array of an unknown class")
    return _view(data, dtype_of(state.get("dtype")), shape, fortran_strides(shape) if is_fortran else None)


def _view(symbol: Symbol, dtype: DType | None, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> ArrayView:
    if dtype is None:
        return _left_out("an array of an unknown dtype")
    if dtype.hasobject:
        return _left_out("objects", is_open=True)
    fields: tuple[RecordField, ...] = ()
    name = name_or_none(dtype)
    if name is None:
        fields, name = record_fields(dtype), "uint8"
        if not fields or strides is not None:
            return _left_out(str(dtype))
    n_bytes = math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return ArrayView("", name, name, shape, None, RawBytes(0, 0), fields=fields)
    data = _data_of(symbol)
    if data is None:
        return _left_out("bytes that are not in the file, or written by Python 2")
    if type(data) is RawBytes and not data.is_text and data.n_bytes != n_bytes:
        raise FormatError(f"an array of {n_bytes} bytes has {data.n_bytes}")
    return ArrayView("", name, name, shape, strides, data, n_bytes, fields=fields)


def _data_of(symbol: Symbol) -> RawBytes | str | None:
    if type(symbol) is RawBytes:
        return None if symbol.is_text or symbol.at < 0 else symbol
    if type(symbol) is str:
        return symbol.encode().decode("latin-1")  # a string of Python 2 whose bytes are a text, too
    if type(symbol) is not PickledObject or global_name(symbol.function) != ENCODE:
        return None
    args = symbol.args
    if type(args) is not tuple or len(args) != 2 or type(args[1]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    text = args[0]
    return text if type(text) is str or (type(text) is RawBytes and text.is_text and text.at >= 0) else None

"""Numpy's arrays in what a pickle makes, each with where its bytes lie; `_pickle_arrays` says how they are pickled.

Protocols up to 2 hold bytes as a text, of which each character is one (``_codecs.encode``).
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from tensorcas_mlflow.containers._joblib import WRAPPERS
from tensorcas_mlflow.containers._pickle_arrays import ENCODE, FROM_BUFFER, dtype_of, is_dtype, is_shape
from tensorcas_mlflow.containers._pickle_symbols import LIST, Blob, Made, Symbol, name_of
from tensorcas_mlflow.dtypes import DType, dtype_name
from tensorcas_mlflow.errors import FormatError

_RECONSTRUCT = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_SCALAR = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
_BYTES = frozenset({"builtins.bytes", "__builtin__.bytes"})
_STATE_LENGTH = 5
_MAX_KIND = 80


class RecordField(NamedTuple):
    """One field of records, which is an array with steps."""

    name: str
    dtype: str
    offset: int
    """Bytes before it in a record."""
    step: int
    """Elements of its own size from one record to the next."""


def fields_of(dtype: DType) -> tuple[RecordField, ...]:
    """Say the fields of records; none where one cannot be read as an array, or these are no records.

    What lies between the fields is nothing that anybody has written: it differs from save to save.
    """
    found: list[RecordField] = []
    for name in dtype.names or ():
        assert dtype.fields is not None
        field, offset = dtype.fields[name][:2]
        try:
            word = dtype_name(field)
        except ValueError:
            return ()
        if not field.itemsize or field.fields or offset % field.itemsize or dtype.itemsize % field.itemsize:
            return ()
        found.append(RecordField(name, word, offset, dtype.itemsize // field.itemsize))
    return tuple(found)


class ArrayView(NamedTuple):
    """One array; its dtype is None where it is left out."""

    name: str
    kind: str
    """Its dtype in words, or why it cannot be read."""
    dtype: str | None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    """Elements, where it is not in C order."""
    data: Blob | str | None = None
    """Where its bytes are; a text where they are written as one that is short."""
    is_open: bool = False
    """Whether there may be other arrays in it."""
    fields: tuple[RecordField, ...] = ()
    """Of records that have no name: they are listed instead, and ``dtype`` is that of bytes."""


def array_in(symbol: Made | tuple[Symbol, ...]) -> ArrayView | None:
    """Read the array that something makes, without a name; None if it makes none.

    Raises:
        FormatError: It has another size than it says.
    """
    if isinstance(symbol, tuple):
        return _of_state(symbol, "") if _is_state(symbol) else _unknown(symbol)
    function, args, state = name_of(symbol.function), symbol.args, symbol.state
    if function in FROM_BUFFER:
        return _of_buffer(args)
    if function in WRAPPERS:
        return None if args else _of_wrapper(symbol)
    if type(state) is tuple and _is_state(state):
        return _of_state(state, _class_of(args) if len(state) > _STATE_LENGTH else "")
    if function in _RECONSTRUCT:
        return _left_out(f"{_class_of(args) or 'an array'} that is not pickled as numpy pickles arrays")
    if function in _SCALAR:
        return None
    if function == ENCODE and type(args) is tuple and args and type(args[0]) is Blob:
        return _left_out(f"{args[0].n_bytes} bytes that are no array")
    for part in (args, state):
        found = _unknown(part) if type(part) is tuple else None
        if found is not None:
            return found
    return None


def _left_out(kind: str, *, is_open: bool = False) -> ArrayView:
    return ArrayView("", kind[:_MAX_KIND], None, is_open=is_open)


def _class_of(args: Symbol) -> str:
    names = [name_of(each) for each in args] if type(args) is tuple else []
    return next(filter(None, names), "")


def _is_state(state: tuple[Symbol, ...]) -> bool:
    """Tell a version, a shape, a dtype, an order and bytes from other tuples."""
    if len(state) < _STATE_LENGTH or type(state[3]) is not bool:
        return False
    return type(state[0]) is int and is_dtype(state[2]) and is_shape(state[1]) and _is_data(state[4])


def _is_data(symbol: Symbol) -> bool:
    return type(symbol) in (Blob, str) or (
        type(symbol) is Made and name_of(symbol.function) in (ENCODE, LIST.name, *_BYTES)
    )


def _unknown(symbols: tuple[Symbol, ...]) -> ArrayView | None:
    """Notice a dtype with bytes beside it: somebody's array, pickled as nobody here knows."""
    if any(map(is_dtype, symbols)) and any(type(each) is Blob and each.n_bytes for each in symbols):
        return _left_out("a dtype and bytes that are pickled in an unknown way", is_open=True)
    return None


def _of_state(state: tuple[Symbol, ...], subclass: str) -> ArrayView:
    if subclass:
        return _left_out(subclass)
    shape = state[1]
    return _view(state[4], dtype_of(state[2]), shape, _columns(shape) if state[3] else None)


def _of_buffer(args: Symbol) -> ArrayView:
    if type(args) is not tuple or len(args) < 4 or not is_shape(args[2]):
        return _left_out("an array that is not pickled as numpy pickles arrays")
    shape, order = args[2], args[3]
    strides = _columns(shape) if type(order) is str and order == "F" else None
    if type(order) is str and order == "K":
        # The bytes are in C order of this shape, whose sides the array has in another order.
        axes: Any = args[4] if len(args) > 4 else None
        if not is_shape(axes) or sorted(axes) != list(range(len(shape))):
            return _left_out("an array of an impossible order")
        steps = [*accumulate(shape[:0:-1], mul, initial=1)][::-1]
        shape, strides = tuple(shape[axis] for axis in axes), tuple(steps[axis] for axis in axes)
    return _view(args[0], dtype_of(args[1]), shape, strides)


def _of_wrapper(wrapper: Made) -> ArrayView:
    state: Any = wrapper.state
    shape: Any = state.get("shape") if type(state) is Made else None
    if not is_shape(shape):
        return _left_out("an array that is not written as joblib writes arrays")
    data = wrapper.elements[0] if wrapper.elements else None
    is_fortran = type(state.get("order")) is str and state.get("order") == "F"
    subclass = name_of(state.get("subclass"))
    if subclass not in ("numpy.ndarray", "numpy.memmap"):
        return _left_out(subclass or "an array of an unknown class")
    return _view(data, dtype_of(state.get("dtype")), shape, _columns(shape) if is_fortran else None)


def _columns(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Say the strides of an array in Fortran order; None if that is C order, too."""
    if sum(side != 1 for side in shape) < 2 or 0 in shape:
        return None
    return tuple(accumulate(shape[:-1], mul, initial=1))


def _view(symbol: Symbol, dtype: DType | None, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> ArrayView:
    if dtype is None:
        return _left_out("an array of an unknown dtype")
    if dtype.hasobject:
        return _left_out("objects", is_open=True)
    fields: tuple[RecordField, ...] = ()
    try:
        name = dtype_name(dtype)
    except ValueError:
        fields, name = fields_of(dtype), "uint8"
        if not fields or strides is not None:
            return _left_out(str(dtype))
    n_bytes = math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return ArrayView("", name, name, shape, None, Blob(0, 0), fields=fields)
    data = _data_of(symbol)
    if data is None:
        return _left_out("bytes that are not in the file, or written by Python 2")
    if type(data) is Blob and not data.is_text and data.n_bytes != n_bytes:
        raise FormatError(f"an array of {n_bytes} bytes has {data.n_bytes}")
    return ArrayView("", name, name, (*shape, dtype.itemsize) if fields else shape, strides, data, fields=fields)


def _data_of(symbol: Symbol) -> Blob | str | None:
    if type(symbol) is Blob:
        return None if symbol.is_text or symbol.at < 0 else symbol
    if type(symbol) is not Made or name_of(symbol.function) != ENCODE:
        return None
    args = symbol.args
    if type(args) is not tuple or len(args) != 2 or type(args[1]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    text = args[0]
    return text if type(text) is str or (type(text) is Blob and text.is_text and text.at >= 0) else None

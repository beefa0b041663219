"""Functions of derived tensors: the bytes of a row as a function of other rows (``docs/format.md``, Functions).

The results are part of the format: every machine and every release computes the same bytes. So each step that
libraries or processors may do in several ways is fixed here: the order of operations, their precision, and the bits of
a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.codecs._blocks import BLOCK_BYTES, BLOCK_ELEMENTS, Q8_0, quantize
from tensorcas_mlflow.codecs._deflate import LEVELS, deflate
from tensorcas_mlflow.codecs._hdf5_chunks import Hdf5Chunks, make_chunks
from tensorcas_mlflow.codecs._words import WORDS
from tensorcas_mlflow.errors import FormatError

MOST_INPUTS = 1024
"""More inputs of one function are refused."""
MOST_EVALUATED_BYTES = 1 << 32
"""A function whose inputs and result take more memory together is refused."""

_NUMPY_FLOATS = frozenset({"float16", "float32", "float64"})
_FLOATS = frozenset(
    {*_NUMPY_FLOATS, *(f">{name}" for name in _NUMPY_FLOATS), "bfloat16", "float8_e3m4", "float8_e4m3"}
    | {"float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
)
"""Dtypes that functions convert."""
_NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
"""The quiet NaN, without its sign."""
_BLOCK = 1 << 16
"""Elements of one step of a conversion or mean; so many stay in the processor's cache."""
_TILE = 64
"""Side of a square tile of a permutation, in elements."""


class Kind(NamedTuple):
    """Dtype and shape of an input or a result."""

    dtype: str | None
    """Its name in manifests; None for plain bytes."""
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def numpy_dtype(self) -> Any:
        """The numpy dtype of an element."""
        return np.dtype(np.uint8) if self.dtype is None else parse_dtype(self.dtype)

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return self.n_elements * int(self.numpy_dtype.itemsize)


def check(function: object, params: object, inputs: Sequence[Kind], output: Kind) -> None:
    """Check that a function gives a result of a dtype and shape; `evaluate` relies on it.

    Args:
        function: The name of the function.
        params: Its parameters.
        inputs: The dtypes and shapes of its inputs, in order.
        output: The dtype and shape of its result.

    Raises:
        FormatError: The function is unknown, or it cannot give such a result.
    """
    known = _FUNCTIONS.get(function) if isinstance(function, str) else None
    if known is None:
        raise FormatError(f"no function is called {function!r:.80}")
    if not isinstance(params, Mapping) or set(params) != known.params:
        raise FormatError(f"function {function} has not the parameters {params!r:.200}")
    if not 1 <= len(inputs) <= known.most_inputs:
        raise FormatError(f"function {function} has not {len(inputs)} inputs")
    if sum(each.n_bytes for each in (*inputs, output)) > MOST_EVALUATED_BYTES:
        raise FormatError(f"function {function} takes more than {MOST_EVALUATED_BYTES} bytes of memory")
    if not known.fits(params, inputs, output):
        raise FormatError(
            f"function {function} with parameters {dict(params)!r:.200} does not make {_in_words(output)} "
            f"of {', '.join(map(_in_words, inputs[:4]))}{', …' if len(inputs) > 4 else ''}"
        )


def evaluate(
    function: str,
    params: Mapping[str, Any],
    inputs: Sequence[np.ndarray[Any, Any]],
    output: Kind,
    *,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """Compute a function of arrays, for arguments checked by `check`.

    The function needs the memory of its result and of a few blocks.

    Args:
        function: The name of the function.
        params: Its parameters.
        inputs: The arrays.
        output: The dtype and shape of the result.
        out: Array for the result: C-contiguous, of that dtype and shape, apart from the inputs in memory.

    Returns:
        ``out``, or a new C-contiguous array; plain bytes as uint8.
    """
    made = np.empty(output.shape, output.numpy_dtype) if out is None else out
    _FUNCTIONS[function].evaluate(params, inputs, made)
    return made


def computes_exactly() -> bool:
    """Tell whether this thread keeps subnormal numbers and rounds to nearest, as every reader does by default.

    Libraries change both for a thread: `torch.set_flush_denormal` does, and so do some that are compiled for speed.
    """
    products = _SMALLEST * _SCALES
    sums = _UNITS + _HALF_STEPS
    return products.tobytes() == _EXACT_PRODUCTS and sums.tobytes() == _EXACT_SUMS


_SMALLEST = np.array([1, 1 << 23], dtype=np.uint32).view(np.float32)
"""The least subnormal number, and the least normal one."""
_SCALES = np.array([2, 0.5], dtype=np.float32)
_EXACT_PRODUCTS = np.array([2, 1 << 22], dtype=np.uint32).tobytes()
_UNITS = np.array([1, -1, 1], dtype=np.float32)
_HALF_STEPS = np.array([2**-24, -(2**-24), 3 * 2**-24], dtype=np.float32)
_EXACT_SUMS = np.array([1, -1, 1 + 2**-22], dtype=np.float32).tobytes()


class _Function(NamedTuple):
    params: frozenset[str]
    most_inputs: int
    fits: Callable[[Mapping[str, Any], Sequence[Kind], Kind], bool]
    evaluate: Callable[[Mapping[str, Any], Sequence[Any], Any], None]


def _in_words(kind: Kind) -> str:
    return f"{'bytes' if kind.dtype is None else kind.dtype:.80}{list(kind.shape)}"


def _is_number(value: Any, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _converts(kind: Kind, output: Kind) -> bool:
    return kind.dtype == output.dtype or (kind.dtype in _FLOATS and output.dtype in _FLOATS)


def _cast_fits(_params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    return _converts(inputs[0], output) and inputs[0].n_elements == output.n_elements


def _cast(_params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    _convert(np.ascontiguousarray(inputs[0]), made)


def _convert(source: Any, target: Any) -> None:
    """Convert all elements of a contiguous array into another one."""
    source, target = source.reshape(-1), target.reshape(-1)
    if source.dtype == target.dtype:
        target[...] = source
        return
    for block in _blocks(len(source)):
        target[block] = _converted(source[block], target.dtype)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, n)) for start in range(0, n, _BLOCK))


def _converted(values: Any, dtype: Any) -> Any:
    """Convert floating-point numbers to another dtype: to nearest, ties to even, and NaNs to one NaN."""
    native = dtype.newbyteorder("=")
    if values.dtype.newbyteorder("=") == native:
        return values.astype(dtype, copy=False)
    with np.errstate(all="ignore"):
        # The small dtypes convert from and to float32 alone, so a float64 is rounded twice.
        if not {values.dtype.name, native.name} <= _NUMPY_FLOATS:
            values = values.astype(np.float32)
        made = values.astype(native)
    bits = _NAN_BITS.get(native.name)
    if bits is not None and (is_nan := np.isnan(made)).any():
        words = made.view(WORDS[made.itemsize])
        signs = np.signbit(values[is_nan]).astype(words.dtype) << words.dtype.type(8 * made.itemsize - 1)
        words[is_nan] = signs | words.dtype.type(bits)
    return made.astype(dtype, copy=False)


def _permute_fits(params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    axes, shape = params["axes"], inputs[0].shape
    if not isinstance(axes, list | tuple) or len(axes) != len(shape) or len(output.shape) != len(shape):
        return False
    return (
        all(_is_number(axis, 0, len(shape)) for axis in axes)
        and len(set(axes)) == len(axes)
        and tuple(shape[axis] for axis in axes) == output.shape
        and _converts(inputs[0], output)
    )


def _permute(params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    _fill(made, inputs[0].transpose(params["axes"]))


def _fill(made: Any, view: Any) -> None:
    """Copy a view into an array of its shape, converted to the array's dtype, in tiles."""
    for tile in _tiles(view, is_bounded=made.dtype != view.dtype):
        made[tile] = _converted(view[tile], made.dtype)


def _tiles(view: Any, *, is_bounded: bool) -> Iterator[tuple[slice, ...]]:
    """Split an array into tiles that are read and written fast.

    Args:
        view: The array.
        is_bounded: Whether a tile has at most `_BLOCK` elements.
    """
    sides = list(view.shape)
    if view.ndim > 1 and view.size > _BLOCK:
        # Neighbours in memory along another axis than the last one: the processor's cache keeps a tile of both axes.
        near = min((axis for axis in range(view.ndim) if sides[axis] > 1), key=lambda axis: abs(view.strides[axis]))
        if near != view.ndim - 1:
            # A tile of a thin array is longer: each one costs a call.
            side = min(sides[near], _TILE)
            sides[-1] = min(sides[-1], _TILE * _TILE // side)
            sides[near] = min(sides[near], _TILE * _TILE // sides[-1])
    for axis in range(view.ndim if is_bounded else 0):
        n = math.prod(sides)
        if n > _BLOCK:
            sides[axis] = max(1, sides[axis] * _BLOCK // n)
    starts = [range(0, whole, max(side, 1)) for whole, side in zip(view.shape, sides, strict=True)]
    for at in product(*starts):
        yield tuple(slice(start, start + side) for start, side in zip(at, sides, strict=True))


def _slice_fits(params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    shape = inputs[0].shape
    axis, start = params["axis"], params["start"]
    if not _is_number(axis, 0, len(shape)) or len(output.shape) != len(shape):
        return False
    return (
        _is_number(start, 0, shape[axis] - output.shape[axis] + 1)
        and shape[:axis] == output.shape[:axis]
        and shape[axis + 1 :] == output.shape[axis + 1 :]
        and _converts(inputs[0], output)
    )


def _slice(params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    _fill(made, inputs[0][_along(params["axis"], params["start"], made.shape)])


def _along(axis: int, start: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, start + shape[axis]))


def fills(offsets: Sequence[Sequence[int]], sides: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
    """Tell whether boxes fill an array without gaps and overlaps.

    Args:
        offsets: The first element of each box along each axis.
        sides: The sides of each box.
        shape: Shape of the array.
    """
    if sum(map(math.prod, sides)) != math.prod(shape):
        return False
    if not len(shape):
        return True
    begins, ends = np.empty((2, len(sides), len(shape)), dtype=np.int64)
    for number, (offset, side) in enumerate(zip(offsets, sides, strict=True)):
        if len(offset) != len(shape) or len(side) != len(shape):
            return False
        begins[number] = offset
        ends[number] = np.asarray(offset, dtype=np.int64) + side
    if (begins < 0).any() or (ends > shape).any():
        return False
    begins, ends = begins[(ends > begins).all(axis=1)], ends[(ends > begins).all(axis=1)]
    # Boxes of the right size in all fill the array unless two of them overlap.
    for number in range(len(begins) - 1):
        overlaps = (begins[number + 1 :] < ends[number]) & (begins[number] < ends[number + 1 :])
        if overlaps.all(axis=1).any():
            return False
    return True


def _assemble_fits(params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    offsets = params["offsets"]
    return (
        isinstance(offsets, list | tuple)
        and len(offsets) == len(inputs)
        and all(isinstance(each, list | tuple) and len(each) == len(output.shape) for each in offsets)
        and all(_is_number(at, 0, side + 1) for each in offsets for at, side in zip(each, output.shape, strict=True))
        and all(len(each.shape) == len(output.shape) and _converts(each, output) for each in inputs)
        and fills(offsets, [each.shape for each in inputs], output.shape)
    )


def _assemble(params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    for each, offsets in zip(inputs, params["offsets"], strict=True):
        box = tuple(slice(at, at + side) for at, side in zip(offsets, each.shape, strict=True))
        _fill(made[box], each)


def _mean_fits(_params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    are_numbers = all(each.dtype in _FLOATS for each in (*inputs, output))
    return are_numbers and all(each.n_elements == output.n_elements for each in inputs)


def _mean(_params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    flat, single = made.reshape(-1), np.dtype(np.float32)
    flat_inputs = [np.ascontiguousarray(each).reshape(-1) for each in inputs]
    weight = np.float32(1 / len(inputs))
    for block in _blocks(len(flat)):
        with np.errstate(all="ignore"):
            total = weight * _converted(flat_inputs[0][block], single)
            for each in flat_inputs[1:]:
                total += weight * _converted(each[block], single)
        # Processors disagree on the sign of a new NaN, and on the one of two NaNs that a sum keeps.
        total[np.isnan(total)] = np.float32(np.nan)
        flat[block] = _converted(total, made.dtype)


def _blocks_fit(_params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    kind = inputs[0]
    return (
        kind.dtype is not None
        and kind.dtype.removeprefix(">") in ("float32", "float16", "bfloat16")
        and len(kind.shape) > 0
        and kind.shape[-1] % BLOCK_ELEMENTS == 0
        and output.dtype in (None, "uint8")
        and output.n_elements == kind.n_elements // BLOCK_ELEMENTS * BLOCK_BYTES
    )


def _make_blocks(_params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    blocks = made.reshape(-1, BLOCK_BYTES)
    flat = np.ascontiguousarray(inputs[0]).reshape(-1)
    for part in _blocks(len(flat)):
        values = _converted(flat[part], np.dtype(np.float32)).reshape(-1, BLOCK_ELEMENTS)
        quantize(values, blocks[part.start // BLOCK_ELEMENTS : part.stop // BLOCK_ELEMENTS])


def _deflate_fits(params: Mapping[str, Any], _inputs: Sequence[Kind], output: Kind) -> bool:
    return _is_number(params["level"], LEVELS.start, LEVELS.stop) and output.dtype is None and len(output.shape) == 1


def _deflate(params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    data = [_raw(each) for each in inputs]
    n_bytes = deflate((data[0] if len(data) == 1 else np.concatenate(data)).data, params["level"], made.data)
    # Digests tell that the result has another size. A longer one leaves any bytes.
    made[0 if n_bytes is None else n_bytes :] = 0


def _hdf5_chunks_fits(params: Mapping[str, Any], inputs: Sequence[Kind], output: Kind) -> bool:
    try:
        chunks = Hdf5Chunks.of(params)
    except ValueError:
        return False
    is_flat = output.dtype is None and len(output.shape) == 1
    return is_flat and chunks.fits(sum(each.n_bytes for each in inputs), output.n_bytes)


def _hdf5_chunks(params: Mapping[str, Any], inputs: Sequence[Any], made: Any) -> None:
    make_chunks(Hdf5Chunks.of(params), [_raw(each) for each in inputs], made)


def _raw(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_FUNCTIONS: Mapping[str, _Function] = {
    "cast": _Function(frozenset(), 1, _cast_fits, _cast),
    "permute": _Function(frozenset({"axes"}), 1, _permute_fits, _permute),
    "slice": _Function(frozenset({"axis", "start"}), 1, _slice_fits, _slice),
    "assemble": _Function(frozenset({"offsets"}), MOST_INPUTS, _assemble_fits, _assemble),
    "mean": _Function(frozenset(), MOST_INPUTS, _mean_fits, _mean),
    Q8_0: _Function(frozenset(), 1, _blocks_fit, _make_blocks),
    "deflate": _Function(frozenset({"level"}), MOST_INPUTS, _deflate_fits, _deflate),
    "hdf5_chunks": _Function(
        frozenset(field.name for field in fields(Hdf5Chunks)), MOST_INPUTS, _hdf5_chunks_fits, _hdf5_chunks
    ),
}

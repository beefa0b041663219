"""Arrays in a file of ``joblib.dump``, which stand in the file and not in its pickle.

There is no specification but ``joblib/numpy_pickle.py``: in an array's place the pickle has a wrapper, whose state says
shape, order and dtype. Right after the opcode that sets the state come a byte that says how much padding follows (since
joblib 1.2), the padding, the array's bytes, and then the pickle goes on. In place of an array of objects comes a pickle
of its own. Files that joblib has compressed do not begin as a pickle does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorcas_mlflow.containers._pickle_arrays import dtype_of, is_shape
from tensorcas_mlflow.containers._pickle_symbols import Made, Symbol
from tensorcas_mlflow.dtypes import DType
from tensorcas_mlflow.tensor import MAX_TENSOR_BYTES

WRAPPERS = frozenset(
    {
        "joblib.numpy_pickle.NumpyArrayWrapper",
        "sklearn.externals.joblib.numpy_pickle.NumpyArrayWrapper",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedArray:
    """What a wrapper says of the array after it."""

    dtype: DType
    shape: tuple[int, ...]
    is_fortran: bool
    is_padded: bool

    @property
    def n_bytes(self) -> int:
        """Size of the array's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def wrapped_array(wrapper: Made) -> WrappedArray | None:
    """Read a wrapper's state; None if it is not understood, and so nobody knows where the pickle goes on."""
    state: Symbol = wrapper.state
    if type(state) is not Made:
        return None
    dtype = dtype_of(state.get("dtype"))
    shape = state.get("shape")
    order = state.get("order")
    if dtype is None or not is_shape(shape) or type(order) is not str:
        return None
    is_padded = type(state.get("numpy_array_alignment_bytes")) is int
    array = WrappedArray(dtype=dtype, shape=shape, is_fortran=order == "F", is_padded=is_padded)
    return array if array.n_bytes <= MAX_TENSOR_BYTES else None

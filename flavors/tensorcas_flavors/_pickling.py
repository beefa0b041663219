"""Pickles without their arrays: the skeleton of a Python object, with what is taken out replaced by references.

The pickle is cloudpickle's (classes of ``__main__`` travel by value, as MLflow's own flavors do it), protocol 5, with
persistent ids for what the caller takes out. A skeleton starts with `MAGIC`, so one can see without reading a pickle
that it holds one.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

MAGIC = b"TCPK1\n"

_NOT_AS_OTHERS = (io.TextIOWrapper, memoryview)
"""Of these cloudpickle makes something else: the text of an open file, bytes."""

_MAX_COPIED_BYTES = 16 << 20

TakeOut = Callable[[object], object | None]
TakeBuffer = Callable[[pickle.PickleBuffer], bool]


def dump_skeleton(
    adapter: str,
    obj: object,
    take_out: TakeOut,
    *,
    take_buffer: TakeBuffer | None = None,
    memo: dict[int, object] | None = None,
) -> Array:
    """Pickle an object without the parts that ``take_out`` and ``take_buffer`` claim.

    Args:
        adapter: The adapter's name, for errors.
        obj: What to pickle.
        take_out: Called for every object before it is pickled; returns a small picklable reference to put in its
            place (tuples of str and int), or None to pickle the object itself. What it claims it must keep alive
            until this returns: it may be an object that pickling made, whose id the next one would get.
        take_buffer: Called for every buffer that an object offers out of band, as pickle's protocol 5 has it; returns
            whether it keeps the buffer. It must keep or copy the bytes, in order. Without it all stay in the pickle.
        memo: Gets the objects that the pickle remembers, by the numbers that it gives them.

    Returns:
        The skeleton, 1-d uint8.

    Raises:
        AdapterError: Something in the object cannot be pickled.
    """
    buffer = io.BytesIO(MAGIC)
    buffer.seek(len(MAGIC))
    try:
        pickler = _SkeletonPickler(buffer, take_out, take_buffer)
        pickler.dump(obj)
        if memo is not None:
            memo.update(pickler.memo.copy().values())
    except AdapterError:
        raise
    except Exception as error:  # pickling runs code of the model's classes, which may raise anything
        raise AdapterError(adapter, f"a {type(obj).__name__} cannot be pickled: {error}") from error
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def is_pickle(skeleton: Array) -> bool:
    """Tell whether a skeleton is one of `dump_skeleton`'s, without reading the pickle."""
    return skeleton[: len(MAGIC)].tobytes() == MAGIC


def load_skeleton(
    adapter: str,
    skeleton: Array,
    put_back: Callable[[Any], object],
    *,
    buffers: Iterable[Any] = (),
    memo: dict[int, object] | None = None,
) -> Any:
    """Unpickle a skeleton. This runs code that the skeleton names: the one documented door for pickles.

    Args:
        adapter: The adapter's name, for errors.
        skeleton: What `dump_skeleton` returned.
        put_back: Called with each reference; returns the part that stood there.
        buffers: What ``take_buffer`` kept, in the same order. The object may use their memory.
        memo: Gets the objects that the pickle remembers, by the numbers that it gives them.

    Raises:
        AdapterError: These bytes are not a skeleton with a pickle, or a class it names is not installed here.
    """
    if not is_pickle(skeleton):
        raise AdapterError(adapter, "the skeleton holds no pickle")

    class SkeletonUnpickler(pickle.Unpickler):
        def persistent_load(self, reference: Any) -> object:
            return put_back(reference)

    try:
        unpickler = SkeletonUnpickler(io.BytesIO(skeleton[len(MAGIC) :].tobytes()), buffers=buffers)
        loaded = unpickler.load()
        if memo is not None:
            memo.update(unpickler.memo.copy())
        return loaded
    except AdapterError:
        raise
    except (ImportError, AttributeError) as error:
        raise AdapterError(
            adapter, f"the model needs code that is not importable here ({error}): pass code_paths when logging it"
        ) from error
    except Exception as error:  # damaged bytes may call anything with anything
        raise AdapterError(adapter, f"the skeleton cannot be read: {error}") from error


def try_back(adapter: str, obj: object, rows: Mapping[str, Array], load: Callable[[dict[str, Array]], object]) -> None:
    """Load what was just taken apart, to see that it can come back. This runs code that the pickle names.

    Args:
        adapter: The adapter's name, for errors.
        obj: What was taken apart.
        rows: Of it. They are copied, but not if they are large: then zeros stand for them, which take no memory.
        load: Loads the object from rows.

    Raises:
        AdapterError: It cannot be loaded.
    """
    is_small = sum(row.nbytes for row in rows.values()) <= _MAX_COPIED_BYTES
    try:
        load(
            {
                name: np.array(row, order="C") if is_small else np.zeros(row.shape, row.dtype)
                for name, row in rows.items()
            }
        )
    except AdapterError as error:
        # What zeros do not fit, values may.
        if is_small or isinstance(error.__cause__, TypeError | AttributeError | ImportError):
            raise AdapterError(
                adapter,
                f"a {type(obj).__name__} can be pickled but not loaded again, so it is not stored "
                f"({error.reason}): store what it is made from, such as a state dict or its arrays, instead",
            ) from error


class _SkeletonPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler, with less Python to run for every object: saves of small models are made of that."""

    def __init__(self, file: io.BytesIO, take_out: TakeOut, take_buffer: TakeBuffer | None) -> None:
        # The pickler looks in here once an object. Cloudpickle's table is a ChainMap, which is Python.
        self.dispatch_table: dict[type, Any] = {}
        for table in reversed(cloudpickle.Pickler.dispatch_table.maps):
            self.dispatch_table.update(table)
        self.dispatch_table[OrderedDict] = _reduce_ordered_dict
        for kind in _NOT_AS_OTHERS:
            self.dispatch_table.pop(kind, None)
        # pickle takes true for "stays in the pickle".
        leave = None if take_buffer is None else lambda buffer: not take_buffer(buffer)
        super().__init__(file, protocol=5, buffer_callback=leave)
        # On the instance the pickler calls it itself; a method would be one more call an object.
        self.persistent_id = take_out

    def reducer_override(self, part: Any) -> Any:
        kind = type(part)
        if kind is not FunctionType and not issubclass(kind, type):
            return NotImplemented  # as cloudpickle's own says of all but functions and classes
        reduced = super().reducer_override(part)
        if kind is not FunctionType and isinstance(reduced, tuple) and len(reduced) > 2:
            # A cache that pickling an instance leaves on its class: with it the second save of an unchanged model
            # would differ from the first.
            reduced[2][0].pop("__slotnames__", None)
        return reduced


def _reduce_ordered_dict(part: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    # What its own method returns, which first looks for the slots of a class that has none. A module has eight of them.
    return OrderedDict, (), vars(part) or None, None, iter(part.items())

"""Pickles without their arrays: the skeleton of a Python object, with what is taken out replaced by references.

The pickle is cloudpickle's (classes of ``__main__`` travel by value, as MLflow's own flavors do it), protocol 5, with
persistent ids for what the caller takes out. A skeleton starts with `MAGIC`, so one can see without reading a pickle
that it holds one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

MAGIC = b"TCPK1\n"


def dump_skeleton(adapter: str, obj: object, take_out: Callable[[object], object | None]) -> Array:
    """Pickle an object without the parts that ``take_out`` claims.

    Args:
        adapter: The adapter's name, for errors.
        obj: What to pickle.
        take_out: Called for every object before it is pickled; returns a small picklable reference to put in its
            place (tuples of str and int), or None to pickle the object itself.

    Returns:
        The skeleton, 1-d uint8.

    Raises:
        AdapterError: Something in the object cannot be pickled.
    """

    class SkeletonPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, part: object) -> object | None:
            return take_out(part)

        def reducer_override(self, part: Any) -> Any:
            reduced = super().reducer_override(part)
            if isinstance(part, type) and isinstance(reduced, tuple) and len(reduced) > 2:
                # A cache that pickling an instance leaves on its class: with it the second save of an unchanged model
                # would differ from the first.
                reduced[2][0].pop("__slotnames__", None)
            return reduced

    buffer = io.BytesIO(MAGIC)
    buffer.seek(len(MAGIC))
    try:
        SkeletonPickler(buffer, protocol=5).dump(obj)
    except AdapterError:
        raise
    except Exception as error:  # pickling runs code of the model's classes, which may raise anything
        raise AdapterError(adapter, f"a {type(obj).__name__} cannot be pickled: {error}") from error
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def is_pickle(skeleton: Array) -> bool:
    """Tell whether a skeleton is one of `dump_skeleton`'s, without reading the pickle."""
    return skeleton[: len(MAGIC)].tobytes() == MAGIC


def load_skeleton(adapter: str, skeleton: Array, put_back: Callable[[Any], object]) -> Any:
    """Unpickle a skeleton. This runs code that the skeleton names: the one documented door for pickles.

    Args:
        adapter: The adapter's name, for errors.
        skeleton: What `dump_skeleton` returned.
        put_back: Called with each reference; returns the part that stood there.

    Raises:
        AdapterError: These bytes are not a skeleton with a pickle, or a class it names is not installed here.
    """
    if not is_pickle(skeleton):
        raise AdapterError(adapter, "the skeleton holds no pickle")

    class SkeletonUnpickler(pickle.Unpickler):
        def persistent_load(self, reference: Any) -> object:
            return put_back(reference)

    try:
        return SkeletonUnpickler(io.BytesIO(skeleton[len(MAGIC) :].tobytes())).load()
    except AdapterError:
        raise
    except (ImportError, AttributeError) as error:
        raise AdapterError(
            adapter, f"the model needs code that is not importable here ({error}): pass code_paths when logging it"
        ) from error
    except Exception as error:  # damaged bytes may call anything with anything
        raise AdapterError(adapter, f"the skeleton cannot be read: {error}") from error

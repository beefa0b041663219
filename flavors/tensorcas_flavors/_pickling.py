"""Pickles without their arrays: the skeleton of a Python object, with references in place of the parts taken out.

The pickle is one of cloudpickle (classes of ``__main__`` travel by value, as in MLflow's own flavors), protocol 5, with
persistent ids for the parts that the caller takes out. A skeleton starts with `MAGIC`, so that a pickle is recognised
without being read.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

MAGIC = b"TCPK1\n"
_NOT_AS_OTHERS = (io.TextIOWrapper, memoryview)
"""Classes that cloudpickle would turn into something else: the text of an open file, bytes."""
_MAX_COPIED_BYTES = 16 << 20
TakeOut = Callable[[object], object | None]
TakeBuffer = Callable[[pickle.PickleBuffer], bool]
ViewOf = Callable[[Array], Array | None]


def dump_skeleton(
    adapter: str,
    obj: object,
    take_out: TakeOut,
    *,
    take_buffer: TakeBuffer | None = None,
    view_of: ViewOf | None = None,
    memo: dict[int, object] | None = None,
) -> Array:
    """Pickle an object without the parts that ``take_out`` and ``take_buffer`` claim.

    Args:
        adapter: The adapter's name, for errors.
        obj: What to pickle.
        take_out: Called for every object before it is pickled; returns a small picklable reference to put in its
            place (tuples of str and int), or None to pickle the object itself. It must keep the parts that it claims
            alive until this returns: pickling may have made one, and the next object would get its id.
        take_buffer: Called for every buffer that an object offers out of band (pickle protocol 5); returns whether it
            keeps the buffer. It must keep or copy the bytes, in order. Without it all buffers stay in the pickle.
        view_of: Returns a plain array with the memory of one of a subclass, which is pickled in its place (see
            `reduce_array`), or None to pickle it as a whole; it must keep both alive.
        memo: Receives the objects that the pickle remembers, by their numbers there.

    Returns:
        The skeleton, a 1-d uint8 array.

    Raises:
        AdapterError: Something in the object cannot be pickled.
    """
    buffer = io.BytesIO(MAGIC)
    buffer.seek(len(MAGIC))
    try:
        pickler = _SkeletonPickler(buffer, take_out, take_buffer, view_of)
        pickler.dump(obj)
        if memo is not None:
            memo.update(pickler.memo.copy().values())
    except AdapterError:
        raise
    except Exception as error:  # pickling runs code of the model's classes, which may raise anything
        raise AdapterError(adapter, f"a {type(obj).__name__} cannot be pickled: {error}") from error
    return np.frombuffer(buffer.getbuffer(), dtype=np.uint8)


def is_pickle(skeleton: Array) -> bool:
    """Tell whether a skeleton starts with a pickle of `dump_skeleton`; the pickle is not read."""
    return skeleton[: len(MAGIC)].tobytes() == MAGIC


def load_skeleton(
    adapter: str,
    skeleton: Array,
    put_back: Callable[[Any], object],
    *,
    buffers: Iterable[Any] = (),
    memo: dict[int, object] | None = None,
) -> Any:
    """Unpickle a skeleton. This runs code that the skeleton names; it is the only place that reads a pickle.

    Args:
        adapter: The adapter's name, for errors.
        skeleton: Result of `dump_skeleton`.
        put_back: Called with each reference; returns its part.
        buffers: The buffers that ``take_buffer`` kept, in the same order. The object may use their memory.
        memo: Receives the objects that the pickle remembers, by their numbers there.

    Raises:
        AdapterError: These bytes are no skeleton with a pickle, or code that it names is not importable here.
    """
    if not is_pickle(skeleton):
        raise AdapterError(adapter, "the skeleton holds no pickle")

    try:
        unpickler: Any = pickle.Unpickler(io.BytesIO(skeleton[len(MAGIC) :].tobytes()), buffers=buffers)
        # A method would cost one more call per reference.
        unpickler.persistent_load = put_back
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


def try_back(
    adapter: str,
    obj: object,
    rows: Mapping[str, Array],
    load: Callable[[dict[str, Array]], object],
    fill: Callable[[dict[str, Array], Any], object] | None = None,
) -> None:
    """Load an object that was just taken apart, to see that it can be loaded. This runs code that the pickle names.

    Args:
        adapter: The adapter's name, for errors.
        obj: The object.
        rows: Its rows. Small ones are copied; zeros, which take no memory, stand for large ones.
        load: Loads the object from rows.
        fill: Fills the object that was loaded from the same rows, if they are small.

    Raises:
        AdapterError: The object cannot be loaded, or not be filled.
    """
    is_small = sum(row.nbytes for row in rows.values()) <= _MAX_COPIED_BYTES
    copies = {
        name: np.array(row, order="C") if is_small else np.zeros(row.shape, row.dtype) for name, row in rows.items()
    }
    try:
        copy = load(copies)
    except AdapterError as error:
        # Code that fails on zeros may accept the values.
        if is_small or isinstance(error.__cause__, TypeError | AttributeError | ImportError):
            raise AdapterError(
                adapter,
                f"a {type(obj).__name__} can be pickled but not loaded again, so it is not stored "
                f"({error.reason}): store what it is made from, such as a state dict or its arrays, instead",
            ) from error
    if fill is None or not is_small:
        return
    try:
        fill(copies, copy)
    except AdapterError as error:
        raise AdapterError(
            adapter,
            f"a {type(obj).__name__} is not stored, since a load with into= could not fill one like it "
            f"({error.reason}): mend that, store what it is made from, or set TENSORCAS_TRY_FILL=false to store what "
            "only a load without into= restores",
        ) from error


class _SkeletonPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's pickler with less Python for every object, which dominates saves of small models."""

    def __init__(
        self, file: io.BytesIO, take_out: TakeOut, take_buffer: TakeBuffer | None, view_of: ViewOf | None
    ) -> None:
        self._view_of = view_of
        # The pickler looks here once per object. Cloudpickle's table is a ChainMap, which is written in Python.
        self.dispatch_table: dict[type, Any] = {}
        for table in reversed(cloudpickle.Pickler.dispatch_table.maps):
            self.dispatch_table.update(table)
        self.dispatch_table[OrderedDict] = _reduce_ordered_dict
        for kind in _NOT_AS_OTHERS:
            self.dispatch_table.pop(kind, None)
        # For pickle, true means that the buffer stays in the pickle.
        leave = None if take_buffer is None else lambda buffer: not take_buffer(buffer)
        super().__init__(file, protocol=5, buffer_callback=leave)
        # The pickler calls an attribute of the instance directly; a method would cost one more call per object.
        self.persistent_id = take_out

    def reducer_override(self, part: Any) -> Any:
        kind = type(part)
        if kind is not FunctionType and not issubclass(kind, type):
            if self._view_of is not None and issubclass(kind, np.ndarray) and kind is not np.ndarray:
                return reduce_array(part, self._view_of)
            return NotImplemented  # as cloudpickle does for all but functions and classes
        reduced = super().reducer_override(part)
        if kind is not FunctionType and isinstance(reduced, tuple) and len(reduced) > 2:
            # Pickling an instance leaves this cache on its class. With it the second save of an unchanged model would
            # differ from the first.
            reduced[2][0].pop("__slotnames__", None)
        return reduced


def reduce_array(array: Any, view_of: ViewOf) -> Any:
    """Return how pickle stores an array of a subclass: its class, a plain array with its memory, and all else.

    Returns:
        NotImplemented for a class that pickles in a way of its own.
    """
    kind: Any = type(array)
    view = view_of(array)
    if view is None:
        return NotImplemented
    if kind is np.memmap:
        return view.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if kind is np.ma.MaskedArray:
        fill_value = array._fill_value
        # numpy computes it on the first access, and then keeps it.
        core: Any = np.ma.core
        if fill_value is not None and repr(fill_value) == repr(core._check_fill_value(None, array.dtype)):
            fill_value = None
        mask = None if array._mask is np.ma.nomask else array._mask
        value = None if fill_value is None else np.asarray(fill_value)[()]
        return masked_array, (view, mask, value, array._hardmask, array._optinfo)
    if issubclass(kind, np.ma.MaskedArray) or kind.__reduce_ex__ is not np.ndarray.__reduce_ex__:
        return NotImplemented
    if kind.__reduce__ is np.ndarray.__reduce__:
        is_plain = kind.__setstate__ is np.ndarray.__setstate__
        attributes = getattr(array, "__dict__", None) or None
        return (array_of_class, (kind, view, attributes)) if is_plain else NotImplemented
    reduced: Any = array.__reduce__()
    function: Any
    state: Any
    function, _, state = reduced if len(reduced) == 3 else (None, None, None)
    is_extended = function is np.ndarray.__reduce__(np.empty(0))[0] and type(state) is tuple and len(state) > 4
    if not is_extended or type(state[4]) is not bytes or len(state[4]) != array.nbytes:
        return NotImplemented
    return array_of_state, (kind, view, state[:4], state[5:])


def view_of_map(array: Array) -> Array | None:
    """Return a plain array with the memory of one that maps a file; None for any other."""
    return np.ndarray.view(array, np.ndarray) if type(array) is np.memmap else None


def array_of_class(kind: Any, plain: Array, attributes: dict[str, Any] | None) -> Any:
    """Return an array of a subclass in the memory of a plain one. Pickles name this function."""
    made = plain.view(kind)
    if attributes:
        vars(made).update(attributes)
    return made


def array_of_state(kind: Any, plain: Array, head: Any, more: Any) -> Any:
    """Return an array of a subclass that extends numpy's state of an array. Pickles name this function."""
    made = np.ndarray.__new__(kind, (0,))
    made.__setstate__((*head, plain.tobytes("F" if head[3] else "C"), *more))
    return made


def masked_array(data: Array, mask: Array | None, fill_value: Any, is_hard: bool, info: dict[str, Any]) -> Any:
    """Return a masked array in the memory of its parts. Pickles name this function."""
    made: Any = np.ma.MaskedArray(data, mask=np.ma.nomask if mask is None else mask, hard_mask=is_hard, copy=False)
    made._fill_value = None if fill_value is None else np.array(fill_value, dtype=made.dtype)
    made._optinfo.update(info)
    return made


OF_ARRAYS = {
    f"{__name__}:{function.__name__}": held
    for function, held in ((array_of_class, (1, 2)), (array_of_state, (1,)), (masked_array, (0, 1, 4)))
}
"""The functions for arrays of subclasses, each with the positions of the arguments that a live array holds itself."""


def _reduce_ordered_dict(part: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    # The result of its own method, which first searches a class without slots for slots. A module holds eight of them.
    return OrderedDict, (), vars(part) or None, None, iter(part.items())


def pinned_packages(modules: Set[str], *, but: Set[str] = frozenset()) -> list[str]:
    """Pin the installed distributions of modules as pip requirements; modules without one are left out.

    Args:
        modules: Top-level names.
        but: Names to leave out, because other requirements install them.
    """
    wanted = modules - but - sys.stdlib_module_names - {"__main__", "tensorcas_mlflow", "tensorcas_flavors"}
    if not wanted:
        return []
    distributions = {name for module in wanted for name in _distributions_of(module)}
    # No index has versions with a local label such as +cpu.
    return sorted(f"{name}=={installed_version(name).partition('+')[0]}" for name in distributions)


@cache
def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, as it was when this process first asked.

    Raises:
        PackageNotFoundError: It is not installed.
    """
    return version(distribution)


@cache
def _distributions_of(module: str) -> list[str]:
    """Return the installed distributions of a top-level module; most modules are in one of their own name."""
    try:
        found = distribution(module)
    except PackageNotFoundError:
        return _distributions().get(module, [])
    # The list of modules is shorter than that of files, which for torch has 12,000 lines.
    declared = (found.read_text("top_level.txt") or "").split()
    if module in (declared or {path.parts[0] for path in found.files or ()}):
        return [str(found.metadata["Name"])]
    return _distributions().get(module, [])


@cache
def _distributions() -> dict[str, list[str]]:
    # It reads the lists of files of all installed distributions: a large part of a second.
    return dict(packages_distributions())

"""Adapter for any Python object that can be pickled: arrays, long texts and buffers are rows, the rest is a pickle.

In: an object that no other adapter takes. Out: rows (`_parts`), and a skeleton that is a pickle followed by the facts
of `tensorcas_flavors._facts`, from which a live object is filled without reading the pickle.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from pickle import PickleBuffer
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from tensorcas_flavors._facts import facts_of_skeleton, misfit, plan_values, read_tail, stored_facts, with_tail
from tensorcas_flavors._jax_arrays import on_cpu
from tensorcas_flavors._pickle_tree import named_modules
from tensorcas_flavors._pickling import (
    dump_skeleton,
    is_pickle,
    load_skeleton,
    pinned_packages,
    try_back,
)
from tensorcas_flavors.generic._parts import JAX, StoredParts, TakenPart, TakenParts
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.base.content_cuts import MIN_BYTES, content_cuts
from tensorcas_mlflow.errors import AdapterError

_NUMBERS = (int, float, complex, np.generic)
_TEXTS = (str, bytes, bytearray, memoryview, PurePath)
_COME_BACK: set[str] = set()
"""Classes and functions that came back from pickles in this process; a save of an object with others loads it once."""
_BUILT_IN = {kind for kind in vars(builtins).values() if isinstance(kind, type)}
_NO_MODELS = (type(None), type, ModuleType, set, frozenset, *_NUMBERS, *_TEXTS)


class GenericAdapter(Adapter):
    """Adapter for objects of users' own classes, dicts of arrays, and models of other frameworks.

    * An array of numbers, strings or times is a row, and so is an array of JAX; many small similar arrays of numpy are
      one row. Strings and bytes of 4096 bytes or more are rows, and so are buffers that an object offers to pickle out
      of band. Rows of bytes are cut by content (`content_cuts`), so that a text that grows in the middle keeps most of
      its chunks.
    * Everything comes back as from a pickle: an object held twice is one object again, and two views of one array are
      two arrays. Arrays keep their memory order and their read-only flag.
    * Models without arrays, and models whose pickles change as a whole, are stored too; they cost more.
    """

    name: ClassVar[str] = "generic"

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take all objects but likely mistakes: None, a number, a string, bytes, a path, a set, a class, a module."""
        return not isinstance(model, _NO_MODELS)

    def extract(self, model: Any) -> dict[str, Array]:
        """Take an object apart; see `Adapter.extract`.

        Returns:
            Rows by the path of attributes, keys and positions that leads to the part (``layers.0.W``), or by a number
            for a part without a path (``__array__/0``, ``__bytes__/0``, ``__buffer__/0``); then the skeleton.

        Raises:
            AdapterError: Something in the object cannot be pickled.
        """
        parts, skeleton, memo = self._take_apart(model)
        facts, code = stored_facts(skeleton, memo)
        rows = {**parts.rows(), SKELETON: with_tail(skeleton, facts)}
        # Objects of different classes may name the same code, as a tensor of PyTorch and its storage do.
        kinds = {type(part) for part in memo.values()} - _BUILT_IN
        named = code | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
        if not named <= _COME_BACK:
            with on_cpu():
                try_back(self.name, model, rows, lambda copies: self._load(copies, memo))
            _COME_BACK.update(named)
        return rows

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Unpickle an object, or fill one that is alive.

        Args:
            tensors: Result of `extract`, read back.
            original: An object to fill, whose own `extract` gives the same names, dtypes and shapes. Its arrays and
                plain values become the stored ones; all else must be equal.
            options: There are none.

        Raises:
            AdapterError: The rows are not those of such an object, code that it needs is not importable, or they do not
                fit ``original``, which then stays as it was. A row fits if it is equal, or if ``original`` holds a
                writable array or bytearray there. Strings, and parts that pickling copies first, cannot be filled.
        """
        if original is not None:
            self._fill(original, tensors)
            return original
        return self._load(tensors)

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut rows of bytes, and the skeleton, by content."""
        return {
            name: content_cuts(row)
            for name, row in tensors.items()
            if row.dtype == np.uint8 and row.ndim == 1 and len(row) > MIN_BYTES
        }

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Tell whether there is a skeleton; each of them is a pickle."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the result of the model's ``predict``, or of the model itself if it has none and can be called.

        Args:
            model: Any object.
            data: The first argument, passed on unchanged.
            params: Keyword arguments; those that the method does not take are left out.

        Raises:
            AdapterError: There is nothing to call.
        """
        method = getattr(model, "predict", model)
        if not callable(method):
            raise AdapterError(
                self.name, f"a {type(model).__name__} has no predict and cannot be called: load it and use it yourself"
            )
        return method(data, **_known_params(method, params or {}))

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """List cloudpickle, numpy, and the packages whose classes and functions the model names.

        Imports that the model's own code makes when it runs are not seen.
        """
        skeleton = tensors[SKELETON]
        of_jax = {"jax"} if JAX.encode() in skeleton.tobytes() else set()
        return pinned_packages({"cloudpickle", "numpy"} | of_jax | named_modules(skeleton))

    def _load(self, tensors: Mapping[str, Array], live: Mapping[int, object] | None = None) -> Any:
        """Unpickle an object; with ``live``, the memo of its pickling, compare the classes of all objects."""
        parts = StoredParts(self.name, tensors)
        memo: dict[int, object] | None = None if live is None else {}
        model = load_skeleton(self.name, parts.row(SKELETON), parts.put_back, buffers=parts.buffers(), memo=memo)
        for number, part in (live or {}).items():
            again = (memo or {}).get(number, part)
            if type(again) is type(part) or type(part) is PickleBuffer:
                continue
            # Pickling changes the class of some dtypes: where longlong equals int64, it comes back as int64.
            if not (isinstance(part, np.dtype) and isinstance(again, np.dtype) and part == again):
                raise AdapterError(self.name, f"its {type(part).__name__} would come back as a {type(again).__name__}")
        return model

    def _take_apart(self, model: Any) -> tuple[TakenParts, Array, dict[int, object]]:
        parts = TakenParts(model)
        memo: dict[int, object] = {}
        skeleton = dump_skeleton(
            self.name, model, parts.take_out, take_buffer=parts.take_buffer, view_of=parts.view_of, memo=memo
        )
        return parts, skeleton, memo

    def _fill(self, original: Any, tensors: Mapping[str, Array]) -> None:
        parts, skeleton, memo = self._take_apart(original)
        facts = facts_of_skeleton(skeleton, memo)
        rows = parts.rows()
        stored = tensors.keys() - {SKELETON}
        if stored != rows.keys():
            differing = sorted(stored ^ rows.keys())
            raise misfit(self.name, f"only one of the two has {', '.join(map(repr, differing[:5]))}")
        for name, live in rows.items():
            row = tensors[name]
            if live.dtype != row.dtype or live.shape != row.shape:
                raise misfit(
                    self.name, f"{name!r} is {live.dtype}{live.shape} in it, and {row.dtype}{row.shape} is stored"
                )
        fill_values = plan_values(self.name, facts, read_tail(self.name, tensors.get(SKELETON)))
        changed: list[tuple[Array, Array]] = []
        for key, part in parts.parts.items():
            values = part.stored(tensors[part.name])
            if _has_same_bits(part.live, values):
                continue
            if not part.is_held or key in facts.fixed or not part.live.flags.writeable:
                raise misfit(self.name, f"{part.name!r} differs, and {_why_fixed(part, key in facts.fixed)}")
            changed.append((part.live, values))
        overlap = _may_overlap(part.live for part in parts.parts.values())
        before = [live.copy() for live, _ in changed] if overlap else []
        for live, values in changed:
            live[...] = values
        if overlap and not all(
            _has_same_bits(part.live, part.stored(tensors[part.name])) for part in parts.parts.values()
        ):
            for (live, _), values in zip(changed, before, strict=True):
                live[...] = values
            raise misfit(self.name, "arrays that share memory in it are stored with different values")
        fill_values()


def _why_fixed(part: TakenPart, is_fixed: bool) -> str:
    """Return why the memory of a part cannot be written to."""
    if is_fixed or not part.is_held or part.live.flags.writeable:
        return "cannot be changed in place"
    if isinstance(part.live.base, np.memmap):
        return f"maps the file {part.live.base.filename} for reading alone: map it with mode='r+' or 'c'"
    return "is read-only in it"


def _has_same_bits(one: Array, other: Array) -> bool:
    """Tell whether two arrays of one dtype and shape are equal to the bit."""
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
    return one.tobytes() == other.tobytes()


def _may_overlap(arrays: Iterable[Array]) -> bool:
    """Tell whether some of these arrays may share memory with each other."""
    extents = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays)
    return any(stop > start for (_, stop), (start, _) in pairwise(extents))


def _known_params(method: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the parameters that a method does not take, as far as its signature tells."""
    if not params:
        return {}
    try:
        takes = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a method written in C may have no signature
        return dict(params)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return dict(params)
    named = {each.name for each in takes if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in params.items() if name in named}

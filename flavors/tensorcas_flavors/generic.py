"""Any Python object that can be pickled: its arrays, long texts and buffers are rows, the rest is a pickle."""

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

from tensorcas_flavors._generic_facts import END, REMEDY, Facts, facts_of, plan_values, with_facts
from tensorcas_flavors._generic_parts import PartsToPutBack, TakenParts
from tensorcas_flavors._named_code import named_modules, pinned_packages
from tensorcas_flavors._pickling import dump_skeleton, is_pickle, load_skeleton, try_back
from tensorcas_flavors._plain_values import read_tail
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.content_cuts import MIN_BYTES, content_cuts
from tensorcas_mlflow.errors import AdapterError

_NUMBERS = (int, float, complex, np.generic)
_TEXTS = (str, bytes, bytearray, memoryview, PurePath)
_COME_BACK: set[str] = set()
"""Classes and functions of objects that were seen to come back from pickles of this process: others are tried."""
_BUILT_IN = {kind for kind in vars(builtins).values() if isinstance(kind, type)}
_NO_MODELS = (type(None), type, ModuleType, set, frozenset, *_NUMBERS, *_TEXTS)


class GenericAdapter(Adapter):
    """Takes what no other adapter takes: objects of users' own classes, dicts of arrays, models of other frameworks.

    * An array of numbers, strings or times is a row, and many small ones that are alike are one; as are strings and
      bytes of 4096 bytes or more, and buffers that an object offers to pickle out of band. Rows of bytes are cut by
      content (`content_cuts`), so that a text which grows in the middle is mostly what it was.
    * Everything comes back as pickle would bring it back: one object that is met twice is one object again, and two
      views of one array are two arrays. Memory order and the read-only flag of arrays are kept.
    * Models that hold no array, and models of which only a pickle's bytes change, are stored too; they cost more.
    """

    name: ClassVar[str] = "generic"

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take everything but what is a mistake: None, a number, a string, bytes, a path, a set, a class, a module."""
        return not isinstance(model, _NO_MODELS)

    def extract(self, model: Any) -> dict[str, Array]:
        """Take an object apart; see `Adapter.extract`.

        Returns:
            Rows by the path of attributes, keys and positions to what they hold (``layers.0.W``), or by a number if
            there is no such path (``__array__/0``, ``__bytes__/0``, ``__buffer__/0``); then the skeleton.

        Raises:
            AdapterError: Something in the object cannot be pickled.
        """
        parts, skeleton, facts, memo = self._take_apart(model)
        rows = {**parts.rows(), SKELETON: with_facts(skeleton, facts)}
        # Objects of different classes may name the same code: a tensor of PyTorch and its storage do.
        kinds = {type(part) for part in memo.values()} - _BUILT_IN
        named = facts.code | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
        if not named <= _COME_BACK:
            try_back(self.name, model, rows, lambda copies: self._load(copies, memo))
            _COME_BACK.update(named)
        return rows

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Unpickle an object, or fill one that is alive.

        Args:
            tensors: What `extract` returned, read back.
            original: An object whose own `extract` gives the same names, dtypes and shapes. Its arrays and plain values
                get the stored ones; all else must be equal.
            options: There are none.

        Raises:
            AdapterError: The rows are not those of such an object, code it needs is not importable, or they do not fit
                ``original``, which is then untouched. A row fits if it is equal, or if ``original`` holds a writable
                array or bytearray there: strings, and what pickling first makes a copy of, cannot be filled.
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
        """Tell whether there is a skeleton; all are pickles."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return what the model's ``predict`` says, or the model itself if it has none and can be called.

        Args:
            model: Any object.
            data: Passed on as it is, as the first argument.
            params: Keyword arguments; those that the method does not take are left out.

        Raises:
            AdapterError: There is nothing to call.
        """
        method = getattr(model, "predict", model)
        if not callable(method):
            raise AdapterError(
                self.name, f"a {type(model).__name__} has no predict and cannot be called: load it and use it yourself"
            )
        return method(data, **_known(method, params or {}))

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """Name cloudpickle, numpy, and the packages whose classes and functions the model refers to.

        What those import besides is theirs to require; what the model's own code imports when it runs is not seen.
        """
        return pinned_packages({"cloudpickle", "numpy"} | named_modules(tensors[SKELETON]))

    def _load(self, tensors: Mapping[str, Array], live: Mapping[int, object] | None = None) -> Any:
        """Unpickle an object; with ``live``, what its pickle remembers, see that each comes back as what it was."""
        parts = PartsToPutBack(self.name, tensors)
        memo: dict[int, object] | None = None if live is None else {}
        model = load_skeleton(self.name, parts.row(SKELETON), parts.put_back, buffers=parts.buffers(), memo=memo)
        for number, part in (live or {}).items():
            again = (memo or {}).get(number, part)
            if type(again) is type(part) or type(part) is PickleBuffer:
                continue
            # Pickling changes the class of some dtypes: where they are equal, longlong comes back as int64.
            if not (isinstance(part, np.dtype) and isinstance(again, np.dtype) and part == again):
                raise AdapterError(self.name, f"its {type(part).__name__} would come back as a {type(again).__name__}")
        return model

    def _take_apart(self, model: Any) -> tuple[TakenParts, Array, Facts, dict[int, object]]:
        parts = TakenParts(model)
        memo: dict[int, object] = {}
        skeleton = dump_skeleton(self.name, model, parts.take_out, take_buffer=parts.take_buffer, memo=memo)
        return parts, skeleton, facts_of(skeleton, memo), memo

    def _fill(self, original: Any, tensors: Mapping[str, Array]) -> None:
        parts, _, facts, _ = self._take_apart(original)
        rows = parts.rows()
        stored = tensors.keys() - {SKELETON}
        if stored != rows.keys():
            differing = sorted(stored ^ rows.keys())
            raise self._misfit(f"only one of the two has {', '.join(map(repr, differing[:5]))}")
        for name, live in rows.items():
            row = tensors[name]
            if live.dtype != row.dtype or live.shape != row.shape:
                raise self._misfit(f"{name!r} is {live.dtype}{live.shape} in it, and {row.dtype}{row.shape} is stored")
        fill_values = plan_values(self.name, facts, read_tail(self.name, tensors.get(SKELETON), END))
        changed: list[tuple[Array, Array]] = []
        for key, part in parts.parts.items():
            values = part.stored(tensors[part.name])
            if _is_same(part.live, values):
                continue
            if not part.is_held or key in facts.fixed or not part.live.flags.writeable:
                raise self._misfit(f"{part.name!r} differs, and cannot be changed in place")
            changed.append((part.live, values))
        overlap = _may_overlap(part.live for part in parts.parts.values())
        before = [live.copy() for live, _ in changed] if overlap else []
        for live, values in changed:
            live[...] = values
        if overlap and not all(_is_same(part.live, part.stored(tensors[part.name])) for part in parts.parts.values()):
            for (live, _), values in zip(changed, before, strict=True):
                live[...] = values
            raise self._misfit("arrays that share memory in it are stored with different values")
        fill_values()

    def _misfit(self, reason: str) -> AdapterError:
        return AdapterError(self.name, f"the stored model does not fit the original: {reason}: {REMEDY}")


def _is_same(one: Array, other: Array) -> bool:
    """Tell whether two arrays of one dtype and shape are equal to the bit."""
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
    return one.tobytes() == other.tobytes()


def _may_overlap(arrays: Iterable[Array]) -> bool:
    """Tell whether some of these arrays may share memory with each other."""
    extents = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays)
    return any(stop > start for (_, stop), (start, _) in pairwise(extents))


def _known(method: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the parameters that a method does not take, as far as it tells."""
    if not params:
        return {}
    try:
        takes = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # some of those written in C
        return dict(params)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return dict(params)
    named = {each.name for each in takes if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in params.items() if name in named}

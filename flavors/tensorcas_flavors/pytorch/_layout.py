"""Rows of a model, and the layout: everything about a model that its rows lack and JSON can express.

A skeleton is a layout, or a pickle, then a layout, then the layout's length as 8 bytes, little-endian. A layout is an
object with

* ``layout``: 2;
* ``storages``: the storages that are not simply the bytes of one row, each a list of ``[row, offset, strides]``;
* ``kinds``: the kind of each row that is no tensor of the row's own dtype;
* ``tree``: the stored value (see `_tree`);
* ``beyond``: facts of the parts that only the pickle can restore, if there is a pickle (see there);
* ``values``: the numbers of both in reading order. They come last, so that the bytes that change at every step lie
  behind those that do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors._pickling import MAGIC, is_pickle
from tensorcas_flavors.pytorch._tensors import (
    ROW_DTYPES,
    Geometry,
    StorageView,
    all_as_tensors,
    as_array,
    geometry,
    memory_refusal,
    name_of,
    pytorch_error,
    refusal,
    share,
    shared_storages,
    some,
    torch_dtype,
)
from tensorcas_mlflow.adapter import SKELETON, Array

if TYPE_CHECKING:
    import torch

ELSEWHERE = "__tensor__/"
"""Prefix of the row names of tensors in no state dict, and of tensors whose name is taken."""
ARRAY = "array"
"""Kind of a row that is a numpy array."""
NUMBERS = "numbers"
"""Kind of a row that is a long list of numbers."""
_MAX_NAME_CHARS = 1000  # 4,000 bytes of UTF-8, and a store takes 4,096
_NOT_IN_NAMES = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


class ModelRows:
    """Rows of one extraction, with their tensors. One tensor has one set of names, however often it is met."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.kinds: dict[str, str] = {}
        """Kind of each row that is no tensor of the row's own dtype: another dtype, `ARRAY` or `NUMBERS`."""
        self._places: dict[str, Geometry] = {}
        self._names: dict[Geometry, str] = {}
        self._tensors: list[torch.Tensor] = []  # alive, so that no later tensor gets their memory

    def place_of(self, name: str) -> Geometry | None:
        """Return the memory of a row's tensor; None if the row is no tensor."""
        return self._places.get(name)

    def find(self, tensor: torch.Tensor) -> str | None:
        """Return the first name of a tensor with the same elements in the same memory; None if it has no row."""
        return None if refusal(tensor) else self._names.get(geometry(tensor))

    def add(self, path: str, tensor: torch.Tensor) -> str | None:
        """Make a row for a tensor, unless it has one of that name, and return the row's name.

        Returns:
            None for a tensor that has no array of its own (`refusal`).

        Raises:
            AdapterError: The tensor's memory or dtype cannot be read.
        """
        if refusal(tensor) is not None:
            return None
        reason = None
        view = geometry(tensor)
        first = self._names.get(view)
        if first is None:
            reason = memory_refusal(tensor, view)
        if reason is not None:
            raise pytorch_error(f"tensor {path!r} {reason}")
        name = path if path.isprintable() and 0 < len(path) <= _MAX_NAME_CHARS else _clean(path)
        while name in self.arrays or name == SKELETON:
            if self._places.get(name) == view:
                return name
            name = ELSEWHERE + name
        if first is None:
            self._names[view] = name
            self.arrays[name] = as_array(tensor)
            self._tensors.append(tensor)
        else:
            self.arrays[name] = self.arrays[first]
        self._places[name] = view
        dtype = name_of(tensor.dtype)
        if dtype not in ROW_DTYPES:
            self.kinds[name] = dtype
        return name

    def add_array(self, path: str, array: Array, kind: str) -> str:
        """Make a row for an array and return the row's name."""
        name = _clean(path)
        while name in self.arrays or name == SKELETON:
            name = ELSEWHERE + name
        self.arrays[name] = array
        self.kinds[name] = kind
        return name

    def storages(self) -> tuple[tuple[StorageView, ...], ...]:
        """Return the storages of rows that share memory, or are not in row-major order."""
        return shared_storages(self._places)


def _clean(path: str) -> str:
    """Return a name for a row: printable, neither empty nor too long."""
    name = _NOT_IN_NAMES.sub(lambda match: f"%{ord(match[0]):02X}", path)
    return name[:_MAX_NAME_CHARS] or "%"


_VERSION = 2
_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
_KINDS = b',"kinds":'
_VALUES = b',"values":['
CUT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Everything about a model that its rows lack and that needs no pickle."""

    storages: tuple[tuple[StorageView, ...], ...] = ()
    """The storages that are not simply the bytes of one row."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each row that is no tensor of the row's own dtype."""
    tree: Any = None
    """The stored value, as `_tree` writes it."""
    values: list[Any] = field(default_factory=list)
    """The numbers of the tree, then those of ``beyond``."""
    beyond: list[Any] = field(default_factory=list)
    """Facts of the parts that only the pickle can restore."""
    version: int = _VERSION
    """Version of the tree; 0 if there is no skeleton."""

    def encode(self) -> bytes:
        """Return the layout as JSON in ASCII."""
        storages = [[[view.name, view.offset, view.stride] for view in views] for views in self.storages]
        facts = {"layout": _VERSION, "storages": storages, "kinds": self.kinds, "tree": self.tree}
        if self.beyond:
            facts["beyond"] = self.beyond
        return _ENCODE(facts | {"values": self.values}).encode("ascii")

    @classmethod
    def decode(cls, text: bytes) -> ModelLayout:
        """Read a layout. The text is not trusted.

        Raises:
            AdapterError: The text is not a layout.
        """
        try:
            facts = json.loads(text)
            version = facts["layout"]
            if type(version) is not int or version != _VERSION:
                raise ValueError(f"its version is {version!r}, and this release reads version {_VERSION}")
            storages = tuple(
                tuple(StorageView(name=name, offset=offset, stride=tuple(stride)) for name, offset, stride in views)
                for views in facts["storages"]
            )
            kinds, values, beyond = facts["kinds"], facts["values"], facts.get("beyond", [])
            if not isinstance(values, list) or not isinstance(beyond, list) or not isinstance(kinds, dict):
                raise ValueError("'values' or 'beyond' is no list, or 'kinds' no mapping")
            if not all(type(kind) is str for kind in kinds.values()):
                raise ValueError("a kind of row is no name")
            return cls(storages=storages, kinds=kinds, tree=facts["tree"], values=values, beyond=beyond)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise pytorch_error(f"the layout in the skeleton cannot be read: {error!r}") from error


def read_layout(rows: Mapping[str, Array]) -> ModelLayout:
    """Read the layout of a skeleton without its pickle; an empty one of version 0 if there is no skeleton.

    Raises:
        AdapterError: The skeleton holds no layout.
    """
    if SKELETON not in rows:
        return ModelLayout(version=0)
    text = rows[SKELETON].tobytes()
    start, stop = _span(text, is_pickle(rows[SKELETON]))
    return ModelLayout.decode(text[start:stop])


def skeleton_cuts(skeleton: Array) -> list[int]:
    """Return ends for chunks of a skeleton of at least `CUT_BYTES`; none if all of it may change at every step.

    Bytes that change at every step share no chunk with others.
    """
    text = skeleton.tobytes()
    start, stop = _span(text, is_pickle(skeleton))
    # JSON escapes the quotes of texts, so no text holds these bytes.
    values = text.rfind(_VALUES, start, stop) + len(_VALUES)
    if values >= stop - 2:
        return []
    return sorted({*range(CUT_BYTES, start, CUT_BYTES), start, values, len(text)} - {0})


@lru_cache(maxsize=1)
def torch_types(text: bytes) -> Mapping[str, str]:
    """Return the rows that are tensors of another dtype than the row's own, with that dtype. No tree is read.

    The steps of a training have one skeleton.
    """
    start, stop = _span(text, text.startswith(MAGIC))
    # Only storages come before, where no colon follows a text.
    at = text.find(_KINDS, start, stop)
    if at < 0 or text.startswith(b"{}", at + len(_KINDS)):
        return {}
    kinds, _ = json.JSONDecoder().raw_decode(text[at + len(_KINDS) : stop].decode("ascii"))
    return {name: kind for name, kind in kinds.items() if kind not in (ARRAY, NUMBERS)}


def as_tensors(rows: Mapping[str, Array], layout: ModelLayout) -> dict[str, torch.Tensor]:
    """Return the rows that are tensors, in the rows' memory where the layout allows it.

    Args:
        rows: Rows of a model by name, or some of them; storages leave out missing ones.
        layout: The layout of the model.

    Raises:
        AdapterError: An array has no tensor type, or the layout does not fit the rows.
    """
    dtypes: dict[str, torch.dtype] = {}
    problems: list[str] = []
    for name, row in rows.items():
        kind = layout.kinds.get(name)
        if name == SKELETON or kind in (ARRAY, NUMBERS):
            continue
        try:
            dtypes[name] = torch_dtype(row.dtype, kind)
        except ValueError as error:
            problems.append(f"row {name!r} {error}")
    if problems:
        raise pytorch_error("; ".join(some(problems)) + ": leave such rows out, or read them as arrays")
    shared: dict[str, torch.Tensor] = {}
    for views in layout.storages:
        present = [view for view in views if view.name in rows]
        names = ", ".join(repr(view.name) for view in present)
        try:
            if any(view.name not in dtypes for view in present):
                raise ValueError("one of them is no tensor")
            shared |= share(rows, present, dtypes)
        except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
            raise pytorch_error(f"the layout in the skeleton does not fit the rows {names}: {error}") from error
    apart = [name for name in dtypes if name not in shared] if shared else list(dtypes)
    made = all_as_tensors([rows[name] for name in apart], [dtypes[name] for name in apart])
    tensors = dict(zip(apart, made, strict=True)) | shared
    return {name: tensors[name] for name in dtypes}


def check_row(rows: Mapping[str, Array], name: str, dtype: str, shape: Sequence[int]) -> None:
    """Check that a row exists and has the stored dtype and shape.

    Args:
        rows: The rows by name.
        name: The row's name.
        dtype: The dtype of the array.
        shape: Its shape.

    Raises:
        AdapterError: The row is missing or another.
    """
    row = rows.get(name)
    if row is None:
        raise pytorch_error(f"tensor {name!r} is missing: read all tensors of the checkpoint")
    if _name_of_row(row.dtype) != dtype or row.shape != tuple(shape):
        raise pytorch_error(f"tensor {name!r} was stored as {dtype} {tuple(shape)}, not {row.dtype} {row.shape}")


@lru_cache(maxsize=128)
def _name_of_row(dtype: np.dtype[Any]) -> str:
    """Return the name of an array's dtype; a lookup without a Python call after the first."""
    return dtype.name


def _span(text: bytes, after_pickle: bool) -> tuple[int, int]:
    """Return start and stop of the layout in a skeleton."""
    if not after_pickle:
        return 0, len(text)
    stop = len(text) - 8
    return max(0, stop - int.from_bytes(text[-8:], "little")), max(0, stop)

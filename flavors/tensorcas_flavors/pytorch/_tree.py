"""Tree of a stored value, as JSON: containers and plain values themselves, tensors and arrays by their row names.

A *node* is JSON. Texts, true, false and null stand for themselves, a list for a list, and ``0`` for the next number of
the list of values, which alone holds numbers: the bytes that change at every step lie by themselves. All else is an
object:

* ``{"tuple": [node…]}``, ``size`` (of torch), ``set``, ``frozenset``;
* ``{"dict": [[key, node]…]}``, ``OrderedDict``, ``defaultdict`` (with its ``factory``), ``Counter``; a key is a text, a
  whole number, true, false or null, or an object like a node, with its numbers in place as ``{"value": …}``.
  ``metadata`` and ``attributes`` are those of an ordered dict, as JSON or as a node;
* ``{"text": hex}`` for a text with surrogates, ``{"bytes": hex}``, ``bytearray``, ``{"dtype": name}``,
  ``{"device": name}``, ``{"bytesio": hex, "at": position}``;
* ``{"deque": [node…], "maxlen": number}``, ``{"path": [class, node]}`` of `pathlib`, and ``{"plain": JSON}`` for dates,
  times and decimals as `tensorcas_flavors._facts` writes them;
* ``{"generator": kind, "engine": name, "state": node, "seeds": node}`` for a random generator (`GeneratorState`);
* ``{"tensor": [row, dtype, shape]}``, with ``grad`` if it requires one, ``parameter`` if it is one, ``is`` if it is the
  very object of that number, and ``attributes``, a node, if it has any;
* ``{"made": kind, "of": node}`` for a tensor that is made of plain ones (`_kinds`), with ``grad``, ``parameter`` and
  ``attributes`` as above;
* ``{"array": [row, dtype, shape]}``, with ``fortran`` for Fortran order;
* ``{"ints": row}`` and ``floats`` for a long list of numbers, with ``tuple`` if it is one;
* ``{"ref": number}`` for an object met before; mutable objects are numbered from 0 as they are met;
* ``{"object": class, "state": node}`` for an object with ``state_dict``, with ``beside`` for a module's tensors that
  its state dict leaves out, ``beyond`` with a number, and ``parameters``, a list of ``[path, shape]``, for an object
  with the groups of parameters of an optimizer: in order, each with its path in the state or null. In its state,
  ``{"parameter": path}`` is a key that is a parameter;
* ``{"namedtuple": class, "fields": [text…], "items": [node…]}``, which only the pickle can restore;
* ``{"opaque": class, "beyond": number}`` for all else that only the pickle can restore.

The list ``beyond`` follows the tree and is read after it, so that tensors get their names from the tree. By number it
has

* of a module, for it and each of its submodules ``[path, class, [[attribute, node]…], [[tensor, node of its
  attributes]…]]``;
* of an opaque value null, or its facts: ``values``, ``rest`` and ``sections`` of `tensorcas_flavors._facts`, and
  ``taken``, a list of the nodes of its parts; and ``flat``, a node, of a tensor that its class can make of its parts
  (`Flat`).

A value is a number of JSON, or a text: ``i`` and hex digits for a whole number of any size, ``f`` and ``c`` and the
bits of a float or of the two of a complex number, ``s``, a dtype, a colon and the bytes of a numpy scalar.
"""

from __future__ import annotations

import io
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from tensorcas_flavors._facts import Encoder, Facts, NotPlainError, decode, facts_json, is_taken
from tensorcas_flavors.pytorch._kinds import Flat, as_made, flattened, put_together, taken_apart, why_refused
from tensorcas_flavors.pytorch._layout import ARRAY, ELSEWHERE, NUMBERS, ModelLayout, ModelRows, check_row
from tensorcas_flavors.pytorch._objects import (
    TORCH,
    GeneratorState,
    attributes_of,
    facts_and_parts,
    generator_state,
    is_in_place_of,
    is_live,
    is_named_tuple,
    is_part,
    is_tensor,
    make_generator,
    modules_in,
    parameters_of,
    plain_view,
    tensors_of,
    torch_attributes,
    unwrap,
)
from tensorcas_flavors.pytorch._tensors import name_of, pytorch_error, refusal, row_dtype
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base import dtypes
from tensorcas_mlflow.errors import AdapterError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, OrderedDict, Counter)
}
"""Factories of a defaultdict that needs no pickle."""
MANY = 32
"""Lists of at least so many whole numbers or floats are a row."""
_ATOMS = frozenset([str, int, bool, type(None)])
_TEXT = frozenset([str])
_IN_KEYS = _ATOMS | {float, complex, bytes, tuple, frozenset}


class TreeWriter:
    """Writer of one tree, which makes the rows that the tree needs."""

    def __init__(self, rows: ModelRows, model: Any, *, fills: bool) -> None:
        """Begin a tree.

        Args:
            rows: Takes the rows of the tree.
            model: The whole value.
            fills: Whether to refuse a state dict that could not fill a live object.
        """
        import torch

        self.values: list[Any] = []
        """The numbers of the tree."""
        self.needs_pickle = False
        """True if only a pickle can restore some part of the tree."""
        self.unwrapped: dict[int, Any] = {}
        """Wrapped module, by identity of the wrapper."""
        self.arrays: dict[int, str] = {}
        """Row of each numpy array, by identity."""
        self.generators: dict[int, str] = {}
        """Row of the state of each torch generator, by identity."""
        self._later: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        """Nodes that refer to ``beyond``, and writers of their entries there."""
        self._rows = rows
        self._model = model
        self._fills = fills
        self._names: dict[int, str] | None = None
        self._submodules: dict[int, list[tuple[str, torch.nn.Module]]] = {}
        self._in_state = 0
        """Number of the objects around a part whose state dict it belongs to."""
        self._in_made_state = 0
        """Number of those that are no module: a load makes their tensors anew, and needs no live ones for it."""
        self._parameter = torch.nn.Parameter
        self._module = torch.nn.Module
        self._scheduler = torch.optim.lr_scheduler.LRScheduler
        self._views: dict[int, Array] = {}
        self._kept_arrays: list[Array] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # numbered objects stay alive, so that no later object gets their ids
        self._writers: dict[type, Callable[[Any, str], Any]] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            str: self._text,
            bool: _itself,
            type(None): _itself,
            int: self._number,
            float: self._number,
            complex: self._number,
            list: self._list,
            tuple: self._list,
            torch.Size: self._list,
            dict: self._mapping,
            OrderedDict: self._mapping,
            defaultdict: self._mapping,
            Counter: self._mapping,
            set: self._set,
            frozenset: self._set,
            bytes: lambda value, path: {"bytes": value.hex()},
            bytearray: lambda value, path: self._met(value) or {"bytearray": value.hex()},
            np.ndarray: self._array,
            io.BytesIO: self._bytesio,
            np.memmap: lambda value, path: self._array(self.view_of(value), path),
            deque: self._deque,
            torch.dtype: lambda value, path: {"dtype": str(value)[6:]},
            torch.device: lambda value, path: {"device": str(value)},
        }

    def node(self, value: Any, path: str) -> Any:
        """Write a value.

        Args:
            value: Anything.
            path: Its path, which names its rows.

        Raises:
            AdapterError: A tensor in the value has no exact array, or ``state_dict()`` fails.
        """
        write = self._writers.get(type(value))
        return write(value, path) if write is not None else self._other(value, path)

    def beyond(self) -> list[Any]:
        """Write the entries beyond the tree that was written.

        Raises:
            AdapterError: A tensor there has no exact array.
        """
        entries: list[Any] = []
        while self._later:
            later, self._later = self._later, []
            for node, write in later:
                node["beyond"] = len(entries)
                entries.append(write())
        return entries

    def _met(self, value: object) -> Any:
        """Return a reference to an object that was met before; number any other and return None."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number != len(self._kept):
            return {"ref": number}
        self._kept.append(value)
        return None

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        path = path or "tensor"
        found = self._rows.find(tensor) if path.startswith(ELSEWHERE) else None
        row = found or self._rows.add(path, tensor)
        if row is None:
            return self._met(tensor) or self._made_tensor(tensor, path)
        node: dict[str, Any] = {"tensor": [row, name_of(tensor.dtype), tensor.shape]}
        if tensor.requires_grad:
            node["grad"] = True
        if type(tensor) is self._parameter:
            node["parameter"] = True
        met = self._met(tensor)
        if met is not None:
            node["is"] = met["ref"]
        elif attributes := vars(tensor):
            node["attributes"] = self.node(dict(attributes), elsewhere(path))
        return node

    def _made_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        apart = taken_apart(tensor)
        if apart is None:
            raise pytorch_error(f"tensor {path!r} {refusal(tensor)}")
        node = {"made": apart[0], "of": self.node(apart[1], elsewhere(path))}
        if tensor.requires_grad:
            node["grad"] = True
        if type(tensor) is self._parameter:
            node["parameter"] = True
        if attributes := vars(tensor):
            node["attributes"] = self.node(dict(attributes), elsewhere(path))
        return node

    def _text(self, text: str, path: str) -> Any:
        return text if text.isascii() or _is_utf8(text) else {"text": text.encode("utf-8", "surrogatepass").hex()}

    def _number(self, number: complex, path: str) -> int:
        self.values.append(value_of(number))
        return 0

    def _list(self, values: Any, path: str) -> Any:
        kind = type(values)
        met = self._met(values) if kind is list else None
        if met is not None:
            return met
        if len(values) >= MANY and kind in (list, tuple):
            many = self._many(values, path)
            if many is not None:
                return many
        nodes = [self.node(value, f"{path}.{n}" if path else str(n)) for n, value in enumerate(values)]
        return nodes if kind is list else {"tuple" if kind is tuple else "size": nodes}

    def _many(self, values: Any, path: str) -> Any:
        kinds = set(map(type, values))
        if kinds not in ({int}, {float}):
            return None
        tag, dtype = ("ints", np.int64) if kinds == {int} else ("floats", np.float64)
        try:
            row = self._rows.add_array(path, np.array(values, dtype=dtype), NUMBERS)
        except OverflowError:
            return None
        return {tag: row} if type(values) is list else {tag: row, "tuple": True}

    def _mapping(self, mapping: dict[Any, Any], path: str) -> Any:
        kind = type(mapping)
        node: dict[str, Any] = {kind.__name__: None}
        if kind is defaultdict:
            factory = mapping.default_factory  # type: ignore[attr-defined]
            node["factory"] = None if factory is None else getattr(factory, "__name__", None)
            if factory is not None and FACTORIES.get(node["factory"]) is not factory:
                return self._opaque(mapping, path)
        names: dict[Any, str] = {}
        if not (_ATOMS.issuperset(map(type, mapping)) or all(map(_is_key, mapping))):
            names = {key: name for key in mapping if (name := self._name_of(key)) is not None}
            if not all(key in names or _is_key(key) for key in mapping):
                return self._opaque(mapping, path)
        met = self._met(mapping)
        if met is not None:
            return met
        prefix = path + "." if path else ""
        if names:
            pairs = [(names.get(key), key, value) for key, value in mapping.items()]
            node[kind.__name__] = [
                [self._key(key) if name is None else {"parameter": name}, self.node(value, f"{prefix}{name or key}")]
                for name, key, value in pairs
            ]
        else:
            node[kind.__name__] = [
                [self._key(key), self.node(value, f"{prefix}{key}")] for key, value in mapping.items()
            ]
        attributes = vars(mapping) if kind is OrderedDict or kind is Counter else None
        if attributes:
            metadata = attributes.get("_metadata")
            if len(attributes) == 1 and type(metadata) is OrderedDict and is_json(dict(metadata)):
                node["metadata"] = metadata
            else:
                node["attributes"] = self.node(dict(attributes), path)
        return node

    def _name_of(self, key: Any) -> str | None:
        """Return the path of a parameter of a module; None for anything else, and outside of state dicts."""
        if not self._in_state or type(key) in _ATOMS or not is_tensor(key):
            return None
        return self._parameter_names().get(id(key))

    def _parameter_names(self) -> dict[int, str]:
        """Return the first path of each parameter and buffer of the modules of the model, by identity."""
        if self._names is None:
            self._names = {}
            for path, module in modules_in(self._model):
                start = path + "." if path else ""
                for name, tensor in tensors_of(self._modules_of(module)):
                    self._names.setdefault(id(tensor), start + name)
        return self._names

    def _modules_of(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Return a module and its submodules, under each of their names."""
        found = self._submodules.get(id(module))
        if found is None:
            found = self._submodules[id(module)] = list(module.named_modules(remove_duplicate=False))
        return found

    def _key(self, key: Any) -> Any:
        kind = type(key)
        if kind is str and not (key.isascii() or _is_utf8(key)):
            return self._text(key, "")
        if kind is int and not -(2**63) <= key < 2**63:
            return {"value": value_of(key)}
        if kind in _ATOMS:
            return key
        if kind is float or kind is complex:
            return {"value": value_of(key)}
        if kind is bytes:
            return {"bytes": key.hex()}
        # The numbers of a key stay with it, because they name the entry.
        return {"tuple" if kind is tuple else "frozenset": [self._inner_key(part) for part in key]}

    def _inner_key(self, key: Any) -> Any:
        return {"value": value_of(key)} if type(key) in (int, float, complex) else self._key(key)

    def _set(self, values: Any, path: str) -> Any:
        if not all(map(_is_key, values)):
            return self._opaque(values, path)
        met = self._met(values) if type(values) is set else None
        if met is not None:
            return met
        # The order of a set of texts differs from process to process.
        return {type(values).__name__: sorted(map(self._inner_key, values), key=repr)}

    def view_of(self, array: Array) -> Array:
        """Return the plain array that is stored in place of one of a subclass, the same one each time."""
        if id(array) not in self._views:
            self._views[id(array)] = plain_view(array)
            self._kept_arrays.append(array)
        return self._views[id(array)]

    def _array(self, array: Array, path: str) -> Any:
        try:
            dtype = dtypes.dtype_name(array.dtype)
        except ValueError:
            return self._opaque(array, path)
        met = self._met(array)
        if met is not None:
            return met
        row = self.arrays[id(array)] = self._rows.add_array(path, array, ARRAY)
        node: dict[str, Any] = {"array": [row, dtype, array.shape]}
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            node["fortran"] = True
        return node

    def _other(self, value: Any, path: str) -> Any:
        if is_tensor(value):
            reason = why_refused(value)
            if reason is not None:
                raise pytorch_error(f"tensor {path!r} {reason}")
            return self._opaque(value, path)
        inner = unwrap(value)
        if inner is not value:
            self.unwrapped[id(value)] = inner
            self._kept_arrays.append(value)
            return self.node(inner, path)
        if is_live(value):
            return self._met(value) or self._live(value, path)
        kind = type(value)
        if is_taken(kind) and not isinstance(value, np.generic):
            try:
                return {"plain": Encoder().encode(value)}
            except NotPlainError:
                return self._opaque(value, path)
        if isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
            return {"path": [kind.__name__, self._text(str(value), path)]}
        if is_named_tuple(kind) and not getattr(value, "__dict__", None):
            self._refuse_in_state(value, path)
            self.needs_pickle = True
            items = [self.node(part, f"{path}.{name}") for name, part in zip(kind._fields, value, strict=True)]
            return {"namedtuple": _qualname(value), "fields": list(kind._fields), "items": items}
        generator = generator_state(value)
        if generator is not None:
            return self._met(value) or self._generator(value, generator, path)
        if isinstance(value, np.generic) and value.dtype.fields is None:
            try:
                text = f"s{dtypes.dtype_name(value.dtype)}:{value.tobytes().hex()}"
            except ValueError:
                return self._opaque(value, path)
            self.values.append(text)
            return 0
        return self._opaque(value, path)

    def _live(self, value: Any, path: str) -> Any:
        self.needs_pickle = True
        try:
            state = value.state_dict()
        except Exception as error:  # state_dict() is code of the object's class, which may raise anything
            raise pytorch_error(f"the {type(value).__name__} {path!r} gives no state_dict(): {error}") from error
        # A scheduler is filled with what a live one has in place of values that only the pickle restores.
        is_filled = not isinstance(value, self._scheduler)
        must_be_made = is_filled and not isinstance(value, self._module)
        self._in_state += is_filled
        self._in_made_state += must_be_made
        try:
            node = {"object": _qualname(value), "state": self.node(state, path)}
        finally:
            self._in_state -= is_filled
            self._in_made_state -= must_be_made
        parameters = parameters_of(value)
        if parameters is not None:
            names = self._parameter_names()
            node["parameters"] = [
                [names.get(id(each)), None if each.is_nested else list(each.shape)] for each in parameters
            ]
        if isinstance(value, self._module):
            prefix = path + "." if path else ""
            beside = []
            modules = self._modules_of(value)
            for name, part in tensors_of(modules):
                if name not in state:
                    beside.append([name, self.node(part, prefix + name)])
            if beside:
                node["beside"] = beside
            self._later.append((node, lambda: self._modules(modules, path)))
        return node

    def _modules(self, modules: Iterable[tuple[str, torch.nn.Module]], path: str) -> list[Any]:
        """Write the attributes of modules that are in no state dict.

        Args:
            modules: A module and its submodules, with their names.
            path: Path of the module.
        """
        entries = []
        start = elsewhere(path)
        for name, part in modules:
            prefix = f"{start}{'.' if path else ''}{name}{'.' if name else ''}"
            attributes, is_itself = attributes_of(part)
            written = [
                [key, self.node(value, prefix + key)]
                for key, value in attributes.items()
                if is_itself or type(value) in self._writers
            ]
            of_tensors = [
                [key, self.node(dict(vars(tensor)), prefix + key)]
                for tensors in (part._parameters, part._buffers)
                for key, tensor in tensors.items()
                if tensor is not None and vars(tensor)
            ]
            entries.append([name, type(part).__name__, written, of_tensors])
        return entries

    def _generator(self, value: object, state: GeneratorState, path: str) -> Any:
        state_node = self.node(state.state, path)
        if isinstance(state.state, np.ndarray):
            self.generators[id(value)] = state_node["array"][0]
        seeds = self.node(state.seeds, f"{path}.seeds")
        return {"generator": state.kind, "engine": state.engine, "state": state_node, "seeds": seeds}

    def _bytesio(self, value: io.BytesIO, path: str) -> Any:
        return self._met(value) or {"bytesio": value.getvalue().hex(), "at": value.tell()}

    def _deque(self, values: deque[Any], path: str) -> Any:
        met = self._met(values)
        if met is not None:
            return met
        nodes = [self.node(value, f"{path}.{n}" if path else str(n)) for n, value in enumerate(values)]
        return {"deque": nodes, "maxlen": values.maxlen}

    def _opaque(self, value: object, path: str) -> Any:
        self._refuse_in_state(value, path)
        self.needs_pickle = True
        met = self._met(value)
        if met is not None:
            return met
        node = {"opaque": _qualname(value), "beyond": None}
        must_be_made = bool(self._in_made_state and self._fills)
        self._later.append((node, lambda: self._facts(value, path, must_be_made=must_be_made)))
        return node

    def _refuse_in_state(self, value: object, path: str) -> None:
        """Refuse a part of a state dict that only a pickle can restore: no object could be filled with it."""
        if self._in_state and self._fills and not is_tensor(value):  # a live tensor of a class takes its parts
            raise _only_in_pickle(value, path)

    def _facts(self, value: object, path: str, *, must_be_made: bool) -> Any:
        try:
            facts, parts = facts_and_parts(value, is_part, self.view_of)
        except AdapterError:
            return None  # it cannot be pickled, and the pickle of the whole will raise that
        start = elsewhere(path)
        taken = [self.node(part, f"{start}.{n}" if path else f"{start}{n}") for n, part in enumerate(parts)]
        flat = self._flat(value, facts, parts, start) if is_tensor(value) else {}
        if must_be_made and not flat:
            raise _only_in_pickle(value, path)
        return facts_json(facts) | {"taken": taken} | flat

    def _flat(self, tensor: Any, facts: Facts, parts: list[Any], path: str) -> dict[str, Any]:
        """Write what its class needs to make a tensor again, if that makes the same tensor."""
        try:
            flat = flattened(tensor)
            again, parts_again = (None, []) if flat is None else facts_and_parts(flat.made(), is_part)
        except AdapterError:
            return {}
        if flat is None or again is None or facts_json(facts) != facts_json(again):
            return {}
        if len(parts) != len(parts_again) or not all(map(is_in_place_of, parts, parts_again)):
            return {}
        return {"flat": self.node(flat._asdict(), path)}


def _only_in_pickle(value: object, path: str) -> AdapterError:
    """Return the error for a part of a state dict with which no live object could be filled."""
    return pytorch_error(
        f"{path!r} is a {type(value).__name__} in the state dict of a live object, which only a pickle can restore, so "
        "into= could not fill such an object: give it plain values, tensors, arrays, bytes or a BytesIO there (a "
        "module by get_extra_state()), or set TENSORCAS_TRY_FILL=false to store what only a load without into= restores"
    )


def elsewhere(path: str) -> str:
    """Return the path of a tensor in an object but in no state dict."""
    return path if path.startswith(ELSEWHERE) else ELSEWHERE + path


def value_of(number: complex) -> Any:
    """Return a number in a form whose bits and type JSON keeps."""
    if type(number) is int:
        return number if -(2**63) <= number < 2**63 else f"i{number:x}"
    if type(number) is float:
        return number if math.isfinite(number) else "f" + struct.pack(">d", number).hex()
    return "c" + struct.pack(">dd", number.real, number.imag).hex()


def is_json(value: object) -> bool:
    """Tell whether JSON keeps a value exactly, types included."""
    if type(value) is dict:
        return _TEXT.issuperset(map(type, value)) and all(map(is_json, value.values()))
    if type(value) is list:
        return all(map(is_json, value))
    return value is None or type(value) in (bool, str) or (type(value) is int and abs(value) < 2**63)


def _itself(value: Any, path: str) -> Any:
    return value


def _is_key(value: object) -> bool:
    kind = type(value)
    return kind in _IN_KEYS and (kind not in (tuple, frozenset) or all(map(_is_key, value)))  # type: ignore[call-overload]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _qualname(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Object that was stored with its state dict: a module, an optimizer or the like."""

    kind: str
    """Its class."""
    state: Any
    """Its state dict."""
    beside: dict[str, torch.Tensor | PickleOnly] = field(default_factory=dict)
    """A module's tensors that its state dict leaves out, by dotted path."""
    modules: Beyond[list[ModuleFacts]] = field(default_factory=lambda: Beyond(number=None))
    """Attributes of a module and its submodules."""
    parameters: list[tuple[str | None, tuple[int, ...] | None]] = field(default_factory=list)
    """Path, or None, and shape of each parameter of an optimizer, in the order of its groups."""


class ParameterKey(NamedTuple):
    """Key of a mapping that was a parameter of a module."""

    name: str
    """Its path in the stored value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleOnly:
    """Value that only a pickle can restore."""

    kind: str
    """Its class."""
    facts: Beyond[OpaqueFacts] = field(default_factory=lambda: Beyond(number=None))
    """Its facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedItems:
    """Named tuple, which only a pickle can restore."""

    kind: str
    """Its class."""
    fields: list[str]
    """Names of the items."""
    items: list[Any]
    """The items, as the tree has them."""


_Entry = TypeVar("_Entry")


@dataclass(slots=True, kw_only=True)
class Beyond(Generic[_Entry]):
    """Reference from the tree to an entry that is read after it."""

    number: int | None
    """Number of the entry; None if the store has none."""
    entry: _Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """Attributes of one module that are in no state dict."""

    path: str
    """Names of the submodules that lead to it."""
    kind: str
    """Name of its class."""
    attributes: dict[str, Any]
    of_tensors: dict[str, dict[str, Any]]
    """Attributes of its parameters and buffers, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueFacts:
    """Facts of a value that only a pickle can restore."""

    facts: dict[str, Any]
    """Result of `facts_json`."""
    taken: list[Any]
    """The parts that were taken out of it."""
    flat: Flat | None = None
    """Of a tensor, what its class needs to make it."""


def read_stored(
    layout: ModelLayout, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], *, skip_missing: bool = False
) -> Any:
    """Read a stored value.

    Args:
        layout: The layout.
        rows: The rows by name.
        tensors: The rows that are tensors, as tensors.
        skip_missing: Leave out entries whose rows are missing.

    Returns:
        The value in new containers, with `StoredObject` for objects, and `PickleOnly` and `NamedItems` for values that
        only a pickle can restore.

    Raises:
        AdapterError: The layout is damaged, or rows are missing or do not fit.
    """
    if layout.version == 0:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(ELSEWHERE)}
    try:
        return _TreeReader(layout, rows, tensors, skip_missing).read()
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        StopIteration,
        struct.error,
        FormatError,
    ) as error:
        raise pytorch_error(f"the layout in the skeleton is damaged: {error!r}") from error


def find_opaque(value: Any, *, objects_too: bool = False) -> PickleOnly | NamedItems | StoredObject | None:
    """Return one part of a stored value that only a pickle can restore, or None.

    Args:
        value: Result of `read_stored`.
        objects_too: Whether an object counts itself; if not, the values of its state dict count.
    """
    stack, seen = [value], set()
    while stack:
        part = stack.pop()
        if isinstance(part, PickleOnly | NamedItems) or (objects_too and isinstance(part, StoredObject)):
            return part
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            stack += part.values()
        elif isinstance(part, list | tuple | deque):
            stack += part
        elif isinstance(part, StoredObject):
            stack.append(part.state)
    return None


def with_flat_tensors(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Return a stored value with the tensors that their classes can make, in place of those that only a pickle can.

    Args:
        value: Result of `read_stored`. Without such tensors it is returned as it is.
        made: The parts that are made already, by identity; a part in two places stays one.

    Raises:
        AdapterError: A class is missing, or refuses.
    """
    if made is None:
        if find_opaque(value) is None:
            return value
        made = {}
    if id(value) in made:
        return made[id(value)]
    kind = type(value)
    changed: Any = value
    if isinstance(value, PickleOnly):
        flat = None if value.facts.entry is None else value.facts.entry.flat
        if flat is not None:
            changed = flat._replace(parts=with_flat_tensors(flat.parts, made)).made()
    elif kind is tuple:
        changed = tuple(with_flat_tensors(part, made) for part in value)
    elif kind in (dict, OrderedDict, defaultdict):
        changed = defaultdict(value.default_factory) if kind is defaultdict else kind()
        made[id(value)] = changed
        changed.update((key, with_flat_tensors(part, made)) for key, part in value.items())
        if kind is OrderedDict:
            vars(changed).update(vars(value))
    elif kind in (list, deque):
        changed = deque(maxlen=value.maxlen) if kind is deque else []
        made[id(value)] = changed
        changed.extend(with_flat_tensors(part, made) for part in value)
    made[id(value)] = changed
    return changed


class _Absent:
    """Placeholder for a tensor whose row is missing."""


_ABSENT = _Absent()


class _TreeReader:
    """Reader of one tree; nothing in it is trusted."""

    def __init__(
        self, layout: ModelLayout, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], skip_missing: bool
    ) -> None:
        import torch

        self._torch = torch
        self._tree = layout.tree
        self._beyond = layout.beyond
        self._wanted: dict[int, Beyond[Any]] = {}
        self._values = iter(layout.values)
        self._kinds = layout.kinds
        self._rows = rows
        self._tensors = tensors
        self._skip_missing = skip_missing
        self._made: list[Any] = []
        self._readers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "tuple": lambda node: tuple(self._nodes(node["tuple"])),
            "size": lambda node: torch.Size(self._nodes(node["size"])),
            "set": lambda node: self._number({_key(part) for part in _list(node["set"])}),
            "frozenset": lambda node: frozenset(_key(part) for part in _list(node["frozenset"])),
            "dict": lambda node: self._mapping(node, "dict", {}),
            "OrderedDict": lambda node: self._mapping(node, "OrderedDict", OrderedDict()),
            "Counter": lambda node: self._mapping(node, "Counter", Counter()),
            "defaultdict": self._defaultdict,
            "text": lambda node: bytes.fromhex(node["text"]).decode("utf-8", "surrogatepass"),
            "bytes": lambda node: bytes.fromhex(node["bytes"]),
            "bytearray": lambda node: self._number(bytearray.fromhex(node["bytearray"])),
            "bytesio": self._bytesio,
            "dtype": lambda node: _of_kind(getattr(torch, node["dtype"]), torch.dtype),
            "device": lambda node: torch.device(_of_kind(node["device"], str)),
            "tensor": self._tensor,
            "made": self._made_tensor,
            "array": self._array,
            "ints": lambda node: self._many(node, node["ints"], "int64"),
            "floats": lambda node: self._many(node, node["floats"], "float64"),
            "ref": lambda node: self._made[_index(node["ref"])],
            "object": self._object,
            "opaque": self._opaque,
            "namedtuple": lambda node: NamedItems(
                kind=_of_kind(node["namedtuple"], str), fields=_list(node["fields"]), items=self._nodes(node["items"])
            ),
            "deque": self._deque,
            "path": self._path,
            "plain": lambda node: decode("pytorch", node["plain"]),
            "generator": self._generator,
        }

    def read(self) -> Any:
        """Read the tree."""
        value = self._node(self._tree)
        self._read_beyond()
        if next(self._values, _ABSENT) is not _ABSENT:
            raise ValueError("there are more numbers than the tree uses")
        return value

    def _node(self, node: Any) -> Any:
        kind = type(node)
        if kind is dict:
            return self._readers[next(iter(node))](node)
        if kind is list:
            made: list[Any] = self._number([])
            made.extend(self._nodes(node))
            return made
        if kind is int:
            return _value(next(self._values))
        if kind is float:
            raise ValueError("a number stands in the tree")
        return node

    def _nodes(self, nodes: Any) -> list[Any]:
        values = [self._node(node) for node in _list(nodes)]
        if any(value is _ABSENT for value in values):
            raise ValueError("a tensor that has no name is missing: read all tensors of the checkpoint")
        return values

    def _number(self, value: Any) -> Any:
        self._made.append(value)
        return value

    def _reserve(self) -> int:
        self._made.append(None)
        return len(self._made) - 1

    def _mapping(self, node: dict[str, Any], tag: str, made: Any) -> Any:
        self._number(made)
        pairs = _list(node[tag])
        n_absent = 0
        for key, part in pairs:
            value = self._node(part)
            if value is _ABSENT:
                n_absent += 1
            else:
                made[key if type(key) is str else _key(key)] = value
        if len(made) + n_absent != len(pairs):
            raise ValueError("a mapping has two entries of one name")
        if "metadata" in node:
            vars(made)["_metadata"] = OrderedDict(_of_kind(node["metadata"], dict))
        elif "attributes" in node:
            vars(made).update(_of_kind(self._node(node["attributes"]), dict))
        return made

    def _defaultdict(self, node: dict[str, Any]) -> Any:
        factory = node["factory"]
        return self._mapping(node, "defaultdict", defaultdict(None if factory is None else FACTORIES[factory]))

    def _tensor(self, node: dict[str, Any]) -> Any:
        name, dtype, shape = node["tensor"]
        place = None
        if "is" not in node:
            place = len(self._made)
            self._made.append(None)
        if self._skip_missing and name not in self._rows:
            value: Any = _ABSENT
        elif "is" in node:
            value = _of_kind(self._made[_index(node["is"])], self._torch.Tensor)
        else:
            check_row(self._rows, name, _dtype_of_row(dtype), shape)
            grad = node.get("grad") is True
            value = self._tensors[name].detach()
            value = self._torch.nn.Parameter(value, grad) if "parameter" in node else value.requires_grad_(grad)
        if place is not None:
            self._made[place] = value
            if "attributes" in node:
                attributes = self._node(node["attributes"])
                if value is not _ABSENT:
                    vars(value).update(_of_kind(attributes, dict))
        return value

    def _made_tensor(self, node: dict[str, Any]) -> Any:
        place = self._reserve()
        parts = _of_kind(self._node(node["of"]), dict)
        attributes = self._node(node["attributes"]) if "attributes" in node else {}
        value: Any = _ABSENT
        if len(parts) == len(node["of"]["dict"]):
            value = as_made(put_together(node["made"], parts), node.get("grad") is True, "parameter" in node)
            vars(value).update(_of_kind(attributes, dict))
        self._made[place] = value
        return value

    def _array(self, node: dict[str, Any]) -> Any:
        name, dtype, shape = node["array"]
        if self._skip_missing and name not in self._rows:
            return self._number(_ABSENT)
        row = self._row(name, ARRAY)
        if row.dtype != dtypes.parse_dtype(dtype) or row.shape != tuple(shape):
            raise ValueError(f"array {name!r} was stored as {dtype} {tuple(shape)}, not {row.dtype} {row.shape}")
        return self._number(np.asfortranarray(row) if "fortran" in node else row)

    def _many(self, node: dict[str, Any], name: str, dtype: str) -> Any:
        if self._skip_missing and name not in self._rows:
            return _ABSENT if "tuple" in node else self._number(_ABSENT)
        row = self._row(name, NUMBERS)
        if row.dtype.name != dtype or row.ndim != 1:
            raise ValueError(f"the numbers {name!r} are {row.dtype} {row.shape}")
        values = row.tolist()
        return tuple(values) if "tuple" in node else self._number(values)

    def _row(self, name: str, kind: str) -> Array:
        if name not in self._rows:
            raise ValueError(f"array {name!r} is missing: read all tensors of the checkpoint")
        if self._kinds.get(name) != kind:
            raise ValueError(f"row {name!r} is not of the kind {kind!r}")
        return self._rows[name]

    def _object(self, node: dict[str, Any]) -> StoredObject:
        place = self._reserve()
        state = self._node(node["state"])
        beside = {}
        for name, part in _list(node.get("beside", [])):
            value = self._node(part)
            if value is not _ABSENT:
                beside[_of_kind(name, str)] = _of_kind(value, (self._torch.Tensor, PickleOnly))
        modules = self._later(node)
        parameters = [
            (
                None if name is None else _of_kind(name, str),
                None if shape is None else tuple(map(_index, _list(shape))),
            )
            for name, shape in _list(node.get("parameters", []))
        ]
        kind = _of_kind(node["object"], str)
        made = StoredObject(kind=kind, state=state, beside=beside, modules=modules, parameters=parameters)
        self._made[place] = made
        return made

    def _opaque(self, node: dict[str, Any]) -> PickleOnly:
        made = PickleOnly(kind=_of_kind(node["opaque"], str), facts=self._later(node))
        if "beyond" in node:
            self._number(made)
        return made

    def _later(self, node: dict[str, Any]) -> Beyond[Any]:
        later: Beyond[Any] = Beyond(number=node.get("beyond"))
        if later.number is not None:
            self._wanted[_index(later.number)] = later
        return later

    def _read_beyond(self) -> None:
        for number, entry in enumerate(self._beyond):
            later = self._wanted[number]
            if type(entry) is list:
                later.entry = [self._module(*part) for part in entry]
            elif entry is not None:
                taken = [self._node(node) for node in _list(entry["taken"])]
                facts = {name: entry[name] for name in ("values", "rest", "sections")}
                flat = self._node(entry["flat"]) if "flat" in entry else None
                if not any(part is _ABSENT for part in taken):
                    later.entry = OpaqueFacts(facts=facts, taken=taken, flat=flat and Flat(**flat))

    def _module(self, path: str, kind: str, attributes: Any, of_tensors: Any) -> ModuleFacts:
        own, of_each = {}, {}
        if attributes != []:
            own = {_of_kind(name, str): self._node(node) for name, node in _list(attributes)}
            own = {name: value for name, value in own.items() if value is not _ABSENT}
            if not torch_attributes().isdisjoint(own):
                raise ValueError("a module's own registers are among its attributes")
        if of_tensors != []:
            of_each = {_of_kind(name, str): _of_kind(self._node(node), dict) for name, node in _list(of_tensors)}
        return ModuleFacts(path=_of_kind(path, str), kind=_of_kind(kind, str), attributes=own, of_tensors=of_each)

    def _bytesio(self, node: dict[str, Any]) -> io.BytesIO:
        made: io.BytesIO = self._number(io.BytesIO(bytes.fromhex(node["bytesio"])))
        made.seek(_index(node["at"]))
        return made

    def _deque(self, node: dict[str, Any]) -> deque[Any]:
        values: deque[Any] = self._number(deque(maxlen=node["maxlen"]))
        values.extend(self._nodes(node["deque"]))
        return values

    def _path(self, node: dict[str, Any]) -> Any:
        name, text = node["path"]
        if name not in _PATHS:
            raise ValueError(f"{name!r} is no class of paths")
        return getattr(pathlib, name)(_of_kind(self._node(text), str))

    def _generator(self, node: dict[str, Any]) -> Any:
        place = self._reserve()
        state, seeds = self._node(node["state"]), self._node(node["seeds"])
        if state is _ABSENT:
            return _ABSENT
        engine = node["engine"]
        facts = GeneratorState(kind=_of_kind(node["generator"], str), engine=engine, state=state, seeds=seeds)
        try:
            self._made[place] = make_generator(facts)
        except RuntimeError:
            if facts.kind != TORCH:
                raise
            self._made[place] = PickleOnly(kind=f"torch.Generator of the device {engine!r}, which is not here,")
        return self._made[place]


@lru_cache(maxsize=128)
def _dtype_of_row(dtype: str) -> str:
    """Return the dtype of the array that holds tensors of a dtype."""
    import torch

    itemsize = _of_kind(getattr(torch, dtype), torch.dtype).itemsize
    return row_dtype(dtype, itemsize) or dtype


_PATHS = frozenset(("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"))


def _key(key: Any) -> Any:
    if type(key) is not dict:
        if type(key) not in (str, int, bool, type(None)):
            raise ValueError(f"not a key: {key!r}")
        return key
    tag = next(iter(key))
    part = key[tag]
    if tag == "value":
        return _value(part)
    if tag == "parameter":
        return ParameterKey(_of_kind(part, str))
    if tag == "bytes":
        return bytes.fromhex(part)
    if tag == "text":
        return bytes.fromhex(part).decode("utf-8", "surrogatepass")
    if tag in ("tuple", "frozenset"):
        keys = [_key(inner) for inner in _list(part)]
        return tuple(keys) if tag == "tuple" else frozenset(keys)
    raise ValueError(f"not a key: {tag!r}")


def _value(value: Any) -> Any:
    if type(value) is int or type(value) is float:
        return value
    text = _of_kind(value, str)
    kind, rest = text[:1], text[1:]
    if kind == "i":
        return int(rest, 16)
    if kind == "f":
        return struct.unpack(">d", bytes.fromhex(rest))[0]
    if kind == "c":
        return complex(*struct.unpack(">dd", bytes.fromhex(rest)))
    if kind != "s":
        raise ValueError(f"not a number: {text[:40]!r}")
    name, _, data = rest.rpartition(":")
    dtype = dtypes.parse_dtype(name)
    bits = bytes.fromhex(data)
    if dtype.itemsize != len(bits):
        raise ValueError(f"not a number of the dtype {name}")
    return np.frombuffer(bits, dtype=dtype)[0]


def _list(value: Any) -> list[Any]:
    return _of_kind(value, list)  # type: ignore[no-any-return]


def _index(value: Any) -> int:
    index = _of_kind(value, int)
    if index < 0:
        raise ValueError(f"not the number of an object: {index}")
    return index  # type: ignore[no-any-return]


def _of_kind(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:40]!r} is no {getattr(kind, '__name__', 'tensor')}")
    return value

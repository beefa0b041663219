"""What was stored, as JSON: containers and plain values themselves, tensors and arrays by the names of their rows.

A *node* is JSON. Texts, true, false and null stand for themselves, a list for a list, and ``0`` for the next number of
the list of values, which numbers alone are in: what changes at every step lies by itself. All else is an object:

* ``{"tuple": [node…]}``, ``size`` (of torch), ``set``, ``frozenset``;
* ``{"dict": [[key, node]…]}``, ``OrderedDict``, ``defaultdict`` (with its ``factory``), ``Counter``; a key is a text,
  a whole number, true, false or null, or an object as a node is one, with its numbers in place as ``{"value": …}``.
  ``metadata`` and ``attributes`` are those of an ordered dict, as JSON or as a node;
* ``{"text": hex}`` for a text with surrogates, ``{"bytes": hex}``, ``bytearray``,
  ``{"dtype": name}``, ``{"device": name}``;
* ``{"deque": [node…], "maxlen": number}``, ``{"path": [class, node]}`` of `pathlib`, and ``{"plain": JSON}`` for dates,
  times and decimals as `_plain_values` writes them;
* ``{"generator": kind, "engine": name, "state": node, "seeds": node}`` for a random generator, see `_torch_generators`;
* ``{"tensor": [row, dtype, shape]}``, with ``grad`` if it requires one, ``parameter`` if it is one, ``is`` if it is
  the very object of that number, and ``attributes``, a node, if it has any;
* ``{"array": [row, dtype, shape]}``, with ``fortran`` if it lies in columns;
* ``{"ints": row}`` and ``floats`` for a long list of them, with ``tuple`` if it is one;
* ``{"ref": number}`` for an object met before; those that can change are numbered from 0 as they are met;
* ``{"object": class, "state": node}`` for an object with ``state_dict``, and ``beside`` with a module's tensors that
  its state dict leaves out, and ``beyond`` with a number;
* ``{"namedtuple": class, "fields": [text…], "items": [node…]}``, which only the pickle can make anew;
* ``{"opaque": class, "beyond": number}`` for what only the pickle says.

What is *beyond* the tree lies in a list after it, and is read after it, so that tensors have the names that they have
in the tree. By number it is

* of a module, for it and each of its submodules ``[path, class, [[attribute, node]…], [[tensor, node of its
  attributes]…]]``;
* of an opaque value null, or what `_torch_facts` says: ``values``, ``rest`` and ``parts`` as `_generic_facts` has them,
  and ``taken``, a list of the nodes of what was taken out.

A value is a number of JSON, or a text: ``i`` and hex digits for a whole number of any size, ``f`` and ``c`` and the
bits of a float or of the two of a complex number, ``s``, a dtype, a colon and the bytes of a numpy scalar.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors._generic_facts import facts_json
from tensorcas_flavors._plain_values import Encoder, is_taken, take_value
from tensorcas_flavors._skeleton_tree import Part
from tensorcas_flavors._torch_facts import attributes_of, is_array, take_apart
from tensorcas_flavors._torch_generators import State, state_of
from tensorcas_flavors._torch_rows import ARRAY, ELSEWHERE, NUMBERS, Rows
from tensorcas_flavors._torch_tensors import dtype_name, pytorch_error
from tensorcas_mlflow import dtypes
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch

FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, OrderedDict, Counter)
}
"""What a defaultdict may make its entries with to be stored without a pickle."""
MANY = 32
"""Lists of so many whole numbers or floats are a row."""

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
_ATOMS = frozenset([str, int, bool, type(None)])
_IN_KEYS = _ATOMS | {float, complex, bytes, tuple, frozenset}


class TreeWriter:
    """Writes one tree, making the rows it needs."""

    def __init__(self, rows: Rows) -> None:
        import torch

        self.values: list[Any] = []
        """The numbers of the tree."""
        self.needs_pickle = False
        """Whether there is anything in the tree that it does not say itself."""
        self.unwrapped: dict[int, Any] = {}
        """By the identity of a wrapper, the module it stands for."""
        self.arrays: dict[int, str] = {}
        """By the identity of a numpy array, the row it is."""
        self.generators: dict[int, str] = {}
        """By the identity of a generator of torch, the row of its state."""
        self._later: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        """Nodes that want a number of what is beyond the tree, and what writes that."""
        self._rows = rows
        self._parameter = torch.nn.Parameter
        self._module = torch.nn.Module
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # what is numbered stays alive, so that no identity is met twice
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
            deque: self._deque,
            torch.dtype: lambda value, path: {"dtype": str(value)[6:]},
            torch.device: lambda value, path: {"device": str(value)},
        }

    def node(self, value: Any, path: str) -> Any:
        """Write a value.

        Args:
            value: Anything.
            path: Where it is, which names its rows.

        Raises:
            AdapterError: A tensor in it has no exact array, or a state dict cannot be had.
        """
        write = self._writers.get(type(value))
        return write(value, path) if write is not None else self._other(value, path)

    def beyond(self) -> list[Any]:
        """Write what is beyond the tree that was written.

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
        """Say which object this is if it was met before, else number it."""
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number != len(self._kept):
            return {"ref": number}
        self._kept.append(value)
        return None

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        found = self._rows.find(tensor) if path.startswith(ELSEWHERE) else None
        row = found or self._rows.add(path, tensor)
        node: dict[str, Any] = {"tensor": [row, dtype_name(tensor), tensor.shape]}
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
        if not all(type(key) in _ATOMS or _is_key(key) for key in mapping):
            return self._opaque(mapping, path)
        met = self._met(mapping)
        if met is not None:
            return met
        prefix = path + "." if path else ""
        node[kind.__name__] = [[self._key(key), self.node(value, f"{prefix}{key}")] for key, value in mapping.items()]
        attributes = vars(mapping) if kind is OrderedDict or kind is Counter else None
        if attributes:
            metadata = attributes.get("_metadata")
            if len(attributes) == 1 and type(metadata) is OrderedDict and is_json(dict(metadata)):
                node["metadata"] = metadata
            else:
                node["attributes"] = self.node(dict(attributes), path)
        return node

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
        # The numbers of a key stay with it: they say what the entry is.
        return {"tuple" if kind is tuple else "frozenset": [self._inner_key(part) for part in key]}

    def _inner_key(self, key: Any) -> Any:
        return {"value": value_of(key)} if type(key) in (int, float, complex) else self._key(key)

    def _set(self, values: Any, path: str) -> Any:
        if not all(map(_is_key, values)):
            return self._opaque(values, path)
        met = self._met(values) if type(values) is set else None
        if met is not None:
            return met
        # The order of a set of texts changes from process to process.
        return {type(values).__name__: sorted(map(self._inner_key, values), key=repr)}

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
            self._rows.add(path, value)  # says why not
        inner = unwrap(value)
        if inner is not value:
            self.unwrapped[id(value)] = inner
            self._kept.append(value)
            return self.node(inner, path)
        if is_live(value):
            return self._met(value) or self._live(value, path)
        kind = type(value)
        if is_taken(kind) and not isinstance(value, np.generic):
            taken = take_value(value)
            return self._opaque(value, path) if taken is None else {"plain": Encoder().encode(Part(taken))}
        if isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
            return {"path": [kind.__name__, self._text(str(value), path)]}
        if is_named_tuple(kind) and not getattr(value, "__dict__", None):
            self.needs_pickle = True
            items = [self.node(part, f"{path}.{name}") for name, part in zip(kind._fields, value, strict=True)]
            return {"namedtuple": _qualname(value), "fields": list(kind._fields), "items": items}
        generator = state_of(value)
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
        node = {"object": _qualname(value), "state": self.node(state, path)}
        if isinstance(value, self._module):
            prefix = path + "." if path else ""
            beside = []
            for name, part in own_tensors(value):
                # A state dict holds plain tensors where a module has a subclass, which a pickle would lose.
                if name not in state or type(part) not in self._writers:
                    beside.append([name, self.node(part, prefix + name)])
            if beside:
                node["beside"] = beside
            self._later.append((node, lambda: self._modules(value, path)))
        return node

    def _modules(self, module: torch.nn.Module, path: str) -> list[Any]:
        """Write what a module and its submodules hold that is in no state dict."""
        entries = []
        start = elsewhere(path)
        for name, part in module.named_modules(remove_duplicate=False):
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

    def _generator(self, value: object, state: State, path: str) -> Any:
        state_node = self.node(state.state, path)
        if isinstance(state.state, np.ndarray):
            self.generators[id(value)] = state_node["array"][0]
        seeds = self.node(state.seeds, f"{path}.seeds")
        return {"generator": state.kind, "engine": state.engine, "state": state_node, "seeds": seeds}

    def _deque(self, values: deque[Any], path: str) -> Any:
        met = self._met(values)
        if met is not None:
            return met
        nodes = [self.node(value, f"{path}.{n}" if path else str(n)) for n, value in enumerate(values)]
        return {"deque": nodes, "maxlen": values.maxlen}

    def _opaque(self, value: object, path: str) -> Any:
        self.needs_pickle = True
        met = self._met(value)
        if met is not None:
            return met
        node = {"opaque": _qualname(value), "beyond": None}
        self._later.append((node, lambda: self._facts(value, path)))
        return node

    def _facts(self, value: object, path: str) -> Any:
        try:
            facts, parts = take_apart(value, is_part)
        except AdapterError:
            return None  # it cannot be pickled, as the pickle of the whole will say
        start = elsewhere(path)
        taken = [self.node(part, f"{start}.{n}" if path else f"{start}{n}") for n, part in enumerate(parts)]
        return facts_json(facts) | {"taken": taken}


def is_part(value: Any) -> bool:
    """Tell whether a tree can say by itself what can be put into an object that is alive."""
    return is_tensor(value) or is_array(value) or is_live(unwrap(value)) or state_of(value) is not None


def is_named_tuple(kind: type) -> bool:
    """Tell whether a class is one that `collections.namedtuple` made, or `typing.NamedTuple`."""
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple)


def elsewhere(path: str) -> str:
    """Return the path of what is in an object, but in no state dict."""
    return path if path.startswith(ELSEWHERE) else ELSEWHERE + path


def value_of(number: complex) -> Any:
    """Return a number as JSON gives it back, bits and type."""
    if type(number) is int:
        return number if -(2**63) <= number < 2**63 else f"i{number:x}"
    if type(number) is float:
        return number if math.isfinite(number) else "f" + struct.pack(">d", number).hex()
    return "c" + struct.pack(">dd", number.real, number.imag).hex()


def is_json(value: object) -> bool:
    """Tell whether JSON gives exactly this value back, types included."""
    if type(value) is dict:
        return all(type(key) is str and is_json(part) for key, part in value.items())
    if type(value) is list:
        return all(map(is_json, value))
    return value is None or type(value) in (bool, str) or (type(value) is int and abs(value) < 2**63)


def is_live(value: object) -> bool:
    """Tell whether an object has a state dict to give and to take."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def is_tensor(value: object) -> bool:
    """Tell whether a value is a tensor of any kind, without importing torch."""
    return any(cls.__name__ == "Tensor" and cls.__module__ == "torch" for cls in type(value).__mro__)


def unwrap(model: Any) -> Any:
    """Return the module that ``torch.compile`` or a parallel wrapper stands for, or the object itself."""
    while type(model).__name__ in _WRAPPERS and type(model).__module__.startswith("torch."):
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def own_tensors(module: torch.nn.Module, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a module and its submodules under each of their names."""
    for name, part in module.named_modules(prefix=prefix, remove_duplicate=False):
        start = name + "." if name else ""
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield start + key, tensor


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

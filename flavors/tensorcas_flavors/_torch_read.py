"""Reads what `tensorcas_flavors._torch_tree` writes, or what somebody claims it wrote; no pickle is read."""

from __future__ import annotations

import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from tensorcas_flavors._plain_values import decode
from tensorcas_flavors._torch_facts import names_of_torch
from tensorcas_flavors._torch_generators import TORCH, State, made
from tensorcas_flavors._torch_layout import Layout, check_row
from tensorcas_flavors._torch_rows import ARRAY, ELSEWHERE, NUMBERS
from tensorcas_flavors._torch_tensors import pytorch_error, row_dtype
from tensorcas_flavors._torch_tree import FACTORIES
from tensorcas_mlflow import dtypes
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import FormatError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An object that was stored with its state dict: a module, an optimizer or the like."""

    kind: str
    """Its class."""
    state: Any
    """Its state dict."""
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    """A module's tensors that its state dict leaves out, by their dotted path."""
    modules: Beyond[list[ModuleFacts]] = field(default_factory=lambda: Beyond(number=None))
    """What a module and its submodules hold besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A value that only a pickle says."""

    kind: str
    """Its class."""
    facts: Beyond[OpaqueFacts] = field(default_factory=lambda: Beyond(number=None))
    """What is said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedItems:
    """A named tuple, which only a pickle makes anew."""

    kind: str
    """Its class."""
    fields: list[str]
    """Names of the items."""
    items: list[Any]
    """The items, as a part of a tree is read."""


_Entry = TypeVar("_Entry")


@dataclass(slots=True, kw_only=True)
class Beyond(Generic[_Entry]):
    """What the tree refers to and what is read after it."""

    number: int | None
    """Its number there; None if a store says nothing of it."""
    entry: _Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What one module holds that is in no state dict."""

    path: str
    """Names of the submodules that lead to it."""
    kind: str
    """Name of its class."""
    attributes: dict[str, Any]
    of_tensors: dict[str, dict[str, Any]]
    """By the names of its parameters and buffers, their attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueFacts:
    """What is said of a value that only a pickle says."""

    said: dict[str, Any]
    """As `_generic_facts` has it."""
    taken: list[Any]
    """What was taken out of it."""


def read_stored(
    layout: Layout, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], *, skip_missing: bool = False
) -> Any:
    """Read what was stored.

    Args:
        layout: The layout.
        rows: The rows by name.
        tensors: Those that are tensors, as such.
        skip_missing: Leave entries out whose rows are not there.

    Returns:
        The value, with `Described` for objects and `Opaque` for what only a pickle says; always
            in new containers.

    Raises:
        AdapterError: The layout says nonsense, or rows are missing or do not fit.
    """
    if layout.version == 2:
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
            raise pytorch_error(f"the layout in the skeleton says nonsense: {error!r}") from error
    named = {name: tensor for name, tensor in tensors.items() if not name.startswith(ELSEWHERE)}
    if layout.version == 0:
        return named
    return _read_version_1(layout.tree, rows, tensors, named, skip_missing)


def find_opaque(value: Any, *, described_too: bool = False) -> Opaque | NamedItems | Described | None:
    """Return one part of a stored value that only a pickle says, or None.

    Args:
        value: What `read_stored` returned.
        described_too: Whether an object is such a part too; if not, what its state dict holds is.
    """
    stack, seen = [value], set()
    while stack:
        part = stack.pop()
        if isinstance(part, Opaque | NamedItems) or (described_too and isinstance(part, Described)):
            return part
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            stack += part.values()
        elif isinstance(part, list | tuple | deque):
            stack += part
        elif isinstance(part, Described):
            stack.append(part.state)
    return None


class _Absent:
    """Stands for a tensor whose row is not there."""


_ABSENT = _Absent()


class _TreeReader:
    def __init__(
        self, layout: Layout, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], skip_missing: bool
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
            "dtype": lambda node: _of_kind(getattr(torch, node["dtype"]), torch.dtype),
            "device": lambda node: torch.device(_of_kind(node["device"], str)),
            "tensor": self._tensor,
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
            raise ValueError("there are more numbers than the tree has places for")
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
                made[_key(key)] = value
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
        place = self._reserve() if "is" not in node else None
        if self._skip_missing and name not in self._rows:
            value: Any = _ABSENT
        elif "is" in node:
            value = _of_kind(self._made[_index(node["is"])], self._torch.Tensor)
        else:
            itemsize = _of_kind(getattr(self._torch, dtype), self._torch.dtype).itemsize
            check_row(self._rows, name, row_dtype(dtype, itemsize) or dtype, shape)
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

    def _object(self, node: dict[str, Any]) -> Described:
        place = self._reserve()
        state = self._node(node["state"])
        beside = {}
        for name, part in _list(node.get("beside", [])):
            value = self._node(part)
            if value is not _ABSENT:
                beside[_of_kind(name, str)] = _of_kind(value, self._torch.Tensor)
        modules = self._later(node)
        made = Described(kind=_of_kind(node["object"], str), state=state, beside=beside, modules=modules)
        self._made[place] = made
        return made

    def _opaque(self, node: dict[str, Any]) -> Opaque:
        made = Opaque(kind=_of_kind(node["opaque"], str), facts=self._later(node))
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
                said = {name: entry[name] for name in ("values", "rest", "parts")}
                if not any(part is _ABSENT for part in taken):
                    later.entry = OpaqueFacts(said=said, taken=taken)

    def _module(self, path: str, kind: str, attributes: Any, of_tensors: Any) -> ModuleFacts:
        own = {_of_kind(name, str): self._node(node) for name, node in _list(attributes)}
        own = {name: value for name, value in own.items() if value is not _ABSENT}
        if not names_of_torch().isdisjoint(own):
            raise ValueError("a module's own registers are called attributes")
        of_each = {_of_kind(name, str): _of_kind(self._node(node), dict) for name, node in _list(of_tensors)}
        return ModuleFacts(path=_of_kind(path, str), kind=_of_kind(kind, str), attributes=own, of_tensors=of_each)

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
        facts = State(kind=_of_kind(node["generator"], str), engine=engine, state=state, seeds=seeds)
        try:
            self._made[place] = made(facts)
        except RuntimeError:
            if facts.kind != TORCH:
                raise
            self._made[place] = Opaque(kind=f"torch.Generator of the device {engine!r}, which is not here,")
        return self._made[place]


_PATHS = frozenset(("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"))


def _read_version_1(
    facts: dict[str, Any],
    rows: Mapping[str, Array],
    tensors: Mapping[str, torch.Tensor],
    named: dict[str, torch.Tensor],
    skip_missing: bool,
) -> Any:
    entries, plain, metadata = facts["entries"], facts["plain"], facts["metadata"]
    state: dict[str, Any]
    if entries is None:
        state = OrderedDict(plain | named)
    else:
        state = OrderedDict() if facts["ordered"] is True else {}
        for name, entry in entries.items():
            if entry is None and name in plain:
                state[name] = plain[name]
            elif isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) and name != SKELETON:
                if not (skip_missing and name not in rows):
                    check_row(rows, name, *entry)
                    state[name] = tensors[name]
            else:
                raise pytorch_error(f"the skeleton does not say what entry {name!r} is")
    if type(state) is OrderedDict and metadata is not None:
        vars(state)["_metadata"] = OrderedDict(metadata)
    return state if entries is not None else Described(kind="torch.nn.Module", state=state)


def _key(key: Any) -> Any:
    if type(key) is not dict:
        if type(key) not in (str, int, bool, type(None)):
            raise ValueError(f"not a key: {key!r}")
        return key
    tag = next(iter(key))
    part = key[tag]
    if tag == "value":
        return _value(part)
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
        raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value

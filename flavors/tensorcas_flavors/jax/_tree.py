"""Trees of JAX states: leaves by name, and the same tree with other leaves.

A node is a dict, a list, a tuple, or an object that JAX knows as a node of a pytree: a state of Optax, a dataclass of
Flax, a module or a variable of ``flax.nnx``. All else is a leaf. Names are the paths of keys, attributes and positions,
joined with dots, as in ``params.Dense_0.kernel``; a variable of nnx has the name of its value.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np

from tensorcas_flavors._facts import Encoder, NotPlainError
from tensorcas_flavors._jax_arrays import is_jax_array, jax_error

ROOT = "array"
"""Name of a leaf that is the whole state."""
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_KEPT_IN_NAMES = " ./()[]<>=,;:+@$&!?'*^|{}#%~-_"
_MODES = frozenset(("deterministic", "use_running_average"))
"""Attributes of layers that ``train()`` and ``eval()`` of a module set."""


@dataclass(slots=True)
class Leaf:
    """One leaf."""

    path: tuple[str, ...]
    value: Any
    name: str = ""


@dataclass(slots=True)
class Node:
    """One node, with its parts in order."""

    part: Any
    path: tuple[str, ...]
    keys: list[Any]
    """Key, position or name of the attribute, for each child."""
    rebuild: Callable[[list[Any]], Any]
    """Makes such a node with other children."""
    children: list[Node | Leaf] = field(default_factory=list)


class Tree:
    """A state as nodes and leaves.

    Raises:
        AdapterError: Two leaves have one name, the state is nested too deep or holds itself, or code of a node fails.
    """

    def __init__(self, state: Any) -> None:
        self.leaves: list[Leaf] = []
        try:
            self.root = self._grow(state, ())
        except RecursionError as error:
            raise jax_error(f"the {type(state).__name__} is nested too deep, or holds itself") from error
        _give_names(self.leaves)

    def _grow(self, part: Any, path: tuple[str, ...]) -> Node | Leaf:
        found = _open(part, path)
        if found is None:
            leaf = Leaf(path, part)
            self.leaves.append(leaf)
            return leaf
        node, components, values = found
        node.children = [
            self._grow(value, path if component is None else (*path, component))
            for component, value in zip(components, values, strict=True)
        ]
        return node

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes, from the root down."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            if isinstance(node, Node):
                yield node
                pending += reversed(node.children)

    def plain(self) -> Any:
        """Return the tree as JSON, with names for leaves; None if it has nodes that are no dict, list or tuple."""
        try:
            return _plain(self.root, Encoder())
        except NotPlainError:
            return None

    def static_values(self) -> dict[str, dict[str, Any]]:
        """Return plain values that are no leaves, as JSON by attribute, by the path of the node.

        They are the static fields of dataclasses, and attributes of objects of nnx but the mode (`_MODES`) of layers.
        """
        encoder = Encoder()
        found: dict[str, dict[str, Any]] = {}
        for node in self.nodes():
            values: dict[str, Any] = {}
            for name, value in _attributes(node):
                try:
                    values[name] = encoder.encode(value)
                except NotPlainError:
                    continue
            if values:
                found.setdefault(".".join(node.path), {}).update(values)
        return found

    def filled(self, leaves: Mapping[str, Any]) -> tuple[Any, list[Callable[[], object]]]:
        """Make the tree with other leaves.

        A dict or list at the root, and the objects of nnx, remain the objects that they are. All other containers are
        new: arrays cannot change, so programs of JAX share containers freely.

        Args:
            leaves: The new leaves by name.

        Returns:
            The tree, and the changes to make in the objects that remain. Nothing has changed before.
        """
        changes: list[Callable[[], object]] = []
        return self._filled(self.root, leaves, changes), changes

    def _filled(self, node: Node | Leaf, leaves: Mapping[str, Any], changes: list[Callable[[], object]]) -> Any:
        if isinstance(node, Leaf):
            return leaves[node.name]
        children = [self._filled(child, leaves, changes) for child in node.children]
        put = self._setter(node)
        if put is None:
            return node.rebuild(children)
        for key, child, old in zip(node.keys, children, node.children, strict=True):
            if child is not (old.value if isinstance(old, Leaf) else old.part):
                changes.append(_Change(put, key, child))
        return node.part

    def _setter(self, node: Node) -> Callable[[Any, Any], object] | None:
        part = node.part
        if is_variable(part):
            return lambda key, value: part.set_raw_value(value)
        if is_nnx_object(part):
            return lambda key, value: setattr(part, key, value)
        if node is self.root and isinstance(part, dict | list):
            return lambda key, value: part.__setitem__(key, value)
        return None


@dataclass(slots=True)
class _Change:
    put: Callable[[Any, Any], object]
    key: Any
    value: Any

    def __call__(self) -> None:
        self.put(self.key, self.value)


def is_variable(part: object) -> bool:
    """Tell whether an object is a variable of ``flax.nnx``, which holds its value."""
    return _descends(part, "flax.nnx.variablelib", "Variable")


def is_nnx_object(part: object) -> bool:
    """Tell whether an object is a module, or another object, of ``flax.nnx``."""
    return _descends(part, "flax.nnx.pytreelib", "Pytree") or _descends(part, "flax.nnx.object", "Object")


def _descends(part: object, module: str, name: str) -> bool:
    known = sys.modules.get(module)
    kind = getattr(known, name, None)
    return isinstance(kind, type) and isinstance(part, kind)


def _open(part: Any, path: tuple[str, ...]) -> tuple[Node, list[str | None], list[Any]] | None:
    """Return a node, the path component of each child, and the children; None for a leaf."""
    kind = type(part)
    if kind in ATOMS or isinstance(part, np.ndarray | np.generic) or is_jax_array(part):
        return None
    if kind is dict:
        keys = list(part)
        node = Node(part, path, keys, lambda values: dict(zip(keys, values, strict=True)))
        return node, [_component(key) for key in keys], list(part.values())
    if kind is list or kind is tuple:
        return Node(part, path, list(range(len(part))), kind), [str(i) for i in range(len(part))], list(part)
    import jax

    try:
        entries, definition = jax.tree_util.tree_flatten_with_path(part, is_leaf=lambda each: each is not part)
    except Exception as error:  # the code of the node's class may raise anything
        raise jax_error(f"a {kind.__name__} at {'.'.join(path)!r} cannot be taken apart: {error}") from error
    if definition.num_nodes == definition.num_leaves == 1:
        return None
    keys = [_key_of(entry) for (entry,), _ in entries]
    values = [value for _, value in entries]
    node = Node(part, path, keys, lambda values: jax.tree_util.tree_unflatten(definition, values))
    if is_variable(part) and len(values) == 1:
        return node, [None], values
    return node, [_component(key) for key in keys], values


def _key_of(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _component(key: Any) -> str:
    return quote(str(key), safe=_KEPT_IN_NAMES, errors="surrogatepass") or "%"


def _give_names(leaves: list[Leaf]) -> None:
    """Name leaves by their paths; where two of them give one name, dots in keys are quoted."""
    plain = Counter(".".join(leaf.path) for leaf in leaves)
    taken: set[str] = set()
    for leaf in leaves:
        name = ".".join(leaf.path) or ROOT
        if plain[".".join(leaf.path)] > 1:
            name = ".".join(component.replace("%", "%25").replace(".", "%2E") for component in leaf.path)
        if name in taken:
            raise jax_error(f"two leaves of the state have the path {name!r}: rename a key")
        taken.add(name)
        leaf.name = name


def _plain(node: Node | Leaf, encoder: Encoder) -> Any:
    if isinstance(node, Leaf):
        return node.name
    parts = [_plain(child, encoder) for child in node.children]
    kind = type(node.part)
    if kind is dict:
        return {"d": [[encoder.encode(key), part] for key, part in zip(node.keys, parts, strict=True)]}
    if kind is list:
        return parts
    if kind is tuple:
        return {"t": parts}
    raise NotPlainError


def _attributes(node: Node) -> Iterator[tuple[str, Any]]:
    part, children = node.part, {key for key in node.keys if isinstance(key, str)}
    if is_variable(part):
        return
    if is_nnx_object(part):
        for name, value in vars(part).items():
            if not name.startswith("_") and name not in children and name not in _MODES:
                yield name, value
    elif dataclasses.is_dataclass(part):
        for each in dataclasses.fields(part):
            if each.name not in children and hasattr(part, each.name):
                yield each.name, getattr(part, each.name)

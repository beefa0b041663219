"""The skeleton of a JAX state: JSON that describes the leaves, after a pickle if the state has nodes of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorcas_flavors._facts import decode, read_tail, with_tail
from tensorcas_flavors._jax_arrays import ADAPTER, KEY, NUMPY, Kind, jax_error
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

_VERSION = 1


@dataclass(slots=True, kw_only=True)
class Layout:
    """Description of a state."""

    rows: dict[str, Kind] = field(default_factory=dict)
    """The leaves that are arrays."""
    inside: dict[str, Kind] = field(default_factory=dict)
    """Arrays inside of leaves that are other objects."""
    values: dict[str, Any] = field(default_factory=dict)
    """The leaves that are plain values, as JSON of `tensorcas_flavors._facts`."""
    code: list[str] = field(default_factory=list)
    """The leaves that are functions or classes: they belong to the program."""
    opaque: list[str] = field(default_factory=list)
    """The leaves that only the pickle holds."""
    static: dict[str, dict[str, Any]] = field(default_factory=dict)
    """See `Tree.static_values`."""
    tree: Any = None
    """See `Tree.plain`."""

    def names(self) -> list[str]:
        """Return the names of all leaves."""
        return [*self.rows, *self.values, *self.code, *self.opaque]

    def kind(self, name: str) -> Kind:
        """Return the kind of an array."""
        return self.rows[name] if name in self.rows else self.inside.get(name, Kind())

    def value(self, name: str) -> Any:
        """Return a plain value."""
        return decode(ADAPTER, self.values[name])

    def encode(self, pickled: Array) -> Array:
        """Return the skeleton.

        Args:
            pickled: The pickle; empty for none.
        """
        facts = {
            "version": _VERSION,
            "static": self.static,
            "tree": self.tree,
            "rows": {name: _kind_json(kind) for name, kind in self.rows.items()},
            "inside": {name: _kind_json(kind) for name, kind in self.inside.items()},
            "code": self.code,
            "opaque": self.opaque,
            "values": self.values,
        }
        return with_tail(pickled, facts)

    @classmethod
    def read(cls, skeleton: Array | None, rows: Iterable[str] = ()) -> Layout:
        """Read the description in a skeleton.

        Args:
            skeleton: The skeleton; None takes all rows for arrays of JAX.
            rows: The names of the rows that there are without a skeleton.

        Raises:
            AdapterError: The skeleton is none of this adapter, or of a newer release.
        """
        if skeleton is None:
            return cls(rows={name: Kind() for name in rows})
        facts = read_tail(ADAPTER, skeleton)
        try:
            if facts["version"] != _VERSION:
                raise jax_error(
                    f"the skeleton has the version {facts['version']!r}: update tensorcas-mlflow to read it"
                )
            layout = cls(
                rows={name: _kind_of(kind) for name, kind in facts["rows"].items()},
                inside={name: _kind_of(kind) for name, kind in facts["inside"].items()},
                values=dict(facts["values"].items()),
                code=list(facts["code"]),
                opaque=list(facts["opaque"]),
                static={path: dict(values.items()) for path, values in facts["static"].items()},
                tree=facts["tree"],
            )
            names = layout.names()
            if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
                raise ValueError("the names of the leaves")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise damaged(error) from error
        return layout


def damaged(error: Exception) -> AdapterError:
    """Return the error for a skeleton that `Layout.encode` has not made."""
    return jax_error(f"the skeleton is not of a JAX state, or damaged: {error!r:.100}")


def rebuilt(node: Any, leaves: Mapping[str, Any]) -> Any:
    """Return the nest that `Tree.plain` describes.

    Raises:
        AdapterError: `Tree.plain` writes no such JSON.
    """
    try:
        return _rebuilt(node, leaves)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(error) from error


def _rebuilt(node: Any, leaves: Mapping[str, Any]) -> Any:
    if isinstance(node, str):
        return leaves[node]
    if isinstance(node, list):
        return [_rebuilt(each, leaves) for each in node]
    ((word, parts),) = node.items()
    if word == "t":
        return tuple(_rebuilt(each, leaves) for each in parts)
    if word != "d":
        raise ValueError(word)
    return {decode(ADAPTER, key): _rebuilt(each, leaves) for key, each in parts}


def _kind_json(kind: Kind) -> dict[str, Any] | None:
    facts: dict[str, Any] = {}
    if kind.kind is not None:
        facts["kind"] = kind.kind
    if kind.impl is not None:
        facts["impl"] = kind.impl
    if kind.is_weak:
        facts["weak"] = True
    return facts or None


def _kind_of(facts: Any) -> Kind:
    if facts is None:
        return Kind()
    kind, impl, is_weak = facts.get("kind"), facts.get("impl"), facts.get("weak", False)
    is_known = kind in (None, NUMPY, KEY) and (kind == KEY) == isinstance(impl, str)
    if not is_known or type(is_weak) is not bool or (is_weak and kind is not None):
        raise ValueError(f"the kind {facts!r:.60}")
    return Kind(kind, impl, is_weak)

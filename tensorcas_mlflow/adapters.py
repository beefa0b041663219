"""Adapters by entry point: ours, and those other packages add for their frameworks."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tensorcas_mlflow.adapter import Adapter, Array, ModelAdapter
from tensorcas_mlflow.errors import AdapterError, TensorCasError

_logger = logging.getLogger(__name__)

GROUP = "tensorcas.flavors"
GENERIC = "generic"
"""The adapter for every model no other adapter accepts."""


def adapter_for(model: object) -> Adapter:
    """Find the adapter for a model.

    Raises:
        AdapterError: No adapter accepts it; the message names the model's type and the available adapters.
    """
    broken: list[str] = []
    for point in _entry_points():
        try:
            adapter = _load(point)
        except AdapterError as error:
            broken.append(str(error))
            continue
        if adapter.accepts(model):
            if broken and point.name == GENERIC:
                _logger.warning("a model goes to the generic adapter, since no other accepts it; %s", "; ".join(broken))
            return adapter
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    reason = f"no adapter takes a {kind}; there are {_known()}"
    raise AdapterError("tensorcas", "; ".join([reason, *broken]))


def adapter_named(name: str) -> Adapter:
    """Find the adapter a model was stored with.

    Raises:
        AdapterError: No adapter has this name, or it cannot be imported here.
    """
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise AdapterError("tensorcas", f"the model was stored by the adapter {name!r}, and there are only {_known()}")


def take_apart(adapter: ModelAdapter, model: object) -> dict[str, Array]:
    """Take a model apart with an adapter.

    Raises:
        AdapterError: The adapter or the model's own code raised an error.
    """
    try:
        return adapter.extract(model)
    except TensorCasError:
        raise
    except Exception as error:
        reason = f"a {type(model).__name__} cannot be taken apart: {type(error).__name__}: {error}"
        raise AdapterError(getattr(adapter, "name", type(adapter).__name__), reason) from error


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    """List the adapters: other people's first, since theirs may be for a class derived from one ours accepts.

    The generic one comes last.
    """
    found = entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda point: (point.name == GENERIC, _is_ours(point), point.name)))


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("tensorcas_flavors.")


@cache
def _load(point: EntryPoint) -> Adapter:
    try:
        adapter = point.load()()
    except Exception as error:
        # Another package's module may raise anything on import: its adapter is broken, ours still work.
        raise AdapterError(point.name, f"the adapter {point.value} cannot be imported: {error}") from error
    if not isinstance(adapter, Adapter):
        raise AdapterError(point.name, f"{point.value} is not an Adapter of tensorcas_mlflow.adapter")
    return adapter


def _known() -> str:
    names = sorted(point.name for point in _entry_points())
    return ", ".join(names) or f"none (is tensorcas-mlflow installed? They are the entry points {GROUP!r})"

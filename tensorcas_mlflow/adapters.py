"""Which adapter takes a model: found by entry point, so that others can add frameworks."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tensorcas_mlflow.adapter import Adapter, Array, ModelAdapter
from tensorcas_mlflow.errors import AdapterError, TensorCasError

_logger = logging.getLogger(__name__)

GROUP = "tensorcas.flavors"
GENERIC = "generic"
"""The adapter of whatever no other one takes."""


def adapter_for(model: object) -> Adapter:
    """Find the adapter that takes a model.

    Raises:
        AdapterError: None does; the message names the model's type and the adapters there are.
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
                _logger.warning("a model goes to the adapter of whatever no other one takes; %s", "; ".join(broken))
            return adapter
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    reason = f"no adapter takes a {kind}; there are {_known()}"
    raise AdapterError("tensorcas", "; ".join([reason, *broken]))


def adapter_named(name: str) -> Adapter:
    """Find the adapter that a model was stored with.

    Raises:
        AdapterError: There is none of that name, or it cannot be imported here.
    """
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise AdapterError("tensorcas", f"the model was stored by the adapter {name!r}, and there are only {_known()}")


def take_apart(adapter: ModelAdapter, model: object) -> dict[str, Array]:
    """Take a model apart with an adapter.

    Raises:
        AdapterError: It cannot be, whatever the adapter or the model's own code raised.
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
    """List the adapters: other people's first, since theirs may be for a class derived from one that ours takes.

    The one that takes everything comes last.
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
        # Whatever other people's module raises when it is imported: their adapter is broken, ours still work.
        raise AdapterError(point.name, f"the adapter {point.value} cannot be imported: {error}") from error
    if not isinstance(adapter, Adapter):
        raise AdapterError(point.name, f"{point.value} is not an Adapter of tensorcas_mlflow.adapter")
    return adapter


def _known() -> str:
    names = sorted(point.name for point in _entry_points())
    return ", ".join(names) or f"none (is tensorcas-mlflow installed? They are the entry points {GROUP!r})"

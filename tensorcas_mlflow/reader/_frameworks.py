"""Arrays as a framework has them; adapters know the frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.adapters import adapter_named

_ADAPTERS = {"pt": "pytorch", "torch": "pytorch", "pytorch": "pytorch"}
_NUMPY = ("np", "numpy")


class Framework(Protocol):
    """Makes a framework's tensors of arrays."""

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Make tensors, by name; they share memory with the arrays where they can."""
        ...


def framework_named(name: str, device: Any = None) -> Framework:
    """Find a framework.

    Args:
        name: ``np`` or ``pt``, as `safetensors.safe_open` has them, or ``numpy`` or ``torch``.
        device: Where tensors go; the CPU unless given.

    Raises:
        ValueError: There is no such framework, or arrays are to go to a device.
        AdapterError: There is no such device.
    """
    if name in _NUMPY:
        if device is not None and str(device) != "cpu":
            raise ValueError(f"numpy's arrays are in memory and not on {str(device)!r}: ask for framework='pt'")
        return lambda arrays: dict(arrays)
    if name not in _ADAPTERS:
        raise ValueError(f"there is no framework {name!r}: it is 'np' or 'pt'")
    adapter = adapter_named(_ADAPTERS[name])
    options = {} if device is None else {"device": device}
    if options:
        adapter.weights({}, **options)  # says now, and not at the first tensor, that there is no such device
    return lambda arrays: adapter.weights(arrays, **options)

"""The frameworks whose tensors a reader gives, besides numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from tensorcas_mlflow.adapter import Array, adapter_named

_ADAPTERS = {
    **dict.fromkeys(("pt", "torch", "pytorch"), ("pytorch", "torch")),
    **dict.fromkeys(("flax", "jax"), ("jax", "jax")),
}
"""Adapter and package of a framework."""
_CONVERTED = {
    **dict.fromkeys(("tf", "tensorflow"), "tensorflow.convert_to_tensor"),
    "mlx": "mlx.core.array",
    **dict.fromkeys(("paddle", "paddlepaddle"), "paddle.to_tensor"),
}
"""Frameworks of `safetensors` without an adapter, and the function that takes an array of numpy."""


def adapted(name: str, device: Any, *, is_elsewhere: bool) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """Find the adapter of a framework; see `framework_named`.

    Args:
        name: The framework.
        device: The device of the tensors.
        is_elsewhere: Whether the device is another one than the CPU.
    """
    if name in _CONVERTED:
        raise ValueError(
            f"framework={name!r} is not supported: open with framework='np', and pass each array to {_CONVERTED[name]}"
        )
    if name not in _ADAPTERS:
        raise ValueError(f"there is no framework {name!r}: it is 'np', 'pt' or 'flax'")
    adapter_name, package = _ADAPTERS[name]
    if find_spec(package) is None:
        raise ValueError(f"framework={name!r} needs the package {package}, which is not installed: or take 'np'")
    adapter = adapter_named(adapter_name)
    options = {} if device is None else {"device": device}
    if adapter_name == "jax":
        if is_elsewhere:
            raise ValueError(
                f"arrays of JAX are made on its default device and not on {str(device)!r}: leave device out, "
                "and use jax.device_put"
            )
        options = {}
    if options:
        adapter.weights({}, **options)  # an unknown device is reported now, and not at the first tensor
    return lambda arrays: adapter.weights(arrays, **options)

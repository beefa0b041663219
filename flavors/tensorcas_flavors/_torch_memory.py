"""The memory of a module's tensors: which of it can be filled, and what takes the place of tensors that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tensorcas_flavors._torch_tensors import extent_bytes, pytorch_error, refusal, row_major
from tensorcas_mlflow.adapter import Array

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


def filling_refusal(tensor: torch.Tensor) -> str | None:
    """Say why a tensor of a module cannot be filled, or None if it can."""
    import torch

    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if torch.nn.parameter.is_lazy(tensor) or not is_plain:
        return refusal(tensor)
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return "is nested, quantized or sparse, and takes no plain values: load the whole model with into="
    if not tensor.is_meta and extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize) > (
        tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    ):
        return "has no memory behind it (its storage was resized): gather the weights before filling them"
    return None


def made_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor on a device, with the strides of another one if those leave no gaps and repeat nothing."""
    import torch

    # empty_like() keeps such strides too, but of a meta tensor only after importing some 500 modules of torch.
    strides, step = tuple(tensor.stride()), 1
    for stride, side in sorted(zip(strides, tensor.shape, strict=True)):
        if side != 1 and stride != step:
            strides = row_major(tensor.shape)
            break
        step *= side
    if device.type != "cpu" or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return torch.from_numpy(_aligned_bytes(tensor.nbytes)).view(tensor.dtype).as_strided(tensor.shape, strides)


def _aligned_bytes(n_bytes: int) -> Array:
    """Allocate bytes where torch would, at a multiple of 64, and as numpy does, which asks for huge pages.

    Torch asks for none: touching its new memory for the first time takes several times as long as filling it.
    """
    block = np.empty(n_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + n_bytes]


def instead_of(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the class and with the attributes of another one."""
    import torch

    if isinstance(old, torch.nn.Parameter):
        new: torch.Tensor = torch.Tensor._make_subclass(type(old), made, old.requires_grad)
    else:
        new = made.detach().as_subclass(type(old)).requires_grad_(old.requires_grad)
    vars(new).update(vars(old))
    return new


def check_device(device: torch.device) -> None:
    """See that tensors can be put on a device and keep their values there.

    Raises:
        AdapterError: They cannot.
    """
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch without CUDA
        raise pytorch_error(f"nothing can be put on the device {str(device)!r}: {error}") from error
    if device.type == "meta":
        raise pytorch_error("the meta device holds no values: give another one")

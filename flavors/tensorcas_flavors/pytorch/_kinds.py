"""Tensors without an array of their own: their plain tensors and values, and back.

`taken_apart` takes a sparse, nested or quantized tensor, or a lazy conjugate or negative, apart into plain tensors that
are views of its memory, and plain values; `put_together` is its inverse, and trusts nothing. A tensor of a subclass is
code of its class: `reduction` returns what pickle stores of it.

========== =============================================================================================
kind       parts
========== =============================================================================================
sparse_coo ``indices``, ``values``, ``shape``, ``coalesced``
sparse_csr ``crow``, ``col``, ``values``, ``shape``; ``sparse_bsr`` too; ``sparse_csc`` and ``sparse_bsc``
           have ``ccol`` and ``row``
nested     ``values``, ``sizes``, ``strides``, ``offsets``
quantized  ``words``, ``dtype``, ``shape``, and ``scale`` and ``zero``; by channel ``scales``, ``zeros``,
           ``axis`` and ``floats``, true if the zero points are floats
lazy       ``values``, ``conj``, ``neg``
========== =============================================================================================
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorcas_flavors.pytorch._tensors import name_of, pytorch_error, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_INDICES = {
    "sparse_csr": ("crow", "col"),
    "sparse_bsr": ("crow", "col"),
    "sparse_csc": ("ccol", "row"),
    "sparse_bsc": ("ccol", "row"),
}
_WORDS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}
_VALUELESS = ("FakeTensor", "FunctionalTensor", "BatchedTensor")


def is_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class of its own, which says how it is pickled."""
    import torch

    return type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter


def why_refused(tensor: torch.Tensor) -> str | None:
    """Return why neither a tensor nor its parts can be stored, and what to do about it; None if they can."""
    import torch

    kind = type(tensor)
    if not is_subclass(tensor):
        return refusal(tensor) if taken_apart(tensor) is None else None
    if torch.nn.parameter.is_lazy(tensor):
        return refusal(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__name__ == "DTensor":
        return f"is a {name}, of which this process has a part: make it a plain tensor first, with full_tensor()"
    if kind.__name__ in _VALUELESS:
        return f"is a {name}, which has no values: store the tensor that it stands for"
    return None


def taken_apart(tensor: torch.Tensor) -> tuple[str, dict[str, Any]] | None:
    """Return the kind of a tensor of torch's own class, and its parts by name; None if it has no parts.

    The tensors among the parts are views of its memory, in an order that depends on the kind alone.
    """
    import torch

    tensor = tensor.detach()
    if tensor.is_nested:
        return "nested", {
            "values": tensor.values(),
            "sizes": tensor._nested_tensor_size(),
            "strides": tensor._nested_tensor_strides(),
            "offsets": tensor._nested_tensor_storage_offsets(),
        }
    if tensor.is_meta:
        return None
    if tensor.is_quantized:
        return "quantized", _quantized_parts(tensor)
    kind = name_of(tensor.layout)
    shape = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values(), "shape": shape}
        return kind, parts | {"coalesced": tensor.is_coalesced()}
    if kind in _INDICES:
        names = _INDICES[kind]
        indices = {name: getattr(tensor, f"{name}_indices")() for name in names}
        return kind, indices | {"values": tensor.values(), "shape": shape}
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    conj, neg = tensor.is_conj(), tensor.is_neg()
    if not conj and not neg:
        return None
    plain = tensor.conj() if conj else tensor
    return "lazy", {"values": torch._neg_view(plain) if neg else plain, "conj": conj, "neg": neg}


def _quantized_parts(tensor: torch.Tensor) -> dict[str, Any]:
    import torch

    dtype = name_of(tensor.dtype)
    words = torch.empty(0, dtype=getattr(torch, _WORDS.get(dtype, "uint8")), device=tensor.device)
    storage = tensor.untyped_storage()
    if dtype in _WORDS:
        words.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    elif dtype in _PER_BYTE and tensor.is_contiguous() and tensor.storage_offset() == 0:
        n_bytes = -(-tensor.numel() // _PER_BYTE[dtype])
        words.set_(storage, 0, (n_bytes,), (1,))
    else:
        raise pytorch_error(f"a tensor of the dtype {dtype} is a view with gaps: store its contiguous()")
    parts: dict[str, Any] = {"words": words, "dtype": dtype, "shape": list(tensor.shape)}
    if tensor.qscheme() == torch.per_tensor_affine:
        return parts | {"scale": tensor.q_scale(), "zero": tensor.q_zero_point()}
    zeros = tensor.q_per_channel_zero_points()
    # Numbers and no tensors, so that a conversion of a model's dtype leaves them.
    return parts | {
        "scales": tensor.q_per_channel_scales().tolist(),
        "zeros": zeros.tolist(),
        "axis": tensor.q_per_channel_axis(),
        "floats": zeros.is_floating_point(),
    }


def put_together(kind: str, parts: dict[str, Any]) -> torch.Tensor:
    """Return the tensor of a kind in the memory of its parts; see `taken_apart`. The parts are not trusted.

    Raises:
        ValueError: The parts are not those of such a tensor. Also KeyError, TypeError and RuntimeError.
    """
    import torch

    if kind == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            parts["shape"],
            check_invariants=True,
            is_coalesced=_of(parts["coalesced"], bool),
        )
    if kind in _INDICES:
        compressed, plain = (parts[name] for name in _INDICES[kind])
        layout = getattr(torch, kind)
        return torch.sparse_compressed_tensor(
            compressed, plain, parts["values"], parts["shape"], layout=layout, check_invariants=True
        )
    return _MAKERS[kind](parts)


def _nested(parts: dict[str, Any]) -> torch.Tensor:
    import torch

    values, sizes, strides, offsets = (parts[name] for name in ("values", "sizes", "strides", "offsets"))
    # The arguments are followed unchecked.
    is_sound = all(part.dtype == torch.int64 and bool((part >= 0).all()) for part in (sizes, strides, offsets))
    is_sound &= values.ndim == 1 and values.is_contiguous() and sizes.shape == strides.shape
    if not is_sound or len(offsets) != len(sizes) or (len(sizes) and sizes.ndim != 2):
        raise ValueError("the parts of a nested tensor do not fit each other")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        stop = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and stop > values.numel():
            raise ValueError("a part of a nested tensor lies outside of its values")
    return torch._nested_view_from_buffer(values, sizes, strides, offsets)


def _quantized(parts: dict[str, Any]) -> torch.Tensor:
    import torch

    words, shape, name = parts["words"], parts["shape"], parts["dtype"]
    if name in _WORDS:
        fits = name_of(words.dtype) == _WORDS[name] and list(words.shape) == shape
        offset, stride = words.storage_offset(), words.stride()
    else:
        n_bytes = -(-math.prod(shape) // _PER_BYTE[name])
        fits = words.dtype == torch.uint8 and list(words.shape) == [n_bytes] and words.is_contiguous()
        offset, stride = 0, torch.empty(shape, device="meta").stride()
        words = words if words.storage_offset() == 0 else words.clone()
    if not fits:
        raise ValueError(f"the words of a tensor of {name} have another dtype or shape")
    dtype = getattr(torch, name)
    if "scale" in parts:
        made = torch._empty_affine_quantized(
            shape, scale=parts["scale"], zero_point=parts["zero"], dtype=dtype, device=words.device
        )
    else:
        axis, floats = _of(parts["axis"], int), _of(parts["floats"], bool)
        scales = torch.tensor(parts["scales"], dtype=torch.float32 if floats else torch.float64, device=words.device)
        zeros = torch.tensor(parts["zeros"], dtype=torch.float32 if floats else torch.int64, device=words.device)
        if not 0 <= axis < len(shape) or not list(scales.shape) == list(zeros.shape) == [shape[axis]]:
            raise ValueError(f"the scales of a tensor of {name} do not fit its shape")
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=words.device
        )
    return made.set_(words.untyped_storage(), offset, shape, stride)


def _lazy(parts: dict[str, Any]) -> torch.Tensor:
    import torch

    made = parts["values"]
    if parts["neg"]:
        made = torch._neg_view(made)
    return made.conj() if parts["conj"] else made  # type: ignore[no-any-return]


_MAKERS: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "nested": _nested,
    "quantized": _quantized,
    "lazy": _lazy,
}


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value


def as_made(tensor: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a tensor as a parameter, or as a tensor that requires a gradient or none."""
    import torch

    tensor = tensor.detach()
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def misfit(target: torch.Tensor, source: torch.Tensor) -> str | None:
    """Return why torch cannot copy one tensor to another, as far as shapes do not tell; or None."""
    mine, its = (_kind_of(tensor) for tensor in (target, source))
    if target.is_quantized and name_of(target.dtype) in _PER_BYTE:
        return f"is {mine}, which torch cannot fill"
    return None if mine == its else f"is {mine}, and {its} was stored"


def shape_of(tensor: torch.Tensor) -> Any:
    """Return the shape of a tensor; of a nested one the sizes of its parts."""
    if tensor.is_nested and not is_subclass(tensor):
        return tensor._nested_tensor_size().tolist()
    return tensor.shape


def _kind_of(tensor: torch.Tensor) -> str:
    import torch

    kind = type(tensor)
    if is_subclass(tensor) and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__module__}.{kind.__qualname__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a tensor of {name_of(tensor.dtype)}, {name_of(tensor.qscheme())}"
    if tensor.layout in (torch.strided, torch.sparse_coo):
        return "a plain tensor" if tensor.layout is torch.strided else "a tensor of sparse_coo"
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return "a tensor of mkldnn"
    return f"a tensor of {name_of(tensor.layout)} with values of {tuple(tensor.values().shape)}"


def reduction(tensor: torch.Tensor) -> Any:
    """Return what pickle stores of a tensor of a subclass: a function, its arguments, and what ``__reduce_ex__`` adds.

    The memory of the tensor is a plain tensor among the arguments, where torch has a storage. A class of parameters is
    kept, where torch makes a plain parameter of it. Other tensors are those of its own ``__reduce_ex__``.

    Raises:
        AdapterError: The class cannot be pickled.
    """
    import torch
    from torch import _utils

    kind = type(tensor)
    try:
        reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    except Exception as error:  # it is code of the class, which may raise anything
        raise pytorch_error(f"a {kind.__name__} cannot be pickled: {error}") from error
    if type(reduced) is not tuple or len(reduced) != 2:
        return reduced
    function, arguments = reduced
    if function is torch._tensor._rebuild_from_type_v2:
        inner, _, own, state = arguments
        if inner in (_utils._rebuild_tensor_v2, _utils._rebuild_tensor_v3):
            return of_class, (kind, _own_memory(tensor), state)
        if inner is _utils._rebuild_wrapper_subclass:
            # Tensors come back on the CPU, and so do those inside.
            own = (*own[:6], torch.device("cpu"), *own[7:])
        return function, (inner, kind, own, state)
    if function in (_utils._rebuild_parameter, _utils._rebuild_parameter_with_state) and type(tensor.data) is not kind:
        return of_class, (kind, arguments[0].requires_grad_(arguments[1]), arguments[3] if len(arguments) > 3 else None)
    return reduced


def of_class(kind: Any, plain: torch.Tensor, state: Any) -> torch.Tensor:
    """Return a tensor of a subclass in the memory of a plain one, with its state. Pickles name this function."""
    import torch

    arguments = (kind, plain.detach(), plain.requires_grad)
    return torch._tensor._rebuild_from_type_v2(torch.Tensor._make_subclass, kind, arguments, state)  # type: ignore[no-any-return,no-untyped-call]


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the memory of one whose class may do anything else with it."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        torch._C._set_tensor_metadata(plain, torch._C._get_tensor_metadata(tensor))  # type: ignore[attr-defined]
        return plain.requires_grad_(tensor.requires_grad)


class Flat(NamedTuple):
    """A tensor of a subclass as ``__tensor_flatten__`` describes it."""

    kind: list[str]
    """Module and qualified name of its class."""
    parts: dict[str, Any]
    """Its tensors, by the names of its attributes."""
    context: Any
    size: list[int]
    stride: list[int]
    requires_grad: bool

    def made(self) -> torch.Tensor:
        """Return the tensor. Its class must have been imported: no text of a store imports a module.

        Raises:
            AdapterError: There is no such class, or it refuses.
        """
        import torch

        module, name = self.kind
        kind: Any = sys.modules.get(module)
        for attribute in name.split("."):
            kind = getattr(kind, attribute, None)
        if (
            not isinstance(kind, type)
            or not issubclass(kind, torch.Tensor)
            or not hasattr(kind, "__tensor_unflatten__")
        ):
            raise pytorch_error(f"a {module}.{name} is stored, and this process has no such class: import it first")
        try:
            made: Any = kind.__tensor_unflatten__(self.parts, self.context, torch.Size(self.size), tuple(self.stride))
            if type(made) is not kind:
                raise TypeError(f"it made a {type(made).__name__}")
        except Exception as error:  # it is code of the class, which may raise anything
            raise pytorch_error(f"a {name} cannot be made of its parts: {error}") from error
        return made.requires_grad_(self.requires_grad) if self.requires_grad else made


def flattened(tensor: torch.Tensor) -> Flat | None:
    """Describe a tensor of a subclass by ``__tensor_flatten__``; None if the class has none, or the shape is symbolic.

    Raises:
        AdapterError: The class refuses.
    """
    kind: Any = type(tensor)
    if not hasattr(kind, "__tensor_flatten__") or not hasattr(kind, "__tensor_unflatten__"):
        return None
    try:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        size, stride = list(tensor.shape), list(tensor.stride())
    except Exception as error:  # it is code of the class, which may raise anything
        raise pytorch_error(f"a {kind.__name__} cannot be flattened: {error}") from error
    if not all(type(n) is int for n in size + stride):
        return None
    return Flat([kind.__module__, kind.__qualname__], parts, context, size, stride, tensor.requires_grad)

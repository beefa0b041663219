"""Tensors of all kinds that ``torch.save`` stores, and the bits of a tensor of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.bias
from torch import nn


class Plain(torch.Tensor):
    """A subclass with memory of its own and no code."""


class Named(torch.Tensor):
    """A subclass with attributes, one of them a tensor."""

    @staticmethod
    def of(tensor: torch.Tensor, scale: float) -> Named:
        made = torch.Tensor._make_subclass(Named, tensor)
        made.scale, made.more = scale, torch.ones(2) * scale
        return made


class OwnParameter(nn.Parameter):
    """A class of parameters, which ``torch.save`` loses."""


class Wrapper(torch.Tensor):
    """A wrapper as torchao's: it has no memory, and torch copies nothing into it."""

    @staticmethod
    def __new__(cls, words: torch.Tensor, scale: torch.Tensor, note: Any = None) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, words.shape, dtype=torch.float32)

    def __init__(self, words: torch.Tensor, scale: torch.Tensor, note: Any = None) -> None:
        self.words, self.scale, self.note = words, scale, note

    def __tensor_flatten__(self) -> Any:
        return ["words", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Wrapper:
        return cls(inner["words"], inner["scale"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            (one,) = args
            is_same = func is torch.ops.aten.detach.default
            words, scale = (part if is_same else part.clone() for part in (one.words, one.scale))
            return cls(words, scale, one.note)
        raise NotImplementedError(str(func))


class Copying(Wrapper):
    """A wrapper that pickles copies, so that nothing can be filled through its pickle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Copying, (self.words.clone(), self.scale.clone(), self.note)


def numbers(seed: int, *shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def coo(seed: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), numbers(seed, 3), (2, 3))


def by_channel(seed: int, dtype: torch.dtype) -> torch.Tensor:
    scales, zeros = numbers(seed, 3).abs() + 0.1, torch.arange(3) + seed
    if dtype in (torch.quint4x2, torch.quint2x4):
        return torch.quantize_per_channel(numbers(seed, 3, 5), scales, zeros.float(), 0, dtype)
    return torch.quantize_per_channel(numbers(seed, 3, 4), scales.double(), zeros, 0, dtype)


def per_tensor(seed: int, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(numbers(seed, 3, 4), 0.1 * (seed + 1), 2, dtype)


def wrapper(seed: int, kind: type[Wrapper] = Wrapper) -> Wrapper:
    return kind(torch.arange(4, dtype=torch.int8) + seed, torch.tensor([seed + 0.5]), "a note")


MADE: dict[str, Callable[[int], torch.Tensor]] = {
    "coo": coo,
    "coo, not coalesced": lambda s: torch.sparse_coo_tensor(torch.tensor([[0, 0, 1]]), numbers(s, 3, 2), (2, 2)),
    "coo without values": lambda s: torch.sparse_coo_tensor(size=(2, 3)),
    "coo with gradient": lambda s: coo(s).requires_grad_(),
    "csr": lambda s: (torch.eye(3) * (s + 1)).to_sparse_csr(),
    "csc": lambda s: (torch.eye(3) * (s + 1)).to_sparse_csc(),
    "bsr": lambda s: (torch.eye(4) * (s + 1)).to_sparse_bsr((2, 2)),
    "bsc": lambda s: (torch.eye(4) * (s + 1)).to_sparse_bsc((2, 2)),
    "nested": lambda s: torch.nested.nested_tensor([numbers(s, 2, 3), numbers(s + 7, 1, 3)]),
    "qint8": per_tensor,
    "quint8 by channel": lambda s: by_channel(s, torch.quint8),
    "qint32": lambda s: per_tensor(s, torch.qint32),
    "transposed qint8": lambda s: per_tensor(s).t(),
    "quint4x2": lambda s: by_channel(s, torch.quint4x2),
    "quint2x4": lambda s: by_channel(s, torch.quint2x4),
    "conjugate": lambda s: numbers(s, 3, dtype=torch.complex64).conj(),
    "negative": lambda s: numbers(s, 3, dtype=torch.complex64).conj().imag,
    "sparse parameter": lambda s: nn.Parameter(coo(s)),
    "quantized parameter": lambda s: nn.Parameter(per_tensor(s), requires_grad=False),
}
"""Tensors that need no pickle."""
CLASSES: dict[str, Callable[[int], torch.Tensor]] = {
    "subclass": lambda s: numbers(s, 3).as_subclass(Plain),
    "transposed subclass": lambda s: numbers(s, 3, 4).t().as_subclass(Plain),
    "conjugate of a subclass": lambda s: numbers(s, 3, dtype=torch.complex64).conj().as_subclass(Plain),
    "subclass with attributes": lambda s: Named.of(numbers(s, 3), s + 1.0),
    "parameter of a subclass": lambda s: nn.Parameter(numbers(s, 3).as_subclass(Plain)),
    "class of parameters": lambda s: OwnParameter(numbers(s, 3)),
    "wrapper": wrapper,
    "parameter of a wrapper": lambda s: nn.Parameter(wrapper(s)),
    "wrapper of a sparse tensor": lambda s: Wrapper(coo(s), torch.tensor([s + 0.5])),
    "wrapper of a wrapper": lambda s: Wrapper(wrapper(s), torch.tensor([s + 0.5])),
    "jagged": lambda s: torch.nested.nested_tensor([numbers(s, 2, 3), numbers(s, 1, 3)], layout=torch.jagged),
    "masked": lambda s: torch.masked.masked_tensor(numbers(s, 3), torch.tensor([True, False, True])),
    "causal bias": lambda s: torch.nn.attention.bias.causal_lower_right(3, 4),
}
"""Tensors that need a pickle for their class."""


def bits(value: Any) -> Any:
    """Return what must be equal of a tensor of any kind: classes, layouts, and the bits of all its plain tensors."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = type(value)
    if kind.__name__ == "MaskedTensor":
        return kind, bits(value._masked_data), bits(value._masked_mask)
    if hasattr(kind, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return kind, value.requires_grad, repr(context), [bits(getattr(value, name)) for name in names]
    attributes = {name: bits(part) for name, part in sorted(vars(value).items())}
    facts = kind, value.dtype, value.layout, value.requires_grad, attributes
    plain = value.detach()
    if kind not in (torch.Tensor, nn.Parameter):
        plain = plain.as_subclass(torch.Tensor)
    return (*facts, *_parts(plain))


def _parts(plain: torch.Tensor) -> list[Any]:
    if plain.is_nested:
        return [*map(bits, plain.unbind()), bits(plain._nested_tensor_strides())]
    if plain.layout is torch.sparse_coo:
        return [plain.shape, plain.is_coalesced(), bits(plain._indices()), bits(plain._values())]
    if plain.layout is not torch.strided:
        is_by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
        names = ("crow_indices", "col_indices") if is_by_row else ("ccol_indices", "row_indices")
        return [plain.shape, *(bits(getattr(plain, name)()) for name in (*names, "values"))]
    if plain.is_quantized:
        of_channels = plain.qscheme() != torch.per_tensor_affine
        names = ["q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis"]
        how = [bits(getattr(plain, name)()) for name in (names if of_channels else ["q_scale", "q_zero_point"])]
        return [plain.qscheme(), how, plain.shape, plain.stride(), plain.int_repr().numpy().tobytes()]
    words = plain.resolve_conj().resolve_neg().contiguous()
    return [plain.shape, plain.stride(), plain.is_conj(), plain.is_neg(), words.numpy().tobytes()]

"""Fills a module with some tensors of a checkpoint, most of them read straight into the module's own memory.

First a plan, which finds all that does not fit; then the reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tensorcas_flavors._torch_fill_module import (
    EXPANDED,
    copy_into,
    is_expanded,
    loses,
    warn_of_rounding,
    with_prefix_of,
    without_repeats,
)
from tensorcas_flavors._torch_memory import check_device, filling_refusal, instead_of, made_like
from tensorcas_flavors._torch_rows import ELSEWHERE
from tensorcas_flavors._torch_storages import overlapping
from tensorcas_flavors._torch_tensors import (
    ROW_DTYPES,
    Geometry,
    as_array,
    as_tensor,
    dtype_name,
    extent_bytes,
    geometry,
    memory_refusal,
    pytorch_error,
    refusal,
    row_dtype,
    some,
    torch_dtype,
)
from tensorcas_flavors._torch_tree import own_tensors, unwrap
from tensorcas_mlflow.adapter import Array, NotFilled, ReadTensors, StoredTensor
from tensorcas_mlflow.dtypes import parse_dtype

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 64 << 20
"""So much is held besides the module, or one tensor if that is larger."""


def fill_weights(
    model: Any,
    stored: Mapping[str, StoredTensor],
    read: ReadTensors,
    *,
    wanted: Callable[[str], bool] | None,
    strict: bool,
    device: torch.device,
) -> NotFilled:
    """Fill a module in place; see `Adapter.fill_weights`.

    What ``load_state_dict`` does besides copying is not done: no hook is run, and extra state stays as it is.

    Args:
        model: A module, maybe wrapped as `unwrap` knows it; names may have the wrapper's prefix on either side.
        stored: By the module's names; tensors that `extract` found outside of state dicts are passed over, and
            named in what is returned. Of tied ones one is enough, and of several the last one in the module's order is
            taken, which is the one that ``load_state_dict`` leaves there.
        read: Is given an ``out`` for the tensors that are on the CPU, contiguous and of the stored dtype. The others
            are read in batches of 64 MiB and converted as ``load_state_dict`` converts them.
        wanted: As there; it must choose one name at least.
        strict: As there. Shapes must fit in any case. Non-persistent buffers are filled where they were stored, and
            never missed.
        device: Where tensors on the meta device are made, of their own dtype, and put in place when all is read.
            Those that were tied are tied again; what else held them (an optimizer) holds the old ones.

    Raises:
        AdapterError: It does not fit, or torch cannot copy what it said it could.
    """
    import torch

    module = unwrap(model)
    if not isinstance(module, torch.nn.Module):
        raise pytorch_error(
            f"only a module is filled with parts of a checkpoint, and this is a {type(module).__name__}"
        )
    check_device(device)
    plan = _Plan(module, stored, wanted)
    plan.check(strict=strict)
    warn_of_rounding(plan.rounded)
    with torch.no_grad():
        plan.execute(read, device)
    return plan.not_filled


@dataclass(eq=False, slots=True, kw_only=True)
class _Target:
    """One tensor of the module, or several that are the same elements of the same memory."""

    tensor: torch.Tensor
    """Any of them."""
    names: list[str] = field(default_factory=list)
    """In the module's order."""
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensor objects by identity."""
    source: StoredTensor | None = None
    """What it is filled with."""
    stored_as: torch.dtype | None = None
    """The dtype of the source."""
    made: torch.Tensor | None = None
    """For one on the meta device, what takes its place."""

    @property
    def memory(self) -> torch.Tensor:
        """What is written to, without its history."""
        return self.tensor.detach() if self.made is None else self.made


class _Plan:
    """Which tensors of a module are filled with what."""

    def __init__(
        self, module: torch.nn.Module, stored: Mapping[str, StoredTensor], chosen: Callable[[str], bool] | None
    ) -> None:
        wanted = chosen or (lambda name: True)
        self.rounded: list[str] = []
        self._module = module
        self._own = dict(own_tensors(module))
        try:
            state = module.state_dict(keep_vars=True)
        except Exception as error:  # state_dict() runs hooks of the module's class, which may raise anything
            raise pytorch_error(f"the {type(module).__name__} gives no state_dict(): {error}") from error
        known = {id(tensor) for tensor in self._own.values()}
        names = self._own | {name: value for name, value in state.items() if id(value) in known}
        outside = [name for name in stored if name.startswith(ELSEWHERE)]
        named = {name: source for name, source in stored.items() if not name.startswith(ELSEWHERE)}
        stored = with_prefix_of(names, named, None)[0]
        self._problems: list[str] = []
        missing: list[str] = []
        without_memory: list[str] = []
        self._filled: list[_Target] = []
        for target in _targets(names):
            found = {name: stored[name] for name in target.names if name in stored and wanted(name)}
            if found:
                self._fill(target, found)
                continue
            missing += [name for name in target.names if name in state and wanted(name)]
            if target.tensor.is_meta:
                without_memory += filter(wanted, target.names)
        self.not_filled = NotFilled(
            missing=tuple(missing),
            unexpected=tuple(name for name in stored if name not in names and wanted(name)),
            without_memory=tuple(without_memory),
            passed_over=tuple(name for name in outside if wanted(name)),
        )
        if chosen is not None and not self._filled and self.not_filled == NotFilled() and not self._problems:
            self._problems.append("no tensor has a name that is asked for")

    def check(self, *, strict: bool) -> None:
        """Raise AdapterError if something does not fit, with all of it in one message."""
        problems = list(some(self._problems))
        if strict:
            for title, names in (("missing", self.not_filled.missing), ("unexpected", self.not_filled.unexpected)):
                if names:
                    problems.append(f"{title}: {', '.join(some([repr(name) for name in names]))}")
        if problems:
            raise pytorch_error(f"the {type(self._module).__name__} cannot be filled: {'; '.join(problems)}")

    def execute(self, read: ReadTensors, device: torch.device) -> None:
        """Read everything, and fill the module."""
        self._fill_expanded(read)
        for target in self._filled:
            if target.tensor.is_meta:
                target.made = made_like(target.tensor, device)
        out, converted = self._ways()
        if out:
            try:
                read(list(out), out=out)
            finally:
                self._mark_changed()  # a read that fails may have written some
        for batch in _batches(converted):
            arrays = read(list(dict.fromkeys(_source(target).name for target in batch)))
            for target in batch:
                copy_into(target.memory, _tensor(arrays[_source(target).name], target), repr(target.names[0]))
            del arrays  # before the next batch is read
        self._put_in_place()

    def _fill(self, target: _Target, stored: Mapping[str, StoredTensor]) -> None:
        """Choose what a target is filled with; note what does not fit."""
        tensor = target.tensor
        reason = filling_refusal(tensor)
        if reason is not None:
            self._problems.append(f"tensor {target.names[0]!r} {reason}")
            return
        for name, source in stored.items():
            try:
                target.stored_as = _stored_dtype(source, tensor)
                if source.shape != tensor.shape:
                    raise ValueError(
                        f"was stored as {source.dtype} {source.shape} and does not fit one of {dtype_name(tensor)} "
                        f"{tuple(tensor.shape)}"
                    )
            except ValueError as error:
                self._problems.append(f"tensor {name!r} {error}")
                continue
            target.source = source
        if target.source is not None and target.stored_as is not None:
            self._filled.append(target)
            if loses(target.stored_as, tensor.dtype):
                self.rounded.append(f"{target.names[0]} ({str(target.stored_as)[6:]} to {dtype_name(tensor)})")

    def _fill_expanded(self, read: ReadTensors) -> None:
        """Fill tensors whose elements are repeated, and first see that the stored ones repeat them."""
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        rest = []
        for target in self._filled:
            if target.tensor.is_meta or not is_expanded(target.tensor):
                rest.append(target)
                continue
            name = _source(target).name
            pair = without_repeats(target.memory, _tensor(read([name])[name], target))
            if pair is None:
                self._problems.append(f"tensor {target.names[0]!r} {EXPANDED}")
            else:
                pairs[target.names[0]] = (pair[0], pair[1].clone())
        self.check(strict=False)
        for first, (once, values) in pairs.items():
            copy_into(once, values, repr(first))
        self._filled = rest

    def _ways(self) -> tuple[dict[str, Array], list[_Target]]:
        """Say which stored tensors are read to where they belong, and which targets are copied into."""
        alone = _alone(self._filled)
        out: dict[str, Array] = {}
        converted = []
        for target in self._filled:
            name = _source(target).name
            if name not in out and target in alone and _is_as_stored(target):
                out[name] = as_array(target.memory)
            else:
                converted.append(target)
        return out, converted

    def _mark_changed(self) -> None:
        """Tell autograd, which does not see what numpy writes: a graph that needs the old values must not go on."""
        import torch

        for target in self._filled:
            if not target.tensor.is_meta and not target.tensor.is_inference():
                torch.autograd.graph.increment_version(target.tensor)

    def _put_in_place(self) -> None:
        new = {
            identity: instead_of(old, target.made)
            for target in self._filled
            if target.made is not None
            for identity, old in target.tensors.items()
        }
        for name, tensor in self._own.items():
            if id(tensor) in new:
                path, _, key = name.rpartition(".")
                # An LSTM, for one, keeps a list of its parameters, and mends it when one is set.
                setattr(self._module.get_submodule(path), key, new[id(tensor)])


def _targets(names: Mapping[str, Any]) -> list[_Target]:
    """Bring the names of one memory together."""
    found: dict[Geometry | int, _Target] = {}
    for name, tensor in names.items():
        target = found.setdefault(id(tensor) if filling_refusal(tensor) else geometry(tensor), _Target(tensor=tensor))
        target.names.append(name)
        target.tensors[id(tensor)] = tensor
    return list(found.values())


def _stored_dtype(source: StoredTensor, target: torch.Tensor) -> torch.dtype:
    """Find the dtype of a stored tensor.

    Raises:
        ValueError: It is not one of torch, or torch does not convert it to the target's.
    """
    row = parse_dtype(source.dtype or "uint8")
    own = dtype_name(target)
    if own not in ROW_DTYPES and row.name == row_dtype(own, target.itemsize):
        return target.dtype  # arrays do not have it, so it is stored as words
    dtype = torch_dtype(row)
    if not _converts(dtype, target.dtype):
        raise ValueError(f"was stored as {source.dtype}, which torch does not convert to {own}")
    return dtype


@cache
def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    import torch

    if source == target:
        return True
    try:
        torch.zeros(1, dtype=target, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_as_stored(target: _Target) -> bool:
    """Tell whether the stored bytes are those of the target's memory."""
    tensor, source = target.memory, _source(target)
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and (source.dtype or "uint8") == row_dtype(dtype_name(tensor), tensor.itemsize)
        and refusal(tensor) is None
        and memory_refusal(tensor, geometry(tensor)) is None
    )


def _alone(targets: list[_Target]) -> set[_Target]:
    """Return the targets on the CPU that share memory with no other one."""
    stretches = {}
    for number, target in enumerate(targets):
        tensor = target.memory
        if tensor.is_cpu:
            start = tensor.data_ptr()
            stretches[number] = range(start, start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize))
    groups = overlapping(list(stretches), stretches)
    return {targets[group[0]] for group in groups if len(group) == 1}


def _source(target: _Target) -> StoredTensor:
    assert target.source is not None
    return target.source


def _tensor(array: Array, target: _Target) -> torch.Tensor:
    assert target.stored_as is not None
    return as_tensor(array, target.stored_as)


def _batches(targets: list[_Target]) -> Iterator[list[_Target]]:
    batch: list[_Target] = []
    n_bytes = 0
    for target in targets:
        source = _source(target)
        size = math.prod(source.shape) * parse_dtype(source.dtype or "uint8").itemsize
        if batch and n_bytes + size > BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append(target)
        n_bytes += size
    if batch:
        yield batch

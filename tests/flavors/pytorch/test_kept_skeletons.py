"""Skeletons kept between the steps of a training, and every change of a module that a step has to notice."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tensorcas_flavors.pytorch._kept as kept_module
from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_flavors.pytorch._kept import PlainModule
from tensorcas_flavors.pytorch._tensors import refusal
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

ADAPTER = PyTorchAdapter()


class Net(nn.Module):
    """A module of a class of its own, importable by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3, bias=False)
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.label = "net"


class Wide(nn.Linear):
    """A class to change a module to."""


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def in_full(model: Any) -> dict[str, Array]:
    """Extract a model without any kept skeleton."""
    known, kept_module._kept = kept_module._kept, {}
    try:
        return ADAPTER.extract(model)
    finally:
        kept_module._kept = known


def check_exact(model: Any) -> dict[str, Array]:
    """Extract a model, and compare the result with an extraction in full."""
    found, wanted = ADAPTER.extract(model), in_full(model)

    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name
    return found


def is_kept(model: Any) -> bool:
    plain = PlainModule.of(model)
    return plain is not None and plain.kept() is not None


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "_kept", {})


def test_a_step_of_a_plain_module_takes_the_kept_skeleton_and_the_new_values() -> None:
    net = Net()
    first = ADAPTER.extract(net)
    with torch.no_grad():
        for weights in net.parameters():
            weights += 1

    assert is_kept(net)
    second = check_exact(net)
    assert second[SKELETON] is first[SKELETON]
    assert np.shares_memory(second["head.weight"], net.head.weight.detach().numpy())


def test_an_equal_module_in_other_memory_takes_the_kept_skeleton() -> None:
    net = Net()
    ADAPTER.extract(net)
    other = copy.deepcopy(net)

    assert is_kept(other)
    check_exact(other)
    for name, weights in ADAPTER.reconstruct(check_exact(other)).state_dict().items():
        assert torch.equal(weights, other.state_dict()[name])


def _set(path: str, name: str, value: Any) -> Callable[[Net], None]:
    return lambda net: setattr(net.get_submodule(path), name, value)


def _rename(net: Net) -> None:
    net.tail = net._modules.pop("head")


def _reorder(net: Net) -> None:
    net._modules["body"] = net._modules.pop("body")


def _reorder_parameters(net: Net) -> None:
    parameters = net.body[0]._parameters
    parameters["weight"] = parameters.pop("weight")


def _tie(net: Net) -> None:
    net.other = nn.Linear(4, 3, bias=False)
    net.other.weight = net.head.weight


def _overlap(net: Net) -> None:
    memory = torch.zeros(20)
    net.head.weight = nn.Parameter(memory[:12].view(3, 4))
    net.scale = memory[10:12]


def _share_a_module(net: Net) -> None:
    net.again = net.head


def _attribute_of_a_tensor(net: Net) -> None:
    net.head.weight.note = "of mine"  # type: ignore[attr-defined]


def _order_of_attributes(net: Net) -> None:
    vars(net)["label"] = vars(net).pop("label")
    vars(net)["training"] = vars(net).pop("training")


def _attributes_of_hooks(net: Net) -> None:
    net._forward_hooks.note = 1  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "shape": lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(4, 3))),
    "dtype": lambda net: net.half(),
    "one dtype": lambda net: net.head.to(torch.bfloat16),
    "name": _rename,
    "order": _reorder,
    "order of parameters": _reorder_parameters,
    "tied weights": _tie,
    "overlapping memory": _overlap,
    "a module twice": _share_a_module,
    "a new module": lambda net: setattr(net, "more", nn.Linear(1, 1)),
    "a removed module": lambda net: delattr(net, "head"),
    "no module": lambda net: setattr(net, "head", None),
    "a new buffer": lambda net: net.register_buffer("extra", torch.zeros(1)),
    "a removed buffer": lambda net: delattr(net, "scale"),
    "a persistent buffer": lambda net: net._non_persistent_buffers_set.clear(),
    "no parameter": lambda net: net.body[0].register_parameter("bias", None),
    "mode": lambda net: net.eval(),
    "mode of one": lambda net: net.body[1].eval(),
    "number": _set("body.3", "p", 0.25),
    "sign of zero": _set("body.1", "eps", -0.0),
    "type of a number": _set("body.2", "inplace", 0),
    "text": _set("", "label", "other"),
    "new attribute": _set("", "epoch", 3),
    "removed attribute": lambda net: delattr(net, "label"),
    "order of attributes": _order_of_attributes,
    "list": _set("", "sizes", [1, 2]),
    "tuple": _set("body.0", "stride", (2, 2)),
    "tuple of truths": _set("body.0", "stride", (True, True)),
    "function": _set("", "activation", torch.relu),
    "array": _set("", "mean", np.zeros(3)),
    "tensor": _set("", "mean", torch.zeros(3)),
    "not a number": _set("", "loss", float("nan")),
    "hook": lambda net: net.head.register_forward_hook(print),
    "attribute of hooks": _attributes_of_hooks,
    "requires no grad": lambda net: net.head.weight.requires_grad_(False),
    "parameter as tensor": lambda net: net.head._parameters.update(weight=net.head.weight.detach()),
    "attribute of a tensor": _attribute_of_a_tensor,
    "strides": lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(4, 3).t())),
    "offset": lambda net: setattr(net.head, "weight", nn.Parameter(torch.zeros(13)[1:].view(3, 4))),
    "class": lambda net: setattr(net.head, "__class__", Wide),
    "class with an extra state": lambda net: setattr(net.head, "__class__", WithExtra),
    "parametrized": lambda net: nn.utils.parametrizations.weight_norm(net.head),
    "spectral norm": lambda net: nn.utils.parametrizations.spectral_norm(net.head),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_module_is_noticed(change: str) -> None:
    net = Net()
    check_exact(net)
    CHANGES[change](net)

    assert not is_kept(net)
    check_exact(net)


def test_weights_that_come_to_overlap_are_stored_as_views_of_one_memory() -> None:
    net = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Linear(6, 1, bias=False))
    memories = torch.zeros(12), torch.zeros(12)
    for layer, memory, begin in zip(net, memories, (0, 3), strict=True):
        layer.weight = nn.Parameter(memory[begin : begin + 6].view(1, 6))
    ADAPTER.extract(net)
    assert is_kept(net)
    net[1].weight = nn.Parameter(memories[0][3:9].view(1, 6))

    assert not is_kept(net)
    check_exact(net)


def test_zero_and_false_are_told_apart() -> None:
    net = Net()
    net.flag = False  # type: ignore[assignment]
    ADAPTER.extract(net)
    net.flag = 0  # type: ignore[assignment]

    assert not is_kept(net)
    assert type(ADAPTER.reconstruct(check_exact(net)).flag) is int


@pytest.mark.parametrize("method", ["state_dict", "_save_to_state_dict", "__getstate__", "__reduce_ex__"])
def test_a_class_whose_code_changes_is_extracted_in_full(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Wide(2, 2))
    ADAPTER.extract(net)
    own = getattr(Wide, method)
    monkeypatch.setattr(Wide, method, lambda self, *args, **options: own(self, *args, **options), raising=False)

    assert PlainModule.of(net) is None


def test_a_class_no_longer_found_by_its_name_is_extracted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Wide(2, 2))
    ADAPTER.extract(net)
    assert is_kept(net)
    monkeypatch.setitem(globals(), "Wide", None)

    assert PlainModule.of(net) is None


def test_a_class_pickled_by_value_is_extracted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    ADAPTER.extract(net)
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        assert PlainModule.of(net) is None
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_a_tensor_without_memory_is_refused_like_before() -> None:
    net = Net()
    ADAPTER.extract(net)
    other = copy.deepcopy(net)  # torch resizes no memory that numpy has seen
    other.head.weight.untyped_storage().resize_(0)

    with pytest.raises(AdapterError, match="no memory"):
        ADAPTER.extract(other)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.sampled_from(["", "a"]), st.tuples(st.integers(0, 2))
)


@pytest.mark.long
@given(steps=st.lists(st.tuples(st.sampled_from(["a", "b"]), VALUES), min_size=1, max_size=6))
def test_any_history_of_attributes_is_stored_like_in_full(steps: list[tuple[str, Any]]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for name, value in steps:
        setattr(net[1], name, value)
        back = ADAPTER.reconstruct(check_exact(net))

        assert pickle.dumps(getattr(back[1], name)) == pickle.dumps(value)


def test_the_number_of_kept_skeletons_is_bounded() -> None:
    for width in range(1, 3 * kept_module._MOST_KEPT):
        ADAPTER.extract(nn.Sequential(nn.Linear(width, 1), nn.ReLU()))

    assert len(kept_module._kept) <= kept_module._MOST_KEPT


def _state_dict_of_halves(self: nn.Module, *args: Any, **options: Any) -> dict[str, Any]:
    return {name: weights.half() for name, weights in _STATE_DICT(self, *args, **options).items()}


_STATE_DICT = nn.Module.state_dict


def test_a_change_of_the_class_of_all_modules_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    ADAPTER.extract(net)
    monkeypatch.setattr(nn.Module, "state_dict", _state_dict_of_halves)

    assert not is_kept(net)
    assert check_exact(net)["head.weight"].dtype == np.float16


def test_a_new_name_of_a_class_is_noticed() -> None:
    net = nn.Sequential(Wide(2, 2))
    ADAPTER.extract(net)
    Wide.__name__ = "Narrow"
    try:
        assert not is_kept(net)
        check_exact(net)
    finally:
        Wide.__name__ = "Wide"


def test_a_module_inside_itself_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].add_module("parent", net)

    with pytest.raises(AdapterError, match="recursion"):
        ADAPTER.extract(net)


def test_another_object_among_the_modules_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net._modules["other"] = object()  # type: ignore[assignment]

    with pytest.raises(AdapterError, match="no attribute 'state_dict'"):
        ADAPTER.extract(net)


def _while_described(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Change a module once, in the middle of its next description, as another thread may."""
    changes = [change]

    def changing(tensor: torch.Tensor) -> str | None:
        if changes:
            changes.pop()()
        return refusal(tensor)

    monkeypatch.setattr(kept_module, "refusal", changing)


def test_a_module_that_gets_attributes_while_it_is_described_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer)
    ADAPTER.extract(net)
    _while_described(monkeypatch, lambda: setattr(layer, "note", "new"))

    assert torch.equal(ADAPTER.reconstruct(ADAPTER.extract(net))[0].weight, layer.weight)


def test_weights_replaced_while_their_module_is_described_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer)
    ADAPTER.extract(net)
    halves = layer.weight.detach().half()
    _while_described(monkeypatch, lambda: layer._parameters.update(weight=nn.Parameter(halves)))

    assert torch.allclose(ADAPTER.reconstruct(ADAPTER.extract(net))[0].weight.float(), halves.float(), atol=1e-3)

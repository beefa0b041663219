"""Whole training states are filled in place, and nothing is unpickled."""

from __future__ import annotations

import argparse
import functools
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import Checkpoint, read_into_live_tensors
from tests.flavors.pytorch.models import ADAPTER, Holder, Tied, perceptron, raw, same, shares_storage, stored
from tests.flavors.pytorch.states import (
    OPTIMIZERS,
    SCHEDULERS,
    Settings,
    as_plain,
    exactly,
    live_values,
    network,
    plain_values,
    train,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*(ComplexHalf|lr_scheduler.step|The epoch parameter).*")

AS_STORED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"live": dict, "plain": as_plain}


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(params=AS_STORED.values(), ids=AS_STORED)
def store_as(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True, params=["new memory", "live memory"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill from rows in memory, and with rows read straight into the live tensors that take them."""
    if request.param == "live memory":
        read_into_live_tensors(monkeypatch)


class TestStates:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_a_filled_optimizer_continues_bit_for_bit(
        self, name: str, store_as: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        state = trained(name)
        rows = stored(store_as(state))
        target = trained(name, seed=1)
        target["epoch"] = 0

        assert ADAPTER.reconstruct(rows, target) is target
        for one in (state, target):
            train(one["model"], one["optimizer"])

        assert target["epoch"] == 3
        assert exactly(target["model"].state_dict(), state["model"].state_dict())
        assert exactly(target["optimizer"].state_dict(), state["optimizer"].state_dict())

    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_filled_scheduler_continues_its_schedule(
        self, name: str, store_as: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        state = trained("momentum", name)
        rows = stored(store_as(state))
        model = network(1)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        target = {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer), "epoch": 0}

        ADAPTER.reconstruct(rows, target)
        for one in (state, target):
            train(one["model"], one["optimizer"], one["scheduler"])

        assert exactly(as_plain(target), as_plain(state))

    def test_random_states_come_back_into_live_generators(self) -> None:
        state = {"w": torch.ones(1), "python": random.getstate(), "torch": torch.get_rng_state(), "numpy": None}
        state["numpy"] = np.random.default_rng(1).bit_generator.state
        rows = stored(state)
        wanted = (random.random(), torch.rand(1).item())

        target = {"w": torch.zeros(1), "python": None, "torch": torch.get_rng_state(), "numpy": None}
        ADAPTER.reconstruct(rows, target)
        random.setstate(target["python"])  # type: ignore[arg-type]
        torch.set_rng_state(target["torch"])  # type: ignore[arg-type]

        assert (random.random(), torch.rand(1).item()) == wanted
        assert target["numpy"] == state["numpy"]

    def test_plain_values_are_replaced_and_containers_kept(self) -> None:
        state = {"w": torch.ones(1)} | plain_values()
        history = [0.0]
        target: dict[str, Any] = {"w": torch.zeros(1)} | dict.fromkeys(plain_values()) | {"whole": history, "arrays": 3}

        ADAPTER.reconstruct(stored(state), target)

        assert target["whole"] is history
        assert exactly(target, state)

    def test_a_grad_scaler_is_filled(self, store_as: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        rows = stored(store_as({"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "w": torch.ones(1)}))
        target = {"scaler": torch.amp.GradScaler("cpu"), "w": torch.zeros(1)}

        ADAPTER.reconstruct(rows, target)

        assert target["scaler"].get_scale() == 8.0

    def test_lists_and_tuples_are_filled_by_position(self) -> None:
        state = [network(), (torch.ones(2), 5), [1, 2]]
        weight = torch.zeros(2)
        target = [network(1), (weight, 0), []]

        ADAPTER.reconstruct(stored(state), target)

        assert exactly(target[0].state_dict(), state[0].state_dict())  # type: ignore[union-attr]
        assert target[1] == (weight, 5)
        assert weight.tolist() == [1, 1]
        assert target[2] == [1, 2]

    def test_a_module_beside_others_is_filled_by_name_alone(self) -> None:
        model = network(1)
        state = trained()

        ADAPTER.reconstruct(stored(state), {"model": model}, strict=False)

        assert exactly(model.state_dict(), state["model"].state_dict())

    @pytest.mark.long
    def test_live_and_wrapped_modules_fill_each_other(self) -> None:
        model = network()
        target = {"model": torch.compile(network(1)), "other": nn.DataParallel(network(2))}

        ADAPTER.reconstruct(stored({"model": nn.DataParallel(model), "other": model}), target)

        assert raw(target["model"].state_dict()["_orig_mod.0.weight"]) == raw(model[0].weight)
        assert raw(target["other"].state_dict()["module.0.weight"]) == raw(model[0].weight)

    def test_a_value_that_only_a_pickle_restores_is_filled_or_refused(self) -> None:
        rows = stored(trained() | live_values() | {"config": {"a": 1, "kind": nn.Linear}})
        others = {"settings": Settings(width=9), "arguments": argparse.Namespace(lr=9), "kind": nn.Linear}
        target = trained("adam", seed=1) | others | {"config": {"a": 0, "kind": nn.Linear}}

        ADAPTER.reconstruct(rows, target)

        assert {name: target[name] for name in live_values()} == live_values()
        assert target["settings"] is others["settings"]
        assert target["config"] == {"a": 1, "kind": nn.Linear}
        for name, value in [*dict.fromkeys(live_values(), None).items(), ("settings", 5), ("kind", nn.Conv1d)]:
            with pytest.raises(AdapterError, match=f"'{name}' .*load a new one, without into="):
                ADAPTER.reconstruct(rows, target | {name: value})

    def test_a_value_that_only_a_pickle_restores_is_unchanged_without_strict(self) -> None:
        target = trained("adam", seed=1) | dict.fromkeys(live_values(), "mine")

        ADAPTER.reconstruct(stored(trained() | live_values()), target, strict=False)

        assert [target[name] for name in live_values()] == ["mine"] * 3

    def test_filling_a_training_state_unpickles_nothing(self, tmp_path: Path) -> None:
        rows = stored(trained() | {"bomb": Bomb(tmp_path / "gone off")})
        (tmp_path / "gone off").unlink(missing_ok=True)  # a class is tried once, at its first save

        ADAPTER.reconstruct(rows, trained())
        ADAPTER.reconstruct(rows, trained() | {"bomb": Bomb(tmp_path / "gone off")})
        ADAPTER.weights(rows)
        ADAPTER.unpickles(rows)
        ADAPTER.cuts(rows)

        assert not (tmp_path / "gone off").exists()
        ADAPTER.reconstruct(rows)
        assert (tmp_path / "gone off").exists()


class TestMisfits:
    @pytest.mark.parametrize(
        "bad", [42, "text", None.__class__, np.ones(3), {1, 2}, object()], ids=lambda bad: type(bad).__name__
    )
    def test_an_object_that_cannot_be_filled_is_named(self, bad: object) -> None:
        with pytest.raises(AdapterError, match="cannot be filled: give a module"):
            ADAPTER.reconstruct(stored(perceptron()), bad)

    def test_a_training_state_does_not_fill_a_bare_module(self, store_as: Callable[[Any], Any]) -> None:
        model = network(1)
        before = raw(model[0].weight)

        with pytest.raises(
            AdapterError, match=r"whole training state .* 'model', 'optimizer', 'epoch'.*\{'model': module\}"
        ):
            ADAPTER.reconstruct(stored(store_as(trained())), model)
        assert raw(model[0].weight) == before

    def test_one_object_does_not_fill_a_mapping_of_objects(self) -> None:
        with pytest.raises(AdapterError, match="one Sequential was stored there: give the object itself"):
            ADAPTER.reconstruct(stored(network()), {"model": network()})

    def test_missing_entries_are_named_before_anything_is_filled(self) -> None:
        target = {"model": network(1), "scheduler": None}
        before = raw(target["model"][0].weight)

        with pytest.raises(AdapterError, match="it lacks 'scheduler' and has 'model', 'optimizer', 'epoch'"):
            ADAPTER.reconstruct(stored(trained()), target)
        assert raw(target["model"][0].weight) == before

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("second", nn.Linear(5, 9), r"size mismatch for weight: copying a param with shape torch.Size\(\[8, 5\]\)"),
            ("second", nn.Linear(5, 8, bias=False), r'Unexpected key\(s\) in state_dict: "bias"'),
            ("second", nn.Bilinear(5, 5, 8), "size mismatch for weight"),
            ("second", torch.optim.SGD([torch.ones(1)]), "no state of an optimizer"),
            ("second", [torch.ones(1)], "a mapping|a list"),
            ("second", torch.ones(1), "is a tensor, and a Linear was stored"),
            ("optimizer", torch.optim.Adam([torch.ones(1)]), "doesn't match the size of optimizer's group"),
            ("optimizer", torch.optim.Adam([{"params": []}, {"params": []}]), "different number of parameter groups"),
            ("optimizer", nn.Linear(1, 1), r"'optimizer': (?s:Error.*)Unexpected key\(s\) in state_dict: \"state\""),
            ("w", torch.ones(3), r"'w' was stored as float32 \(2,\)"),
            ("w", torch.ones(1).expand(2), "it is expanded"),
            ("epoch", torch.ones(1), "is a tensor, and a int was stored"),
            ("epoch", nn.Linear(1, 1), "is a Linear, and a int was stored"),
        ],
    )
    def test_a_misfit_is_found_before_anything_is_filled(self, name: str, value: Any, reason: str) -> None:
        state = trained() | {"second": nn.Linear(5, 8), "w": torch.ones(2)}
        target = trained(seed=1) | {"second": nn.Linear(5, 8), "w": torch.zeros(2)} | {name: value}
        before = raw(target["model"][0].weight)

        with pytest.raises(AdapterError, match=reason):
            ADAPTER.reconstruct(stored(state), target)
        assert raw(target["model"][0].weight) == before

    def test_stored_entries_that_are_not_named_are_left_out(self) -> None:
        state = trained()
        target = {"epoch": None, "model": network(1)}

        ADAPTER.reconstruct(stored(state), target)

        assert target["epoch"] == 3
        assert raw(target["model"][0].weight) == raw(state["model"][0].weight)

    def test_entries_that_were_not_stored_are_unchanged_without_strict(self) -> None:
        target = {"epoch": None, "more": 5}

        ADAPTER.reconstruct(stored(trained()), target, strict=False)

        assert target == {"epoch": 3, "more": 5}

    def test_strict_false_means_the_same_as_in_torch(self) -> None:
        model = nn.Linear(3, 2)
        other = nn.Linear(3, 2, bias=False)
        rows = stored(model)

        ADAPTER.reconstruct(rows, other, strict=False)

        assert raw(other.weight) == raw(model.weight)
        with pytest.raises(AdapterError, match="size mismatch"):
            ADAPTER.reconstruct(rows, nn.Linear(4, 2), strict=False)

    def test_a_state_dict_that_a_hook_makes_fit_is_accepted(self) -> None:
        class Renamed(nn.Linear):
            def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
                state[prefix + "weight"] = state.pop(prefix + "old")
                super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]

        model = nn.Linear(3, 2)
        target = Renamed(3, 2)

        ADAPTER.reconstruct(stored({"old": model.weight.detach(), "bias": model.bias.detach()}), target)

        assert raw(target.weight) == raw(model.weight)

    def test_a_state_dict_with_a_value_that_only_a_pickle_restores_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        optimizer.param_groups[0]["note"] = Bomb(tmp_path / "gone off")

        with pytest.raises(AdapterError, match=r"'o.param_groups.0.note' is a Bomb in the state dict of a live object"):
            stored({"o": optimizer})
        monkeypatch.setenv("TENSORCAS_TRY_FILL", "false")
        with pytest.raises(AdapterError, match=r"'o' holds a .*Bomb, which only a pickle can restore"):
            ADAPTER.reconstruct(stored({"o": optimizer}), {"o": optimizer})


class TestPrefixes:
    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
    def test_a_state_dict_of_a_wrapped_module_fills_a_bare_one(self, prefix: str) -> None:
        model = perceptron()
        state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        target = perceptron()

        ADAPTER.reconstruct(stored(state), target)

        assert exactly(dict(target.state_dict()), dict(model.state_dict()))

    @pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
    def test_state_dicts_fill_wrapped_and_bare_modules_alike(self, wrap: Any) -> None:
        model = perceptron()
        rows = stored(wrap(model).state_dict())
        bare, wrapped = perceptron(), wrap(perceptron())

        ADAPTER.reconstruct(rows, bare)
        ADAPTER.reconstruct(stored(model.state_dict()), wrapped)

        assert exactly(dict(bare.state_dict()), dict(model.state_dict()))
        assert [*map(raw, wrapped.parameters())] == [*map(raw, model.parameters())]

    def test_a_submodule_named_module_keeps_its_name(self) -> None:
        model, target = Holder(module=nn.Linear(2, 2)), Holder(module=nn.Linear(2, 2))

        ADAPTER.reconstruct(stored(model), target)

        assert raw(target.module.weight) == raw(model.module.weight)

    def test_a_bare_state_dict_fills_a_users_wrapper(self) -> None:
        model, target = nn.Linear(2, 2), Holder(module=nn.Linear(2, 2))

        ADAPTER.reconstruct(stored(model.state_dict()), target)

        assert raw(target.module.weight) == raw(model.weight)


class TestOptions:
    def test_floating_point_tensors_of_a_new_model_are_converted(self) -> None:
        model = ADAPTER.reconstruct(stored(perceptron()), dtype=torch.bfloat16)

        assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
        assert model[1].num_batches_tracked.dtype == torch.int64
        assert exactly(dict(model.state_dict()), dict(perceptron().bfloat16().state_dict()))

    def test_tied_weights_stay_tied_after_a_conversion(self) -> None:
        model = ADAPTER.reconstruct(stored(Tied()), dtype="float64")
        weights = ADAPTER.weights(stored(Tied()), dtype="torch.float64")

        assert model.decode.weight is model.encode.weight
        assert shares_storage(weights["encode.weight"], weights["decode.weight"])

    def test_an_optimizers_step_counts_are_not_rounded(self) -> None:
        for state in (trained(), as_plain(trained())):
            back = ADAPTER.reconstruct(stored(state), dtype=torch.float16)
            optimizer = back["optimizer"]
            moments = (optimizer if isinstance(optimizer, dict) else optimizer.state_dict())["state"][0]

            assert (moments["step"].dtype, moments["exp_avg"].dtype) == (torch.float32, torch.float16)

    def test_tensors_go_to_the_requested_device(self) -> None:
        rows = stored(trained() | {"n": torch.arange(2)})

        weights = ADAPTER.weights(rows, device="meta", dtype=torch.float16)
        back = ADAPTER.reconstruct(rows, device=torch.device("meta"))

        assert {tensor.device.type for tensor in weights.values()} == {"meta"}
        assert (weights["n"].dtype, weights["model.0.weight"].dtype) == (torch.int64, torch.float16)
        assert back["model"][0].weight.is_meta
        assert back["optimizer"].param_groups[0]["params"][0] is back["model"][0].weight

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"dtype": torch.int8}, "floating point or complex"),
            ({"dtype": "nn"}, "floating point or complex"),
            ({"dtype": "float99"}, "floating point or complex"),
            ({"device": "nowhere"}, "is no device"),
            ({"device": 1.5}, "is no device"),
            ({"device": "cuda:77"}, "cannot be moved"),
            ({"strict": True}, "give one, or leave it out"),
            ({"assign": True}, "no option 'assign'"),
        ],
        ids=str,
    )
    def test_invalid_options_are_refused(self, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(AdapterError, match=reason):
            ADAPTER.reconstruct(stored(perceptron()), **options)

    @pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float64}], ids=str)
    def test_a_filled_model_keeps_its_device_and_dtype(self, options: dict[str, Any]) -> None:
        with pytest.raises(AdapterError, match="keeps its own"):
            ADAPTER.reconstruct(stored(perceptron()), perceptron(), **options)

    def test_weights_of_a_state_are_tensors_and_arrays(self) -> None:
        state = as_plain(trained()) | {
            "array": np.arange(3),
            "numbers": list(range(100)),
            "w": torch.ones(1).bfloat16(),
        }

        weights = ADAPTER.weights(stored(state))

        assert "numbers" not in weights
        assert weights["array"].tolist() == [0, 1, 2]
        assert same(weights["w"], torch.ones(1).bfloat16())

    def test_unpickling_a_skeleton_by_hand_names_the_adapter(self) -> None:
        skeleton = stored(nn.Linear(1, 1))[SKELETON].tobytes()

        with pytest.raises(AdapterError, match="load it with its adapter"):
            pickle.loads(skeleton[6:])


def test_module_on_the_meta_device_is_refused() -> None:
    rows = stored(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = raw(target[0].weight)

    with pytest.raises(AdapterError, match=r"'1.weight' of the model is on the meta device.*load_into"):
        ADAPTER.reconstruct(rows, original=target)

    assert raw(target[0].weight) == before


def test_tensor_on_the_meta_device_is_refused() -> None:
    rows = stored({"epoch": 3, "scale": torch.ones(2)})

    with pytest.raises(AdapterError, match="'scale' is on the meta device"):
        ADAPTER.reconstruct(rows, original={"epoch": 0, "scale": torch.zeros(2, device="meta")})


def test_module_on_the_meta_device_in_another_order_of_memory_is_refused() -> None:
    target = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).to("meta")

    with pytest.raises(AdapterError, match="'weight' of the model is on the meta device"):
        ADAPTER.reconstruct(stored(nn.Conv2d(2, 3, 3)), original=target)


def test_module_whose_storage_was_resized_is_refused() -> None:
    rows = stored(nn.Linear(2, 2))
    target = nn.Linear(2, 2)
    target.weight.untyped_storage().resize_(0)
    bias = raw(target.bias)

    with pytest.raises(AdapterError, match="'weight' of the model has no memory behind it"):
        ADAPTER.reconstruct(rows, original=target)

    assert raw(target.bias) == bias


def test_tensor_whose_storage_was_resized_is_refused() -> None:
    rows = stored({"scale": torch.ones(2)})
    target = torch.zeros(2)
    target.untyped_storage().resize_(0)

    with pytest.raises(AdapterError, match="'scale' has no memory behind it"):
        ADAPTER.reconstruct(rows, original={"scale": target})


def test_loader_that_passes_for_one_of_torch_is_called() -> None:
    @functools.wraps(nn.Module.load_state_dict)
    def load_doubled(self: nn.Module, state: Any, **options: Any) -> Any:
        return nn.Module.load_state_dict(self, {name: 2 * value for name, value in state.items()}, **options)

    target, source = nn.Linear(2, 2), nn.Linear(2, 2)
    vars(target)["load_state_dict"] = functools.partial(load_doubled, target)
    other = type("Linear", (nn.Linear,), {"load_state_dict": load_doubled})(2, 2)
    for model in (target, other):
        ADAPTER.reconstruct(stored(source), original=model)

        assert torch.equal(model.weight, 2 * source.weight)


@pytest.mark.parametrize("fails", ["absent", "refusing"])
def test_states_are_filled_without_the_private_copy_of_torch(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("not implemented")

    if fails == "absent":
        monkeypatch.delattr(torch, "_foreach_copy_")
    else:
        monkeypatch.setattr(torch, "_foreach_copy_", refuse)
    source, by_state, by_name = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    ADAPTER.reconstruct(stored(source), original=by_state)
    Checkpoint.of(source).fill(by_name)

    for model in (by_state, by_name):
        assert all(same(one, other) for one, other in zip(model.parameters(), source.parameters(), strict=True))


def test_error_of_a_modules_own_code_says_that_the_state_may_be_filled_in_part() -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("refused by a hook")

    target = nn.Linear(2, 2)
    target.register_load_state_dict_post_hook(refuse)

    with pytest.raises(AdapterError, match="refused by a hook") as raised:
        ADAPTER.reconstruct(stored(nn.Linear(2, 2)), original=target)

    assert any("filled in part" in note for note in raised.value.__notes__)

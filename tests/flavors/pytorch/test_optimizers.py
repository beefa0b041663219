"""Optimizers are filled bit for bit, dtypes included, and each parameter gets the entries of its own name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import read_into_live_tensors
from tests.flavors.pytorch.models import ADAPTER, Holder, stored
from tests.flavors.pytorch.states import exactly

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KINDS_AND_DTYPES = [
    pytest.param(kind, dtype, id=f"{kind}-{dtype}", marks=() if (nth + mth) % 2 == 0 else pytest.mark.long)
    for nth, kind in enumerate(KINDS)
    for mth, dtype in enumerate(DTYPES)
]
"""A kind has a wide and a narrow dtype on every change, and all four in the long tests."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, params=["new memory", "live memory"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill from rows in memory, and with rows read straight into the live tensors that take them."""
    if request.param == "live memory":
        read_into_live_tensors(monkeypatch)


def network(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if kind != "Muon" or each.ndim == 2]
    return KINDS[kind](parameters, lr=0.01)  # type: ignore[call-arg]


def train(model: nn.Module, optimizer: Any, n_steps: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        x = torch.randn(5, 3, generator=source).to(next(model.parameters()).dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).float().pow(2).sum()
            loss.backward()
            for parameter in model.parameters():
                if isinstance(optimizer, torch.optim.SparseAdam):
                    parameter.grad = parameter.grad.to_sparse()  # type: ignore[union-attr]
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


class Wide(torch.optim.Optimizer):
    """Keeps float32 moments of parameters of any dtype."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                parameter.data.add_(state["moment"].to(parameter.dtype), alpha=-group["lr"])


class TestDtypes:
    @pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
    def test_training_that_was_filled_continues_bit_for_bit(self, kind: str, dtype: torch.dtype) -> None:
        model, other = network(dtype), network(dtype, 1)
        optimizer, filled = made(kind, model), made(kind, other)
        train(model, optimizer, 3, 1)
        train(other, filled, 1, 2)

        ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

        assert exactly(filled.state_dict(), optimizer.state_dict())
        for one in ((model, optimizer), (other, filled)):
            train(*one, 2, 3)
        assert exactly(filled.state_dict(), optimizer.state_dict())
        assert exactly(dict(other.state_dict()), dict(model.state_dict()))

    @pytest.mark.parametrize("as_plain", [False, True])
    @pytest.mark.parametrize("kind", [*KINDS, "Wide"])
    def test_entries_wider_than_their_parameter_keep_their_dtype(self, kind: str, as_plain: bool) -> None:
        model, other = network(torch.bfloat16), network(torch.bfloat16, 1)
        if kind == "Wide":
            optimizer, filled = Wide(model.parameters()), Wide(other.parameters())
        else:
            optimizer, filled = made(kind, model), made(kind, other)
        train(model, optimizer, 3, 1)
        for entries in optimizer.state.values():
            for key, entry in entries.items():
                if isinstance(entry, torch.Tensor) and entry.dtype == torch.bfloat16:
                    entries[key] = entry.float() + 1e-6
        state = {"m": model.state_dict(), "o": optimizer.state_dict()} if as_plain else {"m": model, "o": optimizer}

        ADAPTER.reconstruct(stored(state), {"m": other, "o": filled})

        assert exactly(filled.state_dict(), optimizer.state_dict())

    def test_hooks_and_set_state_of_an_optimizer_still_run(self) -> None:
        model, other = network(torch.bfloat16), network(torch.bfloat16, 1)
        optimizer = Wide(model.parameters())
        train(model, optimizer, 1, 1)
        called: list[Any] = []

        class Told(Wide):
            def __setstate__(self, state: dict[str, Any]) -> None:
                called.append([type(key) for key in state.get("state", {})])
                super().__setstate__(state)

        filled = Told(other.parameters())
        filled.register_load_state_dict_pre_hook(lambda _, state: called.append(list(state["state"])))
        filled.register_load_state_dict_post_hook(lambda _: called.append("after"))

        ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

        assert called == [[0, 1, 2, 3], [nn.Parameter] * 4, "after"]
        assert [entry["moment"].dtype for entry in filled.state.values()] == [torch.float32] * 4
        assert not any("_as_stored" in repr(hook) for hook in filled._optimizer_load_state_dict_pre_hooks.values())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_scaler_and_moving_average_of_weights_continue_bit_for_bit(self, dtype: torch.dtype) -> None:
        def begun(seed: int) -> dict[str, Any]:
            model = network(dtype, seed)
            average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True).float()
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + seed, growth_interval=2)
            return {"m": model, "o": made("NAdam", model), "e": average, "s": scaler}

        def go_on(state: dict[str, Any], n_steps: int) -> None:
            for _ in range(n_steps):
                state["o"].zero_grad()
                loss = state["m"](torch.ones(2, 3, dtype=dtype)).float().pow(2).sum()
                state["s"].scale(loss).backward()
                state["s"].step(state["o"])
                state["s"].update()
                state["e"].update_parameters(state["m"])

        state, target = begun(0), begun(1)
        go_on(state, 3)

        ADAPTER.reconstruct(stored(state), target)

        go_on(state, 3)
        go_on(target, 3)
        for name in state:
            assert exactly(dict(target[name].state_dict()), dict(state[name].state_dict()))

    def test_average_that_casts_on_its_own_is_refused_by_name(self) -> None:
        average = Average(network(torch.float32))

        with pytest.raises(AdapterError, match=r"'shadow.0.weight' as stored: it was float32 .* and is bfloat16"):
            ADAPTER.reconstruct(stored({"e": average, "w": torch.ones(1)}), {"e": Average(network(torch.bfloat16))})


class Average:
    """Keeps copies of parameters, and fills them in place."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)


class Two(nn.Module):
    def __init__(self, *, size: int = 3) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self) -> torch.Tensor:
        return (self.a * 2 + self.b**2).sum()


def trained(model: Two, optimizer: Any, n_steps: int = 5) -> tuple[Two, Any]:
    for _ in range(n_steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return model, optimizer


def in_groups(kind: Any, *groups: Any, **options: Any) -> Any:
    return kind([{"params": group, "lr": 0.1 / (n + 1)} for n, group in enumerate(groups)], **options)


def assert_own_moments(model: Two, optimizer: Any, other: Two, filled: Any) -> None:
    for name in "ab":
        assert exactly(filled.state[getattr(other, name)], optimizer.state[getattr(model, name)])
    trained(model, optimizer)
    trained(other, filled)
    assert exactly(dict(other.state_dict()), dict(model.state_dict()))


class TestNames:
    @pytest.mark.parametrize(
        "wrap", [lambda model: model, torch.compile, nn.DataParallel], ids=["bare", "compile", "dp"]
    )
    @pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad", "NAdam"])
    @pytest.mark.parametrize("module_first", [True, False])
    def test_parameters_in_another_order_get_their_own_entries(
        self, kind: str, wrap: Callable[[nn.Module], nn.Module], module_first: bool
    ) -> None:
        model, other = Two(), Two()
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer, filled = KINDS[kind]([model.a, model.b], **options), KINDS[kind]([other.b, other.a], **options)
        trained(model, optimizer)
        state, target = {"m": model, "o": optimizer}, {"m": wrap(other), "o": filled}
        if not module_first:
            state, target = dict(reversed(state.items())), dict(reversed(target.items()))

        ADAPTER.reconstruct(stored(state), target)

        assert_own_moments(model, optimizer, other, filled)

    def test_optimizer_of_two_modules_matches_their_paths(self) -> None:
        one, two, three, four = Two(), Two(), Two(), Two()
        optimizer = torch.optim.Adam([one.a, one.b, two.a, two.b])
        filled = torch.optim.Adam([four.b, three.a, three.b, four.a])
        trained(one, optimizer)
        trained(two, optimizer)

        ADAPTER.reconstruct(stored({"models": [one, two], "o": optimizer}), {"models": [three, four], "o": filled})

        for model, other in ((one, three), (two, four)):
            for name in "ab":
                assert exactly(filled.state[getattr(other, name)], optimizer.state[getattr(model, name)])

    def test_wrapper_of_a_user_changes_no_name(self) -> None:
        model, other = Two(), Two()
        optimizer, filled = torch.optim.Adam([model.a, model.b]), torch.optim.Adam([other.b, other.a])
        trained(model, optimizer)

        ADAPTER.reconstruct(
            stored({"m": model, "o": optimizer}), {"m": Holder(module=other), "o": filled}, strict=False
        )

        assert_own_moments(model, optimizer, other, filled)

    def test_groups_keep_their_options_when_their_parameters_are_in_another_order(self) -> None:
        model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = in_groups(torch.optim.AdamW, list(model[0].parameters()), list(model[1].parameters()))
        filled = in_groups(torch.optim.AdamW, [other[0].bias, other[0].weight], [*other[1].parameters()][::-1])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

        ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

        assert [group["lr"] for group in filled.param_groups] == [0.1, 0.05]
        for (_, one), (_, its) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert exactly(filled.state[its], optimizer.state[one])

    def test_parameters_in_other_groups_are_refused(self) -> None:
        model, other = Two(), Two()
        optimizer = trained(model, in_groups(torch.optim.Adam, [model.a], [model.b]))[1]
        filled = in_groups(torch.optim.Adam, [other.b], [other.a])

        with pytest.raises(AdapterError, match=r"group 0 has the parameter 'm.b', which was stored in another group"):
            ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})
        assert not filled.state

    @pytest.mark.parametrize("as_plain", [False, True])
    def test_names_that_an_optimizer_keeps_itself_are_matched(self, as_plain: bool) -> None:
        model, other = Two(), Two()
        optimizer = torch.optim.Adam(list(model.named_parameters()))
        filled = torch.optim.Adam(list(other.named_parameters())[::-1])
        trained(model, optimizer)
        state: Any = {"m": model.state_dict(), "o": optimizer.state_dict()} if as_plain else {"o": optimizer}
        target = {"m": other, "o": filled} if as_plain else {"o": filled}

        ADAPTER.reconstruct(stored(state), target)

        assert filled.param_groups[0]["param_names"] == ["b", "a"]
        for name in "ab":
            assert exactly(filled.state[getattr(other, name)], optimizer.state[getattr(model, name)])

    def test_state_dict_with_names_fills_an_optimizer_without_names(self) -> None:
        model, other = Two(), Two()
        optimizer, filled = torch.optim.Adam(list(model.named_parameters())), torch.optim.Adam([other.b, other.a])
        trained(model, optimizer)

        ADAPTER.reconstruct(stored({"m": model.state_dict(), "o": optimizer.state_dict()}), {"m": other, "o": filled})

        assert_own_moments(model, optimizer, other, filled)

    @pytest.mark.parametrize(
        ("kind", "as_plain"),
        [("Adam", False), ("Adam", True), ("SGD", True), ("Adafactor", False), ("Adafactor", True), ("Wide", False)],
    )
    def test_parameters_of_another_shape_are_refused(self, kind: str, as_plain: bool) -> None:
        one, two = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4, 5))], []
        make: Any = {"Wide": Wide, "SGD": lambda parts: torch.optim.SGD(parts, momentum=0.9)}.get(kind) or KINDS[kind]
        optimizer = make(one)
        for parameter in one:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        two = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 2))]
        filled = make(two)

        with pytest.raises(AdapterError, match=r"stored with the shape .*, and .*has \(4, 5\): give the optimizer"):
            ADAPTER.reconstruct(stored({"o": optimizer.state_dict() if as_plain else optimizer}), {"o": filled})
        assert not filled.state

    def test_optimizer_with_one_state_for_all_parameters_is_refused_in_another_order(self) -> None:
        model, other = network(torch.float32), network(torch.float32, 1)
        optimizer, filled = torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS([*other.parameters()][::-1])
        train(model, optimizer, 1, 1)

        with pytest.raises(AdapterError, match=r"were stored in another order, 'm.0.weight', 'm.0.bias'"):
            ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

    def test_frozen_and_tied_parameters_keep_their_places(self) -> None:
        def make(order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
            model[2].weight = model[0].weight
            model[1].weight.requires_grad_(False)
            return model, torch.optim.Adam(list(model.parameters())[::order])

        (model, optimizer), (other, filled) = make(1), make(-1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

        ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

        for one, its in zip(model.parameters(), other.parameters(), strict=True):
            assert exactly(filled.state.get(its), optimizer.state.get(one))


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, with slow weights by parameter, as the wrappers of several packages do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.n_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.n_steps += 1
        for group in self.param_groups if self.n_steps % 2 == 0 else ():
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                slow += 0.5 * (parameter.detach() - slow)
                parameter.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.state, "base": self.optimizer.state_dict(), "n_steps": self.n_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.n_steps = state["slow"], state["n_steps"]
        self.optimizer.load_state_dict(state["base"])
        self.param_groups = self.optimizer.param_groups


class NumberedLookahead(Lookahead):
    """Numbers the parameters in its state dict."""

    def _parameters(self) -> list[Any]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        slow = {n: self.state[parameter] for n, parameter in enumerate(self._parameters()) if parameter in self.state}
        return super().state_dict() | {"slow": slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        slow = defaultdict(dict, {self._parameters()[n]: entry for n, entry in state["slow"].items()})
        super().load_state_dict(state | {"slow": slow})


class ScheduleFree:
    """Wraps an optimizer without being one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.state: Any = defaultdict(dict)

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                parameter.data.lerp_(z, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"schedulefree_state": self.state, "base_optimizer": self.base.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["schedulefree_state"]
        self.base.load_state_dict(state["base_optimizer"])


class Forgetful(Lookahead):
    """Names its slow weights by addresses, and does not load them."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": {id(key): value for key, value in self.state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"slow": self.state})


class TestOwnFormats:
    @pytest.mark.parametrize("kind", [Lookahead, NumberedLookahead, ScheduleFree])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_wrapper_of_an_optimizer_continues_bit_for_bit(self, kind: Any, dtype: torch.dtype) -> None:
        model, other = Two().to(dtype), Two().to(dtype)
        optimizer = trained(model, kind(torch.optim.NAdam([model.a, model.b])))[1]
        filled = kind(torch.optim.NAdam([other.a, other.b]))

        ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

        trained(model, optimizer)
        trained(other, filled)
        assert exactly(dict(other.state_dict()), dict(model.state_dict()))

    @pytest.mark.parametrize("kind", [Lookahead, NumberedLookahead, ScheduleFree])
    def test_other_order_of_parameters_is_refused(self, kind: Any) -> None:
        model, other = Two(), Two()
        optimizer = trained(model, kind(torch.optim.Adam([model.a, model.b])))[1]
        filled = kind(torch.optim.Adam([other.b, other.a]))

        with pytest.raises(AdapterError, match=r"its parameters were stored in another order, 'm.a', 'm.b'"):
            ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": other, "o": filled})

    def test_optimizer_that_does_not_load_what_it_saves_is_refused_at_the_save(self) -> None:
        model = Two()
        optimizer = trained(model, Forgetful(torch.optim.Adam([model.a, model.b])))[1]

        for _ in range(2):
            with pytest.raises(
                AdapterError, match=r"is not stored.*'o': load_state_dict\(\) of a Forgetful did not take"
            ):
                stored({"m": model, "o": optimizer})

    def test_setting_stores_what_could_not_be_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TENSORCAS_TRY_FILL", "false")
        model = Two()
        optimizer = trained(model, Forgetful(torch.optim.Adam([model.a, model.b])))[1]

        back = ADAPTER.reconstruct(stored({"m": model, "o": optimizer}))

        assert exactly(back["o"].state[back["m"].a], optimizer.state[model.a])

    def test_state_of_parameters_without_their_module_is_refused_at_the_save(self) -> None:
        model = Two()
        optimizer = trained(model, Lookahead(torch.optim.Adam([model.a, model.b])))[1]

        with pytest.raises(AdapterError, match=r"'o.slow' is a defaultdict in the state dict of a live object"):
            stored({"o": optimizer})


class Three(nn.Module):
    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4, bias=False))


def stepped(*parameters: Any, named: bool = False) -> torch.optim.Optimizer:
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(parameters)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_parameter_that_was_not_stored_gets_the_entries_of_no_other_one() -> None:
    model, live = Three(), Three()
    rows = stored({"m": model, "o": stepped(model.a.weight, model.b.weight)})
    other = torch.optim.Adam([live.a.weight, live.c.weight])

    with pytest.raises(AdapterError, match=r"stored with the parameter 'm\.b\.weight', and has another one"):
        ADAPTER.reconstruct(rows, {"m": live, "o": other})
    assert not other.state


def test_optimizer_that_is_filled_without_its_module_goes_by_its_own_names() -> None:
    model, live = Three(), Three()
    optimizer = torch.optim.Adam(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    other = torch.optim.Adam(list(live.named_parameters())[::-1])

    ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"o": other})

    for name in "abc":
        mine, its = other.state[getattr(live, name).weight], optimizer.state[getattr(model, name).weight]
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


def test_containers_among_the_entries_keep_their_kind() -> None:
    model, live = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, live))
    optimizer.state[model.weight] = {
        "h": deque([1.0, 2.0], maxlen=2),
        "o": OrderedDict(a=1),
        "d": defaultdict(list, b=[2]),
    }

    ADAPTER.reconstruct(stored({"m": model, "o": optimizer}), {"m": live, "o": other})
    entries = other.state[live.weight]

    assert (entries["h"].maxlen, type(entries["o"]), entries["d"].default_factory) == (2, OrderedDict, list)


def test_objects_behind_a_wrapped_module_keep_their_places() -> None:
    model, a, b = nn.Linear(4, 4), torch.zeros(2), torch.ones(2)
    rows = stored({"model": nn.DataParallel(model), "a": a, "b": b, "best": a})
    live = {"model": nn.DataParallel(nn.Linear(4, 4)), **{name: torch.full((2,), 7.0) for name in ("a", "b", "best")}}

    ADAPTER.reconstruct(rows, live)

    assert torch.equal(live["best"], a)
    assert torch.equal(live["b"], b)

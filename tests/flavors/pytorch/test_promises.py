"""Objects are filled by the state dict that their class promises, and modules that never ran by those that did."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.testing._internal.two_tensor import TwoTensor

from tensorcas_mlflow.adapter import adapter_for
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import read_into_live_tensors
from tests.flavors.pytorch.models import ADAPTER, Holder, run, stored
from tests.flavors.pytorch.states import exactly

pytestmark = pytest.mark.filterwarnings("ignore")


class Iterator:
    """Position in an epoch; a fresh loader has none."""

    def __init__(self) -> None:
        self.order = [3, 1, 2]


class Loader:
    def __init__(self) -> None:
        self.iterator: Iterator | None = None
        self.position = 0
        self.weights = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.weights, self.iterator = state["position"], state["weights"], None


def begun() -> Loader:
    loader = Loader()
    loader.iterator, loader.position, loader.weights = Iterator(), 5, np.arange(3.0)
    return loader


NESTS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda part: part,
    "in a dict": lambda part: {"loader": part, "step": 3},
    "in a list": lambda part: [part],
    "deep": lambda part: {"data": {"train": (part,)}, "w": np.ones(4)},
    "beside a tensor": lambda part: {"loader": part, "w": torch.ones(2)},
    "beside a module": lambda part: {"loader": part, "m": nn.Linear(2, 2)},
    "in a module": lambda part: Holder(loader=part),
}


class TestStateDicts:
    @pytest.mark.parametrize("nest", NESTS)
    def test_object_that_never_ran_takes_the_state_dict_of_one_that_did(self, nest: str) -> None:
        target, state = Loader(), NESTS[nest](begun())
        adapter = adapter_for(state)
        rows = {name: np.array(row) for name, row in adapter.extract(state).items()}

        adapter.reconstruct(rows, NESTS[nest](target))

        assert (target.position, target.weights.tolist(), target.iterator) == (5, [0.0, 1.0, 2.0], None)

    @pytest.mark.long
    def test_object_of_pure_python_is_filled_in_a_process_without_torch(self) -> None:
        script = """
import sys
import numpy as np
from tensorcas_mlflow.adapter import adapter_for
class Loader:
    it = None
    at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
one, other = Loader(), Loader()
one.it, one.at = iter([1, 2]), 7
assert "torch" not in sys.modules
adapter = adapter_for({"l": one})
rows = {name: np.array(row) for name, row in adapter.extract({"l": one}).items()}
adapter.reconstruct(rows, {"l": other})
print(other.at, other.it)
"""
        assert run(script) == "7 None"

    def test_object_whose_own_code_refuses_its_state_is_refused_at_the_save(self) -> None:
        class Refusing(Loader):
            def load_state_dict(self, state: dict[str, Any]) -> None:
                raise KeyError("epoch")

        with pytest.raises(AdapterError, match=r"is not stored, since a load with into= .*KeyError: 'epoch'.*TRY_FILL"):
            stored({"l": Refusing()})

    def test_scaler_that_is_off_does_not_pass_over_a_state(self) -> None:
        rows = stored({"s": torch.amp.GradScaler("cpu", init_scale=8.0), "w": torch.ones(1)})

        with pytest.raises(AdapterError, match="'s' is a GradScaler that is not enabled"):
            ADAPTER.reconstruct(rows, {"s": torch.amp.GradScaler("cpu", enabled=False), "w": torch.ones(1)})


class Computed(nn.Module):
    """Has views of its weight where it will put what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.used, self.steps, self.by_name = self.w.data, [self.w.data], {"w": self.w.data}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used, self.steps = self.w * 2, [(self.w * 2).detach()]
        self.by_name = {"w": (self.w * 3).detach()}
        return x @ self.used


class Viewed(nn.Module):
    """Has a buffer and an attribute that are always views of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))
        self.last = self.w.data[3:]
        self.register_buffer("first", self.w.data[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.t() + self.last.sum() + self.first.sum()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.all = [self.a.weight, self.b.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def line() -> nn.Linear:
    return nn.Linear(3, 3)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: spectral_norm(line()),
    "spectral norms": lambda: nn.Sequential(spectral_norm(line()), nn.ReLU(), spectral_norm(nn.Linear(3, 2))),
    "spectral norm of a recurrent net": lambda: spectral_norm(nn.LSTM(3, 3), "weight_hh_l0"),
    "weight norm": lambda: weight_norm(line()),
    "weight norm of a recurrent net": lambda: weight_norm(nn.LSTM(3, 3), "weight_hh_l0"),
    "parametrized spectral norm": lambda: parametrizations.spectral_norm(line()),
    "parametrized weight norm": lambda: parametrizations.weight_norm(line()),
    "orthogonal": lambda: parametrizations.orthogonal(line()),
    "pruned by nothing": lambda: prune.identity(line(), "weight"),
    "pruned twice": lambda: prune.l1_unstructured(prune.random_unstructured(line(), "weight", 0.5), "weight", 0.3),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    "computed": Computed,
    "viewed": Viewed,
    "shared": Shared,
}


def train(model: nn.Module, n_steps: int, seed: int) -> nn.Module:
    source = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        out = model(torch.randn(4, 3, generator=source))
        loss = (out[0] if isinstance(out, tuple) else out).pow(2).sum()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad  # type: ignore[operator]
    return model


class TestModules:
    @pytest.mark.parametrize("is_live", [False, True])
    @pytest.mark.parametrize(("n_stored", "n_live"), [(0, 0), (0, 1), (1, 0), (3, 0), (3, 1)])
    @pytest.mark.parametrize("name", MODULES)
    def test_module_that_never_ran_continues_one_that_did(
        self, name: str, n_stored: int, n_live: int, is_live: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        n_stored += name == "lazy" and not n_stored  # what is not initialized cannot be stored
        if is_live:
            read_into_live_tensors(monkeypatch)
        torch.manual_seed(0)
        model = train(MODULES[name](), n_stored, 1)
        target = train(MODULES[name](), n_live, 2)

        ADAPTER.reconstruct(stored({"m": model}), {"m": target})

        assert exactly(dict(target.state_dict()), dict(model.state_dict()))
        for one in (model, target):
            torch.manual_seed(3)
            train(one, 2, 4)
        assert exactly(dict(target.state_dict()), dict(model.state_dict()))

    def test_views_of_a_live_weight_stay_views(self) -> None:
        model, target = Viewed(), Viewed()

        ADAPTER.reconstruct(stored(model), target)
        with torch.no_grad():
            target.w.zero_()

        assert not target.last.any()
        assert not target.first.any()


class Plain(torch.Tensor):
    """A subclass that cannot be taken apart, so that only a pickle makes it anew."""


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        vars(self)["value"] = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        vars(self)["value"] = state


def two(seed: int) -> TwoTensor:
    torch.manual_seed(seed)
    return TwoTensor(torch.randn(2, 2), torch.randn(2, 2))


class TestTensorsOfClasses:
    @pytest.mark.parametrize(
        "value", [lambda seed: {"a": two(seed)}, two, lambda seed: [two(seed), {"b": two(seed + 1)}]]
    )
    def test_extra_state_with_them_is_made_anew(self, value: Callable[[int], Any]) -> None:
        live = Extra(value(7))
        ADAPTER.reconstruct(stored({"m": Extra(value(1))}), {"m": live})

        assert repr(live.value) == repr(value(1))

    @pytest.mark.parametrize(
        "part", [list, lambda: [two(1)], lambda: deque([two(1)], 3), lambda: defaultdict(list, a=two(1))]
    )
    def test_part_of_a_state_in_two_places_stays_one(self, part: Callable[[], Any]) -> None:
        state, live = Loader(), Loader()
        its: Any = part()
        loop: Any = [its]
        loop.append(loop)
        state.position, state.weights = {"a": its, "b": its}, loop  # type: ignore[assignment]

        ADAPTER.reconstruct(stored({"o": state, "w": torch.ones(2)}), {"o": live, "w": torch.zeros(2)})
        found: Any = live.position

        assert found["a"] is found["b"] is live.weights[0]
        assert type(found["a"]) is type(its)
        assert repr(found["a"]) == repr(its)
        assert live.weights[1] is live.weights

    def test_buffer_that_is_not_there_yet_is_made_anew(self) -> None:
        model, live = nn.Linear(2, 2), nn.Linear(2, 2)
        model.register_buffer("cache", two(1), persistent=False)
        live.register_buffer("cache", None, persistent=False)

        ADAPTER.reconstruct(stored({"m": model}), {"m": live})

        assert repr(live.cache) == repr(two(1))

    def test_parameter_that_the_live_module_lacks_is_named(self) -> None:
        model = nn.Linear(2, 2)
        model.odd = nn.Parameter(two(1))

        with pytest.raises(AdapterError, match="'odd'"):
            ADAPTER.reconstruct(stored({"m": model}), {"m": nn.Linear(2, 2)})

    def test_entries_that_only_a_pickle_restores_are_refused_at_every_save(self) -> None:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(Plain))
        optimizer = torch.optim.Adam(model.parameters())
        stored({"m": model, "o": optimizer})  # it has no entries yet
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

        for _ in range(2):
            with pytest.raises(AdapterError, match="only a pickle can restore"):
                stored({"m": model, "o": optimizer})

    def test_nested_parameters_are_stored_beside_an_optimizer(self) -> None:
        model = nn.Module()
        model.w = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        back = ADAPTER.reconstruct(stored({"m": model, "o": optimizer}))

        assert [each.tolist() for each in back["m"].w.unbind()] == [[1.0] * 2, [1.0] * 3]

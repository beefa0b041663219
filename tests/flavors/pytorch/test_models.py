"""Modules of many classes round-trip, and only changed tensors are new."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tensorcas_mlflow.adapter import SKELETON
from tests.flavors.pytorch.models import ADAPTER, Holder, raw, round_trip, stored
from tests.flavors.pytorch.states import exactly, network, train

pytestmark = pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm|nested_tensor).*")


class Config:
    """Data for models of other libraries."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.names = {0: "no", 1: "yes"}


class Configured(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.width, 2)
        self.register_buffer("positions", torch.arange(4).expand(1, -1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dense(inputs) * self.positions.sum()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(inputs, inputs, inputs)[0]


class First(nn.Module):
    """Gives the first answer of a module that gives several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)[0]


def averaged(*, use_buffers: bool = False) -> nn.Module:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
    )
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average.update_parameters(model)
    return average


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d())
    model(torch.ones(2, 4, 5))
    return model


def flattened() -> nn.Module:
    model = nn.LSTM(3, 4, num_layers=2, proj_size=2)
    model.flatten_parameters()
    return First(model)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "averaged": (averaged, (4, 5)),
    "averaged with buffers": (lambda: averaged(use_buffers=True), (4, 5)),
    "lazy": (lazy, (2, 4, 5)),
    "lstm": (flattened, (6, 2, 3)),
    "gru": (lambda: First(nn.GRU(3, 4, bidirectional=True)), (6, 2, 3)),
    "attention": (Attending, (5, 2, 8)),
    "config": (lambda: Configured(Config(3)), (4, 3)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), (4, 3)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), (4, 3)),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3))), (4, 3)),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), (4, 3)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), (4, 3)),
    "lists": (lambda: nn.Sequential(nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(1)})), ()),
}


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
class TestMakes:
    def test_a_model_comes_back(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        model = make().eval()
        batch = torch.randn(shape)

        back = round_trip(model)

        assert type(back).__name__ == type(model).__name__
        assert exactly(back.state_dict(), model.state_dict())
        assert not shape or raw(back(batch)) == raw(model(batch))

    def test_a_model_is_filled(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        model, target = make().eval(), make().eval()
        with torch.no_grad():
            for part in target.parameters():
                part.add_(1)
        batch = torch.randn(shape)

        ADAPTER.reconstruct(stored(model), target)

        assert exactly(target.state_dict(), model.state_dict())
        assert not shape or raw(target(batch)) == raw(model(batch))

    def test_a_loaded_model_is_stored_as_the_same_rows(
        self, make: Callable[[], nn.Module], shape: tuple[int, ...]
    ) -> None:
        first = stored(make())

        again = stored(ADAPTER.reconstruct({name: row.copy() for name, row in first.items()}))

        assert list(again) == list(first)
        assert all(again[name].tobytes() == first[name].tobytes() for name in first if name != SKELETON)


class TestParts:
    def test_the_padding_of_an_embedding_stays_zero(self) -> None:
        back = round_trip(nn.Embedding(4, 3, padding_idx=1, max_norm=1.0))
        back(torch.tensor([0, 1, 2])).sum().backward()

        assert back.padding_idx == 1
        assert back.weight[1].tolist() == back.weight.grad[1].tolist() == [0, 0, 0]

    def test_a_restored_parametrization_is_a_live_one(self) -> None:
        back = round_trip(nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))))
        before = back[0].weight.detach().clone()
        with torch.no_grad():
            back[0].parametrizations.weight.original0.mul_(2)

        assert parametrize.is_parametrized(back[0])
        assert torch.allclose(back[0].weight, 2 * before)
        parametrize.remove_parametrizations(back[0], "weight")
        assert type(back[0]) is nn.Linear

    def test_parameters_that_refer_to_each_other_come_back(self) -> None:
        model = Holder(a=nn.Parameter(torch.ones(1)), b=nn.Parameter(torch.zeros(1)))
        model.a.other, model.b.other = model.b, model.a

        back = round_trip(model)

        assert back.a.other is back.b
        assert back.b.other is back.a

    def test_a_step_of_a_frozen_model_changes_only_batchnorm_and_head(self) -> None:
        backbone = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        model = nn.Sequential(backbone.requires_grad_(False), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model[2].parameters())
        train(model, optimizer)
        before = digests({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer)
        after = digests({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

        changed = {name for name in after if after[name] != before[name]}
        assert changed == {
            "model.0.1.running_mean",
            "model.0.1.running_var",
            "model.0.1.num_batches_tracked",
            "model.2.weight",
            "model.2.bias",
            *(f"optimizer.state.{n}.{part}" for n in (0, 1) for part in ("step", "exp_avg", "exp_avg_sq")),
        }

    def test_a_change_without_a_new_version_of_the_tensor_is_stored(self) -> None:
        model = nn.Linear(2, 2)
        before = digests(model)
        with torch.no_grad():
            model.weight.data[0, 0] += 1  # torch counts no version for .data

        assert digests(model)["weight"] != before["weight"]


def digests(model: Any) -> dict[str, str]:
    rows = ADAPTER.extract(model)
    return {name: hashlib.sha256(row.tobytes()).hexdigest() for name, row in rows.items() if name != SKELETON}

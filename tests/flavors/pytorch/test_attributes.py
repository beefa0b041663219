"""Attributes of modules, tensors and states come back, and a live model keeps some of its own."""

from __future__ import annotations

import datetime
import json
import pathlib
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_flavors._pickling import MAGIC
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.models import ADAPTER, Holder, raw, stored
from tests.flavors.pytorch.states import trained
from tests.flavors.pytorch.test_state import without_its_pickle


class TestStatesWithoutAPickle:
    def test_attributes_of_tensors_come_back(self) -> None:
        tensor = torch.ones(3)
        tensor.note, tensor.like = "decay", [torch.zeros(2), tensor]  # type: ignore[attr-defined]
        state = {"a": tensor, "b": nn.Buffer(torch.ones(2), persistent=False), "again": tensor}

        rows = stored(state)
        back = ADAPTER.reconstruct(rows)

        assert not ADAPTER.unpickles(rows)
        assert (back["a"].note, back["a"].like[1], back["again"]) == ("decay", back["a"], back["a"])
        assert isinstance(back["b"], nn.Buffer)
        assert back["b"].persistent is False

    def test_deques_dates_and_paths_come_back(self) -> None:
        parts = [deque([1, torch.ones(2)], 5), datetime.date(2020, 1, 2), pathlib.PurePosixPath("a/\udcff")]
        rows = stored({"w": torch.ones(1), "parts": parts})

        back = ADAPTER.reconstruct(rows)["parts"]

        assert not ADAPTER.unpickles(rows)
        assert (back[0][0], back[0].maxlen, back[0][1].tolist()) == (1, 5, [1, 1])
        assert back[1:] == parts[1:]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: random.Random(3),
            lambda: np.random.default_rng(3),
            lambda: np.random.Generator(np.random.MT19937(3)),
            lambda: np.random.RandomState(3),
            lambda: torch.Generator().manual_seed(3),
        ],
    )
    def test_random_generators_continue_their_sequences(self, make: Callable[[], Any]) -> None:
        def draw(generator: Any) -> Any:
            if isinstance(generator, torch.Generator):
                return torch.randn(3, generator=generator).tolist()
            if isinstance(generator, np.random.Generator):
                return [generator.normal(), generator.spawn(1)[0].normal()]
            return [generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal()]

        generator = make()
        draw(generator)  # some keep half of what they have drawn
        rows = stored({"w": torch.ones(1), "rng": generator})
        live = stored({"net": nn.Linear(1, 1), "rng": generator})
        wanted = draw(generator)

        assert not ADAPTER.unpickles(rows)
        assert [draw(ADAPTER.reconstruct(each)["rng"]) for each in (rows, live)] == [wanted, wanted]

    def test_a_device_asked_for_does_not_move_the_state_of_a_generator(self) -> None:
        rows = stored({"w": torch.ones(1), "rng": torch.Generator().manual_seed(3)})

        back = ADAPTER.reconstruct(rows, device="meta")

        assert torch.rand(1, generator=back["rng"]) == torch.rand(1, generator=torch.Generator().manual_seed(3))


class TestWhatALiveModelKeeps:
    def test_filling_keeps_training_mode_and_requires_grad(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2)).train()
        live = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.7)).eval().requires_grad_(False)

        ADAPTER.reconstruct(stored(model), live)

        assert [part.training for part in live.modules()] == [False] * 3
        assert not any(part.requires_grad for part in live.parameters())
        assert live[1].p == 0.2

    def test_filling_keeps_attributes_that_name_a_device_or_dtype(self) -> None:
        model = Holder(device=torch.device("cuda:1"), place="cuda", dtype=torch.float16, text="a")
        live = Holder(device=torch.device("cpu"), place="cpu", dtype=torch.float32, text="b")

        ADAPTER.reconstruct(stored(model), live)

        assert (live.device, live.place, live.dtype, live.text) == (torch.device("cpu"), "cpu", torch.float32, "a")

    def test_filling_keeps_hooks_and_their_handles(self) -> None:
        model, live = nn.Linear(2, 2), nn.Linear(2, 2)
        model.handles = [model.register_forward_hook(lambda *_: None)]
        live.register_forward_pre_hook(lambda *_: None)

        ADAPTER.reconstruct(stored(model), live)

        assert (len(live._forward_hooks), len(live._forward_pre_hooks)) == (0, 1)
        assert raw(live.weight) == raw(model.weight)

    def test_filling_keeps_attributes_that_the_stored_model_lacks(self) -> None:
        live = Holder(new=3, known=1)

        ADAPTER.reconstruct(stored(Holder(known=2)), live)

        assert (live.new, live.known) == (3, 2)

    def test_a_function_is_equal_after_lines_are_added_above_it(self) -> None:
        codes = ["lambda x: [y + 1 for y in x]", "\n\n(lambda x: [y + 1 for y in x])"]
        model, live = (Holder(f=eval(code)) for code in codes)

        assert ADAPTER.reconstruct(stored(model), live) is live


class TestModules:
    def test_a_buffer_that_is_made_later_is_filled(self) -> None:
        model = Holder(inner=Holder().with_buffer("cos", torch.ones(2), persistent=False))
        live = Holder(inner=Holder())
        live.inner.register_buffer("cos", None, persistent=False)

        ADAPTER.reconstruct(stored(model), live)

        assert live.inner.cos.tolist() == [1, 1]

    def test_synchronized_batch_norm_is_filled_from_a_plain_batch_norm(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, eps=0.1))
        live = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

        ADAPTER.reconstruct(stored(model), live)

        assert live[1].eps == 0.1

    def test_modules_of_other_classes_are_filled_without_strict(self) -> None:
        model, live = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        rows = stored(model)
        before = raw(live[0].weight)

        with pytest.raises(AdapterError, match=r"'1' was stored as a ReLU, and is a Tanh: .*strict=False"):
            ADAPTER.reconstruct(rows, live)
        assert raw(live[0].weight) == before
        ADAPTER.reconstruct(rows, live, strict=False)
        assert raw(live[0].weight) == raw(model[0].weight)

    def test_a_module_held_by_an_object_is_filled_once(self) -> None:
        def make(n: float) -> Any:
            net = nn.Linear(2, 2)
            nn.init.constant_(net.weight, n)
            return {"call": partial(net.forward), "net": net, "owner": Owner(net)}

        live = make(2.0)
        net = live["net"]

        ADAPTER.reconstruct(stored(make(1.0)), live)

        assert live["net"] is net is live["owner"].net
        assert net.weight.unique().tolist() == [1]

    def test_filling_keeps_the_memory_of_a_tensor_in_an_attribute(self) -> None:
        live = Holder(table=torch.zeros(3))
        table = live.table

        ADAPTER.reconstruct(stored(Holder(table=torch.ones(3))), live)

        assert live.table is table
        assert table.tolist() == [1, 1, 1]

    def test_a_model_stored_without_its_attributes_is_filled(self) -> None:
        model, live = Holder(net=nn.Linear(2, 2), k=1), Holder(net=nn.Linear(2, 2), k=2)

        ADAPTER.reconstruct(
            forged(stored(model), lambda layout: layout.pop("beyond") and layout.update(values=[])), live
        )

        assert raw(live.net.weight) == raw(model.net.weight)
        assert live.k == 2

    @pytest.mark.parametrize(
        "change",
        [
            lambda beyond: beyond.clear(),
            lambda beyond: beyond.append(None),
            lambda beyond: beyond.__setitem__(0, 5),
            lambda beyond: beyond[0][0][2].append(["_parameters", {"dict": []}]),
            lambda beyond: beyond[0][0][2].append(["k"]),
            lambda beyond: beyond[1].pop("rest"),
            lambda beyond: beyond[1].update(values=3),
            lambda beyond: beyond[1].update(values=[{"?": 1}] * len(beyond[1]["values"])),
            lambda beyond: beyond[1].update(taken=[]),
            lambda beyond: beyond[1].update(taken=["a"]),
        ],
    )
    def test_a_damaged_entry_beyond_the_tree_is_refused(self, change: Callable[[Any], Any]) -> None:
        def make(n: int) -> Any:
            return {"net": Holder(net=nn.Linear(2, 2)), "owner": Owner(torch.full((2,), n), n)}

        live = make(2)
        before = raw(live["net"].net.weight)

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(forged(stored(make(1)), lambda layout: change(layout["beyond"])), live)
        assert raw(live["net"].net.weight) == before


def test_a_live_state_is_filled_without_its_pickle() -> None:
    rows = stored(trained() | {"owner": Owner(nn.Linear(2, 2), 5)})
    live = trained(seed=1) | {"owner": Owner(nn.Linear(2, 2), 6)}

    ADAPTER.reconstruct(rows | {SKELETON: without_its_pickle(rows[SKELETON])}, live)

    assert live["owner"].n == 5
    assert raw(live["owner"].net.weight) == round_trip_weight(rows)


class Owner:
    def __init__(self, net: Any, n: int = 0) -> None:
        self.net, self.n = net, n


def round_trip_weight(rows: dict[str, Array]) -> bytes:
    return raw(ADAPTER.reconstruct(rows)["owner"].net.weight)


def forged(rows: dict[str, Array], change: Callable[[dict[str, Any]], Any]) -> dict[str, Array]:
    """Change the layout behind a pickle."""
    data = rows[SKELETON].tobytes()
    assert data.startswith(MAGIC)
    start = len(data) - 8 - int.from_bytes(data[-8:], "little")
    layout = json.loads(data[start:-8])
    change(layout)
    text = json.dumps(layout).encode()
    return rows | {SKELETON: np.frombuffer(data[:start] + text + len(text).to_bytes(8, "little"), dtype=np.uint8)}

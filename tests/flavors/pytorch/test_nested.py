"""Whole training states come back exactly: state dicts without a pickle, live objects with their references."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.models import ADAPTER, Tied, round_trip, same, shares_storage, stored
from tests.flavors.pytorch.states import (
    OPTIMIZERS,
    SCHEDULERS,
    as_plain,
    exactly,
    live_values,
    network,
    plain_values,
    train,
    trained,
)
from tests.zygote import run_program

pytestmark = pytest.mark.filterwarnings("ignore:.*(ComplexHalf|lr_scheduler.step|The epoch parameter).*")


class TestAccepts:
    @pytest.mark.parametrize(
        "state",
        [
            {"epoch": 1, "deep": [({"w": torch.ones(1)},)]},
            [nn.Linear(1, 1)],
            (1, torch.optim.SGD([torch.ones(1)], lr=1)),
            {1: torch.ones(2)},
            torch.optim.SGD([torch.ones(1)], lr=1),
        ],
        ids=["deep", "list", "tuple", "numbered", "optimizer"],
    )
    def test_nests_with_a_tensor_or_a_live_object_are_accepted(self, state: object) -> None:
        assert ADAPTER.accepts(state)

    def test_a_nest_that_holds_itself_is_searched_once(self) -> None:
        nest: list[Any] = [{"a": 1}]
        nest.append(nest)

        assert not ADAPTER.accepts(nest)
        assert ADAPTER.accepts([*nest, torch.ones(1)])

    def test_estimators_and_arrays_are_not_accepted(self) -> None:
        from sklearn.linear_model import LinearRegression

        assert not ADAPTER.accepts({"model": LinearRegression(), "weights": np.ones(3)})
        assert not ADAPTER.accepts([np.ones(3)])


class TestPlainStates:
    @pytest.mark.parametrize("name", plain_values())
    def test_every_plain_value_comes_back_exactly(self, name: str) -> None:
        value = plain_values()[name]
        state = {"w": torch.ones(1), name: value}

        rows = stored(state)

        assert not ADAPTER.unpickles(rows)
        assert exactly(ADAPTER.reconstruct(rows), state)

    def test_state_dicts_of_a_training_need_no_pickle(self) -> None:
        state = as_plain(trained("adam", "onecycle")) | plain_values()
        rows = stored(state)

        assert not ADAPTER.unpickles(rows)
        assert exactly(ADAPTER.reconstruct(rows), state)

    def test_rows_are_named_by_their_dotted_path(self) -> None:
        rows = stored(as_plain(trained()))

        assert list(rows)[:2] == ["model.0.weight", "model.0.bias"]
        assert {"optimizer.state.0.step", "optimizer.state.5.exp_avg_sq"} < rows.keys()

    def test_names_are_unique_whatever_the_keys_are(self) -> None:
        numbers = iter(range(100))

        def tensor() -> torch.Tensor:
            return torch.tensor(next(numbers))

        state = {
            "a.b": tensor(),
            "a": {"b": tensor(), "": tensor()},
            1: tensor(),
            "1": tensor(),
            "": tensor(),
            SKELETON: tensor(),
            "two\nlines": tensor(),
            "\0": tensor(),
            "\ud800": tensor(),
            "x" * 5000: tensor(),
            "x" * 5001: tensor(),
            ("a", 1): tensor(),
        }

        rows = stored(state)

        assert exactly(ADAPTER.reconstruct(rows), state)
        assert all(0 < len(name.encode()) <= 4096 and name.isprintable() for name in rows)

    def test_shared_and_cyclic_containers_are_shared_again(self) -> None:
        inner: dict[str, Any] = {"w": torch.ones(1)}
        inner["me"] = inner
        weight = torch.ones(2)

        back = round_trip([inner, inner, weight, weight])

        assert back[0] is back[1]
        assert back[0]["me"] is back[0]
        assert back[2] is back[3]

    def test_parameters_stay_parameters(self) -> None:
        back = round_trip(
            {"p": nn.Parameter(torch.ones(2)), "g": torch.ones(2, requires_grad=True), "d": torch.ones(2)}
        )

        assert [type(part) for part in back.values()] == [nn.Parameter, torch.Tensor, torch.Tensor]
        assert [part.requires_grad for part in back.values()] == [True, True, False]

    def test_tied_entries_are_tied_again_at_any_depth(self) -> None:
        state = Tied().state_dict()
        back = round_trip({"deep": [state, {"again": state["encode.weight"]}]})

        assert shares_storage(back["deep"][0]["decode.weight"], back["deep"][1]["again"])
        assert back["deep"][0]["encode.weight"] is back["deep"][1]["again"]

    @pytest.mark.long
    def test_equal_states_have_equal_rows_in_every_process(self) -> None:
        script = (
            "import hashlib; from tests.flavors.pytorch.states import *\n"
            "from tests.flavors.pytorch.models import stored\n"
            "rows = stored(as_plain(trained('adam')) | {'set': {'a', 'b', 'c', 'd'}})\n"
            "print(hashlib.sha256(b''.join(n.encode() + r.tobytes() for n, r in rows.items())).hexdigest())"
        )

        rows = stored(as_plain(trained("adam")) | {"set": {"a", "b", "c", "d"}})
        own = hashlib.sha256(b"".join(n.encode() + r.tobytes() for n, r in rows.items())).hexdigest()

        assert run_program(script, check=True).stdout.strip() == own

    def test_values_that_change_at_every_step_end_the_skeleton(self) -> None:
        state = {"epoch": 1, "model": nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)]).state_dict(), "loss": 0.5}
        rows = stored(state)
        before = rows[SKELETON].tobytes()
        after = stored(state | {"epoch": 2, "loss": 0.25})[SKELETON].tobytes()
        [start, end] = ADAPTER.cuts(rows)[SKELETON]

        assert before[:start] == after[:start]
        assert end == len(before)
        assert json.loads(b"[" + before[start:-1]) == [1, 0.5]

    @pytest.mark.long
    def test_a_state_is_loaded_in_a_fresh_process(self, tmp_path: Path) -> None:
        path = str(tmp_path / "rows.npz")
        state = as_plain(trained("adam", "steps")) | {"values": plain_values()["random"]}
        np.savez(path, **stored(state))
        script = (
            "import numpy, sys, tests.flavors.pytorch.states as s; from tests.flavors.pytorch.models import ADAPTER\n"
            "state = ADAPTER.reconstruct(dict(numpy.load(sys.argv[1])))\n"
            "want = s.as_plain(s.trained('adam', 'steps')) | {'values': s.plain_values()['random']}\n"
            "print(s.exactly(state, want))"
        )

        assert run_program(script, path, check=True).stdout.strip() == "True"


class TestLiveStates:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_optimizer_continues_bit_for_bit(self, name: str) -> None:
        state = trained(name)

        back = round_trip(state)
        train(back["model"], back["optimizer"])
        train(state["model"], state["optimizer"])

        assert exactly(back["model"].state_dict(), state["model"].state_dict())
        assert exactly(back["optimizer"].state_dict(), state["optimizer"].state_dict())

    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_scheduler_continues_its_schedule(self, name: str) -> None:
        state = trained("momentum", name)

        back = round_trip(state)
        for one in (back, state):
            train(one["model"], one["optimizer"], one["scheduler"])

        assert back["scheduler"].optimizer is back["optimizer"]
        assert exactly(back["model"].state_dict(), state["model"].state_dict())
        assert back["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]

    def test_the_optimizer_holds_the_parameters_of_the_module(self) -> None:
        back = round_trip(trained())

        assert back["optimizer"].param_groups[0]["params"][0] is back["model"][0].weight
        assert back["model"][0].weight in back["optimizer"].state

    def test_live_objects_and_plain_values_are_stored_together(self) -> None:
        state = trained() | live_values() | {"plain": plain_values()}

        back = round_trip(state)

        assert list(back) == list(state)
        assert (back["settings"], back["arguments"], back["kind"]) == tuple(live_values().values())
        assert exactly(back["plain"], state["plain"])

    def test_rows_have_the_names_that_state_dicts_have(self) -> None:
        state = trained("adam")
        names = [name for name in stored(state) if name != SKELETON]

        assert names == [name for name in stored(as_plain(state)) if name in names]

    def test_a_grad_scaler_comes_back(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(1))
        scaler.update(4.0)

        back = round_trip({"scaler": scaler, "w": torch.ones(1)})["scaler"]

        assert back.state_dict() == scaler.state_dict()
        assert back.get_scale() == 4.0

    @pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
    def test_a_wrapped_module_is_stored_as_the_one_it_wraps(self, wrap: Any) -> None:
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": wrap(model), "optimizer": optimizer}
        rows = stored(state)

        back = ADAPTER.reconstruct(rows)

        assert "model.0.weight" in rows
        assert type(back["model"]) is nn.Sequential
        assert back["optimizer"].param_groups[0]["params"][0] is back["model"][0].weight

    def test_a_bare_optimizer_comes_back(self) -> None:
        optimizer = trained("adam")["optimizer"]

        assert exactly(round_trip(optimizer).state_dict(), optimizer.state_dict())

    @pytest.mark.long
    def test_a_live_state_is_loaded_and_trained_on_in_a_fresh_process(self, tmp_path: Path) -> None:
        path = str(tmp_path / "rows.npz")
        state = trained("adam", "onecycle")
        np.savez(path, **stored(state))
        script = (
            "import numpy, sys, tests.flavors.pytorch.states as s; from tests.flavors.pytorch.models import ADAPTER\n"
            "state = ADAPTER.reconstruct(dict(numpy.load(sys.argv[1])))\n"
            "s.train(state['model'], state['optimizer'], state['scheduler'])\n"
            "print(state['model'][0].weight.detach().numpy().tobytes().hex())"
        )

        answer = run_program(script, path, check=True).stdout.strip()
        train(state["model"], state["optimizer"], state["scheduler"])

        assert answer == state["model"][0].weight.detach().numpy().tobytes().hex()

    def test_a_dict_of_a_users_own_kind_comes_back(self) -> None:
        back = round_trip({"own": Own(w=torch.ones(2)), "w": torch.ones(1)})

        assert type(back["own"]) is Own
        assert same(back["own"]["w"], torch.ones(2))

    def test_a_refusal_to_pickle_names_a_remedy(self) -> None:
        with pytest.raises(AdapterError, match=r"cannot be pickled.*state_dict\(\)"):
            ADAPTER.extract({"w": torch.ones(1), "file": sys.stdout})

    def test_arrays_are_rows_at_any_depth(self) -> None:
        large, small = np.arange(1000.0).reshape(20, 50), np.arange(3)
        model = nn.Linear(1, 1)
        model.tables = {"large": large, "columns": np.asfortranarray(large), "small": small}
        state = {"model": model, "large": large, "small": small, "objects": np.array([None, {}])}
        rows = stored(state)

        back = ADAPTER.reconstruct(rows)

        assert rows[SKELETON].nbytes < 3000
        assert sum(row.nbytes == large.nbytes for row in rows.values()) == 2
        assert exactly(back["model"].tables, model.tables)
        assert back["model"].tables["large"] is back["large"]
        assert back["objects"].tolist() == [None, {}]
        assert "large" in ADAPTER.weights(rows)

    def test_a_nest_that_is_too_deep_is_refused(self) -> None:
        nest: Any = torch.ones(1)
        for _ in range(5000):
            nest = [nest]

        with pytest.raises(AdapterError, match="nested too deep"):
            ADAPTER.extract(nest)


class Own(dict[str, torch.Tensor]):
    pass

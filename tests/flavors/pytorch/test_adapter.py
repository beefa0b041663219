"""Modules come back without a template, and predict the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON, ModelAdapter
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.models import ADAPTER, Holder, Noted, Tied, perceptron, raw, round_trip, run, same, stored
from tests.zygote import run_program


class TestAccepts:
    def test_modules_and_state_dicts_are_accepted(self) -> None:
        model = perceptron()

        assert isinstance(ADAPTER, ModelAdapter)
        assert ADAPTER.accepts(model)
        assert ADAPTER.accepts(model.state_dict())
        assert ADAPTER.accepts({"w": torch.ones(2)})
        assert ADAPTER.accepts(torch.ones(2))
        assert ADAPTER.accepts(torch.compile(model))

    @pytest.mark.parametrize("other", [None, 3, {}, [], {"w": np.ones(2)}, {"a": [1, {"b": None}]}, nn.Linear])
    def test_other_objects_are_not_accepted(self, other: object) -> None:
        assert not ADAPTER.accepts(other)

    @pytest.mark.long
    def test_adapter_of_pytorch_imports_no_torch_until_it_is_needed(self) -> None:
        script = (
            "import sys; from tensorcas_flavors.pytorch import PyTorchAdapter as A;"
            "A.accepts({'w': 1}); A.accepts(object()); print('torch' in sys.modules)"
        )

        assert run(script) == "False"


class TestModules:
    @pytest.mark.parametrize(
        ("make", "shape"),
        [
            (perceptron, (5, 3)),
            (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), (6, 2, 3)),
            (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), (4, 2, 8)),
            (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), (5, 3)),
            (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), (5, 3)),
            (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()), (2, 3, 8, 8)),
            (lambda: nn.Linear(3, 2).bfloat16().float().double(), (5, 3)),
        ],
        ids=["perceptron", "lstm", "transformer", "weight_norm", "spectral_norm", "convolution", "double"],
    )
    @pytest.mark.filterwarnings("ignore:.*(weight_norm|nested_tensor).*")
    def test_a_model_comes_back_with_no_template(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        model = make().eval()
        batch = torch.randn(shape).to(next(model.parameters()).dtype)

        back = round_trip(model)
        answer, wanted = (m(batch)[0] if isinstance(m, nn.LSTM) else m(batch) for m in (back, model))

        assert type(back) is type(model)
        assert raw(answer) == raw(wanted)
        assert all(same(one, other) for one, other in zip(back.parameters(), model.parameters(), strict=True))

    def test_flags_hyperparameters_and_hooks_come_back(self) -> None:
        model = perceptron()
        model[1].eval()
        model[0].weight.requires_grad_(False)
        model[4].register_forward_hook(lambda module, inputs, output: output + 1)

        back = round_trip(model)

        assert [part.training for part in back] == [True, False, True, True, True]
        assert back[3].p == 0.5
        assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
        assert torch.equal(back[4](torch.ones(1, 4)), model[4](torch.ones(1, 4)))

    def test_rows_are_named_as_in_state_dict_and_others_by_their_path(self) -> None:
        model = perceptron()
        model[2].register_buffer("mask", torch.ones(2), persistent=False)
        model[2].scale = torch.tensor(2.0)
        model.cache = {"keys": torch.zeros(3)}

        assert list(ADAPTER.extract(model)) == [
            *model.state_dict(),
            "2.mask",
            "__tensor__/cache.keys",
            "__tensor__/2.scale",
            SKELETON,
        ]

    def test_tensors_deep_in_the_object_graph_come_back(self) -> None:
        deep = torch.randn(3)
        model = Holder(config={"a": [{"b": (deep, deep)}]})

        back = round_trip(model)

        assert same(back.config["a"][0]["b"][0], deep)
        assert back.config["a"][0]["b"][0] is back.config["a"][0]["b"][1]

    def test_buffers_stay_persistent_or_not(self) -> None:
        model = Holder(b=nn.Buffer(torch.ones(2), persistent=False)).with_buffer(
            "hidden", torch.ones(3), persistent=False
        )

        back = round_trip(model)

        assert isinstance(back.b, nn.Buffer)
        assert dict(back.named_buffers()).keys() == {"b", "hidden"}
        assert list(back.state_dict()) == []

    def test_attributes_of_tensors_come_back(self) -> None:
        model = nn.Linear(2, 2)
        model.weight.tag = "decay"
        model.register_buffer("table", torch.ones(2))
        model.table.tag = "fixed"

        back = round_trip(model)

        assert (back.weight.tag, back.table.tag) == ("decay", "fixed")

    def test_gradients_of_a_module_are_not_stored(self) -> None:
        model = nn.Linear(3, 2)
        before = stored(model)
        model(torch.ones(1, 3)).sum().backward()
        after = stored(model)

        assert before.keys() == after.keys()
        assert before[SKELETON].tobytes() == after[SKELETON].tobytes()
        assert ADAPTER.reconstruct(after).weight.grad is None

    def test_an_activation_that_a_module_kept_comes_back_without_its_graph(self) -> None:
        model = nn.Linear(3, 2)
        model.last = model(torch.ones(1, 3))

        back = round_trip(model)

        assert back.last.is_leaf
        assert torch.equal(back.last, model.last)

    def test_extraction_is_repeatable(self) -> None:
        model = Holder(tied=Tied(), rest=perceptron(), cache=[torch.ones(2)])
        first, second = stored(model), stored(model)

        assert list(first) == list(second)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)

    def test_a_training_step_changes_weights_and_not_the_skeleton(self) -> None:
        model = perceptron()
        before = stored(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        after = stored(model)

        assert before[SKELETON].tobytes() == after[SKELETON].tobytes()
        assert before["0.weight"].tobytes() != after["0.weight"].tobytes()
        assert after["1.num_batches_tracked"] == 1

    def test_a_loaded_module_can_be_trained(self) -> None:
        model = round_trip(Tied())
        before = model.encode.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

        assert not torch.equal(model.decode.weight, before)

    def test_a_tensor_renamed_by_a_hook_replaces_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TENSORCAS_TRY_FILL", "false")  # such a state dict fills no module
        model = nn.Linear(2, 2)

        def swap(module: nn.Module, state: dict[str, Any], *rest: object) -> None:
            state["weight"] = torch.zeros(3)

        model.register_state_dict_post_hook(swap)
        back = round_trip(model)

        assert raw(back.weight) == raw(model.weight)

    def test_extra_state_comes_back_with_the_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TENSORCAS_TRY_FILL", "false")

        assert round_trip(Noted({"any": {object}})).note == {"any": {object}}

    @pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
    def test_a_wrapped_model_is_stored_as_the_module_it_wraps(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        model = perceptron().eval()

        back = round_trip(wrap(model))

        assert type(back) is nn.Sequential
        assert torch.equal(back(torch.ones(2, 3)), model(torch.ones(2, 3)))

    def test_a_compiled_part_comes_back(self) -> None:
        back = round_trip(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.ReLU()))

        assert "0._orig_mod.weight" in back.state_dict()

    def test_only_live_objects_need_a_pickle(self) -> None:
        model = nn.Linear(2, 2)

        assert ADAPTER.unpickles(stored(model))
        assert not ADAPTER.unpickles(stored(model.state_dict()))
        assert not ADAPTER.unpickles({})

    @pytest.mark.long
    def test_classes_of_main_travel_with_the_model(self, tmp_path: Path) -> None:
        save = (
            "import sys, numpy, torch\n"
            "from tensorcas_flavors.pytorch import PyTorchAdapter\n"
            "class Scale: factor = 3\n"
            "class Mine(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__(); self.w = torch.nn.Parameter(torch.full((2,), 7.0)); self.by = Scale()\n"
            "    def forward(self, x): return x * self.w * self.by.factor\n"
            "    def other(self): return Scale()\n"
            "model = Mine(); first = PyTorchAdapter().extract(model); second = PyTorchAdapter().extract(model)\n"
            "assert all(first[k].tobytes() == second[k].tobytes() for k in first)\n"
            "numpy.savez(sys.argv[1], **first)"
        )
        load = (
            "import sys, numpy, torch\n"
            "from tensorcas_flavors.pytorch import PyTorchAdapter\n"
            "model = PyTorchAdapter().reconstruct(dict(numpy.load(sys.argv[1])))\n"
            "print(type(model).__name__, model(torch.ones(2)).tolist())"
        )
        path = str(tmp_path / "rows.npz")
        run_program(save, path, check=True)

        assert run_program(load, path, check=True).stdout.strip() == "Mine [21.0, 21.0]"


class TestPredictions:
    def test_a_frame_is_answered_with_a_frame(self) -> None:
        model = perceptron()
        frame = pd.DataFrame(np.random.default_rng(0).normal(size=(4, 3)), index=[9, 7, 5, 3])

        answer = ADAPTER.predict(round_trip(model), frame)
        wanted = model.eval()(torch.tensor(frame.to_numpy(dtype=np.float32))).detach().numpy()

        assert answer.index.tolist() == [9, 7, 5, 3]
        assert answer.to_numpy().tobytes() == wanted.tobytes()

    def test_an_array_is_answered_with_an_array_of_the_models_dtype(self) -> None:
        model = perceptron().double().eval()
        batch = np.random.default_rng(0).normal(size=(4, 3))

        answer = ADAPTER.predict(round_trip(model), batch, {})

        assert answer.dtype == np.float64
        assert answer.tobytes() == model(torch.from_numpy(batch)).detach().numpy().tobytes()

    def test_predictions_are_those_of_mlflows_own_wrapper(self) -> None:
        from mlflow.pytorch import _PyTorchWrapper

        model = perceptron().eval()
        frame = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 3)))
        wanted = _PyTorchWrapper(model, device="cpu").predict(frame)

        pd.testing.assert_frame_equal(ADAPTER.predict(round_trip(model), frame), wanted, check_exact=True)

    def test_read_only_and_reversed_arrays_are_taken(self) -> None:
        model = nn.Linear(3, 2)
        batch = np.ones((4, 3), dtype=np.float32)
        batch.flags.writeable = False

        assert ADAPTER.predict(model, batch).shape == (4, 2)
        assert ADAPTER.predict(model, batch[::-1]).shape == (4, 2)

    def test_params_are_the_device_and_keyword_arguments(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, input: torch.Tensor, by: float = 1.0) -> torch.Tensor:
                return super().forward(input) * by

        model = Scaled(2, 2)
        batch = np.ones((1, 2), dtype=np.float32)

        answer = ADAPTER.predict(model, batch, {"device": "cpu", "by": 0.0})

        assert answer.tolist() == [[0.0, 0.0]]

    def test_predicting_switches_dropout_off(self) -> None:
        batch = np.ones((1, 1000), dtype=np.float32)

        assert ADAPTER.predict(nn.Dropout(0.5), batch).tolist() == batch.tolist()

    def test_a_state_dict_does_not_predict(self) -> None:
        with pytest.raises(AdapterError, match="load it into a module first"):
            ADAPTER.predict(nn.Linear(2, 2).state_dict(), np.ones((1, 2)))

    @pytest.mark.parametrize("data", [[1.0], {"a": 1.0}, "text"])
    def test_predicting_on_other_data_types_is_refused(self, data: object) -> None:
        with pytest.raises(TypeError, match="a DataFrame or an array"):
            ADAPTER.predict(nn.Linear(2, 2), data)

    def test_a_model_that_answers_several_tensors_is_refused(self) -> None:
        with pytest.raises(TypeError, match="must predict one tensor"):
            ADAPTER.predict(nn.LSTM(2, 2), np.ones((1, 2), dtype=np.float32))

    def test_requirements_are_those_of_mlflow(self) -> None:
        from mlflow.pytorch import get_default_pip_requirements

        # With packaging 26.4, MLflow keeps a local label such as +cpu, which no index has.
        theirs = [each.partition("+")[0] for each in get_default_pip_requirements()]
        assert ADAPTER.requirements(ADAPTER.extract(nn.Linear(2, 2))) == theirs

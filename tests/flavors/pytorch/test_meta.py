"""Modules on the meta device get memory when they are filled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import NotFilled
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import Checkpoint
from tests.flavors.pytorch.models import Holder, Tied, perceptron, same, shares_storage, stored


class TestMeta:
    def test_a_module_on_the_meta_device_gets_memory(self) -> None:
        source = perceptron()
        with torch.device("meta"):
            target = perceptron()
        target[0].weight.requires_grad_(False)
        checkpoint = Checkpoint.of(source)

        left = checkpoint.fill(target)

        assert left == NotFilled()
        assert checkpoint.apart == []
        assert not target[0].weight.requires_grad
        target[0].weight.requires_grad_(True)
        for name, tensor in source.state_dict(keep_vars=True).items():
            assert same(target.state_dict(keep_vars=True)[name], tensor)
        assert torch.equal(source.eval()(torch.ones(2, 3)), target.eval()(torch.ones(2, 3)))

    def test_a_module_is_filled_inside_of_a_meta_device_context(self) -> None:
        checkpoint = Checkpoint.of(perceptron())
        with torch.device("meta"):
            target = perceptron().double()
            checkpoint.fill(target)

        assert torch.equal(target[0].weight, perceptron()[0].weight.double())

    def test_a_module_with_only_parameters_on_the_meta_device_is_filled(self) -> None:
        source, target = perceptron(), perceptron()
        for module in target.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        running = target[1].running_mean

        Checkpoint.of(source).fill(target)

        assert target[1].running_mean is running
        assert same(target[4].weight, source[4].weight)

    def test_tied_parameters_on_the_meta_device_stay_tied(self) -> None:
        source = Tied()
        target = Tied().to("meta")
        target.decode.weight = target.encode.weight

        Checkpoint({"encode.weight": stored(source)["encode.weight"]}).fill(target)

        assert target.encode.weight is target.decode.weight
        assert torch.equal(target(torch.arange(3)), source(torch.arange(3)))

    def test_two_meta_parameters_of_one_memory_share_memory_again(self) -> None:
        with torch.device("meta"):
            first = nn.Linear(2, 2, bias=False)
            target = Holder(one=first, two=nn.Linear(2, 2, bias=False))
        target.two.weight = nn.Parameter(first.weight.data)

        Checkpoint({"one.weight": np.ones((2, 2), np.float32)}).fill(target)

        assert target.one.weight is not target.two.weight
        assert shares_storage(target.one.weight, target.two.weight)

    def test_a_parameters_class_and_attributes_are_kept(self) -> None:
        class Marked(nn.Parameter):
            pass

        model = Holder(w=Marked(torch.zeros(2, device="meta"))).with_buffer("b", torch.zeros(2, device="meta"))
        model.w.shard = 3

        Checkpoint({"w": np.ones(2, np.float32), "b": np.ones(2, np.float32)}).fill(model)

        assert type(model.w) is Marked
        assert model.w.shard == 3
        assert dict(model.named_buffers())["b"].tolist() == [1, 1]
        assert [name for name, _ in model.named_parameters()] == ["w"]

    def test_memory_formats_are_kept(self) -> None:
        source = nn.Conv2d(2, 3, 3)
        target = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).to("meta")

        Checkpoint.of(source).fill(target)

        assert torch.equal(target.weight, source.weight)
        assert target.weight.is_contiguous(memory_format=torch.channels_last)

    def test_an_overlapping_meta_tensor_gets_memory_without_overlap(self) -> None:
        target = Holder().with_buffer("w", torch.empty(9, device="meta").as_strided((3, 3), (2, 2)))
        array = np.arange(9, dtype=np.float32).reshape(3, 3)

        Checkpoint({"w": array}).fill(target)

        assert np.array_equal(target.w.numpy(), array)

    def test_an_lstm_computes_with_its_new_weights(self) -> None:
        source = nn.LSTM(3, 4)
        with torch.device("meta"):
            target = nn.LSTM(3, 4)

        Checkpoint.of(source).fill(target)

        assert torch.equal(target(torch.ones(2, 3))[0], source(torch.ones(2, 3))[0])

    def test_parametrized_weights_get_memory(self) -> None:
        source, target = (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)) for _ in range(2))
        target.to("meta")

        Checkpoint.of(source).fill(target)

        assert torch.equal(target(torch.ones(1, 3)), source(torch.ones(1, 3)))

    def test_meta_tensors_that_were_not_stored_are_named(self) -> None:
        model = Holder(lin=nn.Linear(2, 2)).with_buffer("table", torch.zeros(3), persistent=False).to("meta")
        checkpoint = Checkpoint.of({"lin.weight": torch.ones(2, 2)})

        left = checkpoint.fill(model, strict=False)

        assert left == NotFilled(missing=("lin.bias",), without_memory=("table", "lin.bias"))
        assert model.table.is_meta
        assert model.lin.weight.tolist() == [[1, 1], [1, 1]]

    def test_a_read_that_fails_leaves_a_module_without_memory_as_it_was(self) -> None:
        target = perceptron().to("meta")
        checkpoint = Checkpoint.of(perceptron().double())
        del checkpoint.arrays["4.bias"]

        with pytest.raises(KeyError):
            checkpoint.fill(target)

        assert all(parameter.is_meta for parameter in target.parameters())

    @pytest.mark.parametrize("device", ["meta", "cuda:77", "nonsense", "cpu:x"])
    def test_filling_onto_the_meta_device_is_refused(self, device: str) -> None:
        with pytest.raises(AdapterError, match="device"):
            Checkpoint.of(nn.Linear(2, 2)).fill(nn.Linear(2, 2).to("meta"), device=device)

    def test_tensors_to_convert_are_read_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorcas_flavors.pytorch._modules.BATCH_BYTES", 1000)
        source = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(5)], nn.Linear(10, 40, bias=False))
        checkpoint = Checkpoint.of(source)
        target = nn.Sequential(*source).bfloat16().to("meta")

        checkpoint.fill(target)

        assert checkpoint.apart == [["0.weight", "1.weight"], ["2.weight", "3.weight"], ["4.weight"], ["5.weight"]]


MEMORY = """
import re, sys
import numpy as np, torch
from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_mlflow.base.tensors import Spec

with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(24)])  # 384 MiB
stored = sys.argv[1]
specs = {name: Spec(name=name, dtype=stored, shape=tuple(t.shape)) for name, t in model.state_dict().items()}

def read(names, *, out=None):
    out = out or {name: np.empty(specs[name].shape, stored) for name in names}
    for name in names:
        out[name].fill(int(name.partition(".")[0]))
    return out

first = {"weight": specs["0.weight"]}  # of a first time, torch's own code remains
PyTorchAdapter().fill_weights(torch.nn.Linear(2048, 2048, bias=False), first, read)

def status(field):  # of this process alone; getrusage tells of the one that started it, too
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{field}:\\s+(\\d+) kB$", file.read(), re.MULTILINE)[1]) << 10

before = status("VmRSS")
PyTorchAdapter().fill_weights(model, specs, read)
assert model[23].weight[5, 5] == 23
print((status("VmHWM") - before) >> 20)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_module_takes_little_memory_besides_its_own(dtype: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, dtype], capture_output=True, text=True, check=True)

    assert 384 <= int(done.stdout) <= 384 + 64 + 8


@pytest.mark.long
class TestTransformers:
    @pytest.fixture
    def models(self) -> tuple[Any, Any]:
        """A small language model of transformers, and what it was made from."""
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        torch.manual_seed(0)
        source = transformers.AutoModelForCausalLM.from_config(config).eval()
        return source, config

    def build_on_meta(self, config: Any) -> Any:
        import transformers

        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config).eval()

    def test_a_language_model_without_memory_predicts_as_the_one_that_was_stored(self, models: tuple[Any, Any]) -> None:
        source, config = models
        target = self.build_on_meta(config)
        tokens = torch.arange(20).reshape(2, 10)

        left = Checkpoint.of(source).fill(target)

        assert left == NotFilled()
        with torch.no_grad():
            assert torch.equal(source(tokens).logits, target(tokens).logits)

    def test_buffers_missing_from_files_of_transformers_are_named(self, models: tuple[Any, Any]) -> None:
        source, config = models
        target = self.build_on_meta(config)
        arrays = {name: tensor.numpy() for name, tensor in source.state_dict().items()}

        left = Checkpoint(arrays).fill(target)

        assert left.missing == left.unexpected == ()
        assert left.without_memory
        assert all("rotary_emb" in name for name in left.without_memory)

    def test_filling_one_layer_allocates_no_other(self, models: tuple[Any, Any]) -> None:
        source, config = models
        target = self.build_on_meta(config)
        checkpoint = Checkpoint.of(source)

        checkpoint.fill(target, wanted=lambda name: name.startswith("model.layers.1."))

        assert all(name.startswith("model.layers.1.") for name in checkpoint.into)
        assert not any(parameter.is_meta for parameter in target.model.layers[1].parameters())
        assert all(parameter.is_meta for parameter in target.model.layers[0].parameters())

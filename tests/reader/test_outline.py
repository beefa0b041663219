"""Layers and experts, derived from the names of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import PartNotFoundError
from tensorcas_mlflow.layout.manifests import Specs
from tensorcas_mlflow.reader import Naming
from tensorcas_mlflow.reader._outline import Outline
from tensorcas_mlflow.reader._summary import summarize


def outline(names: Iterable[str] | Mapping[str, tuple[int, ...]], naming: Naming | None = None) -> Outline:
    shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, (2, 2))
    specs = [Spec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    return Outline(Specs.of(specs), naming)


def names_of_layer(found: Outline, layer: int, stack: str | None = None) -> list[str]:
    return [found._specs.name(int(row)) for row in found.rows_of_layer(layer, stack)]


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("model.layers.{}.self_attn.q_proj.weight", "model.layers"),  # Llama, Mistral, Qwen
        ("transformer.h.{}.attn.c_attn.weight", "transformer.h"),  # GPT-2
        ("h.{}.attn.c_attn.weight", "h"),
        ("bert.encoder.layer.{}.attention.self.query.weight", "bert.encoder.layer"),
        ("vit.encoder.layer.{}.output.dense.bias", "vit.encoder.layer"),
        ("blocks.{}.attn.qkv.weight", "blocks"),  # timm
        ("gpt_neox.layers.{}.mlp.dense_h_to_4h.weight", "gpt_neox.layers"),
        ("backbone.layers.{}.mixer.A_log", "backbone.layers"),  # Mamba
        ("module.model.layers.{}.mlp.up_proj.weight", "module.model.layers"),  # DistributedDataParallel
        ("encoder.block.{}.layer.0.SelfAttention.q.weight", "encoder.block"),  # T5
        ("unet.down_blocks.{}.attentions.0.proj.weight", "unet.down_blocks"),
        ("features.{}.weight", "features"),  # VGG
        ("{}.weight", ""),  # Sequential
        ("net.{}.conv.weight", "net"),
    ],
)
def test_layers_are_known_by_the_names_that_frameworks_give(name: str, stack: str) -> None:
    found = outline([name.format(0), name.format(1), name.format(11), "other.weight"])

    assert found.stacks == (stack,)
    assert found.layers() == [0, 1, 11]
    assert names_of_layer(found, 11) == [name.format(11)]


def test_blocks_of_a_resnet_are_counted_through_its_stages() -> None:
    found = outline(f"layer{stage}.{block}.conv1.weight" for stage in range(1, 5) for block in range(2))

    assert found.layers() == list(range(8))
    assert names_of_layer(found, 0) == ["layer1.0.conv1.weight"]
    assert names_of_layer(found, 5) == ["layer3.1.conv1.weight"]


def test_model_with_several_kinds_of_layers_needs_the_name_of_one() -> None:
    found = outline([f"{part}.layers.{n}.fc.weight" for part in ("encoder", "decoder") for n in range(3)])

    assert found.stacks == ("encoder.layers", "decoder.layers")
    assert names_of_layer(found, 2, "decoder.layers") == ["decoder.layers.2.fc.weight"]
    with pytest.raises(ValueError, match=r"'encoder\.layers', 'decoder\.layers'.*stack="):
        found.rows_of_layer(2)
    with pytest.raises(ValueError, match="no layers of 'vision'"):
        found.rows_of_layer(2, "vision")


def test_numbers_of_an_optimizer_are_no_layers() -> None:
    found = outline(["model.0.weight", "model.2.weight", "optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"])

    assert found.stacks == ("model",)
    assert found.layers() == [0, 2]


def test_a_layer_that_is_not_there_is_an_error_that_says_which_are() -> None:
    with pytest.raises(PartNotFoundError, match=r"no layer 7 of 'model\.layers': there are layers 0\.\.2, 5"):
        outline([f"model.layers.{n}.w" for n in (0, 1, 2, 5)]).rows_of_layer(7)


def test_names_without_numbers_tell_of_no_layers() -> None:
    found = outline(["fc1.weight", "fc2.weight"])

    assert found.stacks == ()
    with pytest.raises(PartNotFoundError, match="no layers"):
        found.rows_of_layer(0)


# --- experts


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",  # Mixtral
        "model.layers.{}.mlp.experts.{}.gate_proj.weight",  # Qwen-MoE, DeepSeek
    ],
)
def test_experts_are_known_by_their_numbers(name: str) -> None:
    names = [name.format(layer, expert) for layer in range(2) for expert in range(4)]
    found = outline([*names, "model.layers.1.mlp.shared_experts.gate_proj.weight", "model.layers.1.mlp.gate.weight"])

    assert found.experts(1) == [0, 1, 2, 3]
    assert [found._specs.name(part.row) for part in found.parts_of_expert(1, 2)] == [name.format(1, 2)]
    with pytest.raises(PartNotFoundError, match=r"no expert 4 in layer 1: there are experts 0\.\.3"):
        found.parts_of_expert(1, 4)


FUSED = {
    "model.layers.0.mlp.gate.weight": (4, 16),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 16, 32),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (4, 32),
    "model.layers.0.mlp.experts.down_proj": (4, 16, 16),
    "model.layers.0.mlp.shared_experts.up_proj.weight": (16, 16),
    "model.layers.1.mlp.up_proj.weight": (16, 16),
}


def test_expert_of_a_fused_tensor_is_one_row() -> None:
    found = outline(FUSED)

    assert found.experts(0) == [0, 1, 2, 3]
    parts = found.parts_of_expert(0, 2)
    assert [(found._specs.name(part.row), part.rows, part.is_one) for part in parts] == [
        ("model.layers.0.mlp.experts.gate_up_proj", slice(2, 3), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", slice(2, 3), True),
        ("model.layers.0.mlp.experts.down_proj", slice(2, 3), True),
    ]
    assert found.experts(1) == []
    with pytest.raises(PartNotFoundError, match="no expert 0 in layer 1"):
        found.parts_of_expert(1, 0)


def test_experts_that_were_put_one_under_the_other_are_as_many_as_the_router_has_rows() -> None:
    found = outline(
        {"blocks.0.ffn.router.layer.weight": (4, 16), "blocks.0.ffn.experts.mlp.w1": (4 * 32, 16)}  # DBRX
    )

    (part,) = found.parts_of_expert(0, 3)
    assert (part.rows, part.is_one) == (slice(96, 128), False)


def test_without_a_router_only_tensors_of_three_dimensions_are_divided() -> None:
    flat = {"layers.0.mlp.experts.w1": (64, 16)}

    assert outline(flat).experts(0) == []
    assert outline({"layers.0.mlp.experts.w1": (8, 64, 16)}).experts(0) == list(range(8))


# --- names of one's own


def test_caller_can_name_the_patterns_of_layers() -> None:
    names = [f"net.stage{layer}.moe_{expert}.w" for layer in range(3) for expert in range(2)]
    found = outline(
        [*names, "net.stage1.norm", "net.stage10.norm"],
        Naming(layer="net.stage{layer}.", expert="*.stage{layer}.moe_{expert}."),
    )

    assert found.layers() == [0, 1, 2, 10]
    assert names_of_layer(found, 1) == ["net.stage1.moe_0.w", "net.stage1.moe_1.w", "net.stage1.norm"]
    assert [found._specs.name(part.row) for part in found.parts_of_expert(2, 1)] == ["net.stage2.moe_1.w"]


def test_caller_can_say_which_rows_are_experts() -> None:
    found = outline(
        {"net.a0.all": (4, 2, 2), "net.a0.norm": (2,)},
        Naming(layer="net.a{layer}", expert="net.a{layer}.all[{expert}]"),
    )

    assert [(part.row, part.rows) for part in found.parts_of_expert(0, 3)] == [(0, slice(3, 4))]


@pytest.mark.parametrize("pattern", ["net.*{layer}.", "net.*{layer}", "net.*{layer}*", "*.stage{layer}*"])
def test_a_number_beside_anything_is_a_whole_one(pattern: str) -> None:
    found = outline(["net.stage2.w", "net.stage12.w", "net.stage1234567890123456789.w"], Naming(layer=pattern))

    assert found.layers() == [2, 12]


def test_pattern_matches_its_other_characters_as_text() -> None:
    found = outline(["a.(?P<x>[0-9]+).3", "a.b.4"], Naming(layer="a.(?P<x>[0-9]+).{layer}"))

    assert found.layers() == [3]


@pytest.mark.parametrize(
    ("layer", "expert"),
    [
        ("net.", None),
        ("{layer}.{expert}", None),
        ("{layer}{layer}", None),
        ("a{layer}", "b{expert}"),
        ("a{layer}", "b"),
    ],
)
def test_a_pattern_that_says_not_which_number_is_which_is_refused(layer: str, expert: str | None) -> None:
    with pytest.raises(ValueError, match="pattern of"):
        Naming(layer=layer, expert=expert)


# --- names and shapes that somebody has made up


@pytest.mark.long
def test_messages_about_very_many_layers_are_short() -> None:
    kinds = outline([f"kind{nth}x.layers.{nth}.w" for nth in range(20_000)])
    even = outline([f"layers.{2 * nth}.w" for nth in range(20_000)])

    with pytest.raises(ValueError, match=r"'kind0x\.layers', .* …: pass one as stack=") as told:
        kinds.layers()
    with pytest.raises(PartNotFoundError, match=r"there are layers 0, 2, .* …$") as said:
        even.rows_of_layer(1)

    assert len(str(told.value)) + len(str(said.value)) < 5000
    assert kinds.layers("kind7x.layers") == [7]


def test_a_summary_of_very_many_kinds_of_layers_tells_of_the_first() -> None:
    found = outline([f"kind{nth}x.layers.{nth}.w" for nth in range(5_000)])
    summary = summarize("all", found._specs, found, {})

    assert summary.is_cut
    assert [stack.name for stack in summary.stacks[:2]] == ["kind0x.layers", "kind1x.layers"]
    assert len(str(summary)) < 500_000


@pytest.mark.parametrize("shape", [(1 << 17, 1, 1), (1 << 50, 0, 0), (1 << 50, 1, 1)])
def test_a_shape_makes_no_experts_that_nobody_has(shape: tuple[int, ...]) -> None:
    found = outline({"layers.0.mlp.experts.w1": shape, "layers.0.mlp.gate.weight": shape[:2]})

    assert found.experts(0) == []
    assert summarize("all", found._specs, found, {}).stacks[0].n_experts == 0


def test_blocks_are_counted_through_the_stages_of_each_model() -> None:
    names = [f"{model}.layer{stage}.{block}.w" for stage in (2, 1) for block in (0, 3) for model in ("a", "b")]
    found = outline([*names, "b.layer3.1.w", "encoder.layer.5.w"])

    assert (found.layers("a.layer"), found.layers("b.layer"), found.layers("encoder.layer")) == (
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [5],
    )
    assert names_of_layer(found, 2, "a.layer") == ["a.layer2.0.w"]

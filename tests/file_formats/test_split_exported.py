"""Files whose tables come after the tensors: in the end they say of each what `torch.save` says first."""

from __future__ import annotations

import io
import json
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_mlflow.file_formats import Skeleton, Tensor
from tests.file_formats.parts import damaged, joined, take_apart, tensors
from tests.file_formats.samples import EXAMPLE, pt2_entry, pt2_file, pt2_of, pt2_table, torch_file, zip_of


class Network(torch.nn.Module):
    """Tied, transposed and small weights, and one that is longer than a splitter's window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5000, 64)
        self.line = torch.nn.Linear(64, 5000)
        self.line.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.randn(30, 20).t())
        self.tiny = torch.nn.Parameter(torch.randn(3))
        self.brief = torch.nn.Parameter(torch.randn(64, 64).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(self.embedding(x))
        return out + self.turned.sum() + self.tiny.sum() + self.brief.sum()


@cache
def exported() -> bytes:
    return pt2_file(Network())


@cache
def scripted() -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(Network().eval(), (EXAMPLE,)), out)
    return out.getvalue()


def facts(data: bytes) -> dict[str, Any]:
    return {name: (part.dtype, part.shape, content) for name, (part, content) in tensors(data).items()}


@pytest.mark.parametrize("made", [exported, scripted])
def test_weights_have_the_names_dtypes_and_shapes_that_torch_save_gives_them(made: Any) -> None:
    data = made()
    of_save = facts(torch_file(dict(Network().state_dict())))
    found = facts(data)

    assert joined(take_apart(data)) == data
    assert len(of_save) == 4  # of tied weights the first
    assert {name: found.get(name) for name in of_save} == of_save


def test_small_storages_are_skeleton() -> None:
    parts = take_apart(exported())

    assert not any(isinstance(part, Tensor) and "weight_" in part.name for part, _ in parts)
    assert {type(part) for part, _ in parts} == {Skeleton, Tensor}


def test_a_weight_that_looks_like_a_text_is_a_tensor() -> None:
    text = np.frombuffer(b"no text, but weights " * 50, np.uint8)
    table = pt2_table({"w": pt2_entry("weight_0", 1, text.shape, (1,))})
    [(part, content)] = tensors(
        pt2_of({"weights/weight_0": text.tobytes(), "weights/model_weights_config.json": table})
    ).values()

    assert (part.name, part.dtype, part.shape, content) == ("w", "uint8", text.shape, text.tobytes())


def test_a_storage_of_which_tensors_see_parts_has_a_dtype_and_no_shape() -> None:
    entries = {
        "head": pt2_entry("weight_0", 7, (10,), (1,)),
        "tail": pt2_entry("weight_0", 7, (30,), (1,), 10),
    }
    data = pt2_of({"weights/weight_0": bytes(160), "weights/model_weights_config.json": pt2_table(entries)})
    [(part, _)] = tensors(data).values()
    whole = {**entries, "whole": pt2_entry("weight_0", 7, (4, 10), (10, 1))}
    data = pt2_of({"weights/weight_0": bytes(160), "weights/model_weights_config.json": pt2_table(whole)})
    [(named, _)] = tensors(data).values()

    assert (part.name, part.dtype, part.shape) == ("model/data/weights/weight_0", "float32", None)
    assert (named.name, named.dtype, named.shape) == ("whole", "float32", (4, 10))


def test_a_tensor_in_a_file_of_its_own_has_the_name_of_the_table() -> None:
    entry = pt2_entry("weight_0", 7, (5, 20), (20, 1), use_pickle=True)
    files = {"weights/weight_0": torch_file(torch.ones(5, 20))}
    data = pt2_of({**files, "weights/encoder_weights_config.json": pt2_table({"w": entry})})
    [(part, _)] = tensors(data).values()

    assert (part.name, part.dtype, part.shape) == ("encoder/w", "float32", (5, 20))


@pytest.mark.parametrize(
    "table",
    [
        b"nonsense",
        b'{"config": {}}',
        b'{"config": {"w": ' + b"[" * 5000,
        b'{"config": ' + b'{"w":' * 5000,
        pt2_table({"w": {**pt2_entry("weight_0", 7, (40,), (1,)), "path_name": 5}}),
        json.dumps({"config": {"w": pt2_entry("weight_0", 7, (1 << 70,), (1,))}}).encode(),
    ],
    ids=range(6),
)
def test_a_table_of_nonsense_costs_names_and_no_byte(table: bytes) -> None:
    data = pt2_of({"weights/weight_0": bytes(160), "weights/model_weights_config.json": table})
    parts = take_apart(data)

    assert joined(parts) == data
    assert [part.n_bytes for part, _ in parts if isinstance(part, Tensor)] == [160]


def test_a_table_of_another_archive_says_nothing() -> None:
    table = pt2_table({"w": pt2_entry("weight_0", 7, (40,), (1,))})
    data = zip_of({"a/data/weights/weight_0": bytes(160), "b/data/weights/model_weights_config.json": table})
    [(part, _)] = tensors(data).values()

    assert (part.name, part.dtype) == ("a/data/weights/weight_0", None)


def test_damaged_files_come_back() -> None:
    data = pt2_of(
        {
            "weights/weight_0": bytes(160),
            "weights/model_weights_config.json": pt2_table({"w": pt2_entry("weight_0", 7, (40,), (1,))}),
        }
    )
    for each in damaged(data):
        assert joined(take_apart(each)) == each

"""``import``, ``export`` and ``convert``, from the words to the files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.store import Store
from tests.file_formats.arrays import ArrayTensors, write

Tensorcas = Callable[..., Any]

ARRAYS = {"a.weight": np.arange(12, dtype="f4").reshape(3, 4), "a.bias": np.ones(4), "b.weight": np.zeros(2, "i8")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(ArrayTensors(ARRAYS, metadata={"note": "x"}), tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_a_file_is_imported_shown_and_exported_again(
    tensorcas: Tensorcas, store: Store, tmp_path: Path, file: Path
) -> None:
    place = ("--root", store.uri)
    taken = tensorcas("import", file, "--run", "new", "--step", "7", "--name", "base", *place)
    shown = tensorcas("show", "--run", "new", *place, "--json").json
    given = tensorcas("export", "--run", "new", "--name", "base", tmp_path / "out.safetensors", *place)

    assert (taken.status, given.status) == (0, 0), taken.err + given.err
    assert taken.out == "imported 3 tensors, 96 B, from safetensors, as run new base step 7\n"
    assert shown["metadata"] == {"format": "pt", "note": "x"}
    assert given.out.splitlines() == [
        "from run new base step 7",
        f"3 tensors, {file.stat().st_size} B, as safetensors",
        f"  {tmp_path / 'out.safetensors'}  {file.stat().st_size} B",
    ]
    assert (tmp_path / "out.safetensors").read_bytes() == file.read_bytes()


def test_import_replaces_a_checkpoint_only_with_overwrite(tensorcas: Tensorcas, store: Store, file: Path) -> None:
    words = ("import", file, "--run", "train", "--step", "1", "--root", store.uri)
    refused = tensorcas(*words)

    assert refused.status == 1
    assert "there is already a checkpoint step 1 of run 'train'" in refused.err
    assert tensorcas(*words, "--overwrite").status == 0


def test_import_refuses_tensors_it_cannot_store_or_leaves_them_out_when_asked(
    tensorcas: Tensorcas, store: Store, tmp_path: Path
) -> None:
    sparse = torch.ones(3).to_sparse()
    torch.save({"w": torch.ones(2), "s": sparse}, tmp_path / "m.pt")
    words = ("import", tmp_path / "m.pt", "--run", "new", "--step", "1", "--root", store.uri)
    refused = tensorcas(*words)
    taken = tensorcas(*words, "--skip-unknown", "--json")

    assert refused.status == 1
    assert "--skip-unknown" in refused.err
    assert "'s' (" in refused.err
    assert (taken.json["n_tensors"], list(taken.json["left_out"])) == (1, ["s"])


def test_a_checkpoint_with_left_out_tensors_is_exported_only_with_skip_unknown(
    tensorcas: Tensorcas, store: Store, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "s": torch.ones(3).to_sparse()}, tmp_path / "m.pt")
    place = ("--run", "new", "--root", store.uri)
    tensorcas("import", tmp_path / "m.pt", "--step", "1", *place, "--skip-unknown")
    shown = tensorcas("show", *place)
    words = ("export", tmp_path / "w.safetensors", *place)
    refused = tensorcas(*words)
    given = tensorcas(*words, "--skip-unknown", "--json")

    assert "left out: s: " in shown.out
    assert list(tensorcas("show", *place, "--json").json["left_out"]) == ["s"]
    assert (refused.status, "--skip-unknown" in refused.err) == (1, True)
    assert (given.json["n_tensors"], list(given.json["left_out"])) == (1, ["s"])


def test_tensors_outside_the_match_are_not_reported_as_left_out(tensorcas: Tensorcas, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "s": torch.ones(3).to_sparse()}, tmp_path / "m.pt")
    done = tensorcas("convert", tmp_path / "m.pt", tmp_path / "w.npz", "--match", "w")

    assert (done.status, "left out" in done.out) == (0, False)


def test_a_missing_file_is_reported_in_one_line(tensorcas: Tensorcas, tmp_path: Path) -> None:
    done = tensorcas("convert", "absent.pt", tmp_path / "m.npz")

    assert done.err == "tensorcas: error: could not open 'absent.pt': No such file or directory\n"


def test_export_writes_shards_and_partitions(tensorcas: Tensorcas, store: Store, tmp_path: Path) -> None:
    words = ("export", "--run", "train", "--step", "1", "--root", store.uri, "--json")
    shards = tensorcas(*words, tmp_path / "shards", "--shard-size", "1KB").json
    parts = tensorcas(*words, tmp_path / "parts", "--file-format", "serverlessllm", "--partitions", "2").json

    assert (shards["format"], shards["n_tensors"]) == ("safetensors", 2)
    assert {Path(each["path"]).name for each in shards["files"]} == set(os.listdir(tmp_path / "shards"))
    assert {Path(each["path"]).name for each in parts["files"]} == set(os.listdir(tmp_path / "parts"))


def test_export_writes_matching_tensors_and_a_dry_run_writes_none(
    tensorcas: Tensorcas, store: Store, tmp_path: Path
) -> None:
    words = ("export", "--run", "train", "--step", "1", tmp_path / "m.npz", "--match", "f*", "--root", store.uri)
    dry = tensorcas(*words, "--dry-run")

    assert dry.out.startswith("from run train step 1\nwould write 1 tensor, ")
    assert not (tmp_path / "m.npz").exists()
    assert tensorcas(*words).status == 0
    with np.load(tmp_path / "m.npz") as loaded:
        assert loaded.files == ["fixed"]


def test_an_existing_output_is_reported_in_one_line(tensorcas: Tensorcas, store: Store, tmp_path: Path) -> None:
    (tmp_path / "m.npz").write_text("mine")
    words = ("export", "--run", "train", "--step", "1", tmp_path / "m.npz", "--root", store.uri)
    refused = tensorcas(*words)

    assert (refused.status, len(refused.err.splitlines())) == (1, 1)
    assert "already a file" in refused.err
    assert (tmp_path / "m.npz").read_text() == "mine"
    assert tensorcas(*words, "--overwrite").status == 0


def test_convert_needs_no_store(tensorcas: Tensorcas, tmp_path: Path, file: Path) -> None:
    done = tensorcas("convert", file, tmp_path / "m.pt", "--match", "*.weight")
    back = tensorcas("convert", tmp_path / "m.pt", tmp_path / "back.safetensors", "--json")

    assert done.status == 0, done.err
    assert torch.load(tmp_path / "m.pt", weights_only=True)["a.weight"].tolist() == ARRAYS["a.weight"].tolist()
    assert (back.json["source_format"], back.json["n_tensors"]) == ("torch", 2)
    assert safetensors.numpy.load_file(tmp_path / "back.safetensors").keys() == {"a.weight", "b.weight"}


@pytest.mark.parametrize(
    "words",
    [["--shard-size", "0"], ["--shard-size", "5 apples"], ["--partitions", "0"], ["--file-format", "tar"]],
)
def test_invalid_sizes_and_formats_are_wrong_usage(
    tensorcas: Tensorcas, tmp_path: Path, file: Path, words: list[str]
) -> None:
    assert tensorcas("convert", file, tmp_path / "out", *words).status == 2


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("5GB", 5 * 10**9), ("1.5kB", 1500), ("512MiB", 512 << 20), ("2G", 2 * 10**9), ("70", 70)]
)
def test_size_options_take_decimal_and_binary_units(text: str, n_bytes: int) -> None:
    from tensorcas_mlflow.cli._command import size

    assert size(text) == n_bytes


def test_hostile_names_in_a_file_reach_the_terminal_escaped(tensorcas: Tensorcas, store: Store, tmp_path: Path) -> None:
    header = json.dumps({"red\x1b[31m": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    done = tensorcas("import", tmp_path / "m.safetensors", "--run", "r", "--step", "1", "--root", store.uri)

    assert done.status == 1
    assert "\x1b" not in done.out + done.err

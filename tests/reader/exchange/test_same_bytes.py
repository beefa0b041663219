"""A file that comes back into its own format is the same file, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bintensors.numpy
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import KEPT_HEADER
from tensorcas_mlflow.reader import import_checkpoint, open_ref, plan_export
from tensorcas_mlflow.store import Store
from tests.reader.exchange.doors import DOORS

STATE: dict[str, Any] = {
    "z": np.arange(12, dtype="f4").reshape(3, 4),
    "a": np.arange(3, dtype="i8"),
    "é": np.array(2.5, "f2"),
    "empty": np.zeros((0, 2), "u1"),
}


def by_hand(metadata: Any = None, *, order: Any = ("z", "é", "a"), behind: int = 0, **style: Any) -> bytes:
    """Write a file with the tensors in an order, and a header in a style of `json.dumps`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name in order:
        kind = {"f4": "F32", "i8": "I64", "f2": "F16"}[STATE[name].dtype.str[1:]]
        end = len(data) + STATE[name].nbytes
        header[name] = {"dtype": kind, "shape": [*STATE[name].shape], "data_offsets": [len(data), end]}
        data += STATE[name].tobytes()
    if behind:
        header = dict(reversed(header.items()))
    text = json.dumps(header, **style).encode() + b" " * behind
    return len(text).to_bytes(8, "little") + text + data


FILES = {
    "of the library": lambda: safetensors.numpy.save(STATE),
    "of torch": lambda: safetensors.torch.save({"w": torch.ones(3, dtype=torch.bfloat16)}, {"format": "pt"}),
    "with another format": lambda: safetensors.numpy.save(STATE, {"format": "np"}),
    "with much metadata": lambda: safetensors.numpy.save(STATE, {f"k{n}": "v" for n in range(9)} | {"format": "pt"}),
    "with metadata in another order": lambda: by_hand({"z": "1", "format": "pt", "a": "2"}, separators=(",", ":")),
    "with empty metadata": lambda: by_hand({}, separators=(",", ":")),
    "with spaces": lambda: by_hand({"format": "pt"}),
    "with lines": lambda: by_hand({"q": '"', "n": "é"}, indent=1),
    "with escapes": lambda: by_hand({"n": "é"}, ensure_ascii=False),
    "with padding": lambda: by_hand(behind=37),
    "with tensors in another order": lambda: by_hand(order=("a", "z", "é"), separators=(",", ":")),
    "without tensors": lambda: by_hand(order=()),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FILES)
def test_safetensors_file_comes_back_byte_for_byte(tmp_path: Path, name: str, door: str) -> None:
    data = FILES[name]()
    (tmp_path / "m.safetensors").write_bytes(data)
    expected = open_listing(tmp_path / "m.safetensors").metadata
    with DOORS[door](tmp_path / "m.safetensors") as reader:
        assert reader.metadata == expected
        plan_export(reader, tmp_path / "back.safetensors").execute()

    assert (tmp_path / "back.safetensors").read_bytes() == data


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("metadata", [None, {"z": "1", "a": "2"}])
def test_bintensors_file_comes_back_byte_for_byte(tmp_path: Path, metadata: Any, door: str) -> None:
    (tmp_path / "m.bt").write_bytes(bytes(bintensors.numpy.save(STATE, metadata)))
    with DOORS[door](tmp_path / "m.bt") as reader:
        plan_export(reader, tmp_path / "back.bt").execute()

    assert (tmp_path / "back.bt").read_bytes() == (tmp_path / "m.bt").read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_safetensors_file_is_converted_byte_for_byte(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(FILES[name]())
    plan_export(open_listing(tmp_path / "m.safetensors"), tmp_path / "back.safetensors").execute()

    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_header_that_an_export_writes_anyway_is_not_kept(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    kept = []
    for step, name in enumerate(("of torch", "of the library", "with much metadata", "with spaces")):
        (tmp_path / "m.safetensors").write_bytes(FILES[name]())
        ref = import_checkpoint(store, open_listing(tmp_path / "m.safetensors"), RefTarget(run_id="r", step=step))
        kept.append(store.manifest(ref).metadata.get(KEPT_HEADER))

    assert kept[:2] == [None, []]
    assert sorted(kept[2]) == ["format", *(f"k{n}" for n in range(9))]
    assert kept[3].startswith('{"__metadata__": {"format": "pt"}, "z"')


@pytest.mark.parametrize("options", [{"match": "a"}, {"shard_bytes": 100}, {"format": "torch"}])
def test_some_tensors_or_another_format_have_a_header_of_their_own(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "m.safetensors").write_bytes(by_hand())
    with DOORS["imported"](tmp_path / "m.safetensors") as reader:
        plan_export(reader, tmp_path / "out.safetensors", **options).execute()

    with DOORS["where it lies"](tmp_path / "out.safetensors") as reader:
        assert {name: array.tobytes() for name, array in reader.items()} == {
            name: STATE[name].tobytes() for name in reader
        }


@pytest.mark.parametrize("kept", [by_hand()[8:90].decode(), "{}", "no header", 3, ["z"], '{"w":{"dtype":"F32"}}'])
def test_kept_header_of_other_tensors_is_ignored(tmp_path: Path, kept: Any) -> None:
    store = Store.init(tmp_path / "store")
    with store.begin_checkpoint({"w": STATE["z"]}, flavor="generic", metadata={KEPT_HEADER: kept}) as save:
        save.write()
        ref = save.commit(RefTarget(run_id="r", step=1))
    with open_ref(store, ref) as reader:
        plan_export(reader, tmp_path / "out.safetensors").execute()

    assert safetensors.numpy.load_file(tmp_path / "out.safetensors")["w"].tobytes() == STATE["z"].tobytes()


def test_file_whose_metadata_has_the_key_of_the_kept_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors.numpy.save(STATE, {KEPT_HEADER: "x"}))

    with pytest.raises(ValueError, match="reserved"):
        DOORS["imported"](tmp_path / "m.safetensors")

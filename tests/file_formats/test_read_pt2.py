"""Files of `torch.export` and `torch.jit`, read without torch: each tensor is listed, or named, or the file refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export.pt2_archive._package import package_pt2

from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.file_formats import EXAMPLE_INPUT, Listing, open_listing
from tests.file_formats.samples import (
    ARRAYS,
    TORCH_DTYPES,
    files,
    of_torch,
    pt2_entry,
    pt2_file,
    pt2_of,
    pt2_of_2_7,
    pt2_of_2_8,
    pt2_table,
    same,
    scripted_file,
    some_of,
    torch_file,
    torch_state,
    zip_of,
)

Read = Callable[[bytes], Listing]
TABLE = "weights/model_weights_config.json"
ONE = {"w": pt2_entry("weight_0", 7, (2, 3), (3, 1))}
STORAGE = np.arange(6, dtype=np.float32)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(data: bytes) -> Listing:
        path = tmp_path / "model.pt2"
        path.write_bytes(data)
        return open_listing(path)

    return read


def arrays(listing: Listing) -> dict[str, Any]:
    return {name: listing.array(name) for name in listing.locations}


def alike(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(same(found[name], array) for name, array in wanted.items())


def of_state(state: Any) -> dict[str, Any]:
    return {name: of_torch(tensor.detach()) for name, tensor in state.items()}


def by_hand(entries: Any = ONE, *, storage: bytes = STORAGE.tobytes(), **others: bytes) -> bytes:
    table = entries if isinstance(entries, bytes) else pt2_table(entries)
    return pt2_of({"weights/weight_0": storage, TABLE: table}, **others)


@pytest.mark.filterwarnings("ignore")
def test_weights_buffers_and_constants_are_those_that_torch_loads(read: Read) -> None:
    data = files()["exported.pt2"]
    program = torch.export.load(io.BytesIO(data))
    listing = read(data)

    assert listing.format == "pt2"
    assert {*program.state_dict} >= {"turned", "first", "second", "whole", "head.weight", "embedding.weight", "nothing"}
    assert {*program.constants} == {"passing", "constant"}
    assert {name: (array.dtype, array.shape) for name, array in arrays(listing).items()} == {
        name: (array.dtype, array.shape)
        for name, array in {**of_state(program.state_dict), **of_state(program.constants)}.items()
    }
    assert alike(arrays(listing), {**of_state(program.state_dict), **of_state(program.constants)})


def test_example_inputs_are_named_and_are_no_tensors_of_the_model(read: Read) -> None:
    listing = read(files()["exported.pt2"])

    assert listing.left_out == {"data/sample_inputs/model.pt/0/0": EXAMPLE_INPUT}


def test_tied_weights_are_places_in_one_storage(read: Read) -> None:
    places = read(files()["exported.pt2"]).locations

    assert places["head.weight"].start == places["embedding.weight"].start
    assert places["second"].start == places["first"].start + places["first"].n_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_DTYPES if dtype != torch.float8_e8m0fnu], ids=str)
def test_every_dtype_comes_back(read: Read, dtype: torch.dtype) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("t", some_of(dtype))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, self.t

    listing = read(pt2_file(Module(), torch.ones(2)))

    assert same(listing.array("t"), of_torch(some_of(dtype)))


@pytest.mark.filterwarnings("ignore")
def test_the_weights_of_several_models_have_the_models_names(read: Read) -> None:
    class Line(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.line = torch.nn.Linear(30, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.line(x)
            return out

    modules = {"model": Line(0), "encoder": Line(1)}
    out = io.BytesIO()
    package_pt2(
        out, exported_programs={name: torch.export.export(m, (torch.ones(2, 30),)) for name, m in modules.items()}
    )
    listing = read(out.getvalue())

    assert alike(
        arrays(listing),
        {
            **of_state(modules["model"].state_dict()),
            **{f"encoder/{name}": array for name, array in of_state(modules["encoder"].state_dict()).items()},
        },
    )
    assert [*listing.left_out.values()] == [EXAMPLE_INPUT] * 2


def test_the_layout_of_torch_2_8_is_read(read: Read) -> None:
    for model, prefix in (("model", ""), ("encoder", "encoder/")):
        listing = read(pt2_of_2_8(torch_state(), {"k": torch.ones(3)}, model=model))

        assert alike(
            arrays(listing), {prefix + name: array for name, array in {**ARRAYS, "k": np.ones(3, "f4")}.items()}
        )
        assert listing.left_out == {f"data/sample_inputs/{model}.pt/0/0": EXAMPLE_INPUT}


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_the_layout_until_torch_2_7_is_read(read: Read, suffix: str) -> None:
    data = pt2_of_2_7(torch_state(), None)
    if suffix == "json":  # as torch 2.1 wrote it, without example inputs
        kept = {name: content for name, content in members_of(data).items() if "example" not in name}
        data = zip_of({name.replace("dict.pt", "dict.json"): content for name, content in kept.items()})
    listing = read(data)

    assert alike(arrays(listing), ARRAYS)
    assert {*listing.left_out} == (set() if suffix == "json" else {"serialized_example_inputs.pt/0/0"})


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_weights_of_compiled_code_are_read_and_the_code_is_named(read: Read) -> None:
    whole = torch.arange(24.0)
    table = {"w": ["weight_0", [2, 3], [3, 1], 0], "turned": ["weight_0", [3, 4], [1, 3], 12]}
    code = {"aotinductor/model/weights_config.json": json.dumps(table).encode(), "aotinductor/model/m.so": b"\x7fELF"}
    listing = read(pt2_of({**code, "weights/weight_0": torch_file(whole)}))

    assert alike(arrays(listing), of_state({"w": whole[:6].reshape(2, 3), "turned": whole[12:].reshape(4, 3).t()}))
    assert listing.left_out == {"data/aotinductor/model/m.so": "compiled code"}


def test_a_tensor_of_a_subclass_is_read_from_its_own_file(read: Read) -> None:
    entry = pt2_entry("weight_0", 7, (2, 3), (3, 1), use_pickle=True)
    listing = read(by_hand({"w": entry}, storage=torch_file(torch.ones(2, 3))))

    assert alike(arrays(listing), {"w": np.ones((2, 3), np.float32)})

    listing = read(by_hand({"w": entry}, storage=torch_file({"a": torch.ones(2), "b": torch.zeros(3)})))

    assert {*listing.locations} == {"w.a", "w.b"}


@pytest.mark.parametrize(
    ("entry", "storage", "kind"),
    [
        (pt2_entry("weight_0", 7, (2, 3), (3, 1), use_pickle=True), b"no archive", "pickled tensor"),
        ({"path_name": "weight_0", "use_pickle": True, "tensor_meta": None}, b"an object", "pickled object"),
        (pt2_entry("weight_0", 7, (2, 3), (3, 1)), b"", "fake tensor"),
        (pt2_entry("weight_0", 9, (2, 3), (3, 1)), bytes(24), "dtype 9"),
        (
            {**pt2_entry("weight_0", 7, (), ()), "tensor_meta": {**ONE["w"]["tensor_meta"], "layout": 2}},
            b"",
            "layout 2",
        ),
    ],
)
def test_objects_other_than_plain_tensors_are_named(read: Read, entry: Any, storage: bytes, kind: str) -> None:
    listing = read(by_hand({"w": entry}, storage=storage))

    assert (list(listing.locations), listing.left_out) == ([], {"w": kind})


def test_a_payload_that_no_table_names_is_named(read: Read) -> None:
    data = pt2_of({"weights/weight_0": STORAGE.tobytes(), "weights/weight_1": b"more", TABLE: pt2_table(ONE)})

    assert read(data).left_out == {"data/weights/weight_1": "a file that no table names"}


def test_constants_of_the_name_of_a_weight_are_numbered(read: Read) -> None:
    table = pt2_table({"w": pt2_entry("tensor_0", 7, (2,), (1,))})
    constants = {"constants/tensor_0": bytes(8), "constants/model_constants_config.json": table}
    data = pt2_of({"weights/weight_0": STORAGE.tobytes(), TABLE: pt2_table(ONE), **constants})

    assert [*read(data).locations] == ["w", "w (2)"]


def changed(**fields: Any) -> dict[str, Any]:
    return {"w": {**ONE["w"], **fields}}


def meta(**fields: Any) -> dict[str, Any]:
    return changed(tensor_meta={**ONE["w"]["tensor_meta"], **fields})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (by_hand(changed(path_name="weight_1")), "is missing"),
        (by_hand(changed(path_name="../weights/weight_0")), "without the position of"),
        (by_hand(changed(use_pickle=0)), "without the position of"),
        (by_hand(changed(tensor_meta=None)), "without the shape of"),
        (by_hand(meta(sizes=[{"as_int": 3}, {"as_int": 3}])), "beyond its storage"),
        (by_hand(meta(storage_offset={"as_int": 1})), "beyond its storage"),
        (by_hand(meta(storage_offset={"as_int": -1})), "where a size or place is wanted"),
        (by_hand(meta(sizes=[{"as_expr": {"expr_str": "s0"}}, {"as_int": 3}])), "not a number"),
        (by_hand(meta(strides=[{"as_int": 1}])), "impossible shape"),
        (by_hand(meta(dtype="float32")), "where a size or place is wanted"),
        (by_hand(b"[]"), "not an object"),
        (by_hand(b'{"config": {"w": 1}}'), "unsound"),
        (by_hand(b'{"config": {}, "more": {}}'), "goes on"),
        (by_hand(pt2_table(ONE).replace(b'{"w"', b'{"w": ' + json.dumps(ONE["w"]).encode() + b', "w"')), "twice"),
        (by_hand(byteorder=b"big"), "little-endian"),
        (by_hand(archive_format=b"pt3"), "does not contain 'pt2'"),
        (by_hand(**{"data.pkl": b"\x80\x02N."}), "torch.save"),
        (zip_of({"a/archive_format": b"pt2", "b/archive_format": b"pt2"}), "two archives"),
        (zip_of({"a/archive_format": b"pt2", "b/data/weights/weight_0": b"1"}), "two archives"),
        (pt2_of({"weights/model.pt": b"no archive"}), "directory"),
        (pt2_of({"aotinductor/m/weights_config.json": b"[]"}), "no table"),
        (pt2_of({"aotinductor/m/weights_config.json": b'{"w": ["weight_0", [2], [1]]}'}), "without the position of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_entry_that_the_pt2_format_forbids_is_refused(read: Read, data: bytes, reason: str) -> None:
    with pytest.raises(MalformedFileError, match=reason):
        read(data)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_tensors_are_those_that_torch_loads(read: Read) -> None:
    module = torch.jit.load(io.BytesIO(scripted_file()))
    listing = read(scripted_file())
    loaded = {name: array for name, array in arrays(listing).items() if name.split(".")[0] != "constants"}
    constants = [array for name, array in arrays(listing).items() if name.split(".")[0] == "constants"]

    # Buffers that are not persistent are attributes of the module, and in no state dict.
    assert alike(loaded, {**of_state(module.state_dict()), "passing": np.arange(60, dtype=np.float32)})
    assert np.full((3, 3), 0.5).tolist() in [array.tolist() for array in constants]
    assert [*listing.left_out.values()] == [EXAMPLE_INPUT]


def test_files_that_are_not_known_in_torchscript_are_named(read: Read) -> None:
    members = members_of(scripted_file())
    root = next(iter(members)).partition("/")[0]
    data = zip_of({**members, f"{root}/bytecode.pkl": b"\x80\x02N."})

    assert read(data).left_out["bytecode.pkl"] == "a file that is not known"


@pytest.mark.long
def test_reading_an_exported_program_imports_neither_torch_nor_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(files()["exported.pt2"])
    script = f"""
import sys
from tensorcas_mlflow.file_formats import open_listing
listing = open_listing({str(path)!r})
for name in listing.locations: listing.array(name)
print("torch" in sys.modules, len(listing.locations))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "16"]

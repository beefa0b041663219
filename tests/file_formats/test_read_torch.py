"""Files of `torch.save`, read without torch."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.file_formats import Listing, open_listing
from tests.file_formats.samples import TORCH_DTYPES, of_torch, same, some_of, torch_file

Read = Callable[..., Listing]


@pytest.fixture(params=["zip", "legacy"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    def saved(what: Any) -> Listing:
        path = tmp_path / "file.pt"
        path.write_bytes(torch_file(what, _use_new_zipfile_serialization=request.param == "zip"))
        return open_listing(path)

    return saved


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(data: bytes) -> Listing:
        path = tmp_path / "file.pt"
        path.write_bytes(data)
        return open_listing(path)

    return read


def repacked(data: bytes, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Write an archive anew, with each member changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w", method) as after:
        for name in before.namelist():
            after.writestr(name, change(name, before.read(name)))
    return out.getvalue()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_comes_back(saved: Read, dtype: torch.dtype) -> None:
    tensor = some_of(dtype)
    listing = saved({"t": tensor})

    assert same(listing.array("t"), of_torch(tensor))


def test_names_are_the_keys_that_lead_to_a_tensor(saved: Read) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    listing = saved({"model": OrderedDict(w=parameter), "optimizer": optimizer.state_dict(), "list": [torch.zeros(2)]})

    assert {*listing.locations} == {
        "model.w",
        "optimizer.state.0.step",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.exp_avg_sq",
        "list.0",
    }


def test_a_whole_module_is_named_as_its_state_dict(saved: Read) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    listing = saved(net)

    assert {*listing.locations} == {*net.state_dict()}
    assert all(same(listing.array(name), of_torch(tensor)) for name, tensor in net.state_dict().items())


def test_a_tensor_saved_by_itself_has_a_name(saved: Read) -> None:
    listing = saved(torch.arange(6).reshape(2, 3))

    assert [*listing.locations] == ["tensor"]
    assert same(listing.array("tensor"), np.arange(6).reshape(2, 3))


def test_tied_tensors_are_places_in_one_storage(saved: Read) -> None:
    weight = torch.randn(8, 4)
    tied = {"embed": weight, "head": weight.detach(), "again": weight}
    listing = saved({**tied, "rows": weight[2:5], "column": weight[:, 1]})
    starts = {name: place.start for name, place in listing.locations.items()}

    assert {*starts} == {"embed", "head", "again", "rows", "column"}
    assert starts["embed"] == starts["head"] == starts["again"]
    assert starts["rows"] == starts["embed"] + 2 * 4 * 4
    assert same(listing.array("rows"), of_torch(weight[2:5]))
    assert same(listing.array("column"), of_torch(weight[:, 1]))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1::3],
        lambda t: t.reshape(3, 4, 5)[:, 1:3].permute(2, 0, 1),
        lambda t: t[:0],
        lambda t: t[:1].expand(7, 5),
        lambda t: t[2, 3],
        lambda t: t.reshape(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "with steps", "permuted", "empty", "expanded", "scalar", "channels last"],
)
def test_views_come_back_in_c_order(saved: Read, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(12, 5))
    listing = saved({"t": tensor})

    assert same(listing.array("t"), of_torch(tensor))
    assert b"".join(piece for _, piece in listing.stream(["t"])) == listing.array("t").tobytes()


@pytest.mark.long
def test_a_large_transposed_tensor_streams_in_pieces(saved: Read) -> None:
    tensor = torch.arange(3000 * 3000, dtype=torch.int32).reshape(3000, 3000).T
    pieces = [bytes(piece) for _, piece in saved({"t": tensor}).stream(["t"])]

    assert max(map(len, pieces)) <= 16 << 20
    assert b"".join(pieces) == of_torch(tensor).tobytes()


def test_objects_other_than_plain_tensors_are_left_out(saved: Read) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    listing = saved(
        {
            "quantized": quantized,
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
            "meta": torch.ones(3, device="meta"),
            "plain": torch.ones(3),
        }
    )

    assert {*listing.left_out} == {"quantized", "sparse", "csr", "conjugated", "meta"}
    assert listing.left_out["sparse"] == "sparse"
    assert [*listing.locations] == ["plain"]


def test_ways_that_are_written_alike_are_numbered(saved: Read) -> None:
    listing = saved({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})

    assert [*listing.locations] == ["a.b", "a.b (2)"]
    assert listing.array("a.b (2)").tolist() == [1.0]


def test_one_dict_in_two_places_has_its_tensors_twice(saved: Read) -> None:
    state = {"w": torch.ones(2)}

    assert [*saved({"model": state, "ema": state}).locations] == ["model.w", "ema.w"]


def test_pickle_walk_ends_at_objects_that_hold_each_other(saved: Read) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    state["self"] = state

    assert [*saved(state).locations] == ["w"]


def test_a_file_whose_things_are_in_each_other_too_often_is_refused(read: Read) -> None:
    layer: Any = [torch.ones(1)]
    for _ in range(40):
        layer = [layer, layer]

    with pytest.raises(MalformedFileError, match="too deep or too often"):
        read(torch_file(layer))


def test_a_file_of_a_big_endian_machine_is_turned_round(read: Read) -> None:
    half, single = torch.arange(5).to(torch.bfloat16), torch.arange(6.0).reshape(2, 3).T
    state = {"half": half, "single": single, "byte": torch.tensor([1], dtype=torch.uint8)}
    items = {"0": 2, "1": 4, "2": 1}

    def turned(name: str, data: bytes) -> bytes:
        if name.endswith("byteorder"):
            return b"big"
        n_bytes = items.get(name.rpartition("data/")[2]) if "/data/" in name else None
        return np.frombuffer(data, f"u{n_bytes}").byteswap().tobytes() if n_bytes else data

    listing = read(repacked(torch_file(state), turned))

    assert all(same(listing.array(name), of_torch(tensor)) for name, tensor in state.items())
    streamed = b"".join(piece for _, piece in listing.stream([*state]))
    assert streamed == b"".join(of_torch(tensor).tobytes() for tensor in state.values())


def test_an_archive_that_somebody_compressed_is_read(read: Read) -> None:
    weight = torch.arange(600.0).reshape(20, 30)
    state = {"all": weight, "rows": weight[3:5], "columns": weight[:, 2:4]}
    listing = read(repacked(torch_file(state), lambda _, data: data, zipfile.ZIP_DEFLATED))

    assert all(same(listing.array(name), of_torch(tensor)) for name, tensor in state.items())


def test_a_file_without_checksums_is_read_as_torch_reads_it(read: Read) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        data = torch_file({"w": torch.ones(5)})
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)

    assert read(data).array("w").tolist() == [1.0] * 5


def test_nothing_in_a_file_is_run(read: Read, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "was here"), "w"))

    listing = read(torch_file({"bomb": Bomb(), "w": torch.ones(2)}))

    assert [*listing.locations] == ["w"]
    assert not (tmp_path / "was here").exists()


@pytest.mark.long
def test_torch_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(torch_file({"w": torch.ones(2)}))
    code = (
        "import sys; from tensorcas_mlflow.file_formats import open_listing; "
        f"open_listing({str(path)!r}).array('w'); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((5,), (1,), 0), ((4,), (1,), 1), ((2, 2), (3, 1), 0), ((1 << 40,), (1 << 20,), 0), ((4,), (1,), 1 << 62)],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(
    read: Read, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    with pytest.raises(MalformedFileError, match="beyond its storage"):
        read(with_view(size, stride, offset))


def test_a_tensor_that_one_element_is_said_to_fill_is_refused(read: Read) -> None:
    with pytest.raises(MalformedFileError, match="to take them from"):
        read(with_view((1 << 40,), (0,), 0))


@pytest.mark.parametrize("size", [(-1,), (2, True), (1.5,), ("2",), (1,) * 65, (1 << 60, 0)])
def test_an_impossible_shape_is_refused(read: Read, size: Any) -> None:
    with pytest.raises(MalformedFileError):
        read(with_view(size, (1,) * len(size), 0))


class _Call:
    """Pickled as a call of a function that is only named."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def with_view(size: Any, stride: Any, offset: int) -> bytes:
    """A torch file of one storage of 4 floats, and a tensor that claims to be anything in it."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", 4) if obj == "the storage" else None

    out = io.BytesIO()
    rebuild = torch._utils._rebuild_tensor_v2
    Pickler(out, 2).dump({"t": _Call(rebuild, "the storage", offset, size, stride, False, OrderedDict())})
    data = out.getvalue()
    return repacked(torch_file({"t": torch.ones(4)}), lambda name, old: data if name.endswith("data.pkl") else old)


def as_python_2(table: dict[type, Callable[[Any], Any]]) -> Any:
    """Return a module of pickle that reduces objects of these classes as another Python does."""

    class Pickler(pickle._Pickler):
        dispatch_table = table

    module: Any = types.ModuleType("pickle_2")
    module.Pickler, module.dump = Pickler, pickle.dump
    return module


def pairs_of(made: dict[Any, Any]) -> Any:
    """Reduce an ``OrderedDict`` as Python 2 does: to a list of lists of a key and a value."""
    return OrderedDict, ([[key, value] for key, value in made.items()],)


@pytest.mark.parametrize("is_zip", [True, False])
def test_state_dict_of_python_2_has_the_names_of_its_keys(read: Read, is_zip: bool) -> None:
    file = io.BytesIO()
    state = OrderedDict({"lin0.weight": torch.ones(2, 3), "lin0.bias": torch.zeros(2), "empty": OrderedDict()})
    options: Any = {"pickle_module": as_python_2({OrderedDict: pairs_of})}
    torch.save({"state": state, "n": 3}, file, _use_new_zipfile_serialization=is_zip, **options)
    listing = read(file.getvalue())

    assert [*listing.locations] == ["state.lin0.weight", "state.lin0.bias"]
    assert same(listing.array("state.lin0.weight"), np.ones((2, 3), "f4"))


def test_list_of_pairs_that_is_no_dict_keeps_its_positions(saved: Read) -> None:
    pairs = [["a", torch.ones(2)], ["b", torch.zeros(3)]]
    listing = saved({"list": pairs, "deque": deque(pairs), "twice": [("a", torch.ones(1)), ("a", torch.ones(1))]})

    assert [*listing.locations] == [f"{name}.{nth}.1" for name in ("list", "deque", "twice") for nth in (0, 1)]


class Named(dict):  # type: ignore[type-arg]
    """A dict with a name."""


class Color(Enum):
    RED = 1


def test_every_key_of_a_dict_is_part_of_the_name(saved: Read) -> None:
    keys = ["a", 3, -1, True, None, 0.5, b"raw", b"\xff", b"k" * 100, (0, "w"), (1, ("w", 2.0)), torch.float16]
    keys += [Color.RED, np.int64(7), np.float32(0.25)]
    expected = ["a", "3", "-1", "True", "None", "0.5", "raw", "\xff", "k" * 100, "(0, w)", "(1, (w, 2.0))"]
    listing = saved({"m": dict.fromkeys(keys, torch.ones(2))})

    assert [*listing.locations] == [f"m.{name}" for name in (*expected, "torch.float16", "Color(1)", "7", "0.25")]


@pytest.mark.parametrize("protocol", [1, 2, 4, 5])
def test_dicts_of_every_class_and_protocol_have_the_names_of_their_keys(read: Read, protocol: int) -> None:
    what: dict[str, Any] = {
        "ordered": OrderedDict(w=torch.ones(1)),
        "default": defaultdict(list, w=torch.ones(2)),
        "counter": Counter({"w": torch.ones(3)}),  # type: ignore[dict-item]
        "own": Named(w=torch.ones(4)),
        "object": types.SimpleNamespace(w=torch.ones(5)),
    }
    file = io.BytesIO()
    torch.save(what, file, pickle_protocol=protocol)

    assert [*read(file.getvalue()).locations] == [f"{name}.w" for name in what]


def test_name_with_bytes_that_are_no_text_is_refused(read: Read) -> None:
    data = torch_file({"weight": torch.ones(2)}, _use_new_zipfile_serialization=False)

    with pytest.raises(MalformedFileError):
        read(data.replace(b"weight", b"wei\xffht"))


def test_storage_of_an_unknown_class_is_left_out_by_name(read: Read) -> None:
    data = torch_file({"s": torch.ones(2).untyped_storage()})
    listing = read(repacked(data, lambda _, member: member.replace(b"UntypedStorage", b"LaterStorage")))

    assert listing.left_out == {"s": "torch.storage.LaterStorage"}

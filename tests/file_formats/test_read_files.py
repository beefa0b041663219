"""Files of one tensor after the other, of every format: what is read is what the format's own library has written."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import bintensors.torch
import gguf
import ml_dtypes
import msgpack
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tensorcas_mlflow.errors import BackendError, CorruptError, MalformedFileError
from tensorcas_mlflow.file_formats import EXAMPLE_INPUT, FORMATS_IN, ByteSource, Listing, list_source, open_listing
from tensorcas_mlflow.file_formats._tape import Tape
from tests.file_formats.samples import (
    ARRAYS,
    TORCH_DTYPES,
    Array,
    bhckpt_file,
    bhckpt_of,
    files,
    gguf_file,
    npy,
    npz,
    of_torch,
    safetensors_of,
    same,
    some_of,
    torch_file,
)

Read = Callable[[bytes], Listing]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(data: bytes) -> Listing:
        path = tmp_path / "file"
        path.write_bytes(data)
        return open_listing(path)

    return read


class Elsewhere(ByteSource):
    """A file that is not mapped, and counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.name = "elsewhere"
        self.size = len(data)
        self.n_bytes = 0
        self.touched: list[int] = []
        """The first and last byte of every read."""
        self._data = data

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, "it ends")
        out[:] = self._data[start : start + len(out)]
        self.n_bytes += len(out)
        self.touched += (start, start + len(out) - 1)


LEFT_OUT = {
    "arrays.joblib": {"objects"},
    "model.onnx": {"texts", "fours", "s"},
    "weights.keras": {"assets/vocabulary"},
    "gnu.tar": {"data"},
}


@pytest.mark.parametrize("name", files())
def test_every_sample_is_told_by_its_first_bytes_wherever_it_lies(read: Read, name: str) -> None:
    here, there = read(files()[name]), list_source(Elsewhere(files()[name]))

    assert there is not None
    assert here.format == there.format
    assert dict(here.locations) == dict(there.locations)
    assert here.metadata == there.metadata
    assert here.left_out == there.left_out
    examples = {key for key, kind in here.left_out.items() if kind == EXAMPLE_INPUT}
    assert {*here.left_out} - examples == LEFT_OUT.get(name, set())
    assert all(same(here.array(key), there.array(key)) for key in here.locations)


@pytest.mark.parametrize("name", files())
def test_streamed_bytes_are_the_bytes_of_the_array(read: Read, name: str) -> None:
    listing = read(files()[name])
    streamed: dict[str, bytes] = dict.fromkeys(listing.locations, b"")
    for key, piece in listing.stream([*listing.locations]):
        streamed[key] += piece

    assert streamed == {key: listing.array(key).tobytes() for key in listing.locations}
    assert [spec.name for spec in listing.specs()] == [*listing.locations]


@pytest.mark.parametrize(
    "name", ["plain.safetensors", "state.pt", "legacy.pt", "stored.npz", "deflated.npz", "plain.bt", "plain.bckpt"]
)
def test_every_array_of_a_sample_is_what_was_written(read: Read, name: str) -> None:
    listing = read(files()[name])

    assert {*listing.locations} == {*ARRAYS}
    assert all(same(listing.array(key), array) for key, array in ARRAYS.items())


def test_a_file_of_another_kind_has_no_listing(read: Read) -> None:
    for data in (b"", b"text", b"\x80\x04K\x01.", np.random.default_rng(0).bytes(5000)):
        assert list_source(Elsewhere(data)) is None
        with pytest.raises(MalformedFileError):
            read(data)


def test_a_format_that_is_asked_for_is_the_one_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(files()["stored.npz"])

    assert open_listing(path, format="npz").format == "npz"
    with pytest.raises(MalformedFileError, match="it is a file of npz"):
        open_listing(path, format="torch")
    with pytest.raises(ValueError, match="no format is called"):
        open_listing(path, format="zarr")
    assert "npz" in FORMATS_IN


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("notes", b"hello", r"is not a sound tensor file: it begins as none of self-contained, safetensors, .* does"),
        ("notes", b"", "is not a sound tensor file: it is empty"),
        ("model.gguf", b"", "is not a sound gguf file"),
    ],
)
def test_a_file_of_no_known_format_is_said_to_be_none(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MalformedFileError, match=reason):
        open_listing(tmp_path / name)


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(BackendError):
        open_listing(tmp_path / "absent.pt")


@pytest.mark.parametrize("name", files())
def test_little_more_than_headers_is_read(name: str) -> None:
    arrays = {"first": np.zeros(300_000, np.float32), "second": np.ones(300_000, np.float32)}
    large = {
        "plain.safetensors": lambda: safetensors.numpy.save(arrays),
        "stored.npz": lambda: npz(arrays),
        "one.npy": lambda: npy(arrays["first"]),
        "plain.gguf": lambda: gguf_file(arrays),
        "plain.bckpt": lambda: bhckpt_file(arrays),
    }
    source = Elsewhere(large.get(name, lambda: files()[name])())

    assert list_source(source) is not None
    assert source.n_bytes < (100_000 if name in large else 200_000)


@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_DTYPES if dtype != torch.complex128], ids=str)
def test_every_dtype_of_safetensors_comes_back_from_a_safetensors_file(read: Read, dtype: torch.dtype) -> None:
    tensor = some_of(dtype)
    listing = read(safetensors.torch.save({"t": tensor}))

    assert same(listing.array("t"), of_torch(tensor))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_dtypes_of_torch_come_back_from_bintensors(read: Read, dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    listing = read(bytes(bintensors.torch.save({"t": tensor})))

    assert same(listing.array("t"), of_torch(tensor))


def test_metadata_of_a_file_is_kept(read: Read) -> None:
    assert read(files()["plain.safetensors"]).metadata == {"format": "pt", "note": 'a "quoted" {brace}'}
    assert read(files()["plain.bt"]).metadata == {"format": "np", "note": "x" * 300}
    assert read(files()["plain.bckpt"]).metadata == {"arch": {"dim": 10}}
    said = read(files()["plain.gguf"]).metadata
    assert (said["general.name"], said["llama.context_length"]) == ("a model", 512)
    assert "tokenizer.ggml.tokens" not in said


def test_packed_dtypes_are_left_out_by_name(read: Read) -> None:
    entries = {
        "four": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
        "plain": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
    }
    data = safetensors_of(entries, 12)
    listing = read(data)

    assert listing.left_out == {"four": "F4"}
    assert [*listing.locations] == ["plain"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_of_numpy_in_any_order_come_back(read: Read, order: str, compressed: bool) -> None:
    arrays: dict[str, Array] = {
        "cube": np.asarray(np.random.default_rng(1).normal(size=(3, 4, 5)), order=order),  # type: ignore[call-overload]
        "row": np.asarray([[1.0, 2.0, 3.0]], order=order),  # type: ignore[call-overload]
        "big": np.arange(12, dtype=">i4").reshape(3, 4),
        "records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "texts": np.array(["a", "bcd"]),
    }
    listing = read(npz(arrays, compressed=compressed))

    assert listing.left_out == {}
    assert all(same(listing.array(name), array) for name, array in arrays.items())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_fields_of_an_empty_array_of_padded_records_have_its_shape(
    read: Read, shape: tuple[int, ...], compressed: bool
) -> None:
    padded = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f8"], "offsets": [0, 8], "itemsize": 16})
    listing = read(npz({"records": np.zeros(shape, padded)}, compressed=compressed))

    assert {name: listing.array(name).shape for name in listing.locations} == {"records.a": shape, "records.b": shape}


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6L,), }",
        "{u'descr': '<f4', u'fortran_order': True, u'shape': (2, 3L), }",
        "{\"descr\": [('3L', '<f4'), ('\\x41', '<i4')], 'fortran_order': False, 'shape': (3L,)}",
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_npy_header_that_numpy_reads_is_read(read: Read, header: str, version: int) -> None:
    width = 2 if version == 1 else 4
    text = f"{header:<116}\n".encode("latin-1")
    data = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text
    data += np.arange(6, dtype="<f4").tobytes()
    with pytest.warns(UserWarning, match="Python 2") if "L," in header else contextlib.nullcontext():
        expected = np.load(io.BytesIO(data))

    listing = read(data)
    parts = {f"array.{name}": expected[name] for name in expected.dtype.names or ()} or {"array": expected}
    assert all(same(listing.array(name), array) for name, array in parts.items())


def test_arrays_of_objects_and_of_unknown_dtypes_are_left_out(read: Read) -> None:
    arrays: dict[str, Array] = {"objects": np.array([{}, 1], dtype=object), "half": np.ones(3, ml_dtypes.bfloat16)}
    listing = read(npz({**arrays, "plain": np.arange(3)}))

    assert {*listing.left_out} == {"objects", "half"}
    assert [*listing.locations] == ["plain"]


def test_a_damaged_member_of_an_npz_shows_by_its_checksum(read: Read) -> None:
    data = bytearray(npz({"w": np.arange(1000.0)}))
    data[2000] ^= 1
    listing = read(bytes(data))

    with pytest.raises(CorruptError):
        listing.array("w")
    with pytest.raises(CorruptError):
        list(listing.stream(["w"]))


@pytest.mark.parametrize("byte_order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def test_gguf_tensors_come_back_in_either_byte_order(read: Read, byte_order: gguf.GGUFEndian) -> None:
    arrays = {f"blk.{name}": ARRAYS["encoder.weight"].astype(name) for name in ("float32", "float16", "int8", "int32")}
    listing = read(gguf_file(arrays, endianess=byte_order))

    assert all(same(listing.array(name), array) for name, array in arrays.items())


def test_quantized_tensors_of_gguf_are_left_out_by_name(read: Read, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = np.random.default_rng(0).integers(0, 255, (4, 34), dtype=np.uint8)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", np.ones(5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    listing = open_listing(tmp_path / "q.gguf")

    assert listing.left_out == {"q": "Q8_0"}
    assert same(listing.array("plain"), np.ones(5, np.float32))


def test_a_tensor_of_bhckpt_in_a_codec_is_left_out(read: Read) -> None:
    place = {"nbytes": 4, "size": 4, "shape": [8]}
    table = [
        {"name": "a", "dtype": "fp16", "codec": "int4", "off": 0, **place},
        {"name": "b", "dtype": "uint8", "codec": "raw", "off": 4, **place, "shape": [4]},
    ]
    listing = read(bhckpt_of(table, bytes(8)))

    assert listing.left_out == {"a": "fp16, codec int4"}
    assert [*listing.locations] == ["b"]


def test_unknown_extension_object_of_any_size_is_left_out_by_name(read: Read) -> None:
    tree = {"a": msgpack.ExtType(9, b"abc"), "b": msgpack.ExtType(5, b""), "c": msgpack.Timestamp(3)}
    listing = read(msgpack.packb({**tree, "w": msgpack.ExtType(1, msgpack.packb(((2,), "uint8", b"xy")))}))

    assert listing.left_out == {name: f"an extension object of the type {kind}" for name, kind in (("a", 9), ("b", 5))}
    assert listing.array("w").tobytes() == b"xy"


@pytest.mark.parametrize("array", [np.arange(3, dtype="<i4"), np.arange(200, dtype="<f8"), np.arange(2000.0)], ids=len)
def test_array_in_a_pickle_of_python_2_is_read(read: Read, array: Array) -> None:
    pickled, data = pickle.dumps({"w": array}, 2), array.tobytes()
    begin, end = pickled.rindex(b"h\x05"), pickled.rindex(b"Rq")  # from `_codecs.encode` to its call
    string = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + len(data).to_bytes(4, "little")
    listing = read(pickled[:begin] + string + data + pickled[end + 1 :])

    assert same(listing.array("w"), array)


def test_a_plain_tensor_is_a_view_of_the_file(read: Read) -> None:
    listing = read(files()["plain.safetensors"])

    assert not listing.array("encoder.weight").flags.owndata


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_tensors_of_one_large_file_stream_in_pieces(read: Read, kind: str) -> None:
    large = np.arange(9 << 20, dtype=np.float32)
    data = safetensors.numpy.save({"w": large}) if kind == "safetensors" else npz({"w": large})
    pieces = [len(piece) for _, piece in read(data).stream(["w"])]

    assert sum(pieces) == large.nbytes
    assert max(pieces) <= 16 << 20


def test_npy_files_of_the_library_are_read(read: Read) -> None:
    out = io.BytesIO()
    np.lib.format.write_array(out, ARRAYS["head.weight"], version=(3, 0))
    listing = read(out.getvalue())

    assert same(listing.array("array"), ARRAYS["head.weight"])


@pytest.mark.parametrize("name", ["stored.npz", "state.pt", "plain.safetensors", "plain.bt"])
def test_listing_a_file_reads_no_byte_of_a_tensor(name: str) -> None:
    source = Elsewhere(large_files()[name])
    listing = list_source(source)
    assert listing is not None
    places = [range(place.start, place.start + place.n_bytes) for place in listing.locations.values()]

    assert not any(at in place for place in places for at in source.touched)


def large_files() -> dict[str, bytes]:
    """Files that begin with something longer than what a format is told by."""
    arrays = {"first": np.zeros(5000, np.float32), "second": np.ones(5000, np.float32)}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    metadata = {"note": "x" * 5000}
    return {
        "stored.npz": npz({"objects": np.array(["x" * 5000, None], dtype=object), **arrays}),
        "state.pt": torch_file({"note": "x" * 5000, **tensors}),
        "plain.safetensors": safetensors.numpy.save(arrays, metadata),
        "plain.bt": bytes(bintensors.torch.save(tensors, metadata)),
    }


def test_listing_of_an_archive_reads_each_header_into_memory_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", **{f"w{number}": np.ones(3) for number in range(50)})
    filled: list[int] = []
    fill = Tape._fill
    monkeypatch.setattr(Tape, "_fill", lambda tape, n_bytes: (filled.append(n_bytes), fill(tape, n_bytes))[1])

    listing = open_listing(tmp_path / "a.npz")

    assert len(listing.locations) == 50
    assert sum(filled) <= 50 * 128

"""Files that their specification forbids: each is refused as such, whatever it claims, at once and in little memory."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bintensors
import bintensors.numpy
import msgpack
import numpy as np
import pytest

from tensorcas_mlflow.errors import CorruptError, MalformedFileError
from tensorcas_mlflow.file_formats import open_listing
from tests.file_formats.samples import (
    bhckpt_of,
    files,
    flax_file,
    gguf_file,
    leveldb_table,
    mat_file,
    message,
    npy,
    safetensors_of,
    tensorflow_entry,
)

Refuse = Callable[..., None]


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    def refuse(data: bytes, suffix: str, match: str = "") -> None:
        path = tmp_path / f"file{suffix}"
        path.write_bytes(data)
        with pytest.raises(MalformedFileError, match=match or None) as caught:
            open_listing(path)
        assert caught.value.path == str(path)

    return refuse


ONE = b'{"a":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}'


def entry(begin: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": entry(0, 50), "b": entry(51, 100)}, "a hole before"),
        ({"a": entry(1, 100)}, "a hole before"),
        ({"a": entry(0, 50), "b": entry(49, 100)}, "of another tensor"),
        ({"a": entry(0, 100), "b": entry(0, 100)}, "of another tensor"),
        ({"a": entry(0, 99)}, "the file at byte"),
        ({"a": entry(0, 101)}, "the file at byte"),
        ({}, "the file at byte"),
        ({"a": entry(0, 100, "F32")}, "not the size"),
        ({"a": entry(0, 100, "F4", [100])}, "not the size"),
        ({"a": entry(0, 100, "F7", [100])}, "does not exist"),
        ({"a": entry(0, 100, ["U8"])}, ""),
        ({"a": entry(0, 100, "U8", [-10, -10])}, ""),
        ({"a": entry(0, 100, "U8", [100.0])}, ""),
        ({"a": entry(0, 100, "U8", [True, 100])}, ""),
        ({"a": entry(0, 100, "U8", ["100"])}, ""),
        ({"a": entry(0, 100, "U8", [1] * 70 + [100])}, "shape"),
        ({"a": entry(0, 100, "U8", [100]), "b": entry(100, 100, "U8", [1 << 62, 0])}, "shape"),
        ({"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100.0]}}, ""),
        ({"a": {"dtype": "U8", "shape": [100], "data_offsets": [True, 100]}}, ""),
        ({"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 50, 100]}}, ""),
        ({"a": {"dtype": "U8", "shape": [100], "data_offsets": [1 << 64, (1 << 64) + 100]}}, ""),
        ({"": entry(0, 100)}, "can be called"),
        ({"a\0b": entry(0, 100)}, "can be called"),
        ({"a\nb": entry(0, 100)}, "can be called"),
        ({"a" * 5000: entry(0, 100)}, "can be called"),
        ({"__skeleton__": entry(0, 100)}, "can be called"),
        ({"a": entry(0, 100), "__metadata__": {"k": 1}}, ""),
        ({"a": entry(0, 100), "__metadata__": {"k": {}}}, ""),
        (ONE[:-1] + b',"a":{"dtype":"U8","shape":[0],"data_offsets":[100,100]}}', "one name"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[100],"data_offsets":[0,100]}}', "twice"),
        (b'{"__metadata__":{"k":"1","k":"2"},' + ONE[1:], "twice"),
        (b'{"__metadata__":{},"__metadata__":{},' + ONE[1:], "twice"),
        (b'{"a":{"dtype":"U8","shape":[0100],"data_offsets":[0,100]}}', ""),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,100]}}', ""),
        (b'{"\xff":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}', ""),
        (b'{"\\ud800":{"dtype":"U8","shape":[100],"data_offsets":[0,100]}}', "no text"),
        (b'{"__metadata__":{"k":"\\ud800"},' + ONE[1:], ""),
        (ONE + b" and more", "goes on"),
        (b'{"a":' + b"[" * 100_000, ""),
        (b'{"a":' + b'{"a":' * 100_000, ""),
        (b" {}", ""),
        (b"", ""),
    ],
    ids=lambda value: repr(value)[:60] or "any",
)
def test_a_safetensors_header_that_is_not_sound_is_refused(refuse: Refuse, header: Any, match: str) -> None:
    refuse(safetensors_of(header, 100), ".safetensors", match)


@pytest.mark.parametrize("n_bytes", [100_000_001, 1 << 63, (1 << 64) - 1, 1000])
def test_a_safetensors_header_longer_than_the_cap_or_the_file_is_refused(refuse: Refuse, n_bytes: int) -> None:
    refuse(n_bytes.to_bytes(8, "little") + b'{"a":{}}', ".safetensors", "header")


@pytest.mark.long
@pytest.mark.parametrize(
    "header",
    [
        b'{"a":[' + b"[]," * 700_000,
        b"{" + b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 10_000,
        b'{"__metadata__":{' + b'"":"",' * 400_000 + b'"":""}}',
    ],
    ids=["lists", "tensors", "metadata"],
)
def test_a_hostile_header_takes_no_more_than_some_times_its_size(refuse: Refuse, header: bytes) -> None:
    tracemalloc.start()
    try:
        refuse(safetensors_of(header, 0), ".safetensors")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 40 * len(header)


def bt(header: bytes, n_data_bytes: int, *, pad: bool = True) -> bytes:
    header += b" " * (-len(header) % 8 if pad else 0)
    return len(header).to_bytes(8, "little") + header + bytes(n_data_bytes)


ONE_BT = b"\x00\x01\x01a\x01\x01\x64\x00\x64"  # no metadata; one tensor: "a", U8, [100], 0 to 100


def test_a_bintensors_header_by_hand_is_what_the_library_reads(tmp_path: Path) -> None:
    (tmp_path / "file.bt").write_bytes(bt(ONE_BT, 100))

    assert bintensors.numpy.load(bt(ONE_BT, 100))["a"].shape == (100,)
    assert open_listing(tmp_path / "file.bt").array("a").shape == (100,)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (ONE_BT + b" " * 8, "goes on"),
        (ONE_BT + b"hidden", "goes on"),
        (ONE_BT[:-1], ""),
        (b"\x02" + ONE_BT[1:], ""),
        (b"\x00\x01\x01a\x01\x01\xfb\x64\x00\x00\x64", "more bytes than it needs"),
        (b"\x00\x01\x01a\x01\x01\xfe" + bytes(16) + b"\x00\x64", "64 bits"),
        (b"\x00\x01\x01a\x01\x01\xff\x00\x64", "64 bits"),
        (b"\x00\x01\x01a\x0f\x01\x64\x00\x64", "does not exist"),
        (b"\x00\x01\x01a\x01\x41" + b"\x01" * 64 + b"\x64\x00\x64", "dimensions"),
        (b"\x00\x01\x01a\x01\x01\x65\x00\x64", "not the size"),
        (b"\x00\x01\x01a\x01\x01\x64\x64\x00", "not the size"),
        (b"\x00\x01\x01a\x01\x01\x63\x01\x64", "a hole before"),
        (b"\x00\x02\x01a\x01\x01\x64\x00\x64\x01b\x01\x01\x32\x32\x64", "of another tensor"),
        (b"\x00\x02\x01a\x01\x01\x64\x00\x64\x01a\x01\x01\x00\x64\x64", "one name"),
        (b"\x00\x02\x01a\x01\x01\x64\x00\x64\x01b\x0c\x02\xfd" + bytes(7) + b"\x80\x00\x64\x64", "shape"),
        (b"\x00\x01\x01\xff\x01\x01\x64\x00\x64", ""),
        (b"\x00\x01\x01\x00\x01\x01\x64\x00\x64", "can be called"),
        (b"\x01\x02\x01k\x01v\x01k\x01v" + ONE_BT[1:], "twice"),
        (b"\x00\xfd" + b"\xff" * 8, "tensors"),
        (b"\x01\xfd" + b"\xff" * 8, ""),
        (b"\x00\x01\xfd" + b"\xff" * 8, ""),
    ],
)
def test_a_bintensors_header_that_is_not_sound_is_refused(refuse: Refuse, header: bytes, match: str) -> None:
    refuse(bt(header, 100), ".bt", match)


def test_bytes_hidden_behind_a_bintensors_header_are_refused_where_the_library_lets_them_pass(refuse: Refuse) -> None:
    data = bytes(bintensors.numpy.save({"w": np.ones(4, np.float32)}))
    n_bytes = int.from_bytes(data[:8], "little")
    hidden = data[8 : 8 + n_bytes] + b"\x7fELF" + bytes(100_000)
    polyglot = len(hidden).to_bytes(8, "little") + hidden + data[8 + n_bytes :]

    assert bintensors.numpy.load(polyglot)["w"].tolist() == [1.0] * 4
    refuse(polyglot, ".bt", "goes on")


@pytest.mark.long
def test_bytes_behind_the_tensors_are_refused_in_every_format_but_hdf5(refuse: Refuse) -> None:
    others = {name: data for name, data in files().items() if Path(name).suffix != ".h5"}
    assert len(others) > 20
    for name, data in others.items():
        refuse(data + bytes(1000), Path(name).suffix)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"off": 1}, "a hole before"),
        ({"size": 99, "nbytes": 99}, "not the size"),
        ({"nbytes": 99}, "two sizes"),
        ({"shape": [-100]}, ""),
        ({"shape": [100.0]}, ""),
        ({"shape": "100"}, ""),
        ({"off": "0"}, ""),
        ({"off": -1}, ""),
        ({"name": None}, ""),
        ({"name": ""}, "can be called"),
    ],
)
def test_a_table_of_bhckpt_that_is_not_sound_is_refused(refuse: Refuse, change: dict[str, Any], match: str) -> None:
    place = {"codec": "fp16", "nbytes": 100, "off": 0, "size": 100}
    refuse(bhckpt_of([{"name": "a", "shape": [100], "dtype": "uint8", **place, **change}], bytes(100)), ".bckpt", match)


def test_other_faults_of_bhckpt_are_refused(refuse: Refuse) -> None:
    sound = files()["plain.bckpt"]
    one = {"name": "a", "shape": [2], "dtype": "uint8", "codec": "raw", "nbytes": 2, "size": 2, "off": 0}
    two = [one, {**one, "off": 2}]

    refuse(bhckpt_of(two, bytes(4)), ".bckpt", "one name")
    refuse(bhckpt_of(two[:1], bytes(4)), ".bckpt", "counts other")
    refuse(bhckpt_of(b"[]", b"", n_tensors=1), ".bckpt", "counts other")
    refuse(bhckpt_of(b"[" + b"[" * 50_000, b""), ".bckpt")
    refuse(sound[:-1], ".bckpt", "ends? at byte")
    refuse(b"BCK1" + b"\xff" * 100, ".bckpt")
    refuse(b"BCK1" + struct.pack("<I", 2) + b"{}" + b"\xff" * 4, ".bckpt")


@pytest.mark.long
def test_files_of_flax_that_are_not_sound_are_refused(refuse: Refuse) -> None:
    array = np.arange(40, dtype=np.float32)
    sound, large = flax_file({"a": {"b": array, "c": array}}), flax_file({"a": array}, chunk_bytes=64)
    shape = msgpack.packb("shape") + b"\x81" + msgpack.packb("0")

    refuse(sound + b"\0", ".msgpack", "the file at byte")
    refuse(sound[:-1], ".msgpack", "ends in its tree")
    refuse(sound.replace(b"\xa1c", b"\xa1b"), ".msgpack", "twice")
    refuse(sound.replace(b"\xa1c", b"\x05\x05"), ".msgpack", "no name")
    refuse(sound.replace(b"\xa1c", b"\xa1\xff"), ".msgpack", "decode")
    refuse(sound[: sound.index(b"\xa1c") + 2] + b"\x91" * 1000, ".msgpack", "nests too deep")
    refuse(sound[: sound.index(b"\xa1c") + 2] + b"\xdd\xff\xff\xff\xff" + bytes(2_000_000), ".msgpack", "values in")
    refuse(sound[::-1].replace(b"\x28"[::-1], b"\x29", 1)[::-1], ".msgpack", "")
    refuse(large.replace(shape + b"\x28", shape + b"\x29"), ".msgpack", "want 164")
    refuse(large.replace(b"\xa11\xc7", b"\xa17\xc7"), ".msgpack", "do not make it whole")
    refuse(large.replace(b"\xa6chunks", b"\xa6chunky"), ".msgpack", "no chunks")


def test_mat_files_that_are_not_sound_are_refused(refuse: Refuse) -> None:
    sound = mat_file({"weights": np.arange(40.0).reshape(4, 10)})
    element = sound[128:]
    sides = struct.pack("<II", 4, 10)

    refuse(sound[:-1], ".mat", "an element")
    refuse(sound + b"\0", ".mat", "ends in a tag")
    refuse(sound + element, ".mat", "called 'weights'")
    refuse(sound.replace(b"\0\1IM", b"\1\0MI"), ".mat", "big-endian")
    refuse(sound.replace(sides, struct.pack("<II", 4, 11)), ".mat", "not the size")
    refuse(sound.replace(sides, struct.pack("<II", 1 << 31, 1 << 31)), ".mat", "")
    refuse(sound.replace(b"weights", b"we\xffghts"), ".mat", "decode")
    refuse(patched(sound, 128, "<I", 99), ".mat", "type 99")
    refuse(patched(sound, 128 + 8, "<I", 99), ".mat", "type 99")
    refuse(patched(sound, 128 + 4, "<I", len(element)), ".mat", "an element")
    refuse(patched(sound, 128 + 4, "<I", 64), ".mat", "")
    refuse(sound[:128] + struct.pack("<II", 15, 50) + bytes(50), ".mat", "")


def test_a_compressed_variable_of_a_mat_file_that_ends_too_early_cannot_be_read(tmp_path: Path) -> None:
    sound = mat_file({"weights": np.arange(40.0).reshape(4, 10)})
    packed = zlib.compress(sound[128:228])
    (tmp_path / "cut.mat").write_bytes(sound[:128] + struct.pack("<II", 15, len(packed)) + packed)
    listing = open_listing(tmp_path / "cut.mat")

    with pytest.raises(CorruptError):
        listing.array("weights")


@pytest.mark.long
def test_indexes_of_tensorflow_that_are_not_sound_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    array = np.ones(8, np.float32)
    (tmp_path / "file.data-00000-of-00001").write_bytes(array.tobytes())
    entry, head = tensorflow_entry(array, 0), (b"", message(f1=1))
    sound = leveldb_table([head, (b"a", entry)])

    def of(*entries: tuple[bytes, bytes]) -> bytes:
        return leveldb_table([head, *entries])

    refuse(sound[:-1], ".index", "does not end")
    refuse(leveldb_table([(b"", message(f1=1, f2=1))]), ".index", "")
    refuse(of((b"a", entry), (b"a", entry)), ".index", "order")
    refuse(of((b"b", entry), (b"a", entry)), ".index", "order")
    refuse(of((b"a" * 5000, entry)), ".index", "exceeds its block")
    refuse(of((b"a\n", entry)), ".index", "")
    refuse(of((b"\xff", entry)), ".index", "decode")
    refuse(of((b"a", tensorflow_entry(array, 0, 1))), ".index", "file 1 of 1")
    refuse(of((b"a", entry + message(f5=31))), ".index", "not the size")
    refuse(of((b"a", entry + message(f2=message(f3=1)))), ".index", "without a shape")
    refuse(of((b"a", entry + message(f9=1))), ".index", "unknown field")
    refuse(of((b"a", entry[:-1])), ".index", "")
    restarts = struct.pack("<II", 0, 1)
    refuse(sound.replace(entry + restarts + b"\0", entry + restarts + b"\1"), ".index", "compressed")
    refuse(of((b"a", tensorflow_entry(array, 4))), ".index", "outside of the file")
    names = [(f"{nth:09}".ljust(4000, "x").encode(), message(f1=7)) for nth in range(17_000)]
    refuse(leveldb_table([head, *names], entries_a_block=1000), ".index", "too long")


def gguf_info(data: bytes, name: bytes) -> int:
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def patched(data: bytes, at: int, layout: str, *numbers: int) -> bytes:
    new = struct.pack(layout, *numbers)
    return data[:at] + new + data[at + len(new) :]


def test_gguf_files_that_are_not_sound_are_refused(refuse: Refuse) -> None:
    data = gguf_file({"aa": np.ones(40, np.float32), "bb": np.ones(40, np.float32)})
    first, second = gguf_info(data, b"aa"), gguf_info(data, b"bb")
    place = 4 + 8 + 4

    refuse(patched(data, second + place, "<Q", 0), ".gguf", "does not begin")
    refuse(patched(data, second + place, "<Q", 256), ".gguf", "does not begin")
    refuse(patched(data, second + place, "<Q", 161), ".gguf", "does not begin")
    refuse(patched(data, second + place, "<Q", 1 << 63), ".gguf", "does not begin")
    refuse(patched(data, second + 4, "<Q", 1 << 61), ".gguf", "")
    refuse(patched(data, first, "<I", 1 << 30), ".gguf", "dimensions")
    refuse(data.replace(b"bb", b"aa"), ".gguf", "called 'aa'")
    refuse(data.replace(b"bb", b"\xff\xfe"), ".gguf", "no text")
    refuse(data.replace(b"llama.context_length", b"general.architecture"), ".gguf", "twice")
    refuse(patched(data, 8, "<Q", 1 << 60), ".gguf", "tensors")
    refuse(patched(data, 16, "<Q", 1 << 60), ".gguf", "values")
    refuse(data[:-100], ".gguf", "")


def npy_of(text: str, n_bytes: int) -> bytes:
    header = text.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(n_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (26,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (24,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-5,-5), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 25), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999, 99999999999999999), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 5000 + "25,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 70 + "25,), }",
        "{'descr': __import__('os').system('x'), 'fortran_order': False, 'shape': (25,), }",
        "{'descr': '<f99', 'fortran_order': False, 'shape': (25,), }",
        "{'descr': 'S0', 'fortran_order': False, 'shape': (25,), }",
    ],
)
def test_an_npy_header_that_is_not_sound_is_refused(refuse: Refuse, text: str) -> None:
    refuse(npy_of(text, 100), ".npy")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy_of(text, 100))
    refuse(out.getvalue(), ".npz")


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return bytearray(out.getvalue())


def central(data: bytes, nth: int = 0) -> int:
    at = -1
    for _ in range(nth + 1):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def test_members_of_a_zip_archive_that_overlap_or_lie_outside_are_refused(refuse: Refuse) -> None:
    data = archive({"a.npy": npy(np.arange(10)), "b.npy": npy(np.arange(10))})

    refuse(patched(data, central(data, 1) + 42, "<I", 0), ".npz", "begin")
    refuse(patched(data, central(data, 1) + 42, "<I", len(data) - 4), ".npz", "")
    refuse(patched(data, central(data, 1) + 42, "<I", 1 << 31), ".npz", "")
    refuse(patched(data, central(data, 0) + 20, "<II", 5000, 5000), ".npz", "")


def test_a_local_header_that_says_other_than_the_directory_is_refused(refuse: Refuse) -> None:
    data = archive({"a.npy": npy(np.arange(10))})

    refuse(data.replace(b"a.npy", b"b.npy", 1), ".npz", "differs from the directory")
    refuse(patched(data, 18, "<I", 1), ".npz", "differs from the directory")
    refuse(patched(data, 8, "<H", 8), ".npz", "differs from the directory")
    refuse(patched(data, 6, "<H", 1), ".npz", "differs from the directory")


def test_odd_zip_archives_are_refused(refuse: Refuse) -> None:
    data = archive({"a.npy": npy(np.arange(10))})
    two = archive({"a.npy": npy(np.arange(10)), "b.npy": npy(np.arange(10))})

    refuse(two.replace(b"b.npy", b"a.npy"), ".npz", "one name")
    refuse(bytes(100) + data, ".npz", "")
    refuse(data + bytes(30), ".npz", "")
    refuse(data[:-30], ".npz", "")
    refuse(bytes(archive({"a.npy": npy(np.arange(10))}, zipfile.ZIP_BZIP2)), ".npz", "method 12")
    refuse(data.replace(b"a.npy", b"a\0npy"), ".npz", "can be called")
    refuse(bytes(archive({".npy": npy(np.arange(10))})), ".npz", "can be called")


def test_bytes_between_members_are_refused(refuse: Refuse) -> None:
    first, second = bytes(archive({"a.npy": npy(np.arange(10))})), archive({"a.npy": npy(np.arange(10))})
    end = central(first)
    hidden = b"hidden " * 10
    moved = bytearray(first[:end] + hidden + first[end:])
    moved = bytearray(patched(moved, len(moved) - 6, "<I", end + len(hidden)))

    assert len(second) == len(first)
    refuse(bytes(moved), ".npz", "directory does not begin")


def test_an_array_that_deflated_bytes_cannot_become_is_refused(refuse: Refuse) -> None:
    header = npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,), }", 0)
    data = archive({"a.npy": header}, zipfile.ZIP_DEFLATED)
    claim = len(header) + 4_000_000_000
    data = bytearray(patched(patched(data, 22, "<I", claim), central(data) + 24, "<I", claim))

    refuse(bytes(data), ".npz", "cannot be inflated")


def test_a_member_that_inflates_to_more_or_less_than_it_says_is_refused_when_it_is_read(tmp_path: Path) -> None:
    for n_said, n_there in ((1000, 900), (1000, 1100)):
        said = npy(np.zeros(n_said))
        there = said[: len(said) - 8 * n_said] + bytes(8 * n_there)
        data = archive({"a.npy": there}, zipfile.ZIP_DEFLATED)
        data = bytearray(patched(patched(data, 22, "<I", len(said)), central(data) + 24, "<I", len(said)))
        path = tmp_path / f"{n_there}.npz"
        path.write_bytes(data)
        listing = open_listing(path)

        with pytest.raises(CorruptError):
            listing.array("a")
        with pytest.raises(CorruptError):
            list(listing.stream(["a"]))


@pytest.mark.long
def test_a_real_bomb_is_inflated_no_further_than_its_array(tmp_path: Path) -> None:
    array = np.zeros(1 << 20, np.uint8)
    bomb = npy(array) + bytes(64 << 20)
    data = archive({"a.npy": bomb}, zipfile.ZIP_DEFLATED)
    said = len(npy(array))
    crc = zlib.crc32(npy(array))
    for at in (14, central(data) + 16):
        data = bytearray(patched(data, at, "<I", crc))
    for at in (22, central(data) + 24):
        data = bytearray(patched(data, at, "<I", said))
    (tmp_path / "bomb.npz").write_bytes(data)
    listing = open_listing(tmp_path / "bomb.npz")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            listing.array("a")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 40 << 20


def test_every_malformed_file_names_itself_and_its_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_of({"a": entry(0, 50)}, 100))

    with pytest.raises(MalformedFileError) as caught:
        open_listing(path)
    assert (caught.value.path, caught.value.format) == (str(path), "safetensors")
    assert json.dumps(str(path)).strip('"') in str(caught.value)

from __future__ import annotations

import io
import random
import struct
import zipfile

import numpy as np
import pytest
import skops.io
from sklearn.ensemble import RandomForestClassifier

from tensorcas_mlflow.file_formats import DerivedBytes, PlainBytes, Skeleton, Tape, Tensor, split
from tests.file_formats.parts import damaged, joined, kinds, take_apart, tensors

NOISE = random.Random(0).randbytes(3_000_000)
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


class Stream(io.RawIOBase):
    """A place to write to that cannot go back, so that sizes follow the bytes they are of."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += bytes(data)
        return len(data)


def zipped(
    entries: dict[str, bytes], *, method: int = STORED, streamed: bool = False, force_zip64: bool = False
) -> bytes:
    out = Stream() if streamed else io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in entries.items():
            with archive.open(name, "w", force_zip64=force_zip64) as file:
                file.write(content)
    return out.data if isinstance(out, Stream) else out.getvalue()


@pytest.mark.parametrize("force_zip64", [False, True], ids=["zip", "zip64"])
@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
def test_stored_entries_begin_and_end_where_they_do(streamed: bool, force_zip64: bool) -> None:
    entries = {"small": NOISE[:600], "window": NOISE[: 1 << 20], "large": NOISE, "empty": b"", "last": NOISE[7:5000]}
    data = zipped(entries, streamed=streamed, force_zip64=force_zip64)
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {Skeleton, Tensor}
    assert {name: content for name, (_, content) in tensors(data).items()} == {k: v for k, v in entries.items() if v}


@pytest.mark.parametrize("shift", range(-30, 30, 7))
def test_a_descriptor_is_found_wherever_it_lies_in_a_window(shift: int) -> None:
    content = NOISE[: (2 << 20) + shift]
    data = zipped({"a": content, "b": NOISE[:1000]}, streamed=True)

    assert joined(take_apart(data)) == data
    assert tensors(data)["a"][1] == content


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
@pytest.mark.parametrize("method", [DEFLATED, zipfile.ZIP_BZIP2], ids=["deflated", "bzip2"])
def test_large_compressed_entries_are_streams_or_plain_and_small_ones_skeleton(method: int, streamed: bool) -> None:
    data = zipped({"large": NOISE, "small": NOISE[:1000], "text": b"word " * 100}, method=method, streamed=streamed)
    parts = take_apart(data)
    streams = [len(taken) for part, taken in parts if isinstance(part, DerivedBytes)]
    plain = [len(taken) for part, taken in parts if isinstance(part, PlainBytes)]

    assert joined(parts) == data
    if method == DEFLATED:
        assert streams[0] >= len(NOISE)
        assert not plain
    else:
        assert not streams
        assert sum(plain) >= len(NOISE)


@pytest.mark.parametrize("content", [b'{"a": "b"}' * 999, "dürfte ".encode() * 999, b"\x80\x04\x95" + NOISE[:999]])
@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
def test_text_and_pickles_are_skeleton(content: bytes, streamed: bool) -> None:
    data = zipped({"a": content}, streamed=streamed)
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {Skeleton}


@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
def test_an_npz_gives_its_arrays_by_name(streamed: bool) -> None:
    arrays = {"weights": np.arange(400_000.0).reshape(400, 1000), "turned": np.asfortranarray(np.ones((30, 20), "f4"))}
    out = Stream() if streamed else io.BytesIO()
    np.savez(out, **arrays, objects=np.array([{}, 1e99] * 500), small=np.arange(3))  # type: ignore[arg-type]
    data = out.data if isinstance(out, Stream) else out.getvalue()
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in found.items()} == {
        "weights": ("float64", (400, 1000)),
        "turned": ("float32", (20, 30)),
    }
    assert found["weights"][1] == arrays["weights"].tobytes()
    assert found["turned"][1] == arrays["turned"].T.tobytes()


def test_an_array_that_is_not_all_of_its_entry_is_left_as_it_is() -> None:
    out = io.BytesIO()
    np.save(out, np.arange(100.0))
    data = zipped({"a.npy": out.getvalue() + b"more", "b": NOISE[:1000]})

    assert joined(take_apart(data)) == data
    assert tensors(data)["b"][1] == NOISE[:1000]


def test_skops_gives_the_large_arrays_of_an_estimator_by_number() -> None:
    X = np.random.default_rng(0).normal(size=(3000, 5))
    model = RandomForestClassifier(3, random_state=0).fit(X, np.arange(3000) % 7)
    data = skops.io.dumps(model)
    found = tensors(data)
    contents = {content for _, content in found.values()}

    assert joined(take_apart(data)) == data
    assert all(tree.tree_.__getstate__()["values"].tobytes() in contents for tree in model.estimators_)
    assert all(name.isdecimal() and int(name) < 99 for name in found)


def test_small_members_of_a_skops_file_are_one_plain_piece() -> None:
    data = skops.io.dumps({"a": np.arange(100.0), "b": np.arange(3), "c": np.arange(1000.0), "d": np.arange(50)})

    assert joined(take_apart(data)) == data
    assert kinds(data) == [PlainBytes, Tensor, PlainBytes]


@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
def test_archives_in_an_archive_are_taken_apart(streamed: bool) -> None:
    inner = zipped({"deep": NOISE[5:70_000], "text": b"a" * 100}, streamed=True)
    middle = zipped({"inner.zip": inner, "beside": NOISE[:2000]}, streamed=streamed)
    data = zipped({"middle.zip": middle, "last": NOISE}, streamed=streamed)
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert found.keys() == {"deep", "beside", "last"}
    assert found["deep"][1] == NOISE[5:70_000]


def test_an_archive_that_is_damaged_in_an_archive_leaves_the_rest_as_it_is() -> None:
    inner = zipped({"a": NOISE[:2000], "b": NOISE[:3000]})
    data = zipped({"inner.zip": inner[:1000] + inner[1500:], "last": NOISE[:4000]})

    assert joined(take_apart(data)) == data
    assert tensors(data)["last"][1] == NOISE[:4000]


def test_archives_nested_without_end_are_not_followed() -> None:
    data = NOISE[:1000]
    for _ in range(50):
        data = zipped({"a": data, "b": NOISE[:600]}, streamed=True)

    assert joined(take_apart(data)) == data


def test_bytes_after_an_archive_are_plain() -> None:
    data = zipped({"a": NOISE[:1000]}) + NOISE[:100]
    parts = take_apart(data)

    assert joined(parts) == data
    assert [type(part) for part, _ in parts if not isinstance(part, Skeleton)] == [Tensor, PlainBytes]


def local_header(name: bytes, *, flags: int = 0, size: int = 0, extra: bytes = b"") -> bytes:
    return (
        struct.pack("<4sHHHIIIIHH", b"PK\x03\x04", 20, flags, 0, 0, 0, size, size, len(name), len(extra)) + name + extra
    )


@pytest.mark.parametrize(
    "header",
    [
        local_header(b"a", size=0xFFFFFFFE),
        local_header(b"a", size=0xFFFFFFFF, extra=struct.pack("<HHQQ", 1, 16, 2**63, 2**63)),
        local_header(b"a", size=0xFFFFFFFF, extra=struct.pack("<HH", 1, 0)),
        local_header(b"a", size=0xFFFFFFFF),
        local_header(b"x/data.pkl", flags=8),
        local_header(b"x/data.pkl", size=0x0FFFFFFF),
        local_header(b"\xff" * 65535, size=100, extra=bytes(65535)),
    ],
    ids=["4 GB", "2**63", "no sizes in extra", "no extra", "endless pickle", "large pickle", "long names"],
)
def test_sizes_that_are_lies_cost_nothing(header: bytes) -> None:
    data = header + NOISE[:1000]

    assert joined(take_apart(data)) == data


def test_false_descriptors_do_not_take_long() -> None:
    false = (b"PK\x07\x08" + bytes(12)) * 200_000 + b"PK\x01\x02"
    data = local_header(b"a", flags=8) + false

    assert joined(take_apart(data)) == data
    assert len(list(_counted(data))) < 10


def test_entries_without_their_descriptor_end_the_search() -> None:
    out = io.BytesIO()
    np.save(out, np.arange(8.0))
    data = (local_header(b"a", flags=8) + out.getvalue()) * 2000
    parts = take_apart(data)

    assert joined(parts) == data
    assert len(parts) < 10


def _counted(data: bytes) -> list[int]:
    tape = Tape(io.BytesIO(data))
    return [len(tape.take(part.n_bytes)) for part in split(tape)]


@pytest.mark.parametrize("streamed", [False, True], ids=["sized", "streamed"])
def test_a_damaged_file_comes_back_bit_for_bit(streamed: bool) -> None:
    inner = zipped({"deep": NOISE[:900]}, streamed=True)
    data = zipped({"a": NOISE[:700], "text": b"a" * 700, "inner": inner}, streamed=streamed, force_zip64=streamed)

    for broken in damaged(data):
        assert joined(take_apart(broken)) == broken

"""Writes to a place: all files or none, whatever existed before and whatever fails."""

from __future__ import annotations

import fcntl
import os
import signal
import tracemalloc
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import BackendError, ConflictError, CorruptError
from tensorcas_mlflow.file_formats import FORMATS_OUT, Tensors, plan_write
from tensorcas_mlflow.file_formats import _zip as zips
from tests.file_formats.arrays import ArrayTensors, write
from tests.zygote import run_program

FOLDERS = {"shards": {"shard_bytes": 100}, "serverlessllm": {"partitions": 2}}
KINDS: list[dict[str, Any]] = [
    *({"format": name} for name in FORMATS_OUT if name != "serverlessllm"),
    *FOLDERS.values(),
]


def some(seed: int = 0) -> ArrayTensors:
    draw = np.random.default_rng(seed)
    arrays = {f"w{at}": draw.normal(size=(at, 5)).astype("f4") for at in range(8)}
    return ArrayTensors(arrays, metadata={"b": "1", "a": "2"})


def held(place: Path) -> dict[str, bytes]:
    """All files at and below a place, hidden ones too."""
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    return {os.fspath(path.relative_to(place)): path.read_bytes() for path in files if path.is_file()}


class Failing:
    """Tensors that are not given to the end."""

    def __init__(self, tensors: Tensors, error: BaseException, *, after: int = 3) -> None:
        self.metadata: Mapping[str, Any] = tensors.metadata
        self._tensors, self._error, self._after = tensors, error, after

    def specs(self) -> Sequence[Spec]:
        return self._tensors.specs()

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        for at, piece in enumerate(self._tensors.stream(names)):
            if at == self._after:
                raise self._error
            yield piece


# --- the plan


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_which_files_of_which_sizes_and_writes_none(tmp_path: Path, kind: dict[str, Any]) -> None:
    plan = plan_write(some(), tmp_path / "out", **kind)

    assert held(tmp_path) == {}
    written = plan.execute()
    assert written == plan.result
    assert {file.path: file.n_bytes for file in written.files} == {
        path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()
    }
    assert all(str(file.path) in str(plan) for file in written.files)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tensors_make_equal_files(tmp_path: Path, kind: dict[str, Any]) -> None:
    for name in ("one", "other"):
        write(some(), tmp_path / name, **kind)

    assert held(tmp_path / "one") == held(tmp_path / "other")


@pytest.mark.parametrize("format", ["safetensors", "bintensors"])
def test_the_order_in_which_tensors_and_metadata_were_named_is_not_in_a_file(tmp_path: Path, format: str) -> None:
    arrays = {f"w{at}": np.full(at, at) for at in range(20)}
    metadata = {f"m{at}": str(at) for at in range(20)}
    for name, order in (("one", 1), ("other", -1)):
        tensors = ArrayTensors(dict(list(arrays.items())[::order]), metadata=dict(list(metadata.items())[::order]))
        write(tensors, tmp_path / name, format=format)

    assert held(tmp_path / "one") == held(tmp_path / "other")


@pytest.mark.parametrize("n_bytes", [(1 << 30) - 64, 1 << 30, (1 << 31) + 64, (1 << 32) + 64])
@pytest.mark.long
def test_a_large_member_of_an_archive_has_the_size_that_was_planned(tmp_path: Path, n_bytes: int) -> None:
    class Zeros:
        metadata: Mapping[str, Any] = {}

        def specs(self) -> Sequence[Spec]:
            return [Spec(name=name, dtype="uint8", shape=(n,)) for name, n in (("large", n_bytes), ("b", 3))]

        def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
            block = memoryview(bytes(1 << 24))
            for spec in self.specs():
                for start in range(0, spec.n_bytes, len(block)):
                    yield spec.name, block[: spec.n_bytes - start]

    [layout] = plan_write(Zeros(), tmp_path / "m.pt")._layouts
    with open(tmp_path / "sparse", "wb") as file:
        layout.write(_Sparse(file), zips.Feed(Zeros(), layout.specs, None))  # type: ignore[arg-type]
        assert file.seek(0, 2) == layout.n_bytes
    with zipfile.ZipFile(tmp_path / "sparse") as archive:
        assert archive.getinfo("archive/data/0").file_size == n_bytes
        assert archive.read("archive/data/1") == bytes(3)
    loaded = torch.load(tmp_path / "sparse", weights_only=True, mmap=True)
    assert (loaded["large"].shape, loaded["b"].tolist()) == ((n_bytes,), [0, 0, 0])


class _Sparse:
    """A file in which zeros take no room."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        if len(data) == 1 << 24:
            self._file.seek(len(data), 1)
            return len(data)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_the_format_is_told_by_the_name(tmp_path: Path) -> None:
    for suffix, format in {".safetensors": "safetensors", ".PTH": "torch", ".npz": "npz", ".bt": "bintensors"}.items():
        assert plan_write(some(), tmp_path / f"m{suffix}").result.format == format
    assert plan_write(some(), tmp_path / "m", partitions=2).result.format == "serverlessllm"
    with pytest.raises(ValueError, match=r"'m\.zip' has no suffix of a format"):
        plan_write(some(), tmp_path / "m.zip")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "tar"}, "no format 'tar'"),
        ({"format": "npz", "shard_bytes": 5}, "npz has no shards"),
        ({"format": "torch", "partitions": 5}, "torch has no partitions"),
        ({"shard_bytes": 0}, "counted from 1"),
        ({"partitions": 0}, "counted from 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_write(some(), tmp_path / "m", **options)


@pytest.mark.parametrize(
    ("format", "dtypes"),
    [
        ("safetensors", ["complex128", ">float32", "S3", "float8_e3m4", "int4"]),
        ("torch", [">float32", "S3", "float8_e3m4", "datetime64[ns]"]),
        ("npz", ["bfloat16", "float8_e4m3fn", "int4", "{a:bfloat16}"]),
        ("bintensors", ["complex64", "float8_e8m0fnu", ">int16"]),
        ("serverlessllm", ["uint2", "U4"]),
    ],
)
def test_every_tensor_that_a_format_does_not_have_is_named(tmp_path: Path, format: str, dtypes: list[str]) -> None:
    class Described(ArrayTensors):
        def specs(self) -> Sequence[Spec]:
            known = Spec(name="known", dtype="float32", shape=(2,))
            return [known, *(Spec(name=f"of {dtype}", dtype=dtype, shape=(2,)) for dtype in dtypes)]

    with pytest.raises(ValueError, match=f"cannot hold {len(dtypes)} of these tensors") as raised:
        write(Described({}), tmp_path / "m", format=format)
    assert all(f"'of {dtype}' has the dtype {dtype}" in str(raised.value) for dtype in dtypes)
    assert held(tmp_path) == {}


def test_names_that_a_format_has_another_use_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'__metadata__' has the name of the metadata"):
        write(ArrayTensors({"__metadata__": np.ones(1)}), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'x' is 'x.npy' too"):
        write(ArrayTensors({"x": np.ones(1), "x.npy": np.ones(1)}), tmp_path / "m.npz")


@pytest.mark.parametrize("format", [pytest.param("safetensors", marks=pytest.mark.long), "bintensors"])
def test_a_header_that_no_reader_takes_is_not_written(tmp_path: Path, format: str) -> None:
    tensors = ArrayTensors({"w": np.ones(1)}, metadata={"long": "x" * 100_000_000})

    with pytest.raises(ValueError, match="100000000 are allowed"):
        write(tensors, tmp_path / "m", format=format)
    assert held(tmp_path) == {}


# --- what was there


@pytest.mark.parametrize("kind", KINDS)
def test_writer_replaces_an_existing_file_only_if_told_to(tmp_path: Path, kind: dict[str, Any]) -> None:
    write(some(1), tmp_path / "out", **kind)
    before = held(tmp_path / "out")
    with pytest.raises(ConflictError, match="pass overwrite=True"):
        write(some(2), tmp_path / "out", **kind)

    assert held(tmp_path / "out") == before
    write(some(2), tmp_path / "out", overwrite=True, **kind)
    assert held(tmp_path / "out") != before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_holds_anything_else_is_never_replaced(tmp_path: Path, kind: dict[str, Any]) -> None:
    write(some(), tmp_path / "out", **kind)
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    before = held(tmp_path)
    with pytest.raises(ConflictError, match=r"holds 'thesis\.tex' as well"):
        write(some(1), tmp_path / "out", overwrite=True, **kind)

    assert held(tmp_path) == before


def test_a_folder_takes_the_place_of_an_empty_one_and_a_file_of_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(some(), tmp_path / "empty", shard_bytes=100)
    with pytest.raises(ConflictError, match="is a folder"):
        write(some(), tmp_path / "empty", format="torch", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConflictError, match="is a file"):
        write(some(), tmp_path / "file", partitions=1, overwrite=True)

    assert len(held(tmp_path / "empty")) > 2


def test_reader_that_mapped_a_file_keeps_its_bytes_when_the_file_is_replaced(tmp_path: Path) -> None:
    write(some(1), tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        write(ArrayTensors({}), tmp_path / "m.safetensors", overwrite=True)

        assert file.get_tensor("w3").shape == (3, 5)


# --- what goes wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [BackendError("read", "k", "gone"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, kind: dict[str, Any], error: BaseException) -> None:
    write(some(1), tmp_path / "old", **kind)
    before = held(tmp_path)
    for place in ("new", "old"):
        with pytest.raises(type(error)):
            write(Failing(some(2), error), tmp_path / place, overwrite=True, **kind)

    assert held(tmp_path) == before
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_given_whole_are_told(tmp_path: Path, kind: dict[str, Any]) -> None:
    class Short(ArrayTensors):
        def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
            for name, piece in super().stream(names):
                yield name, piece[: 4 * (len(piece) // 8)]

    with pytest.raises(CorruptError, match="were not given"):
        write(Short({"w": np.ones(100)}), tmp_path / "out", **kind)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(BackendError, match="could not write"):
        write(some(), tmp_path / "file" / "m.npz")


KILLED = """
import os, signal, sys
import numpy as np
from tests.file_formats.arrays import ArrayTensors, write

def die(done, all):
    if done > all // 2:
        os.kill(os.getpid(), signal.SIGKILL)

arrays = {f"w{at}": np.full(1000, at) for at in range(10)}
write(ArrayTensors(arrays), sys.argv[1], progress=die, **eval(sys.argv[2]))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", [{"format": "torch"}, {"shard_bytes": 20_000}], ids=["file", "folder"])
def test_leftovers_of_a_killed_writer_are_hidden_and_removed_by_the_next_writer(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    ended = run_program(KILLED, tmp_path / "out", repr(kind))

    assert ended.returncode == -signal.SIGKILL
    [left] = os.listdir(tmp_path)
    assert left.startswith(".")
    write(some(), tmp_path / "another", **kind)
    assert left in os.listdir(tmp_path)
    write(some(), tmp_path / "out", **kind)
    assert sorted(os.listdir(tmp_path)) == ["another", "out"]


def test_temporary_file_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    seen: list[str] = []

    def meanwhile(done: int, n_all: int) -> None:
        if not seen:
            seen.extend(os.listdir(tmp_path))
            write(some(1), tmp_path / "out", format="npz")

    with pytest.raises(ConflictError, match="already a file"):
        write(some(2), tmp_path / "out", format="npz", progress=meanwhile)
    assert len(seen) == 1
    with np.load(tmp_path / "out") as loaded:
        assert len(loaded.files) == 8
    assert os.listdir(tmp_path) == ["out"]


def test_folders_of_other_names_are_not_taken_for_what_a_dead_writer_left(tmp_path: Path) -> None:
    for name in (".out.tensorcas-part", ".abc.tensorcas-part", "out.tensorcas-part"):
        (tmp_path / name).mkdir()
    write(some(), tmp_path / "out", format="npz")

    assert len(os.listdir(tmp_path)) == 4


def test_names_as_long_as_a_file_system_has_them_can_be_written(tmp_path: Path) -> None:
    write(some(), tmp_path / ("n" * 251 + ".npz"))

    assert len(os.listdir(tmp_path)) == 1


def test_a_write_goes_on_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    write(some(), tmp_path / "out", format="npz")

    assert os.listdir(tmp_path) == ["out"]


# --- cost


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_holds_little_memory_whatever_the_size(tmp_path: Path, kind: dict[str, Any]) -> None:
    class Made:
        """4 tensors of 8 MiB, made as they are wanted."""

        metadata: Mapping[str, Any] = {}

        def specs(self) -> Sequence[Spec]:
            return [Spec(name=f"w{at}", dtype="uint8", shape=(8 << 20,)) for at in range(4)]

        def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
            for name in names:
                yield name, memoryview(bytes(8 << 20))

    tracemalloc.start()
    write(Made(), tmp_path / "out", **kind)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 20 << 20


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    write(some(), tmp_path / "m.npz", progress=lambda done, n_all: told.append((done, n_all)))

    assert told[-1] == (560, 560)
    assert [done for done, _ in told] == sorted({done for done, _ in told})

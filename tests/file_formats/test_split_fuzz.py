"""Files of every format, damaged in every way: what comes back is the file, and no claim in it costs anything."""

from __future__ import annotations

import io
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import MAX_NAME_BYTES
from tensorcas_mlflow.file_formats import FilePart, Learned, More, PlainBytes, Tape, Tensor, split
from tests.file_formats.parts import take_apart
from tests.file_formats.split_samples import samples

MAX_FILE_BYTES = 2 << 20
TAKE_BYTES = 1 << 20
WITHOUT_ROWS = {
    *("pickle, protocol 0", "pickle, protocol 1", "pickle, protocol 2", "joblib, zlib", "npy, objects"),
    *("npz, compressed", "xgboost, trees", "xgboost, json", "xgboost, pickled", "parquet"),
}

# What a length, a count or an offset may be made to say.
CLAIMS = [
    number.to_bytes(n_bytes, order)
    for n_bytes in (1, 2, 4, 8)
    for half, full in [(1 << 8 * n_bytes - 1, 1 << 8 * n_bytes)]
    for number in (0, 1, 1 << 4 * n_bytes, half - 1, half, full - 1)
    for order in ("little", "big")
]


@cache
def edges(name: str) -> list[int]:
    """Return the offsets of a sample's parts; the fields with their sizes lie beside them."""
    at, found = 0, [0]
    for _, taken in take_apart(samples()[name]):
        at += len(taken)
        found.append(at)
    return found


@dataclass(frozen=True)
class Damage:
    """One thing that has happened to a file."""

    how: str
    start: int
    n_bytes: int
    other: bytes

    def do(self, data: bytes) -> bytes:
        start = min(self.start, len(data))
        stop = min(start + self.n_bytes, len(data))
        match self.how:
            case "cut off":
                return data[:start]
            case "lost":
                return data[:start] + data[stop:]
            case "repeated":
                return data[:stop] + data[start:stop] * 40 + data[stop:]
            case "zeroed":
                return data[:start] + bytes(stop - start) + data[stop:]
            case "put in":
                return data[:start] + self.other + data[start:]
            case "written over":
                return data[:start] + self.other + data[start + len(self.other) :]
            case "gone on with another":
                return data[:start] + self.other[self.n_bytes :]
            case _:
                raise AssertionError(self.how)


@st.composite
def damages(draw: st.DrawFn, data: bytes, places: list[int]) -> Damage:
    start = draw(st.sampled_from(places)) + draw(st.integers(-24, 24)) if draw(st.booleans()) else None
    if start is None:
        start = draw(st.integers(0, len(data)))
    how = draw(
        st.sampled_from(
            ["cut off", "lost", "repeated", "zeroed", "put in", "written over", "written over", "gone on with another"]
        )
    )
    if how == "gone on with another":
        other = samples()[draw(st.sampled_from(sorted(samples())))]
        return Damage(how, max(0, start), draw(st.integers(0, len(other))), other)
    other = draw(st.sampled_from(CLAIMS) | st.binary(min_size=1, max_size=12))
    if how == "put in" and draw(st.integers(0, 9)) == 0:
        other = samples()[draw(st.sampled_from(sorted(samples())))]
    return Damage(how, max(0, start), draw(st.sampled_from([1, 2, 4, 8, 64]) | st.integers(1, 5000)), other)


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(samples())))
    data = samples()[name]
    places = edges(name)
    for _ in range(draw(st.integers(1, 4))):
        data = draw(damages(data, places)).do(data)[:MAX_FILE_BYTES]
    return name, data


def sizes_of_sound_parts(data: bytes) -> Iterator[tuple[FilePart, int]]:
    """Split a file as the store does, keeping nothing, and check on the way that the bytes are those of the file."""
    tape = Tape(io.BytesIO(data))
    at = 0
    for part in split(tape):
        if isinstance(part, Learned):
            for tensor in part.tensors.values():
                check_tensor(tensor)
            continue
        assert part.n_bytes > 0
        left = part.n_bytes
        before = at
        while left and (taken := tape.take(min(left, TAKE_BYTES))):
            assert data[at : at + len(taken)] == taken
            at += len(taken)
            left -= len(taken)
        yield part, at - before
    assert at == len(data)


def check(data: bytes) -> int:
    """Check what is promised of any file, and return how many bytes of memory it took at most."""
    tracemalloc.start()
    n_parts = n_tensors = 0
    last: FilePart | None = None
    for part, n_bytes in sizes_of_sound_parts(data):
        assert n_bytes > 0
        n_parts += 1
        if isinstance(part, More):
            assert isinstance(last, Tensor | More)
        if isinstance(part, Tensor):
            n_tensors += 1
            check_tensor(part)
        last = part
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert n_tensors <= 1 + len(data) // 64
    assert n_parts <= len(data)
    assert peak <= 8 * len(data) + (6 << 20)


def check_tensor(part: Tensor) -> None:
    itemsize = 1 if part.dtype is None else parse_dtype(part.dtype).itemsize
    if part.shape is not None:
        assert all(isinstance(side, int) and side >= 0 for side in part.shape)
        if part.dtype is not None:
            assert math.prod(part.shape) * itemsize == part.n_bytes
    if part.cuts is not None:
        assert list(part.cuts) == sorted(set(part.cuts))
        assert part.cuts[-1] == part.n_bytes
    assert len(part.name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
    assert part.name.isprintable()


def test_the_samples_are_what_they_are_called() -> None:
    kinds = {name: {type(part) for part, _ in take_apart(data)} for name, data in samples().items()}

    assert {name for name, found in kinds.items() if Tensor not in found} == WITHOUT_ROWS
    assert {name for name, found in kinds.items() if PlainBytes in found} == {
        *("pickle, protocol 0", "pickle, protocol 1", "joblib, zlib", "skops", "parquet")
    }


@settings(max_examples=250, derandomize=True, database=None)
@given(damaged_files())
def test_a_damaged_file_of_any_format_comes_back(file: tuple[str, bytes]) -> None:
    check(file[1])

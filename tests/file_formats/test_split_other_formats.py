"""Files that nobody takes apart: they are plain bytes, whatever lies in them."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tensorcas_mlflow.file_formats import PlainBytes, Skeleton
from tests.file_formats.parts import joined, take_apart

TABLE = pa.table({"a": np.random.default_rng(0).normal(size=5000), "b": [str(i) for i in range(5000)]})


def parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, out)
    return out.getvalue()


def feather() -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(TABLE, out)
    return out.getvalue()


def arrow_file() -> bytes:
    out = io.BytesIO()
    with pyarrow.ipc.new_file(out, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return out.getvalue()


def arrow_stream() -> bytes:
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return out.getvalue()


def hdf5() -> bytes:
    return b"\x89HDF\r\n\x1a\n\x00\x00\x00\x00\x00\x08\x08\x00" + bytes(8) + b"\xff" * 40 + bytes(2000)


def compressed() -> bytes:
    return gzip.compress(TABLE["a"].to_numpy().tobytes())


def noise() -> bytes:
    return np.random.default_rng(0).bytes(50_000)


@pytest.mark.parametrize("make", [parquet, feather, arrow_file, arrow_stream, hdf5, compressed, noise])
def test_a_file_of_another_format_is_plain(make: Callable[[], bytes]) -> None:
    data = make()

    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {PlainBytes}


@pytest.mark.parametrize("text", ["key: value\n" * 500, '{"learner": {"version": [3, 2]}}', "Zürich\n" * 3000, "x"])
def test_a_text_is_skeleton(text: str) -> None:
    parts = take_apart(text.encode())

    assert joined(parts) == text.encode()
    assert {type(part) for part, _ in parts} == {Skeleton}


def test_an_empty_file_has_no_parts() -> None:
    assert take_apart(b"") == []

"""Writing and reading of manifests' streams, against pyarrow."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec, chunk_ends
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout.manifests import Columns, Manifest, Row
from tensorcas_mlflow.layout.manifests._manifest_stream import read_columns, read_head
from tests.layout.arrow_streams import MANIFEST_SCHEMA, arrow_stream

CHUNK = 4096


def row(name: str, shape: tuple[int, ...], cuts: list[int] | None = None, dtype: str | None = "uint8") -> Row:
    spec = Spec(name=name, dtype=dtype, shape=shape)
    at = None if cuts is None else np.array(cuts, np.int64)
    n_chunks = len(chunk_ends(spec.n_bytes, CHUNK, at))
    digests = b"".join(digest(f"{name} {chunk}".encode()) for chunk in range(n_chunks))
    return Row(spec=spec, cuts=at, digests=np.frombuffer(digests, np.uint8).reshape(-1, 32))


def stream_of(rows: list[Row], **metadata: Any) -> bytes:
    return Manifest(
        kind="checkpoint", store_id="f" * 32, flavor=None, chunk_bytes=CHUNK, rows=rows, metadata=metadata
    ).to_bytes()


ROWS = {
    "one": [row("weight", (3, 4000), dtype="float32")],
    "alike": [row(f"layer.{n}", (3,), dtype="bfloat16") for n in range(40)],
    "mixed": [
        row("weight", (3, 4000)),
        row("empty", (0, 7)),
        row("scalar", (), dtype="float64"),
        row("cut", (9000,), [100, 5000, 9000]),
        row(SKELETON, (5000,), dtype=None),
        row("\u540d\u524d", (2,), dtype="U7"),
    ],
    "cut": [row("cut", (9000,), [100, 5000, 9000])],
    "bytes": [row(SKELETON, (5000,), dtype=None)],
    "none": [],
}
STREAMS = {name: stream_of(rows, note=name) for name, rows in ROWS.items()}


def facts(columns: Columns) -> dict[str, list[Any]]:
    """Return everything in columns, as pyarrow gives it."""
    cuts, starts = columns.cuts, zip(columns.chunk_at[:-1], columns.chunk_at[1:], strict=True)
    of_rows = [None if cuts is None else cuts.of(at) for at in range(len(columns))]
    return {
        "name": columns.names.to_list(),
        "dtype": [columns.dtypes[code] for code in columns.dtype.tolist()],
        "shape": [list(columns.shape(at)) for at in range(len(columns))],
        "chunks": [[each.tobytes() for each in columns.digests[start:stop]] for start, stop in starts],
        "cuts": [None if each is None else each.tolist() for each in of_rows],
    }


def read_by_arrow(stream: bytes) -> tuple[bytes, dict[str, list[Any]]] | None:
    """Read a stream by pyarrow; None if it is refused."""
    try:
        table = pa.ipc.open_stream(stream).read_all()
        table.validate(full=True)
        assert table.schema.equals(MANIFEST_SCHEMA)
        return table.schema.metadata[b"tensorcas"], table.to_pydict()
    except (pa.ArrowException, OSError, ValueError):
        return None


def read(stream: bytes, **options: Any) -> tuple[bytes, dict[str, list[Any]]] | None:
    """Read a stream; None if it is refused."""
    try:
        said = read_head(stream)
        return None if said is None else (said, facts(read_columns(stream, len(said), **options)))
    except FormatError:
        return None


@pytest.mark.parametrize("name", ROWS)
def test_stream_is_read_as_pyarrow_reads_it(name: str) -> None:
    found = read(STREAMS[name])

    assert found is not None
    assert found == read_by_arrow(STREAMS[name])


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"none"}))
@pytest.mark.parametrize("note", ["", "x", "xy", "xyz", "xyzä"])
def test_stream_is_the_one_that_pyarrow_writes(name: str, note: str) -> None:
    stream = stream_of(ROWS[name], note=note)
    columns = facts(Columns.of_rows(ROWS[name]))

    assert arrow_stream(columns, read_head(stream)) == stream


@pytest.mark.long
def test_stream_of_100_000_rows_is_read_as_pyarrow_reads_it() -> None:
    kinds = ["float32", "bfloat16", "int64"]
    stream = stream_of([row(f"model.layers.{n}.weight", (n % 3,), dtype=kinds[n % 7 % 3]) for n in range(100_000)])

    assert read(stream) == read_by_arrow(stream)


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.long), 10])
@pytest.mark.parametrize("name", ROWS)
def test_changed_bytes_never_read_as_other_contents_than_pyarrow_finds(name: str, share: int) -> None:
    stream, changes = STREAMS[name], random.Random(1)
    n_read = 0
    for at in changes.sample(range(len(stream)), len(stream) // share):
        for value in {stream[at] ^ 1 << changes.randrange(8), 0, 0xFF, changes.randrange(256)}:
            changed = stream[:at] + bytes([value]) + stream[at + 1 :]
            found = read(changed)
            if found is not None:
                n_read += 1
                expected = read_by_arrow(changed)
                # pyarrow refuses a few streams for bytes that mean nothing: alignment, and fields of later versions.
                assert expected is None or found == expected, (at, value)

    assert n_read


def test_stream_cut_anywhere_is_refused() -> None:
    stream = STREAMS["mixed"]

    # The last eight bytes mark the end, and a stream may lack them.
    assert [n for n in range(len(stream)) if read(stream[:n]) is not None] == [len(stream) - 8]


def test_more_rows_than_allowed_are_refused() -> None:
    assert read(STREAMS["alike"], max_rows=39) is None
    assert read(STREAMS["alike"], max_rows=40) is not None


def with_name_offset(row: int, offset: int) -> bytes:
    """Return the mixed stream with another end of one name."""
    names = [row.spec.name for row in ROWS["mixed"]]
    ends = np.cumsum([0, *(len(name.encode()) for name in names)]).astype("<i4")
    stream = STREAMS["mixed"]
    at = stream.index(ends.tobytes()) + 4 * (row + 1)
    return stream[:at] + np.int32(offset).astype("<i4").tobytes() + stream[at + 4 :]


def test_name_split_inside_of_a_character_is_refused() -> None:
    begin = sum(len(row.spec.name.encode()) for row in ROWS["mixed"][:5])

    assert read(with_name_offset(4, begin)) is not None
    assert read(with_name_offset(4, begin + 1)) is None
    assert read_by_arrow(with_name_offset(4, begin + 1)) is None


def test_names_with_descending_offsets_are_refused() -> None:
    assert read(with_name_offset(0, 40)) is None
    assert read_by_arrow(with_name_offset(0, 40)) is None

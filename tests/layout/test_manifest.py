from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import FormatError, NewerFormatError, TensorNotFoundError
from tensorcas_mlflow.layout.manifests import Manifest, Row

CHUNK = 4096


def digests(n: int) -> np.ndarray:
    return np.frombuffer(b"".join(digest(bytes([k % 256])) for k in range(n)), np.uint8).reshape(-1, 32)


def row(name: str, shape: tuple[int, ...], n_chunks: int, cuts: list[int] | None = None, dtype: str = "uint8") -> Row:
    at = None if cuts is None else np.array(cuts, np.int64)
    return Row(spec=Spec(name=name, dtype=dtype, shape=shape), cuts=at, digests=digests(n_chunks))


def manifest(rows: list[Row], **changes: object) -> Manifest:
    said: dict[str, object] = {"kind": "checkpoint", "store_id": "f" * 32, "flavor": "pytorch", "metadata": {"a": [1]}}
    return Manifest(chunk_bytes=CHUNK, rows=rows, **{**said, **changes})  # type: ignore[arg-type]


ROWS = [
    row("weight", (3, 4000), 3),
    row("empty", (0, 7), 0),
    row("scalar", (), 1, dtype="float64"),
    row("cut", (9000,), 4, [100, 5000, 9000]),
    row("名前", (1,), 1, dtype="{a:int8,b:float32[2]}"),
]
MANIFEST = manifest(ROWS)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    for read in (Manifest.from_bytes(MANIFEST.to_bytes()), Manifest.from_blob(MANIFEST.to_blob())):
        assert (read.kind, read.chunk_bytes, read.store_id) == ("checkpoint", CHUNK, "f" * 32)
        assert (read.flavor, read.metadata) == ("pytorch", {"a": [1]})
        assert read.names() == ["weight", "empty", "scalar", "cut", "名前"]
        assert [got.spec for got in read.rows] == [want.spec for want in ROWS]
        assert [got.identity for got in read.rows] == [want.identity for want in ROWS]
        assert read.row("cut").cuts.tolist() == [100, 5000, 9000]
        assert read.row("weight").cuts is None
        assert (read.digests == MANIFEST.digests).all()
        assert read.digest == MANIFEST.digest


def test_a_manifest_of_nothing_is_read_back() -> None:
    assert list(Manifest.from_bytes(manifest([]).to_bytes()).rows) == []


def test_a_large_manifest_is_kept_so_that_it_can_be_mapped_and_a_small_one_compressed() -> None:
    large = manifest([row(f"tensor-{n}", (3,), 1) for n in range(2_000)])

    assert large.to_blob() == large.to_bytes()
    assert MANIFEST.to_blob()[:4] == b"\x28\xb5\x2f\xfd"
    assert Manifest.from_blob(large.to_blob()).digest == large.digest


def test_equal_checkpoints_have_one_name() -> None:
    assert manifest(ROWS).digest == MANIFEST.digest
    assert manifest(ROWS, flavor="sklearn").digest != MANIFEST.digest


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(TensorNotFoundError, match="'absent'"):
        MANIFEST.row("absent")


def test_a_manifest_is_recognised_by_its_first_bytes() -> None:
    assert Manifest.looks_like(MANIFEST.to_bytes()[:1024])
    assert not Manifest.looks_like(b"\xff\xff\xff\xff and so on")
    assert not Manifest.looks_like(b"")


@pytest.mark.parametrize(
    "changes", [{"flavor": ""}, {"flavor": "x" * 201}, {"store_id": ""}, {"kind": "model"}, {"flavor": 3}], ids=str
)
def test_manifest_that_could_not_be_read_back_is_refused_on_write(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="manifest's"):
        manifest(ROWS, **changes)


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(FormatError, match="two rows one name"):
        manifest([row("a", (1,), 1), row("a", (1,), 1)])


def stream(head: object, *, compression: str | None = None, n_batches: int = 1, **columns: object) -> bytes:
    batch = pa.ipc.open_stream(MANIFEST.to_bytes()).read_next_batch()
    if isinstance(head, dict):
        head = {**json.loads(batch.schema.metadata[b"tensorcas"]), **head}
    arrays = {name: columns.get(name, batch.column(name)) for name in batch.schema.names}
    metadata = {b"tensorcas": head if isinstance(head, bytes) else json.dumps(head).encode()}
    changed = pa.record_batch({key: value for key, value in arrays.items() if value is not None})
    changed = changed.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, changed.schema, options=options) as writer:
        for _ in range(n_batches):
            writer.write_batch(changed)
    return sink.getvalue().to_pybytes()


def test_unchanged_sample_of_the_hostile_tests_is_a_manifest() -> None:
    assert Manifest.from_bytes(stream({})).digests.tobytes() == MANIFEST.digests.tobytes()


@pytest.mark.parametrize(
    "head",
    [
        {"format": "1"},
        {"format": None},
        {"format": True},
        {"kind": "model"},
        {"kind": []},
        {"chunk_bytes": 0},
        {"chunk_bytes": -4096},
        {"chunk_bytes": "4096"},
        {"chunk_bytes": True},
        {"chunk_bytes": 1 << 40},
        {"chunk_bytes": 100},
        {"store": 7},
        {"store": "x" * 1_000},
        {"flavor": ""},
        {"flavor": ["a"]},
        {"metadata": []},
        {"metadata": None},
        {"left_out": []},
        {"left_out": {"w": 1}},
        [],
        7,
        b"{",
        b"\xff",
        b"[" * 100_000,
    ],
    ids=repr,
)
def test_a_hostile_head_is_a_format_error(head: object) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(stream(head))


INTS = pa.list_(pa.int64())
CHUNKS = pa.list_(pa.binary(32))


@pytest.mark.parametrize(
    "columns",
    [
        {"name": None},
        {"name": pa.array(["a", "a", "c", "d", "e"])},
        {"name": pa.array(["a", None, "c", "d", "e"])},
        {"name": pa.array(["a", "b\n", "c", "d", "e"])},
        {"name": pa.array([1, 2, 3, 4, 5])},
        {"dtype": pa.array(["object"] * 5)},
        {"dtype": pa.array([None] * 5, pa.utf8())},
        {"shape": pa.array([[-1], [], [], [], []], INTS)},
        {"shape": pa.array([[1 << 62, 1 << 62], [0], [], [9000], [1]], INTS)},
        {"shape": pa.array([[1 << 40], [0, 7], [], [9000], [1]], INTS)},
        {"shape": pa.array([[3, 4000], [0, 1 << 62], [], [9000], [1]], INTS)},
        {"shape": pa.array([[3, None], [0, 7], [], [9000], [1]], INTS)},
        {"shape": pa.array([None, [0, 7], [], [9000], [1]], INTS)},
        {"chunks": pa.array([[]] * 5, CHUNKS)},
        {"chunks": pa.array([None] * 5, CHUNKS)},
        {"chunks": pa.array([[None] * 3, [], [b"x" * 32], [b"x" * 32] * 4, [b"x" * 32]], CHUNKS)},
        {"chunks": pa.array([[b"x" * 32] * 3, [b"x" * 32], [b"x" * 32], [b"x" * 32] * 4, [b"x" * 32]], CHUNKS)},
        {"cuts": pa.array([None, [0], None, [100, 5000, 9000], None], INTS)},
        {"cuts": pa.array([None, None, None, [100, 5000, 8999], None], INTS)},
        {"cuts": pa.array([None, None, None, [5000, 100, 9000], None], INTS)},
        {"cuts": pa.array([None, None, None, [-(1 << 63), 100, 9000], None], INTS)},
        {"cuts": pa.array([None, None, None, [], None], INTS)},
        {"cuts": pa.array([None, None, None, [None, 5000, 9000], None], INTS)},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_hostile_columns_are_a_format_error(columns: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(stream({}, **columns))


def test_manifest_of_a_later_release_is_refused_with_its_version() -> None:
    with pytest.raises(NewerFormatError, match="version 9"):
        Manifest.from_bytes(stream({"format": 9}))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_manifest_compressed_inside_is_refused_before_it_is_unpacked(compression: str) -> None:
    bomb = stream({}, compression=compression, name=pa.array(["x" * (40 << 20), "b", "c", "d", "e"]))
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with pytest.raises(FormatError):
        Manifest.from_bytes(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 << 20
    assert pa.total_allocated_bytes() - before < 4 << 20


def test_a_stream_without_a_batch_or_with_two_is_a_format_error() -> None:
    for n_batches in (0, 2):
        with pytest.raises(FormatError):
            Manifest.from_bytes(stream({}, n_batches=n_batches))


def test_a_zstd_frame_that_would_unpack_to_more_than_a_small_manifest_is_refused() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False)
    for bomb in (
        zstandard.ZstdCompressor().compress(bytes(100 << 20)),
        unsized.compress(bytes(100 << 20)),
        unsized.compress(MANIFEST.to_bytes()),
    ):
        with pytest.raises(FormatError):
            Manifest.from_blob(bomb)


@pytest.mark.parametrize("kind", ["stream", "blob"])
def test_a_manifest_cut_short_is_a_format_error(kind: str) -> None:
    data = MANIFEST.to_bytes() if kind == "stream" else MANIFEST.to_blob()
    # Arrow's end marker is eight bytes that say nothing.
    for size in range(len(data) - 8):
        with pytest.raises(FormatError):
            Manifest.from_blob(data[:size])


@pytest.mark.long
@settings(max_examples=700)  # the first damage imports pyarrow
@given(st.data())
def test_a_damaged_manifest_is_a_manifest_or_a_format_error(data: st.DataObject) -> None:
    damaged = bytearray(MANIFEST.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255, damaged[at] ^ 1]))
    try:
        read = Manifest.from_bytes(bytes(damaged))
    except FormatError:
        return

    for got in read.rows:
        assert len(got.ends(read.chunk_bytes)) == len(got.digests)


@given(st.binary(max_size=300))
def test_junk_in_place_of_a_manifest_is_a_format_error(junk: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_blob(junk)


def test_a_damaged_manifest_is_not_taken_for_one_of_a_later_release() -> None:
    later = stream({"format": 9})

    with pytest.raises(NewerFormatError):
        Manifest.from_blob(later, digest(later).hex() + ".0123abcd")
    with pytest.raises(FormatError, match="it hashes to") as caught:
        Manifest.from_blob(later, MANIFEST.digest)
    assert not isinstance(caught.value, NewerFormatError)

"""Manifests of very many rows, which are held as columns."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec, chunk_begins, chunk_ends
from tensorcas_mlflow.errors import FormatError, TensorNotFoundError
from tensorcas_mlflow.layout.manifests import Manifest, Row, Specs
from tests.layout.arrow_streams import arrow_stream

CHUNK = 4096
N_MANY = 20_000
"""More rows than names are compared of at once, and than are looked through in one block."""


def row(name: str, shape: tuple[int, ...], cuts: list[int] | None = None, dtype: str | None = "uint8") -> Row:
    spec = Spec(name=name, dtype=dtype, shape=shape)
    at = None if cuts is None else np.array(cuts, np.int64)
    n_chunks = len(chunk_ends(spec.n_bytes, CHUNK, at))
    digests = b"".join(digest(f"{name} {chunk}".encode()) for chunk in range(n_chunks))
    return Row(spec=spec, cuts=at, digests=np.frombuffer(digests, np.uint8).reshape(-1, 32))


def manifest(rows: list[Row], **changes: object) -> Manifest:
    said: dict[str, object] = {"kind": "checkpoint", "store_id": "f" * 32, "flavor": None}
    return Manifest(chunk_bytes=CHUNK, rows=rows, **{**said, **changes})  # type: ignore[arg-type]


def many(*, kind: str = "checkpoint", **columns: object) -> bytes:
    """The stream of a manifest of many tensors of four bytes each, with some columns changed."""
    lists = np.arange(N_MANY + 1, dtype=np.int32)
    given: dict[str, object] = {
        "name": pa.array([f"layer.{n}" for n in range(N_MANY)]),
        "dtype": pa.array(["float32"] * N_MANY),
        "shape": pa.ListArray.from_arrays(lists, pa.array([1] * N_MANY, pa.int64())),
        "chunks": pa.ListArray.from_arrays(lists, pa.array([bytes(32)] * N_MANY, pa.binary(32))),
        "cuts": pa.nulls(N_MANY, pa.list_(pa.int64())),
    }
    head = {"format": 1, "kind": kind, "chunk_bytes": CHUNK, "store": None, "flavor": None, "metadata": {}}
    return arrow_stream(given | columns, json.dumps(head))


def names(**changed: str) -> pa.Array:
    """The names of `many`, some of them changed."""
    return pa.array([changed.get(f"n{n}", f"layer.{n}") for n in range(N_MANY)])


MIXED = [
    row("weight", (3, 4000)),
    row("empty", (0, 7)),
    row("scalar", (), dtype="float64"),
    row("cut", (9000,), [100, 5000, 9000]),
    row(SKELETON, (5000,), dtype=None),
    row("名前", (2,), dtype="U7"),
]


def test_rows_are_made_as_they_were_given() -> None:
    read = Manifest.from_bytes(manifest(MIXED).to_bytes())

    assert [each.identity for each in read.rows] == [each.identity for each in MIXED]
    assert [read.rows[at].spec for at in range(-6, 6)] == [each.spec for each in MIXED] * 2
    assert [each.spec.name for each in read.rows[1:3]] == ["empty", "scalar"]
    with pytest.raises(IndexError):
        read.rows[6]


def test_a_manifest_that_was_read_is_written_as_it_was() -> None:
    first = manifest(MIXED)
    moved = dataclasses.replace(Manifest.from_bytes(first.to_bytes()), store_id="0" * 32)

    assert moved.stream != first.stream
    assert dataclasses.replace(moved, store_id=first.store_id).stream == first.stream


def test_sizes_of_rows_and_elements_are_columns() -> None:
    columns = manifest(MIXED).columns

    assert columns.n_bytes.tolist() == [each.spec.n_bytes for each in MIXED]
    assert columns.itemsizes.tolist() == [1, 1, 8, 1, 1, 28]
    assert columns.codec_itemsizes.tolist() == [1, 1, 8, 1, 1, 1]


rows_of_any_kind = st.lists(
    st.tuples(st.lists(st.integers(0, 90), max_size=3), st.sets(st.integers(1, 9000), max_size=4) | st.none()),
    max_size=8,
)


@pytest.mark.long
@settings(max_examples=60)
@given(rows_of_any_kind, st.data())
def test_chunks_of_many_rows_are_those_of_each(
    given_rows: list[tuple[list[int], set[int] | None]], data: st.DataObject
) -> None:
    rows = []
    for at, (shape, cuts) in enumerate(given_rows):
        size = int(np.prod(shape, dtype=np.int64))
        ends = None if cuts is None or not size else [*sorted(cut for cut in cuts if cut < size), size]
        rows.append(row(f"n{at}", tuple(shape), ends))
    made = manifest(rows)
    some = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=6)) if rows else []

    for which in (list(range(len(rows))), some):
        picked = np.array(which, dtype=np.int64)
        ends_of = [rows[at].ends(CHUNK) for at in which]
        sizes = [size for ends in ends_of for size in np.diff(ends, prepend=0).tolist()]
        chunks = made.columns.chunks_of(picked)
        assert made.columns.chunk_sizes(CHUNK, picked).tolist() == sizes
        assert made.digests[chunks].tobytes() == b"".join(rows[at].digests.tobytes() for at in which)
        assert made.columns.rows_of(chunks).tolist() == np.repeat(picked, [len(ends) for ends in ends_of]).tolist()
    begins = chunk_begins(made.chunk_sizes, made.columns.chunk_at)
    assert (begins + made.chunk_sizes).tolist() == [end for each in rows for end in each.ends(CHUNK).tolist()]


def test_rows_are_equal_where_their_identities_are() -> None:
    before = manifest([row("a", (3,)), row("b", (9000,)), row("c", (2, 2)), row("d", (4,))])
    changed = [row("x", (1,)), row("a", (3,)), row("b", (9000,)), row("c", (4,)), row("d", (4,), dtype="int8")]
    changed[2].digests.flags.writeable = False
    after = manifest([*changed, dataclasses.replace(row("e", (9000,)), digests=row("b", (9000,)).digests[[0, 1, 1]])])

    one, other = np.array([0, 1, 2, 3, 1]), np.array([1, 2, 3, 4, 5])
    is_equal = before.columns.equal(one, after.columns, other).tolist()

    assert is_equal == [True, True, False, False, False]
    identities = [(before.rows[at].identity, after.rows[to].identity) for at, to in zip(one, other, strict=True)]
    assert is_equal == [mine == its for mine, its in identities]


def test_a_few_names_are_found_as_well_as_very_many() -> None:
    read = Manifest.from_bytes(many())
    wanted = [f"layer.{n}" for n in range(0, N_MANY, 400)]

    assert read.row("layer.19999").spec.name == "layer.19999"
    assert "layer.7" in read.by_name
    assert "layer.x" not in read.by_name
    assert read.numbers(wanted).tolist() == list(range(0, N_MANY, 400))
    assert read.row("layer.19999").spec.name == "layer.19999"


@pytest.mark.parametrize("name", ["absent", "", "\udc80", "layer.1\0"])
def test_a_name_that_many_rows_lack_is_not_found(name: str) -> None:
    read = Manifest.from_bytes(many())

    for _ in range(20):
        with pytest.raises(TensorNotFoundError):
            read.row(name)


def test_two_of_many_rows_named_alike_are_found_by_whoever_goes_by_names() -> None:
    stream = many(name=names(n19998="layer.3"))

    for use in (
        lambda found: found.row("layer.3"),
        lambda found: found.names(),
        lambda found: found.check_names(),
        lambda found: list(found.by_name),
        lambda found: found.numbers(found.columns.names.to_list()),
    ):
        with pytest.raises(FormatError, match="two rows one name"):
            use(Manifest.from_bytes(stream))


def test_many_stretches_of_a_file_need_no_name() -> None:
    nameless = pa.array([""] * N_MANY)

    Manifest.from_bytes(many(kind="file", name=nameless)).check_names()
    with pytest.raises(FormatError, match="two rows one name"):
        Manifest.from_bytes(many(name=nameless)).check_names()


ONES = [1] * N_MANY


def lists_of(values: list[int], counts: list[int]) -> pa.ListArray:
    at = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return pa.ListArray.from_arrays(at, pa.array(values, pa.int64()))


@pytest.mark.parametrize(
    "columns",
    [
        {"name": names(n19999="a\nb")},
        {"name": names(n19999="x" * 4097)},
        {"name": pa.array([b"layer"] * (N_MANY - 1) + [b"\xc3"], pa.binary()).view(pa.utf8())},
        {"dtype": pa.array(["float32"] * (N_MANY - 1) + ["floatXX"])},
        {"dtype": pa.array(["float32"] * (N_MANY - 1) + [b"\xc3loat32"], pa.binary()).view(pa.utf8())},
        {"dtype": pa.array(["float32"] * (N_MANY - 1) + [None]), "shape": lists_of(ONES[1:], [*ONES[1:], 0])},
        {"shape": lists_of([*ONES[1:], -1], ONES)},
        {"shape": lists_of([*ONES[1:], 0], ONES)},
        {"shape": lists_of([*ONES[1:], 1 << 56], ONES)},
        {"shape": lists_of([*ONES[1:], 1 << 31, 1 << 31, 4], [*ONES[1:], 3])},
        {"shape": lists_of([*ONES[1:], 1] * 65, [*ONES[1:], 65])},
        {"shape": lists_of([*ONES[1:], 5000], ONES)},
        {"cuts": lists_of([3], [0] * (N_MANY - 1) + [1])},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_fault_in_the_last_of_many_rows_is_a_format_error(columns: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(many(**columns))


def test_cuts_of_a_row_that_has_none_are_a_format_error() -> None:
    # Row 0 has cuts, and no other; but offsets give the last row some too.
    given = pa.py_buffer(b"\1" + bytes(N_MANY // 8))
    at = np.array([0, *[1] * (N_MANY - 1), 2], dtype=np.int32)
    values = pa.array([4, 4], pa.int64())
    hidden = pa.ListArray.from_buffers(pa.list_(values.type), N_MANY, [given, pa.py_buffer(at)], children=[values])

    with pytest.raises(FormatError, match="cuts of a row that has none"):
        Manifest.from_bytes(many(cuts=hidden))


def test_dtypes_of_one_length_are_told_apart() -> None:
    dtypes = ["uint8", "int16"] * (N_MANY // 2)
    shape = lists_of([4, 2] * (N_MANY // 2), [1] * N_MANY)
    read = Manifest.from_bytes(many(dtype=pa.array(dtypes), shape=shape))

    assert [each.spec.dtype for each in read.rows[-2:]] == ["uint8", "int16"]
    assert set(read.columns.n_bytes.tolist()) == {4}


ARRAYS = {
    "a": np.zeros((3, 4), np.float16),
    "b": np.zeros((0, 3)),
    "c": np.array(7, ">i4"),
    "名": np.array(["x", "yz"]),
    SKELETON: np.zeros(5, np.uint8),
    "d": np.zeros((2, 2, 2), np.float16),
    "e": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
}


def test_many_arrays_are_described_as_each_is() -> None:
    specs = Specs.of_arrays(list(ARRAYS), list(ARRAYS.values()))

    assert [specs.spec(at) for at in range(len(specs))] == [Spec.of(name, array) for name, array in ARRAYS.items()]
    assert Specs.of([Spec.of(name, array) for name, array in ARRAYS.items()]).n_bytes.tolist() == specs.n_bytes.tolist()


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("", np.zeros(3), "not a tensor's name"),
        ("a\nb", np.zeros(3), "not a tensor's name"),
        ("\udc80", np.zeros(3), "not a tensor's name"),
        ("x", np.array([object()]), "cannot be stored"),
        (SKELETON, np.zeros(5), "1-d uint8"),
    ],
    ids=["no name", "a newline", "no character", "objects", "a skeleton of numbers"],
)
def test_one_of_many_arrays_that_cannot_be_described_is_refused(name: str, array: np.ndarray, why: str) -> None:
    given_arrays = {"a": np.zeros(3), name: array, "z": np.zeros(3)}

    with pytest.raises(ValueError, match=why):
        Specs.of_arrays(list(given_arrays), list(given_arrays.values()))


def test_damage_of_a_long_manifest_is_not_taken_for_one_of_a_later_release() -> None:
    stream = many(name=pa.array([f"{n:060}" for n in range(N_MANY)]))
    later = stream.replace(b'"format": 1', b'"format": 9', 1)

    assert len(stream) > 1 << 20
    assert len(Manifest.from_blob(stream, digest(stream).hex()).rows) == N_MANY
    with pytest.raises(FormatError, match="it hashes to"):
        Manifest.from_blob(later, digest(stream).hex())

"""Manifests with derived rows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.base.tensors import Spec, chunk_ends
from tensorcas_mlflow.errors import FormatError, NewerFormatError
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, Row

CHUNK_BYTES = 4096
rng = np.random.default_rng(0)


def row(name: str, dtype: str | None, *shape: int, cuts: list[int] | None = None) -> Row:
    spec = Spec(name=name, dtype=dtype, shape=shape)
    n_chunks = len(chunk_ends(spec.n_bytes, CHUNK_BYTES, cuts))
    digests = rng.integers(0, 256, (n_chunks, 32)).astype(np.uint8)
    return Row(spec=spec, cuts=None if cuts is None else np.array(cuts, dtype=np.int64), digests=digests)


ROWS = [
    row("a", "bfloat16", 50, 64),
    row("b", "float32", 50, 64),
    row("c", None, 3400),
    row("d", "float32", 64, 50),
    row("e", "float32", 10, cuts=[20, 40]),
]
INPUTS = [row("", "float32", 50, 64, cuts=[6400, 8000, 12800]), row("", "uint16", 3200), row("", "float32", 10)]
DERIVED = (
    Derivation(0, "cast", {}, (5,)),
    Derivation(2, "q8_0", {}, (1,)),
    Derivation(3, "permute", {"axes": [1, 0]}, (5,)),
)


def derived_manifest(**changes: Any) -> Manifest:
    return Manifest(
        **{
            "kind": "checkpoint",
            "chunk_bytes": CHUNK_BYTES,
            "store_id": "s",
            "flavor": None,
            "rows": ROWS,
            "inputs": INPUTS,
            "derived": DERIVED,
            **changes,
        }
    )


def said_by(manifest: Manifest) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(pa.ipc.open_stream(manifest.to_bytes()).schema.metadata[b"tensorcas"])
    return said


def with_head(manifest: Manifest, **changes: Any) -> bytes:
    """The stream of a manifest with other values in its metadata."""
    stream = pa.ipc.open_stream(manifest.to_bytes())
    said = json.dumps(said_by(manifest) | changes)
    batch = stream.read_next_batch().replace_schema_metadata({"tensorcas": said})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_a_manifest_with_derived_rows_is_read_as_it_was_written() -> None:
    manifest = derived_manifest()
    again = Manifest.from_blob(manifest.to_blob(), manifest.digest)

    assert said_by(manifest)["format"] == 2
    assert again.derived == DERIVED
    assert again.n_inputs == 3
    assert again.names() == list("abcde")
    for mine, its in ((manifest.rows, again.rows), (manifest.inputs, again.inputs)):
        for one, other in zip(mine, its, strict=True):
            assert (one.spec, one.identity) == (other.spec, other.identity)
            assert np.array_equal(one.cuts, other.cuts) if one.cuts is not None else other.cuts is None
    assert dataclasses.replace(again).stream == manifest.stream


def test_a_manifest_without_derived_rows_keeps_its_format() -> None:
    manifest = derived_manifest(inputs=(), derived=())

    assert said_by(manifest)["format"] == 1
    assert set(said_by(manifest)) & {"derived", "n_inputs"} == set()
    assert manifest.table is manifest.columns
    assert manifest.stored is manifest.columns
    assert manifest.stored_digests is manifest.digests
    assert manifest.stored_sizes is manifest.chunk_sizes


def test_the_store_keeps_chunks_of_inputs_and_none_of_derived_rows() -> None:
    manifest = derived_manifest()
    kept = [*ROWS[1:2], *ROWS[4:], *INPUTS]

    assert np.array_equal(manifest.stored_digests, np.concatenate([each.digests for each in kept]))
    assert np.array_equal(manifest.digests, np.concatenate([each.digests for each in ROWS]))
    assert manifest.stored_sizes.tolist() == [
        size for each in kept for size in np.diff(each.ends(CHUNK_BYTES), prepend=0).tolist()
    ]
    assert manifest.n_bytes == sum(each.spec.n_bytes for each in ROWS)


def test_a_damaged_input_names_the_tensors_derived_of_it() -> None:
    manifest = derived_manifest()
    first = {name: int(at) for name, at in zip(["b", "e", "5", "6", "7"], manifest.stored.chunk_at[:-1], strict=True)}

    assert manifest.names_of_stored([first["b"]]) == ("b", "c")
    assert manifest.names_of_stored([first["5"]]) == ("a", "d")
    assert manifest.names_of_stored([first["6"], first["e"]]) == ("e",)
    assert manifest.names_of_stored([first["7"]]) == ()


def test_a_manifest_in_full_has_the_same_content_and_no_derived_row() -> None:
    manifest = derived_manifest()
    full = manifest.in_full(store_id=None)

    assert said_by(full)["format"] == 1
    assert np.array_equal(full.stored_digests, manifest.digests)
    assert full.in_full(store_id=None) is full


@pytest.mark.parametrize(
    "derived",
    [
        (Derivation(0, "sine", {}, (5,)),),
        (Derivation(0, "cast", {}, (2,)), Derivation(2, "q8_0", {}, (1,))),
        (Derivation(0, "cast", {}, (0,)),),
        (Derivation(0, "cast", {}, (8,)),),
        (Derivation(0, "cast", {}, (-1,)),),
        (Derivation(0, "cast", {}, ()),),
        (Derivation(0, "cast", {}, (True,)),),
        (Derivation(0, "cast", {}, (7,)),),
        (Derivation(0, "cast", {"to": "bfloat16"}, (5,)),),
        (Derivation(5, "cast", {}, (1,)),),
        (Derivation(-1, "cast", {}, (5,)),),
        (Derivation(0, "cast", {}, (5,)), Derivation(0, "cast", {}, (5,))),
        (Derivation(3, "permute", {"axes": [1, 0]}, (5,)), Derivation(0, "cast", {}, (5,))),
        (Derivation("0", "cast", {}, (5,)),),  # type: ignore[arg-type]
        (Derivation(0, "cast", {}, ("5",)),),  # type: ignore[arg-type]
        (Derivation(0, None, {}, (5,)),),  # type: ignore[arg-type]
        (Derivation(0, "cast", None, (5,)),),  # type: ignore[arg-type]
        (),
    ],
)
def test_impossible_derived_rows_are_refused(derived: tuple[Derivation, ...]) -> None:
    with pytest.raises(FormatError):
        derived_manifest(derived=derived)
    said = [[each.row, each.function, each.params, list(each.inputs)] for each in derived]
    with pytest.raises(FormatError):
        Manifest.from_bytes(with_head(derived_manifest(), derived=said))


@pytest.mark.parametrize("derived", [None, {}, "x", [1], [[]], [[0, "cast", {}, 5]], [[0, "cast", {}, [5], None]]])
def test_a_list_of_derived_rows_of_another_form_is_refused(derived: Any) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(with_head(derived_manifest(), derived=derived))


@pytest.mark.parametrize("n_inputs", [None, -1, 1, 8, 9, 2.0, True, 1 << 80])
def test_an_impossible_number_of_inputs_is_refused(n_inputs: Any) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(with_head(derived_manifest(), n_inputs=n_inputs))


def test_an_input_may_have_a_name_and_is_no_tensor_of_its_manifest() -> None:
    named = dataclasses.replace(INPUTS[0], spec=dataclasses.replace(INPUTS[0].spec, name="x"))
    again = Manifest.from_bytes(derived_manifest(inputs=[named, *INPUTS[1:]]).to_bytes())
    found = again.input_named("x")

    assert found is not None
    assert found.digests.tolist() == named.digests.tolist()
    assert again.input_named("a") is None
    assert again.names() == ["a", "b", "c", "d", "e"]


def test_an_evaluation_of_more_than_4_gib_is_refused() -> None:
    spec = Spec(name="", dtype="uint8", shape=((1 << 32) + 1,))
    large = Row(spec=spec, cuts=None, digests=np.zeros((1 << 20) // 16 + 1, np.uint8).repeat(32).reshape(-1, 32))
    small = row("x", "uint8", 1)
    derived = (Derivation(0, "slice", {"axis": 0, "start": 0}, (1,)),)

    with pytest.raises(FormatError, match="bytes of memory"):
        derived_manifest(rows=[small], inputs=[large], derived=derived, chunk_bytes=65536)


def test_a_later_format_is_refused_by_name() -> None:
    with pytest.raises(NewerFormatError):
        Manifest.from_bytes(with_head(derived_manifest(), format=3))


def test_a_manifest_of_format_1_has_no_derived_rows_whatever_its_head_says() -> None:
    manifest = derived_manifest(inputs=(), derived=())
    said = [[0, "sine", {}, [9], None]]

    assert Manifest.from_bytes(with_head(manifest, derived=said, n_inputs=2)).derived == ()

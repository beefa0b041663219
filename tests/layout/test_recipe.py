"""Blobs of recipes: what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout import (
    MAX_BYTES,
    Derivation,
    Manifest,
    Row,
    find_strangers,
    list_recipes,
    read_recipe,
    recipe_key,
)

CHUNK_BYTES = 4096
rng = np.random.default_rng(0)


def row(name: str, dtype: str | None, *shape: int) -> Row:
    spec = Spec(name=name, dtype=dtype, shape=shape)
    return Row(spec=spec, cuts=None, digests=rng.integers(0, 256, (-(-spec.n_bytes // CHUNK_BYTES), 32)).astype("u1"))


ROWS = [row("a", "bfloat16", 50, 64), row("", "float32", 64, 50)]
INPUTS = [row("", "float32", 50, 64), row("", "uint16", 3200)]
DERIVED = (Derivation(0, "cast", {}, (2,), 3), Derivation(1, "permute", {"axes": [1, 0]}, (2,)))


def recipe(**changes: Any) -> Manifest:
    parts = {"kind": "recipe", "chunk_bytes": CHUNK_BYTES, "store_id": "s", "flavor": None, "rows": ROWS}
    return Manifest(**{**parts, "inputs": INPUTS, "derived": DERIVED, **changes})


def with_head(manifest: Manifest, **changes: Any) -> bytes:
    """The stream of a manifest with other values in its metadata."""
    stream = pa.ipc.open_stream(manifest.to_bytes())
    said = json.dumps(json.loads(stream.schema.metadata[b"tensorcas"]) | changes)
    batch = stream.read_next_batch().replace_schema_metadata({"tensorcas": said})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def named(stream: bytes) -> str:
    return f"{digest(stream).hex()}.{'0' * 8}"


def read(stream: bytes, name: str | None = None) -> Manifest:
    """Read a blob under the name that it should have, or another one."""
    backend = MemoryBackend()
    name = name or named(stream)
    backend.put_new(recipe_key(name), [stream])
    assert list(list_recipes(backend)) == [name]
    return read_recipe(backend, name)


def test_recipe_is_read_as_it_was_written() -> None:
    backend = MemoryBackend()
    name = f"{recipe().digest}.{'0' * 8}"
    backend.put_new(recipe_key(name), [recipe().to_blob()])

    again = read_recipe(backend, name)

    assert list_recipes(backend) == {name: len(recipe().to_blob())}
    assert again.kind == "recipe"
    assert again.derived == DERIVED
    assert np.array_equal(again.digests, np.concatenate([each.digests for each in ROWS]))
    assert np.array_equal(again.stored_digests, np.concatenate([each.digests for each in INPUTS]))
    assert again.label == f"recipe {name[:16]}…"


def test_missing_recipe_is_not_found() -> None:
    with pytest.raises(BlobNotFoundError):
        read_recipe(MemoryBackend(), named(b""))


@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_recipe_is_damaged(compressed: bool) -> None:
    manifest = recipe()
    blob = manifest.to_blob() if compressed else manifest.to_bytes()
    name = f"{manifest.digest}.{'0' * 8}"

    for n in {0, 1, 4, len(blob) // 3, len(blob) // 2, len(blob) - 1}:
        with pytest.raises(CorruptError, match="recipes/"):
            read(blob[:n], name)


def test_recipe_with_any_flipped_byte_is_damaged() -> None:
    manifest = recipe()
    blob = manifest.to_blob()
    name = f"{manifest.digest}.{'0' * 8}"

    for at in range(len(blob)):
        flipped = bytearray(blob)
        flipped[at] ^= 1 << at % 8
        try:
            again = read(bytes(flipped), name)
        except CorruptError:
            continue
        assert again.to_bytes() == manifest.to_bytes()  # the byte says nothing, such as a flag of the frame


def test_recipe_under_the_digest_of_another_one_is_damaged() -> None:
    with pytest.raises(CorruptError, match="recipes/"):
        read(recipe().to_bytes(), named(b"other"))


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_manifest_of_another_kind_is_no_recipe(kind: str) -> None:
    name = "" if kind == "file" else "a"
    rows = [dataclasses.replace(each, spec=dataclasses.replace(each.spec, name=name * (at + 1)))
            for at, each in enumerate(ROWS)]  # fmt: skip
    manifest = recipe(kind=kind, rows=rows)

    with pytest.raises(CorruptError, match="it is no recipe"):
        read(manifest.to_bytes())


@pytest.mark.parametrize("kind", [None, "", "Recipe", "recipes", 1, ["recipe"]])
def test_unknown_kind_is_damaged(kind: Any) -> None:
    with pytest.raises(CorruptError, match="recipes/"):
        read(with_head(recipe(), kind=kind))


def test_recipe_with_a_row_that_is_not_derived_is_refused() -> None:
    with pytest.raises(FormatError, match="not derived"):
        recipe(derived=DERIVED[:1])
    said = [[each.row, each.function, each.params, list(each.inputs), each.residual] for each in DERIVED[:1]]
    with pytest.raises(CorruptError, match="not derived"):
        read(with_head(recipe(), derived=said))


def test_recipe_of_format_1_is_refused() -> None:
    """It cannot have derived rows."""
    with pytest.raises(CorruptError, match="not derived"):
        read(with_head(recipe(), format=1))


def test_recipe_without_rows_is_refused() -> None:
    with pytest.raises(FormatError):
        recipe(rows=[], inputs=[], derived=())
    empty = Manifest(kind="checkpoint", chunk_bytes=CHUNK_BYTES, store_id="s", flavor=None, rows=[])
    for changes in ({}, {"format": 2}, {"format": 2, "derived": [], "n_inputs": 0}):
        with pytest.raises(CorruptError, match="recipes/"):
            read(with_head(empty, kind="recipe", **changes))


@pytest.mark.parametrize(
    "derived",
    [
        [[0, "sine", {}, [2], 3], [1, "permute", {"axes": [1, 0]}, [2], None]],
        [[0, "cast", {}, [2], 3], [1, "permute", {"axes": [1, 0]}, [0], None]],  # an input that is a product
        [[0, "cast", {}, [0], 3], [1, "permute", {"axes": [1, 0]}, [2], None]],  # its own input
        [[0, "cast", {}, [2], 3], [1, "permute", {"axes": [1, 1]}, [2], None]],
        [[0, "cast", {}, [2], 3], [1, "permute", {"axes": [1 << 80, 0]}, [2], None]],
        [[0, "cast", {}, [2], 3], [1, "slice", {"axis": 0, "start": 1 << 62}, [2], None]],
        [[0, "cast", {}, [2], 1 << 62], [1, "permute", {"axes": [1, 0]}, [2], None]],
        [[0, "cast", {}, [1 << 31], 3], [1, "permute", {"axes": [1, 0]}, [2], None]],
        None,
        [],
    ],
)
def test_recipe_of_impossible_functions_is_damaged(derived: Any) -> None:
    with pytest.raises(CorruptError, match="recipes/"):
        read(with_head(recipe(), derived=derived))


@pytest.mark.parametrize("n_inputs", [None, -1, 0, 4, 5, 2.0, True, 1 << 62, 1 << 80])
def test_recipe_with_an_impossible_number_of_inputs_is_damaged(n_inputs: Any) -> None:
    with pytest.raises(CorruptError, match="recipes/"):
        read(with_head(recipe(), n_inputs=n_inputs))


@pytest.mark.parametrize("chunk_bytes", [-1, 0, 1, 1 << 40, 1 << 80, None])
def test_recipe_with_an_impossible_chunk_size_is_damaged(chunk_bytes: Any) -> None:
    with pytest.raises(CorruptError, match="recipes/"):
        read(with_head(recipe(), chunk_bytes=chunk_bytes))


def test_recipe_of_a_later_release_is_refused_by_name() -> None:
    with pytest.raises(NewerFormatError, match="recipes/"):
        read(with_head(recipe(), format=99))


def test_damage_of_a_recipe_does_not_count_as_a_later_release() -> None:
    with pytest.raises(CorruptError):
        read(with_head(recipe(), format=99), f"{recipe().digest}.{'0' * 8}")


def test_recipe_longer_than_any_manifest_is_not_read_into_memory() -> None:
    class Huge(MemoryBackend):
        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            assert max_bytes == MAX_BYTES
            raise CorruptError(key, "too long")

    with pytest.raises(CorruptError, match="too long"):
        read_recipe(Huge(), named(b""))


@pytest.mark.parametrize(
    "make", [recipe, lambda: recipe(kind="checkpoint", rows=[ROWS[0], row("b", "float32", 64, 50)])]
)
def test_each_kind_of_blob_is_read_as_what_it_is_alone(make: Callable[[], Manifest]) -> None:
    manifest = make()
    is_recipe = manifest.kind == "recipe"

    assert Manifest.from_blob(manifest.to_blob(), is_recipe=is_recipe).kind == manifest.kind
    with pytest.raises(FormatError, match=r"it is (a|no) recipe"):
        Manifest.from_blob(manifest.to_blob(), is_recipe=not is_recipe)


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "0" * 63, "0" * 65, "G" * 64, f"{'0' * 64}.{'0' * 7}", f"{'0' * 64}/x", f"{'0' * 64}.tmp", "@lease"],
)
def test_foreign_file_below_recipes_is_a_stranger(name: str) -> None:
    backend = MemoryBackend()
    backend.put_new(f"recipes/{name}", [b"notes"])

    assert list_recipes(backend) == {}
    assert find_strangers(backend) == (f"recipes/{name}",)

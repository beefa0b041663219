"""Casts with recipes, and optimizations that write such: a capital's chunk is the other letter's, transposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.layout import Derivation, Manifest, Row, recipe_key
from tensorcas_mlflow.maintenance._optimize_derive import write_recipe
from tests.protocol.casts import CHUNK_BYTES, STORE_ID, Cast, chunk, open_store


def recipe(*products: str) -> Manifest:
    """The recipe that makes some letters of the same ones in the other case."""
    return Manifest(
        kind="recipe",
        chunk_bytes=CHUNK_BYTES,
        store_id=STORE_ID,
        flavor=None,
        metadata={"nonce": new_name()},
        rows=[_row(each) for each in products],
        inputs=[_row(each.swapcase()) for each in products],
        derived=tuple(
            Derivation(at, "permute", {"axes": [1, 0]}, (len(products) + at,)) for at in range(len(products))
        ),
    )


def _row(letter: str) -> Row:
    digests = np.frombuffer(digest(chunk(letter).tobytes()), np.uint8).reshape(1, -1)
    return Row(spec=Spec(name="", dtype="uint8", shape=(64, 64)), cuts=None, digests=digests)


def with_recipes(cast: Cast, *products: str, drop: Sequence[int] = ()) -> Cast:
    """Put recipes into a store at the start, each for some letters, and drop steps."""
    blobs = dict(cast.blobs())
    for number, letters in enumerate(products):
        made = recipe(*letters)
        blobs[recipe_key(f"{made.digest}.{number:08x}")] = made.to_blob()
    cast.start = blobs
    return cast.drop(*drop) if drop else cast


def deriver(cast: Cast, name: str, *products: str) -> Cast:
    """Add an optimization that has found a function for some letters."""

    def program(backend: Backend) -> None:
        store = open_store(backend)
        store.catalog.refresh()
        write_recipe(store, recipe(*products), "0" * 64)

    cast.actors[name] = program
    return cast

"""Checkpoints and files with derived rows, written row by row as `docs/format.md` describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import digest_all
from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.base.tensors import Spec, bytes_of, chunk_ends, pieces_of
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, Row
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._save import PendingSave
from tensorcas_mlflow.store._sources import TensorSource

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Made(NamedTuple):
    """The function that makes a tensor of a test."""

    function: str
    inputs: Sequence[Any]
    """Arrays, which are stored without a name, or names of stored tensors of the same checkpoint."""
    params: Mapping[str, Any] = {}


def row_of(name: str, array: np.ndarray[Any, Any], chunk_bytes: int, *, dtype: str | None = "") -> Row:
    """Describe an array as a row; ``dtype`` None makes it plain bytes."""
    spec = Spec(name=name, dtype=dtype_name(array.dtype) if dtype == "" else dtype, shape=array.shape)
    pieces = pieces_of(bytes_of(array), chunk_ends(spec.n_bytes, chunk_bytes)) if array.nbytes else []
    return Row(spec=spec, cuts=None, digests=digest_all(pieces))


def derived_save(
    store: Store,
    tensors: Arrays,
    made: Mapping[str, Made],
    *,
    is_bytes: Sequence[str] = (),
    kind: Any = "checkpoint",
    nameless: Sequence[str] = (),
) -> PendingSave:
    """Store a checkpoint or file, some of its tensors as functions of others.

    Args:
        store: The store.
        tensors: All tensors, in their order.
        made: For the derived ones the functions.
        is_bytes: Names of the rows of plain bytes.
        kind: Kind of the manifest.
        nameless: Names of the rows that have none in the manifest.
    """
    size = store.chunk_bytes
    names = list(tensors)
    rows = [row_of(name, array, size, dtype=None if name in is_bytes else "") for name, array in tensors.items()]
    inputs: dict[str, np.ndarray[Any, Any]] = {}

    def number(array: Any) -> int:
        if isinstance(array, str):
            return names.index(array)
        for at, known in enumerate(inputs.values()):
            if known is array:
                return len(names) + at
        inputs[f"input {len(inputs)}"] = array
        return len(names) + len(inputs) - 1

    derived: list[Derivation] = []
    for name in names:
        if name not in made:
            continue
        each = made[name]
        places = tuple(map(number, each.inputs))
        derived.append(Derivation(names.index(name), each.function, each.params, places))
    manifest = Manifest(
        kind=kind,
        chunk_bytes=size,
        store_id=store.id,
        flavor=None,
        rows=[
            dataclasses.replace(row, spec=dataclasses.replace(row.spec, name="")) if row.spec.name in nameless else row
            for row in rows
        ],
        inputs=[
            dataclasses.replace(row, spec=dataclasses.replace(row.spec, name=""))
            for row in (row_of(name, array, size) for name, array in inputs.items())
        ],
        derived=tuple(derived),
    )
    stored = {name: array for name, array in tensors.items() if name not in made} | inputs
    return PendingSave(store.backend, store.catalog, manifest, TensorSource(stored, {}, size))


def save_derived(store: Store, key: RefTarget, tensors: Arrays, made: Mapping[str, Made], **options: Any) -> Ref:
    """Store and commit a checkpoint or file; see `derived_save`."""
    with derived_save(store, tensors, made, **options) as save:
        return save.commit(key)

"""Forms written by hand: a capital's tensor is that of the other letter, transposed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest, Row
from tensorcas_mlflow.maintenance._inventory import manifest_of
from tensorcas_mlflow.store import Derived, Store, commit_form

SIDE = 64


def transposed(array: Any) -> Any:
    """The tensor of a capital, given that of the other letter."""
    return np.ascontiguousarray(array.reshape(SIDE, SIDE).T)


def derived_rows(manifest: Manifest, letters: str, tensor_of: Any) -> dict[int, Derived]:
    """Return rows of a checkpoint, by number: the tensors of some letters, derived from those in the other case.

    Args:
        manifest: Its manifest.
        letters: Names of tensors.
        tensor_of: Returns the tensor of a letter.
    """
    derived = {}
    for letter in letters:
        raw = tensor_of(letter.swapcase()).tobytes()
        digests = np.frombuffer(digest(raw), np.uint8).reshape(1, -1)
        inputs = [Row(spec=Spec(name="", dtype="uint8", shape=(SIDE, SIDE)), cuts=None, digests=digests)]
        made = transposed(np.frombuffer(raw, np.uint8)).reshape(-1).data
        derived[int(manifest.numbers([letter])[0])] = Derived(
            function="permute",
            params={"axes": [1, 0]},
            inputs=inputs,
            row=manifest.row(letter),
            made=lambda made=made: made,
        )
    return derived


def derive(store: Store, ref: Ref, letters: str, tensor_of: Any) -> bool:
    """Write the form of a checkpoint, as an optimization does that has found the functions of some tensors."""
    manifest = manifest_of(store, [ref])
    if manifest is None or not {*letters} <= {*manifest.names()}:
        return False
    store.catalog.refresh()
    return commit_form(store, manifest, derived_rows(manifest, letters, tensor_of), [ref.manifest])

"""Stores with forms: checkpoints saved without a search, whose rows an optimization then derives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.layout import FORMS, Ref, formed_by, list_blobs
from tensorcas_mlflow.layout.manifests import Manifest, each_form
from tensorcas_mlflow.maintenance import OptimizeReport, plan_gc, plan_optimize
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._bases import Parents
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.derived.made import Tensors, as_bfloat16, model, save


@contextmanager
def no_search() -> Iterator[None]:
    """Save as a release without bases and functions did."""
    with (
        mock.patch.object(Parents, "plan", return_value=None),
        mock.patch.object(Parents, "derive", return_value={}),
    ):
        yield


def transposed(tensors: Mapping[str, Any]) -> Tensors:
    return {name: np.ascontiguousarray(array.T) for name, array in tensors.items()}


def optimize(store: Store, **how: Any) -> OptimizeReport:
    """Optimize a store as another process does."""
    return plan_optimize(Store.open_backend(store.backend), **how).execute()


def collect(store: Store) -> None:
    """Collect all that nothing needs, as another process does."""
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()


def drop(store: Store, ref: Ref) -> None:
    Store.open_backend(store.backend).drop(ref)


def forms_of(store: Store) -> list[str]:
    """Return the manifests with a form, which may say that all is stored in full."""
    return sorted(str(formed_by(info.key)) for info in list_blobs(store.backend, FORMS))


def form_in(store: Store) -> Ref:
    """Return the one form of a store."""
    [info] = list_blobs(store.backend, FORMS)
    ref = store.ref(info.key)
    assert ref is not None
    return ref


def derived_forms(store: Store) -> list[Manifest]:
    """Return the manifests of the forms that derive rows."""
    return [form for form in each_form(store.backend) if form.derived]


def held(backend: Backend) -> set[bytes]:
    """Return the digests of all chunks in packs."""
    return {entry["digest"].tobytes() for name, _ in list_packs(backend) for entry in read_pack_table(backend, name)}


def digests_of(store: Store, ref: Ref) -> set[bytes]:
    return {digest.tobytes() for digest in Store.open_backend(store.backend).manifest(ref).digests}


class Family:
    """A model, and its bf16 copy, of which a form derives the latter."""

    def __init__(self, backend: Backend, *, d: int = 256) -> None:
        self.store = Store.init_backend(backend, chunk_bytes=64 << 10)
        self.model = model(1, d=d, n_layers=1)
        self.copy = as_bfloat16(self.model)
        with no_search():
            self.of_model = save(self.store, self.model, run_id="model")
            self.of_copy = save(self.store, self.copy, run_id="copy")

    def optimized(self) -> Family:
        report = optimize(self.store)
        assert report.n_forms == 1
        assert not digests_of(self.store, self.of_copy) <= held(self.store.backend)
        return self

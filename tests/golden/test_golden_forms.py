"""Forms that an earlier release wrote derive the same tensors in every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store
from tests.forms.made import derived_forms, digests_of, forms_of, held
from tests.golden.stores import copied

EXPECTED = json.loads((Path(__file__).parent / "v1_forms/expected.json").read_text())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return copied("v1_forms", "root", tmp_path)


def check_holds(store: Store) -> None:
    """Check that both checkpoints load bit for bit, and that all is sound."""
    assert {ref.key for ref in store.checkpoints()} == EXPECTED.keys()
    for key, expected in EXPECTED.items():
        ref = store.ref(key)
        assert ref is not None
        found = store.read_tensors(store.manifest(ref))
        assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    assert verify(store, full=True).problems == ()


def test_what_golden_forms_derive_is_read_bit_for_bit(store: Store) -> None:
    for ref in store.checkpoints():
        assert digests_of(store, ref).isdisjoint(held(store.backend))
    check_holds(store)


def test_golden_forms_are_of_two_functions(store: Store) -> None:
    assert {each.function for form in derived_forms(store) for each in form.derived} == {"cast", "permute"}


def test_golden_store_of_forms_is_optimized_and_collected(store: Store) -> None:
    """The form is replaced whose inputs nothing else needs, and which take more room than what it derives."""
    forms = forms_of(store)
    plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()
    assert forms_of(store) == forms
    check_holds(Store.open_backend(store.backend))

    plan_optimize(Store.open_backend(store.backend)).execute()

    assert len(derived_forms(store)) == 1
    check_holds(Store.open_backend(store.backend))


def test_repair_of_the_golden_store_of_forms_finds_nothing_to_do(store: Store) -> None:
    assert plan_repair(store).is_empty

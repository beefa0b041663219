"""An optimization that finds functions may die, or fail, at any call of its backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize
from tensorcas_mlflow.store import Store
from tests.derived.made import check_loads
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.forms.made import Family, collect, optimize

MAKERS: dict[str, Callable[[Path], Backend]] = {
    "memory": lambda _: MemoryBackend(),
    "objects": lambda _: MemoryBackend(is_remote=True),
    "files": LocalBackend,
}


def check_all_calls(make: Callable[[int], Backend], *, when: str, crash: bool, every: int) -> int:
    """Let an optimization die, or fail, at its backend's calls; return at how many."""
    n_met = 0
    for nth in range(0, 10_000, every):
        family = Family(make(nth), d=128)
        faulty = FaultyBackend(family.store.backend)
        dying = Store.open_backend(faulty)
        (faulty.crash if crash else faulty.fail)(nth, when=when)  # type: ignore[arg-type]
        with suppress(SimulatedCrash, BackendError):
            plan_optimize(dying).execute()
        if not faulty.has_met():
            break
        n_met += 1
        check_loads(family.store, family.of_copy, family.copy)
        check_loads(family.store, family.of_model, family.model)
        optimize(family.store)
        collect(family.store)
        assert plan_gc(Store.open_backend(family.store.backend), grace_s=0).is_empty
        check_loads(family.store, family.of_copy, family.copy)
        check_loads(family.store, family.of_model, family.model)
    return n_met


@pytest.mark.long
@pytest.mark.parametrize("crash", [True, False], ids=["death", "failure"])
def test_optimization_with_a_fault_at_some_call_is_finished_by_the_next(crash: bool) -> None:
    assert check_all_calls(lambda _: MemoryBackend(), when="after", crash=crash, every=17) > 3


@pytest.mark.long
@pytest.mark.parametrize("crash", [True, False], ids=["death", "failure"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", MAKERS)
def test_optimization_with_a_fault_at_any_call_is_finished_by_the_next(
    tmp_path: Path, kind: str, when: str, crash: bool
) -> None:
    n_met = check_all_calls(lambda nth: MAKERS[kind](tmp_path / str(nth)), when=when, crash=crash, every=1)

    assert n_met > 50

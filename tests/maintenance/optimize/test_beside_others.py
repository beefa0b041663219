"""Others save, drop and collect between any two calls of an `optimize`, and it may die at any: nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.maintenance import plan_optimize, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, parse_intent
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.maintenance.optimize.hooks import AfterPuts, Interrupted
from tests.maintenance.optimize.trainings import (
    base_packs,
    blobs,
    collect,
    drop,
    is_done,
    loads,
    new_store,
    optimize,
    save,
    tables,
    train,
)

When = Literal["before", "after"]
CHANGES = ("put_new", "promote", "withdraw", "delete")


def half_done(*, is_remote: bool = False) -> Store:
    """A store of which the first steps are optimized, so that later ones are stored against packs that are there."""
    store = train(new_store(MemoryBackend(is_remote=is_remote)), range(2))
    optimize(store)
    return train(store, range(2, 4))


def copy_of(store: Store) -> Store:
    """The same blobs in a backend of their own."""
    memory = MemoryBackend(is_remote=store.backend.is_remote)
    memory._blobs = dict(store.backend._blobs)  # type: ignore[attr-defined]
    memory._versions = store.backend._versions  # type: ignore[attr-defined]
    return Store.open_backend(memory)


def attempt(backend: Backend) -> None:
    plan_optimize(Store.open_backend(backend)).execute()


def save_one(store: Store) -> None:
    save(store, 4)


def drop_one(store: Store) -> None:
    drop(store, 2)


def collect_all(store: Store) -> None:
    collect(store)


def drop_and_collect(store: Store) -> None:
    drop(store, 2)
    collect(store)


def optimize_too(store: Store) -> None:
    optimize(store)


def n_calls(store: Store) -> int:
    counting = FaultyBackend(copy_of(store).backend)
    attempt(counting)
    return len(counting.calls)


def act_between(made: Store, nth: int, act: Callable[[Store], None]) -> None:
    """Let somebody act before one of the calls; see that nothing is lost, and that the next run does what is left."""
    store = copy_of(made)
    hooked = Interrupted(store.backend, nth, lambda: act(Store.open_backend(store.backend)))
    attempt(hooked)
    if not hooked.has_acted():
        # Threads ask for this and that twice, or not, and the last calls of one run may be missing in another.
        assert nth > 30
        act(Store.open_backend(store.backend))
    steps = {0, 1, 2, 3} - ({2} if act in (drop_one, drop_and_collect) else set())
    steps |= {4} if act is save_one else set()

    assert all(loads(store, step) for step in steps)

    optimize(store)
    collect(store)
    assert all(loads(store, step) for step in steps)
    assert is_done(store.backend)
    assert not [key for key in blobs(store.backend) if key.startswith(("intents/", "condemned/")) and "@" not in key]


ACTS = [save_one, drop_one, collect_all, drop_and_collect, optimize_too]


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_an_optimization_loses_nothing_whatever_others_do_meanwhile(act: Callable[[Store], None]) -> None:
    made = half_done()
    n = n_calls(made)
    assert n > 60
    for nth in range(ACTS.index(act), n, n // 5):
        act_between(made, nth, act)


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_work_of_others_between_any_two_calls_of_an_optimization_loses_nothing(
    act: Callable[[Store], None], is_remote: bool
) -> None:
    made = half_done(is_remote=is_remote)
    for nth in range(n_calls(made)):
        act_between(made, nth, act)


def die_and_go_on(made: Store, nth: int, when: When) -> None:
    store = copy_of(made)
    faulty = FaultyBackend(store.backend)
    faulty.crash(nth, operations=CHANGES, when=when)
    with pytest.raises(SimulatedCrash):
        attempt(faulty)

    assert all(loads(store, step) for step in range(4))
    assert verify(Store.open_backend(store.backend), full=True).problems == ()

    optimize(store)
    collect(store)
    assert all(loads(store, step) for step in range(4))
    assert is_done(store.backend)
    assert plan_optimize(Store.open_backend(store.backend)).is_empty


def n_changes(made: Store) -> int:
    counting = FaultyBackend(copy_of(made).backend)
    attempt(counting)
    return sum(call in CHANGES for call in counting.calls)


@pytest.mark.long
def test_optimization_after_a_dead_one_ends_in_the_same_store() -> None:
    made = half_done()
    n = n_changes(made)
    assert n >= 8
    for nth in range(0, n, 2):
        die_and_go_on(made, nth, "before")
    die_and_go_on(made, n - 1, "after")


@pytest.mark.long
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_optimization_after_a_death_at_any_change_ends_in_the_same_store(when: When, is_remote: bool) -> None:
    made = half_done(is_remote=is_remote)
    for nth in range(n_changes(made)):
        die_and_go_on(made, nth, when)


@pytest.mark.long
def test_an_optimization_whose_storage_fails_at_any_call_ends_and_the_next_run_goes_on() -> None:
    made = half_done()
    for nth in range(n_calls(made)):
        store = copy_of(made)
        faulty = FaultyBackend(store.backend)
        faulty.fail(nth)
        with contextlib.suppress(BackendError):
            attempt(faulty)

        assert all(loads(store, step) for step in range(4))
        optimize(store)
        collect(store)
        assert is_done(store.backend)


def test_optimization_writes_no_chunk_again_that_was_written_before_a_death() -> None:
    store = train(new_store(), range(4))
    faulty = FaultyBackend(store.backend)
    faulty.crash(0, operations=["delete"])
    with pytest.raises(SimulatedCrash):
        attempt(faulty)
    written = set(tables(store.backend))

    report = optimize(store)
    collect(store)  # the dead one's list is not waited for

    assert report.written_bytes == 0
    assert set(tables(store.backend)) < written
    assert is_done(store.backend)


def optimized_packs(store: Store) -> set[str]:
    return {name for name, rows in tables(store.backend).items() if (rows["effort"] > 0).all()}


def bases_elsewhere(store: Store, before: set[str]) -> set[str]:
    """Packs in which bases lie of what new packs hold."""
    return {pack for name, packs in base_packs(store.backend).items() if name not in before for pack in packs - {name}}


def test_optimization_uses_no_base_condemned_at_the_last_moment() -> None:
    store = half_done()
    before = optimized_packs(store)

    def condemn() -> None:
        store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(frozenset(before), frozenset())])

    attempt(AfterPuts(store.backend, "intents/", [condemn]))

    assert all(loads(store, step) for step in range(4))
    assert optimized_packs(store) - before
    assert bases_elsewhere(store, before) == set()


def test_packs_of_bases_are_named_in_an_intent_before_deltas_are_written() -> None:
    store = half_done()
    before = optimized_packs(store)
    named: set[str] = set()

    def look() -> None:
        for info in store.backend.list("intents"):
            named.update(parse_intent(info, store.backend.get(info.key)).bases)

    attempt(AfterPuts(store.backend, "packs/", [look]))

    assert bases_elsewhere(store, before) <= named
    assert bases_elsewhere(store, before)

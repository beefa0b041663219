"""Forms beside saves, collections and deletions, under every schedule with few preemptions."""

from __future__ import annotations

import random

import pytest

from tests.protocol.casts import Cast
from tests.protocol.delta_casts import stored
from tests.protocol.explored import (
    N_RANDOM,
    MakeCast,
    assert_no_schedule_fails,
    assert_no_walk_fails,
    long_but,
    long_but_first,
    name_of,
)
from tests.protocol.form_casts import collected, deriver, restorer, saver_of_known, with_forms

N_PARTS = 12


def new_form() -> Cast:
    """A form is written while the checkpoint of its input is deleted."""
    cast = stored({0: "a", 1: "A"}, "a", "A")
    return deriver(cast, "deriver", 1, "A").collector("collector").deletion("deletion", 0)


def new_form_of_garbage() -> Cast:
    """Two collectors are about to delete the input."""
    cast = stored({0: "a", 1: "A"}, "a", "A", drop=[0])
    return deriver(cast, "deriver", 1, "A").collector("first").collector("second")


def new_form_of_a_delta() -> Cast:
    """The input is a delta, and its base is needed for nothing else."""
    cast = stored({0: "b", 1: "B"}, "a", "b<a", "B")
    return deriver(cast, "deriver", 1, "B").collector("collector").deletion("deletion", 0)


def each_of_the_other() -> Cast:
    """Two optimizations derive two tensors from each other."""
    cast = stored({0: "a", 1: "A"}, "a", "A")
    return deriver(deriver(cast, "one", 1, "A"), "other", 0, "a").collector("collector")


def pack_or_form() -> Cast:
    """A chunk lies in a pack, a form derives it too, and two collectors may each rely on another one."""
    cast = with_forms(stored({0: "a", 1: "A"}, "a", "A"), {1: "A"})
    return cast.collector("first").collector("second").writer("writer", "A", 2)


def derived_tensor_is_saved() -> Cast:
    """Somebody saves what only a form derives, while its last checkpoint is deleted."""
    cast = collected(with_forms(stored({0: "a", 1: "A"}, "a", "A"), {1: "A"}))
    return cast.writer("writer", "A", 2).collector("collector").deletion("deletion", 1, 0)


def derived_tensor_is_read() -> Cast:
    """The pack of a chunk goes, since a form derives it, while somebody reads."""
    cast = with_forms(stored({0: "a", 1: "A"}, "a", "A"), {1: "A"})
    return cast.reader("reader", 1).collector("collector").deletion("deletion", 0)


def form_is_replaced() -> Cast:
    """Content is stored in full again while a collector relies on its form, and another one deletes inputs."""
    cast = collected(with_forms(stored({0: "a", 1: "A"}, "a", "A"), {1: "A"}, drop=[0]))
    return restorer(cast, "restorer", 1).collector("first").collector("second")


def form_of_a_deleted_checkpoint() -> Cast:
    """A checkpoint goes with its form, and the same process saves the same again."""
    cast = with_forms(stored({0: "a", 1: "A"}, "a", "A"), {1: "A"})
    return saver_of_known(cast, "saver", "A", 1, 2).collector("first").collector("second")


CASTS = [new_form, new_form_of_garbage, new_form_of_a_delta, each_of_the_other, pack_or_form]
CASTS += [derived_tensor_is_saved, derived_tensor_is_read, form_is_replaced, form_of_a_deleted_checkpoint]
QUICK = {new_form, derived_tensor_is_read, form_is_replaced}


@pytest.mark.long
@pytest.mark.parametrize("make", long_but(QUICK, CASTS), ids=name_of)
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.long)])
def test_no_schedule_of_forms_loses_a_chunk_or_leaks(make: MakeCast, *, is_remote: bool) -> None:
    assert_no_schedule_fails(make(), is_remote=is_remote)


@pytest.mark.long
@pytest.mark.parametrize("make", CASTS, ids=name_of)
def test_no_schedule_of_forms_with_a_death_loses_a_chunk(make: MakeCast) -> None:
    cast = make()

    assert_no_schedule_fails(cast, deaths=[name for name in cast.actors if name not in ("deletion", "second")])


def everybody(draw: random.Random) -> Cast:
    """A crowd: optimizations, writers, collectors, deletions and readers."""
    cast = stored({0: "a", 1: "Ab", 2: "Bd", 5: "D"}, "a", "A b", "B d<a", "D g")
    forms = dict(draw.sample([(1, "A"), (2, "B"), (5, "D")], draw.choice([0, 1, 2])))
    with_forms(cast, forms, drop=draw.sample([0, 1, 2], 1))
    waste, grace_s = draw.choice([0.0, 0.0, 0.5]), draw.choice([0.0, 0.0, 3600.0])
    deriver(cast, "d1", *draw.choice([(1, "A"), (2, "B"), (0, "a")]))
    deriver(cast, "d2", *draw.choice([(5, "D"), (1, "b"), (2, "B")]))
    restorer(cast, "s", draw.choice([1, 2, 5]))
    cast.writer("w1", draw.choice(["AB", "aD", "ce"]), 6)
    cast.writer("w2", draw.choice(["A", "b", "Dd"]), draw.choice([1, 7]))
    cast.collector("c1", max_waste=waste, rounds=draw.choice([1, 2]))
    cast.collector("c2", max_waste=waste, grace_s=grace_s, rounds=draw.choice([1, 2]))
    cast.deletion("deletion", *draw.sample([0, 1, 2, 6], draw.choice([1, 2, 3])))
    cast.reader("r5", 5)
    return cast


@pytest.mark.parametrize("part", long_but_first(N_PARTS))
def test_random_schedules_of_a_crowd_with_forms_lose_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 3)
    assert_no_walk_fails(everybody, range(part, N_RANDOM, N_PARTS), mortal="wcds")

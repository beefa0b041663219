"""A request that goes wrong costs time and nothing else, whichever it is and whatever happens to it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from tensorcas_mlflow.backends import _buckets, _objects
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tests.backends.objects.faults import (
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    CutBody,
    CutUpload,
    Fault,
    Late,
    LostAnswer,
    ResetBefore,
    Stall,
)
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.servers import S3Server
from tests.backends.objects.trials import (
    LATE_S,
    SILENCE_S,
    Place,
    Prepare,
    Trials,
    are_equal,
    be_hasty,
    model_of,
    reach,
    save,
)

FAULTS: dict[str, Fault] = {
    "slow down": SLOW_DOWN,
    "too many requests": TOO_MANY_REQUESTS,
    "internal error": INTERNAL_ERROR,
    "reset before": ResetBefore(),
    "lost answer": LostAnswer(),
    "cut upload": CutUpload(after_bytes=20),
    "cut answer": CutBody(after_bytes=20),
    "reset answer": CutBody(after_bytes=20, reset=True),
    "stall": Stall(seconds=2 * SILENCE_S),
    "late arrival": Late(seconds=LATE_S),
}


@pytest.fixture(autouse=True)
def hasty(s3: S3Server, way: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are reached through the proxy, by clients that do not wait long."""
    reach(s3.at(way.endpoint), monkeypatch)
    be_hasty(monkeypatch)


@pytest.fixture
def trials(s3: S3Server, way: Proxy, bucket: str) -> Trials:
    return Trials(s3, way, bucket)


def first_save(place: Place) -> Callable[[], None]:
    store = place.through()
    return lambda: void(place.keep(store, 0, model_of(0)))


def changed_save(place: Place) -> Callable[[], None]:
    store = place.through()
    place.keep(store, 0, model_of(0))
    return lambda: void(place.keep(store, 1, model_of(0) | {"layer.1": model_of(1)["layer.1"]}))


def unchanged_save(place: Place) -> Callable[[], None]:
    store = place.through()
    place.keep(store, 0, model_of(0))
    return lambda: void(place.keep(store, 1, model_of(0)))


def replacing_save(place: Place) -> Callable[[], None]:
    place.keep(place.direct(), 0, model_of(0))
    store = place.through()
    return lambda: void(place.keep(store, 0, model_of(1)))


def large_save(place: Place) -> Callable[[], None]:
    store = place.through()
    return lambda: void(place.keep(store, 0, model_of(0, n_tensors=2, n_bytes=6 << 20)))


def load(place: Place) -> Callable[[], None]:
    place.keep(place.direct(), 0, model_of(0))

    def act() -> None:
        store = place.through()
        (ref,) = store.checkpoints()

        assert are_equal(store.read_tensors(store.manifest(ref)), model_of(0))

    return act


def stream(place: Place) -> Callable[[], None]:
    store = place.through()
    content = b"".join(tensor.tobytes() for tensor in model_of(0).values())

    def act() -> None:
        with store.write_stream(io.BytesIO(content)) as pending:
            ref = pending.commit(RefTarget(path="a/file"))

        assert b"".join(place.direct().iter_file(ref)) == content
        place.direct().drop(ref)

    return act


def collection(place: Place) -> Callable[[], None]:
    """One that aborts a save, rewrites a pack, and deletes others."""
    direct = place.direct()
    for step in range(3):
        place.keep(direct, step, model_of(step) | {"of all": model_of(9)["layer.0"]})
    direct.begin_checkpoint(model_of(7)).write()
    for ref in direct.checkpoints()[:2]:
        direct.drop(ref)
        del place.models[ref.step or 0]
    store = place.through()
    return lambda: void(plan_gc(store, grace_s=0).execute())


def drop(place: Place) -> Callable[[], None]:
    ref = save(place.direct(), model_of(0), 0)
    store = place.through()
    return lambda: store.drop(ref)


def drop_of_what_was_seen(place: Place) -> Callable[[], None]:
    direct = place.direct()
    with direct.write_checkpoint(model_of(0)) as pending:
        pending.commit(RefTarget(path="a/model"))
    store = place.through()

    def act() -> None:
        assert store.drop_artifact("a/model", store.artifact_token("a/model"))

    return act


def void(result: object) -> None:
    """Let go of a result."""


SMALL: list[Prepare] = [
    first_save,
    changed_save,
    unchanged_save,
    replacing_save,
    load,
    stream,
    collection,
    drop,
    drop_of_what_was_seen,
]


def weigh(prepare: Prepare) -> int:
    """Return the step through an operation's requests: every third of a collection, whose requests are alike."""
    return 3 if prepare is collection else 1


@pytest.mark.long
def test_no_answer_of_a_save_that_is_lost_changes_its_outcome(trials: Trials) -> None:
    for _, place in trials.each(first_save, LostAnswer()):
        place.check()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_store_works_through_many_faults(trials: Trials, way: Proxy, seed: int) -> None:
    place = trials.place()
    for number, fault in enumerate(FAULTS.values()):
        way.inject(fault, times=None, probability=0.03, seed=len(FAULTS) * seed + number)
    store = place.through()
    refs = [place.keep(store, step, model_of(step) | {"of all": model_of(9)["layer.0"]}) for step in range(5)]
    for ref in refs[:2]:
        store.drop(ref)
        del place.models[ref.step or 0]
    plan_gc(store, grace_s=0).execute()
    place.keep(place.through(), 6, model_of(4))
    found = store.read_tensors(store.manifest(refs[4]))
    traffic = way.traffic()
    place.settle()
    way.calm()

    assert are_equal(found, place.models[4])
    assert sum(it.fault is not None for it in traffic.exchanges) > 10
    place.check()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("prepare", SMALL)
def test_fault_of_any_one_request_changes_no_outcome(trials: Trials, prepare: Prepare, fault: str) -> None:
    start = 1 + list(FAULTS).index(fault) % weigh(prepare)
    for _, place in trials.each(prepare, FAULTS[fault], start=start, every=weigh(prepare)):
        place.check()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_any_request_of_a_multipart_upload_changes_no_outcome(
    trials: Trials, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_buckets, _objects):
        monkeypatch.setattr(module, "PART_BYTES", 5 << 20)
    for _, place in trials.each(large_save, FAULTS[fault]):
        place.check()

"""A commit whose answers are lost is done once, and says what became of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorcas_mlflow.backends import _buckets
from tensorcas_mlflow.errors import BackendError, BlobExistsError, CheckpointExistsError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import PendingSave, Store
from tests.backends.objects.faults import SLOW_DOWN, Answer, LostAnswer, Stall
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.trials import SILENCE_S, Place, Trials, be_hasty, model_of, reach

pytestmark = pytest.mark.long

N_REQUESTS = 3
"""Of a commit of a new ref: it says so in the intent, creates the ref, and removes the intent."""
N_REPLACING = 6
"""Of a commit that finds another ref: the first two, a look, the note of another attempt, the ref, and the removal."""
TARGET = RefTarget(run_id="run", step=0)


@pytest.fixture
def place(s3: S3Server, way: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty store."""
    reach(s3.at(way.endpoint), monkeypatch)
    be_hasty(monkeypatch)
    return Trials(s3, way, bucket).place()


def begun(store: Store, seed: int) -> PendingSave:
    """A save that has but to be committed."""
    pending = store.write_checkpoint(model_of(seed))
    pending.write()
    return pending


@pytest.mark.parametrize("replace", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize("nth", range(1, N_REQUESTS + 1))
def test_a_commit_is_done_once_whichever_answer_is_lost(place: Place, nth: int, replace: bool) -> None:
    pending = begun(place.through(), 0)
    place.way.forget()
    place.way.inject(LostAnswer(), nth=nth)
    ref = pending.commit(TARGET, replace=replace)
    place.models[0] = model_of(0)

    assert any(it.fault for it in place.way.traffic().exchanges)
    assert [found.write for found in place.direct().checkpoints()] == [ref.write]
    place.check()


@pytest.mark.parametrize("nth", range(1, N_REPLACING + 1))
def test_a_commit_that_replaces_a_ref_is_done_whichever_answer_is_lost(place: Place, nth: int) -> None:
    place.keep(place.direct(), 0, model_of(1))
    pending = begun(place.through(), 0)
    place.way.forget()
    place.way.inject(LostAnswer(), nth=nth)
    ref = pending.commit(TARGET)
    place.models[0] = model_of(0)

    assert any(it.fault for it in place.way.traffic().exchanges)
    assert [found.write for found in place.direct().checkpoints()] == [ref.write]
    place.check()


@pytest.mark.parametrize("nth", range(1, N_REQUESTS + 1))
@pytest.mark.parametrize("replace", [True, False])
def test_one_of_two_commits_to_a_ref_remains_while_an_answer_stalls(place: Place, nth: int, replace: bool) -> None:
    slow, quick = begun(place.through(), 0), begun(place.direct(), 1)
    place.way.forget()
    place.way.inject(Stall(seconds=2 * SILENCE_S), nth=nth)

    def commit(pending: PendingSave) -> Ref | None:
        try:
            return pending.commit(TARGET, replace=replace)
        except CheckpointExistsError:
            pending.abandon()
            return None

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(commit, slow)
        stalled = threading.Event()
        while not stalled.wait(0.01) and not any(it.fault for it in place.way.traffic().exchanges):
            pass
        # What stalls is carried out by now, or is about to be: both orders are fair.
        outcomes = {0: commit(quick), 1: outcome.result()}
    (left,) = place.direct().checkpoints()
    won = [ref.write for ref in outcomes.values() if ref is not None]
    place.models[0] = model_of(1 if outcomes[0] is not None and left.write == outcomes[0].write else 0)

    assert left.write in won
    assert len(won) == (2 if replace else 1)
    place.check()


def test_a_commit_that_cannot_tidy_up_is_done_all_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.2)
    pending = begun(place.through(), 0)
    place.way.inject(SLOW_DOWN, kinds=(Kind.DELETE,), times=None)
    ref = pending.commit(TARGET, replace=False)
    place.way.calm()
    place.models[0] = model_of(0)

    assert [found.write for found in place.direct().checkpoints()] == [ref.write]
    place.check()


def test_a_save_that_fails_in_its_commit_can_be_made_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.2)
    store = place.through()
    pending = begun(store, 0)
    place.way.inject(LostAnswer(), kinds=(Kind.PUT,), path="/refs/", times=None)
    with pytest.raises(BackendError) as caught:
        pending.commit(TARGET)
    place.way.calm()
    pending.abandon()
    place.keep(store, 0, model_of(2))

    assert "attempts" in str(caught.value)
    place.check()


def test_collection_removes_the_rest_of_a_failed_withdrawal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_buckets, "GIVE_UP_S", 0.2)
    monkeypatch.setattr("tensorcas_mlflow.maintenance._gc.DEFAULT_GRACE_S", 0.0)
    pending = begun(place.through(), 0)
    place.way.inject(SLOW_DOWN, kinds=(Kind.DELETE,), times=None)
    pending.abandon()
    place.way.calm()
    before = place.objects("intents")
    plan_gc(place.direct(), grace_s=0).execute()

    assert len(before) == 1
    assert place.objects("intents") == []


def test_a_conflict_that_may_pass_is_waited_for(place: Place) -> None:
    place.way.inject(Answer(409, "ConditionalRequestConflict"), kinds=(Kind.PUT,), times=3)
    place.keep(place.through(), 0, model_of(0))

    place.check()


def test_a_key_that_is_taken_is_not_asked_for_again_where_a_store_calls_it_a_conflict(place: Place) -> None:
    backend = place.through().backend
    backend.put_new("a/key", [b"first"])
    place.way.forget()
    place.way.inject(Answer(409, "BlobAlreadyExists"), kinds=(Kind.PUT,), times=None)  # as Azure does
    with pytest.raises(BlobExistsError):
        backend.put_new("a/key", [b"second"])

    assert len(place.way.traffic().of(Kind.PUT)) == 1

"""Saves that go on after `log_checkpoint` has returned."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.integration.checkpoints import CheckpointInfo, _log
from tensorcas_mlflow.integration.checkpoints._pace import Pace
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tests.zygote import run_program


def log(weights: np.ndarray[Any, Any], step: int, **options: Any) -> CheckpointInfo:
    info: CheckpointInfo = mlflow.tensorcas.log_checkpoint({"w": weights}, step=step, blocking=False, **options)
    return info


def weights_of(step: int) -> np.ndarray[Any, Any]:
    return np.array(mlflow.tensorcas.load_checkpoint(step=step)["w"])


def drain() -> None:
    """Wait for all saves, and ignore their errors."""
    for _ in range(20):
        with contextlib.suppress(MlflowException):
            mlflow.tensorcas.wait()


@pytest.fixture
def weights() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=300_000)


@pytest.fixture
def slow_packs(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Packs are written only once this is set, by saves in the background."""
    go_on = threading.Event()
    put_all = FolderBackend.put_all

    def wait_first(self: FolderBackend, blobs: Any) -> Any:
        assert go_on.wait(30)
        return put_all(self, blobs)

    monkeypatch.setattr(FolderBackend, "put_all", wait_first)
    return go_on


@pytest.fixture
def failing_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FolderBackend, blobs: Any) -> None:
        raise BackendError("write", "packs", "the disk is full")

    monkeypatch.setattr(FolderBackend, "put_all", fail)


@pytest.fixture
def in_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of all series run in the caller, as after many steps without work between them."""
    monkeypatch.setattr(_log, "pace_of", lambda series: Pace(is_here=True))


@pytest.fixture
def on_thread() -> None:
    """Saves run on the thread, as in the first steps."""


@pytest.fixture(params=["on_thread", "in_caller"])
def each_way(request: pytest.FixtureRequest) -> None:
    """Saves run on the thread, or in the caller."""
    request.getfixturevalue(request.param)


def test_call_frees_its_views_of_the_state_before_the_save_begins(
    experiment: str, weights: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_apart, submit = _log.take_apart, _log.saves.submit
    views: list[weakref.ref[Any]] = []
    are_free: list[bool] = []

    def viewed(*arguments: Any) -> dict[str, Any]:
        tensors = {name: array.view() for name, array in take_apart(*arguments).items()}
        views.extend(map(weakref.ref, tensors.values()))
        return tensors

    def note(*arguments: Any, **options: Any) -> Any:
        are_free.extend(view() is None for view in views)
        return submit(*arguments, **options)

    monkeypatch.setattr(_log, "take_apart", viewed)
    monkeypatch.setattr(_log.saves, "submit", note)
    with mlflow.start_run():
        log(weights, 0).wait()

    assert are_free
    assert all(are_free)


@pytest.mark.usefixtures("in_caller")
def test_save_in_the_caller_is_done_when_the_call_returns(experiment: str, weights: np.ndarray[Any, Any]) -> None:
    with mlflow.start_run():
        info = log(weights, 0)
        assert info._saved is not None
        assert info._saved.done()

    assert info.wait().blocked_s == info.blocked_s
    assert info.wait().new_bytes is not None
    assert np.array_equal(weights_of(0), weights)


def test_change_after_a_background_call_is_not_logged(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event
) -> None:
    expected = weights.copy()
    with mlflow.start_run():
        info = log(weights, 0)
        weights += 1
        assert info.stored_bytes is None
        slow_packs.set()
        finished = info.wait()

    assert finished.stored_bytes is not None
    assert finished.stored_bytes > expected.nbytes // 2
    assert np.array_equal(weights_of(0), expected)


@pytest.fixture
def copied_before(slow_packs: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packs are written only once a second state is copied."""
    copy = Store.copy
    n_copied = 0

    def note(self: Store, *arguments: Any, **options: Any) -> Any:
        nonlocal n_copied
        copied = copy(self, *arguments, **options)
        n_copied += 1
        if n_copied == 2:
            slow_packs.set()
        return copied

    monkeypatch.setattr(Store, "copy", note)
    yield
    drain()


@pytest.fixture
def copied_after(
    slow_packs: threading.Event, weights: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Packs are written late, and a state is too large to be copied before."""
    monkeypatch.setattr(_log, "_MAX_AHEAD_BYTES", weights.nbytes - 1)
    threading.Timer(0.2, slow_packs.set).start()
    yield
    drain()


@pytest.fixture(params=["copied_before", "copied_after"])
def second_copy(request: pytest.FixtureRequest) -> None:
    """The second state is copied before the packs of the first are written, or after."""
    request.getfixturevalue(request.param)


@pytest.mark.long
@pytest.mark.usefixtures("second_copy")
def test_call_waits_for_the_save_before_it_and_each_saves_its_own_state(
    experiment: str, weights: np.ndarray[Any, Any]
) -> None:
    with mlflow.start_run():
        first = log(weights, 0)
        weights[0] = 1
        second = log(weights, 1)
        assert first._saved is not None
        assert first._saved.done()
        weights[0] = 2
        second.wait()

    assert weights_of(0)[0] not in (1, 2)
    assert weights_of(1)[0] == 1


@pytest.mark.usefixtures("second_copy")
def test_step_still_on_its_way_is_refused_without_overwrite(experiment: str, weights: np.ndarray[Any, Any]) -> None:
    with mlflow.start_run():
        log(weights, 0)
        with pytest.raises(MlflowException, match="there is already a checkpoint"):
            log(weights + 1, 0)

    assert np.array_equal(weights_of(0), weights)


def test_large_state_is_copied_after_the_save_before_it(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_log, "_MAX_AHEAD_BYTES", weights.nbytes - 1)
    copy = Store.copy
    were_done: list[bool] = []
    with mlflow.start_run():
        first = log(weights, 0)
        saved = first._saved
        assert saved is not None

        def note(self: Store, *arguments: Any, **options: Any) -> Any:
            were_done.append(saved.done())
            return copy(self, *arguments, **options)

        monkeypatch.setattr(Store, "copy", note)
        threading.Timer(0.2, slow_packs.set).start()
        log(weights, 1).wait()

    assert were_done == [True]


@pytest.mark.usefixtures("each_way")
def test_save_after_a_failed_one_stores_the_chunks_that_both_have(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all, failed = FolderBackend.put_all, threading.Event()

    def fail_first(self: FolderBackend, blobs: Any) -> Any:
        if failed.is_set():
            return put_all(self, blobs)
        assert slow_packs.wait(30)
        failed.set()
        raise BackendError("write", "packs", "the disk is full")

    monkeypatch.setattr(FolderBackend, "put_all", fail_first)
    with mlflow.start_run():
        threading.Timer(0.1, slow_packs.set).start()
        first = log(weights, 0)
        with pytest.raises(MlflowException, match="the disk is full"):
            first.wait()
        log(weights, 1).wait()
        log(weights, 2).wait()

    assert np.array_equal(weights_of(1), weights)
    assert np.array_equal(weights_of(2), weights)


@pytest.mark.usefixtures("each_way")
def test_save_stores_chunks_again_that_were_collected_with_the_step_before(
    experiment: str, weights: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    with mlflow.start_run() as run:
        log(weights, 0).wait()
        mlflow.tensorcas.delete_checkpoint(run.info.run_id, step=0)
        plan_gc(Store.find(tmp_path / "artifacts")[0], grace_s=0, max_waste=0).execute()
        log(weights, 1).wait()

    assert np.array_equal(weights_of(1), weights)


@pytest.mark.long
@pytest.mark.usefixtures("each_way")
def test_save_writes_chunks_again_that_this_process_found_damaged(
    experiment: str, weights: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    with mlflow.start_run():
        log(weights, 0, policy="fast").wait()
        for pack in (tmp_path / "artifacts").rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
        with pytest.raises(MlflowException, match="is damaged in"):
            weights_of(0)
        log(weights, 1, policy="fast").wait()

    assert np.array_equal(weights_of(1), weights)


def test_background_save_of_an_unchanged_state_copies_nothing(experiment: str, weights: np.ndarray[Any, Any]) -> None:
    with mlflow.start_run():
        log(weights, 0).wait()
        info = log(weights, 1).wait()

    assert info.new_bytes == 0
    assert np.array_equal(weights_of(1), weights)


@pytest.mark.usefixtures("failing_packs", "each_way")
def test_an_error_is_raised_where_the_checkpoint_is_waited_for_and_only_there(
    experiment: str, weights: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run():
        info = log(weights, 0)
        with pytest.raises(MlflowException, match="the disk is full"):
            info.wait()
        mlflow.tensorcas.wait()
        monkeypatch.undo()
        log(weights, 1).wait()


@pytest.mark.usefixtures("failing_packs", "each_way")
@pytest.mark.parametrize("join", ["wait", "log", "list", "load"])
def test_later_call_raises_the_error_of_a_background_save(
    experiment: str, weights: np.ndarray[Any, Any], join: str
) -> None:
    calls = {
        "wait": mlflow.tensorcas.wait,
        "log": lambda: [log(weights, step) for step in range(1, 20)],
        "list": mlflow.tensorcas.list_checkpoints,
        "load": mlflow.tensorcas.load_checkpoint,
    }
    with mlflow.start_run():
        log(weights, 0)
        with pytest.raises(MlflowException, match="the disk is full"):
            calls[join]()
        drain()

    assert mlflow.tensorcas.list_checkpoints() == []


@pytest.mark.usefixtures("each_way")
def test_a_save_that_fails_leaves_the_earlier_steps_and_no_intent(
    experiment: str, weights: np.ndarray[Any, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with mlflow.start_run():
        log(weights, 0).wait()
        request.getfixturevalue("failing_packs")
        with pytest.raises(MlflowException, match="the disk is full"):
            log(weights + 1, 1).wait()
    store = Store.find(tmp_path / "artifacts")[0]

    assert list(store.backend.list("intents")) == []
    assert np.array_equal(weights_of(0), weights)


def run_tracked(body: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    program = "import sys, mlflow, numpy as np\nmlflow.set_tracking_uri(sys.argv[1])\n" + body
    done = run_program(program, *arguments)
    assert done.returncode == status, done.stderr
    return done


def test_an_interpreter_that_ends_saves_first(experiment: str, tracking_uri: str) -> None:
    run = mlflow.MlflowClient().create_run(experiment)
    body = (
        "w = np.random.default_rng(0).normal(size=(3_000_000,))\n"
        "mlflow.tensorcas.log_checkpoint({'w': w}, step=1, run_id=sys.argv[2], blocking=False)\n"
        "w += 1\n"
    )
    run_tracked(body, tracking_uri, run.info.run_id)

    (record,) = mlflow.tensorcas.list_checkpoints(run.info.run_id)
    state = mlflow.tensorcas.load_checkpoint(record.uri)
    assert np.array_equal(state["w"], np.random.default_rng(0).normal(size=(3_000_000,)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("last_words", "status"),
    [
        ("", 120),
        pytest.param("sys.exit(0)", 120, marks=pytest.mark.long),
        pytest.param("mlflow.tensorcas.wait()", 1, marks=pytest.mark.long),
    ],
)
def test_an_interpreter_whose_last_save_failed_says_so_and_ends_with_another_status_than_zero(
    experiment: str, tracking_uri: str, last_words: str, status: int
) -> None:
    run = mlflow.MlflowClient().create_run(experiment)
    body = (
        "import atexit\n"
        "atexit.register(lambda: print('another function', file=sys.stderr, flush=True))\n"
        "from tensorcas_mlflow.backends import FolderBackend\n"
        "def fail(self, blobs): raise OSError('the disk is full')\n"
        "FolderBackend.put_all = fail\n"
        "mlflow.tensorcas.log_checkpoint({'w': np.arange(9e5)}, step=1, run_id=sys.argv[2], blocking=False)\n"
    )
    done = run_tracked(body + last_words, tracking_uri, run.info.run_id, status=status)

    assert "the disk is full" in done.stderr
    assert ("was not saved in the background" in done.stderr) == (status == 120)
    assert done.stderr.count("another function") == 1
    assert mlflow.tensorcas.list_checkpoints(run.info.run_id) == []


@pytest.mark.long
def test_a_forked_child_has_none_of_its_parents_saves(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event
) -> None:
    with mlflow.start_run():
        log(weights, 0)
        child = os.fork()
        if child == 0:
            slow_packs.set()
            mlflow.tensorcas.wait()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        slow_packs.set()
        mlflow.tensorcas.wait()

    assert status == 0
    assert np.array_equal(weights_of(0), weights)


@pytest.mark.long
def test_a_save_given_up_for_dead_fails_and_loses_nothing(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event, tmp_path: Path
) -> None:
    with mlflow.start_run():
        slow_packs.set()
        log(weights, 0).wait()
        slow_packs.clear()
        weights[0] += 1
        info = log(weights, 1)
        weights[0] += 1
        store = Store.find(tmp_path / "artifacts")[0]
        for intent in list(store.backend.list("intents")):
            assert store.backend.withdraw(intent.key, intent.token)
        slow_packs.set()
        finished = info.wait()

    # Nothing it relied on was deleted meanwhile, so it could begin again with what it had copied.
    assert finished.new_bytes > 0
    assert weights_of(1)[0] == weights[0] - 1


@pytest.mark.long
def test_a_child_cannot_wait_for_a_save_of_its_parent(
    experiment: str, weights: np.ndarray[Any, Any], slow_packs: threading.Event
) -> None:
    with mlflow.start_run():
        info = log(weights, 0)
        child = os.fork()
        if child == 0:
            try:
                info.wait()
            except RuntimeError:
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        slow_packs.set()
        info.wait()

    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.long
def test_a_function_that_runs_at_exit_may_log(experiment: str, tracking_uri: str) -> None:
    run = mlflow.MlflowClient().create_run(experiment)
    body = (
        "import atexit\n"
        "def log(step):\n"
        "    state = {'w': np.full(300_000, step)}\n"
        "    mlflow.tensorcas.log_checkpoint(state, step=step, run_id=sys.argv[2], blocking=False)\n"
        "atexit.register(log, 1)\n"
        "log(2)\n"
        "atexit.register(log, 3)\n"
    )
    run_tracked(body, tracking_uri, run.info.run_id)

    assert [record.step for record in mlflow.tensorcas.list_checkpoints(run.info.run_id)] == [1, 2, 3]


@pytest.mark.long
def test_metrics_of_many_steps_wait_together_for_a_slow_tracking_store(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    steps_are_logged = threading.Event()
    log_batch = mlflow.MlflowClient.log_batch

    def slow(self: mlflow.MlflowClient, run_id: str, metrics: Any, **options: Any) -> Any:
        assert steps_are_logged.wait(timeout=300)
        if run_id == run.info.run_id:
            batches.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", slow)
    with mlflow.start_run() as run:
        for step in range(20):
            mlflow.tensorcas.log_checkpoint({"w": np.arange(1000)}, step=step)
        steps_are_logged.set()
        mlflow.tensorcas.wait()

    assert sum(batches) == 80
    assert len(batches) <= 2
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "tensorcas/new_bytes")
    assert [metric.step for metric in history] == list(range(20))

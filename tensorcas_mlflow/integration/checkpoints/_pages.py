"""The page of a series beside its steps, ``history.html``: written in the background, for MLflow's UI to show.

A page costs little by construction: after each writing comes a pause of fifty times its duration. Steps that come
meanwhile wait for the next one. `mlflow.tensorcas.wait` and the end of the process write what is waiting. If more than
`_MOST_WAITING` steps come during one writing, the page leaves some out, and says so.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
import time
from collections import OrderedDict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import mlflow
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.backends import UPLOADING
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration._background import pages
from tensorcas_mlflow.integration._figures import as_warning
from tensorcas_mlflow.layout.manifests import Manifest

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.checkpoints._series import Series
    from tensorcas_mlflow.integration.pages import SeriesFacts

_PAUSE = 50
"""Pause after a writing, in durations of the writing."""
_LEAST_PAUSE_S = 1.0
_FAR_PAUSE_S = 30.0
"""The least pause where a writing is a request."""
_MOST_WAITING = 64
_MOST_EARLIER = 200
"""Steps of other processes that a page begins with: the latest ones."""
_MOST_SERIES = 16


class _Waiting(NamedTuple):
    step: int
    created: str
    manifest: Manifest
    stored_bytes: int | None


class _History:
    """The page of one series, as far as this process knows it."""

    def __init__(self, series: Series, folder: str | None) -> None:
        self.series = series
        self.folder = folder
        """The local folder of the page; None if the artifacts are elsewhere."""
        self.tracking_uri = mlflow.get_tracking_uri()
        self.waiting: list[_Waiting] = []
        self.dropped: set[int] = set()
        self.rule: str = ""
        """The rule for the steps to keep that the last save was given, in words."""
        self.metric: str | None = None
        """The metric of that rule."""
        self.is_queued = False
        self.next_s = 0.0
        """Earliest begin of the next writing, by `time.monotonic`."""
        self.n_unseen = 0
        """Steps that had no room to wait, since the last writing."""
        self.n_left_out = 0
        """Steps that the page leaves out."""
        self.facts: SeriesFacts | None = None
        self.turn = Lock()
        """Held while the facts are read or changed."""


_histories: OrderedDict[tuple[str, str], _History] = OrderedDict()
"""By artifact root and name of the series."""
_lock = Lock()


def note_step(series: Series, folder: str | None, step: int, manifest: Manifest, *, stored_bytes: int | None) -> None:
    """Bring the page of a series up to date with a step that has been saved, later.

    Args:
        series: The series.
        folder: The local folder of its steps; None if MLflow keeps the artifacts elsewhere.
        step: The step.
        manifest: Its manifest.
        stored_bytes: Growth of the store.
    """
    if not config.writes_pages():
        return
    key = (series.run.artifact_uri, series.name)
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    with _lock:
        history = _histories.get(key)
        if history is None:
            history = _histories[key] = _History(series, folder)
            if len(_histories) > _MOST_SERIES:
                _histories.popitem(last=False)
        if len(history.waiting) >= _MOST_WAITING:
            _take_waiting(history)
        if len(history.waiting) >= _MOST_WAITING:
            history.waiting.pop()
            history.n_unseen += 1
        history.waiting.append(_Waiting(step, created, manifest, stored_bytes))
        history.dropped.discard(step)
    _queue(history)


def note_rule(series: Series, rule: str, metric: str | None) -> None:
    """Name a rule for the steps to keep on the page of a series, from its next writing on.

    Args:
        series: The series.
        rule: The rule, in words.
        metric: The metric that it goes by, if any.
    """
    with _lock:
        history = _histories.get((series.run.artifact_uri, series.name))
        if history is not None:
            history.rule, history.metric = rule, metric


def note_dropped(series: Series, step: int) -> None:
    """Bring the page of a series up to date with a step that has been deleted, if this process writes the page."""
    with _lock:
        history = _histories.get((series.run.artifact_uri, series.name))
        if history is None:
            return
        history.dropped.add(step)
    _queue(history)


def _queue(history: _History) -> None:
    with _lock:
        if history.is_queued:
            return
        history.is_queued = True
    pages.submit(lambda: _write(history), begin_s=lambda: history.next_s)


def _take_waiting(history: _History) -> None:
    """Add the waiting steps to the facts of a page that is not being written now."""
    if history.turn.acquire(blocking=False):
        try:
            with as_warning("the page of a series of checkpoints leaves out some steps"):
                if history.facts is not None and _add(history.facts, history.waiting):
                    history.waiting = []
        finally:
            history.turn.release()


def _add(facts: SeriesFacts, steps: list[_Waiting]) -> bool:
    """Add steps to the facts of a series; return False, and add none, if they do not follow those before."""
    numbers = [facts.steps[-1].step if facts.steps else -(2**63), *(each.step for each in steps)]
    if any(before >= after for before, after in pairwise(numbers)):
        return False
    for each in steps:
        facts.add(each.step, each.created, each.manifest, stored_bytes=each.stored_bytes)
    return True


def _write(history: _History) -> None:
    with history.turn:
        _write_in_turn(history)


def _write_in_turn(history: _History) -> None:
    with _lock:
        waiting, history.waiting = history.waiting, []
        history.is_queued = False
        n_unseen, history.n_unseen = history.n_unseen, 0
    began = time.monotonic()
    with as_warning("the page of a series of checkpoints cannot be written"):
        from tensorcas_mlflow.integration.pages import (
            history_page,
            run_facts,
        )  # a process that saves need not wait for it

        facts = _facts_with(history, waiting, n_unseen)
        with _lock:
            dropped, rule, metric = set(history.dropped), history.rule, history.metric
        client = MlflowClient(history.tracking_uri)
        run = run_facts(client, history.series.run.run_id, metric=metric)
        page = history_page(
            history.series.name,
            run,
            facts,
            dropped=dropped,
            n_left_out=history.n_left_out,
            rule=rule,
            is_stored=True,
        )
        _put(history, page)
    ended = time.monotonic()
    least_s = _FAR_PAUSE_S if history.folder is None else _LEAST_PAUSE_S
    history.next_s = ended + max(_PAUSE * (ended - began), least_s)


def _facts_with(history: _History, waiting: list[_Waiting], n_unseen: int) -> SeriesFacts:
    """Return the facts of a series with some more steps; read them anew from the store if steps came out of order."""
    from tensorcas_mlflow.integration.pages import SeriesFacts

    facts = history.facts
    # Of the steps after these some are waiting already.
    newest = max(
        [*(each.step for each in waiting), *(each.step for each in (facts.steps if facts else ()))], default=2**63
    )
    if facts is not None and _add(facts, waiting):
        history.n_left_out += n_unseen
        return facts
    history.facts = None
    facts = SeriesFacts()
    known = {each.step: each for each in waiting}
    steps = sorted({*(step for step in history.series.steps() if step <= newest), *known})
    history.n_left_out = max(0, len(steps) - _MOST_EARLIER)
    stored = _stored_bytes(history) if len(steps) > len(known) else {}
    with _lock:
        # Figures of a step outlive it.
        history.dropped |= {step for step in stored if step < newest and step not in steps}
    for step in steps[-_MOST_EARLIER:]:
        if step in known:
            one = known[step]
            facts.add(step, one.created, one.manifest, stored_bytes=one.stored_bytes)
            continue
        try:
            checkpoint = history.series.find(step)
            if checkpoint is not None and not checkpoint.is_cut:
                with checkpoint.opened() as (manifest, _):
                    facts.add(step, checkpoint.created or "", manifest, stored_bytes=stored.get(step))
        except TensorCasError:
            continue  # a load reports the damage
    history.facts = facts
    return facts


def _stored_bytes(history: _History) -> dict[int, int]:
    """Return the growth of the store at earlier steps, from the metrics of the run."""
    from tensorcas_mlflow.integration._figures import figure_name

    client = MlflowClient(history.tracking_uri)
    name = figure_name(history.series.name, "stored_bytes")
    return {each.step: int(each.value) for each in client.get_metric_history(history.series.run.run_id, name)}


def _put(history: _History, page: bytes) -> None:
    from tensorcas_mlflow.integration.pages import HISTORY_PAGE

    if history.folder is not None:
        # MLflow omits names like this from its listings.
        staging = f"{history.folder}{os.sep}{UPLOADING}{new_name()}"
        Path(staging).write_bytes(page)
        os.replace(staging, f"{history.folder}{os.sep}{HISTORY_PAGE}")
        return
    from tensorcas_mlflow.integration.server_store import shelf_at

    series = history.series
    with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
        file = Path(scratch, HISTORY_PAGE)
        file.write_bytes(page)
        shelf_at(series.run.artifact_uri, posixpath.dirname(series.artifact(0))).put(HISTORY_PAGE, file)

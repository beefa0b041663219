"""A step that many processes save together: the coordinator's side, in a run of MLflow."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import mlflow

from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import CheckpointExistsError, WrongStoreError
from tensorcas_mlflow.integration._background import saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration.checkpoints._find import series_of
from tensorcas_mlflow.integration.checkpoints._log import CheckpointInfo, Finish, Keep
from tensorcas_mlflow.integration.checkpoints._series import Saving, run_to_read, run_to_write
from tensorcas_mlflow.integration.checkpoints._store_series import StoreSeries
from tensorcas_mlflow.integration.checkpoints._uris import parse_checkpoint_uri
from tensorcas_mlflow.layout import DEFAULT_NAME, Ref, as_step
from tensorcas_mlflow.store import Policy, Store, store_shards

if TYPE_CHECKING:
    from mlflow.entities import Run

    from tensorcas_mlflow.layout.manifests import Manifest
    from tensorcas_mlflow.reader import CheckpointReader, ReadArrays
    from tensorcas_mlflow.store import Box, JoinedRows, Shard, StoredShards


@dataclass(slots=True)
class StoredPart:
    """Figures of what one process has stored of a step."""

    intents: list[str] = field(default_factory=list)
    """The intents that protect its shards."""
    n_new_bytes: int = 0
    n_stored_bytes: int = 0

    def add(self, stored: StoredShards) -> tuple[Shard, ...]:
        """Count shards; return them."""
        self.intents.append(stored.intent)
        self.n_new_bytes += stored.n_new_bytes
        self.n_stored_bytes += stored.n_stored_bytes
        return stored.shards


class ShardPlace(NamedTuple):
    """Everything a process must know to store its shards of a step."""

    store_uri: str
    store_id: str
    folder: str
    """Name of the series in the store."""
    policy: str
    before: Ref | None
    """The step before, whose chunks may be bases of deltas."""

    def store(self) -> Store:
        """Open the store; a process opens it once.

        Raises:
            WrongStoreError: There is another store at the place.
        """
        store, _ = Store.find(self.store_uri)
        if store.id != self.store_id:
            raise WrongStoreError(self.store_id, store.id, store.uri)
        return store

    def store_boxes(self, boxes: Sequence[Box], part: StoredPart, *, rank: int) -> tuple[Shard, ...]:
        """Store some boxes of a rank; see `store_shards`. The part counts them as soon as they are stored."""
        store = self.store()
        stored = store_shards(
            store,
            boxes,
            series=f"{self.folder}#{rank}.{len(part.intents)}",
            policy=Policy.of(self.policy),
            earlier=None if self.before is None else partial(store.manifest, self.before),
        )
        return part.add(stored)


class ShardedStep:
    """One step of a run whose shards several processes store; one of them commits it."""

    @translate_errors()
    def __init__(
        self,
        *,
        step: int,
        name: str = DEFAULT_NAME,
        run_id: str | Run | None = None,
        overwrite: bool = False,
        keep: Keep | None = None,
        log_metrics: bool | None = None,
        policy: str | None = None,
    ) -> None:
        """Find the step's place; see `log_checkpoint` for the arguments.

        Raises:
            CheckpointExistsError: The step is there and ``overwrite`` is False; it is untouched.
            ValueError: A server keeps the store of the run: other processes cannot write into it.
        """
        self._began = time.perf_counter()
        saves.wait()
        self.step = as_step(step)
        self.policy = Policy.of(policy)
        self._overwrite = overwrite
        self._keep = keep
        self._log_metrics = config.logs_metrics() if log_metrics is None else log_metrics
        series = series_of(run_to_write(run_id), name, create=True)
        if not isinstance(series, StoreSeries) or series.store.backend.is_carrier:
            raise ValueError(
                f"the artifacts of run {series.run.run_id} are behind a server, and many processes can save into a "
                "store only if they reach it themselves: give the experiment an artifact location in a shared "
                "folder or a bucket (docs/deployments.md)"
            )
        self._series = series
        if not overwrite and series.has(self.step):
            raise CheckpointExistsError(f"{name!r} of run {series.run.run_id} at step {self.step}")

    @property
    def store(self) -> Store:
        """The store of the step."""
        return self._series.store

    @property
    def folder(self) -> str:
        """Name of the series in the store."""
        return posixpath.dirname(self._series.target(self.step).key)

    def place(self) -> ShardPlace:
        """Return what the processes must know."""
        return ShardPlace(
            store_uri=self.store.uri,
            store_id=self.store.id,
            folder=self.folder,
            policy=self.policy.value,
            before=self._series.before(self.step),
        )

    @translate_errors()
    def commit(
        self,
        rows: JoinedRows,
        *,
        flavor: str,
        left_out: Mapping[str, str],
        n_tensors: int,
        parts: Iterable[StoredPart],
    ) -> CheckpointInfo:
        """Make the step visible, in one step; log its figures.

        Args:
            rows: Its rows.
            flavor: Name of the adapter of its state.
            left_out: Tensors that cannot be read as arrays, by name, with their types.
            n_tensors: Number of its tensors.
            parts: What each process has stored.
        """
        saving = self._series.begin(
            self.step,
            rows,
            flavor=flavor,
            cuts=None,
            left_out=left_out,
            overwrite=self._overwrite,
            policy=self.policy,
        )
        return Finish(
            series=self._series,
            saving=_WithShards(saving, list(parts)),
            step=self.step,
            n_tensors=n_tensors,
            keep=self._keep,
            log_metrics=self._log_metrics,
            tracking_uri=mlflow.get_tracking_uri(),
            began=self._began,
        )()


class _WithShards(Saving):
    """A save of joined rows, with the figures of the processes that have stored them."""

    def __init__(self, saving: Saving, parts: Sequence[StoredPart]) -> None:
        self._saving = saving
        self._n_stored_bytes = sum(part.n_stored_bytes for part in parts)
        self.n_bytes = saving.n_bytes
        self.n_new_bytes = (saving.n_new_bytes or 0) + sum(part.n_new_bytes for part in parts)

    def finish(self) -> int:
        return (self._saving.finish() or 0) + self._n_stored_bytes

    def abandon(self) -> None:
        self._saving.abandon()


@translate_errors()
def find_whole_step(source: str | Run | None, *, step: int | None, name: str) -> tuple[str, str, int]:
    """Find a step; see `load_checkpoint` for the arguments.

    Returns:
        Its run (the id, or the artifact root), its series and its number.

    Raises:
        NotFoundError: There is no such step.
    """
    saves.wait()
    one = parse_checkpoint_uri(source, step=step, name=name) if isinstance(source, str) else None
    if one is not None:
        source, name, step = one
    run = run_to_read(source)
    return run.run_id if one is None else one[0], name, series_of(run, name).get(step).step


Take = Callable[["Manifest", "ReadArrays"], Any]
"""Takes the manifest of a step and a reader of its arrays."""


@translate_errors()
def open_whole_step(
    run_id: str | Run | None, *, step: int | None, name: str, take: Take, framework: str = "pt"
) -> tuple[Any, CheckpointReader]:
    """Open a step of a run to read its structure, and then parts of its tensors.

    Args:
        run_id: See `load_checkpoint`, as for the others.
        take: Called with the manifest and a reader of arrays.
        framework: The framework of the reader's tensors.

    Returns:
        The result of ``take``, and a reader.

    Raises:
        NotFoundError: There is no such step.
    """
    saves.wait()
    checkpoint = series_of(run_to_read(run_id), name).get(step)
    with checkpoint.opened() as (manifest, read):
        taken = take(manifest, read)
    return taken, checkpoint.reader(framework=framework)

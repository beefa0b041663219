"""Checkpoint series in a store that this process reaches: one ref per step."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.integration._home import Home
from tensorcas_mlflow.integration.checkpoints import _show, _store_series
from tensorcas_mlflow.integration.checkpoints._series import Checkpoint, RunRoot, Saving, Series, step_named
from tensorcas_mlflow.layout import Manifest, Ref, RefTarget, list_dir
from tensorcas_mlflow.reader import Reader
from tensorcas_mlflow.store import PendingSave, Policy, Store
from tensorcas_mlflow.store.protocol import STAND_INS

if TYPE_CHECKING:
    from tensorcas_mlflow.reader import CheckpointReader


_logger = logging.getLogger(__name__)

_MAX_TOLD = 4096
_told: set[tuple[str, str]] = set()
"""Refs of which this process has told, by store and key."""
_lock = Lock()


def stand_ins(store: Store) -> Iterator[Ref]:
    """Read the refs that stand in for another, those which are whole."""
    for info in list_dir(store.backend, STAND_INS)[0]:
        try:
            ref = store.ref(info.key)
        except CorruptError:
            continue
        if ref is not None:
            yield ref


def stand_ins_for(store: Store, target: RefTarget) -> list[Ref]:
    """Read the refs that stand in for that of a run's step, the latest last."""
    step = (target.run_id, target.name, target.step)
    found = [ref for ref in stand_ins(store) if (ref.run_id, ref.name, ref.step) == step]
    return sorted(found, key=lambda ref: ref.created)


def explained(error: CorruptError) -> CorruptError:
    """Say of a ref that cannot be read what it is, and what to do."""
    return CorruptError(error.key, f"{error.reason}; {_CAUSE}: delete the step, or save it again with overwrite=True")


def tell(store: Store, error: CorruptError, *, has_stand_in: bool = False) -> None:
    """Warn of a ref that cannot be read, once in the life of the process."""
    with _lock:
        if (store.uri, error.key) in _told:
            return
        if len(_told) >= _MAX_TOLD:
            _told.clear()
        _told.add((store.uri, error.key))
    if has_stand_in:
        _logger.warning("the ref %r is read from its stand-in, since %s", error.key, _CAUSE)
    else:
        _logger.warning("%s", explained(error))


_CAUSE = "its save has died while it sent this"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSeries(Series):
    """The checkpoints of one name in one run, as refs.

    Where our artifact repository serves the run's artifacts, a checkpoint is the ref of an artifact, so that it is
    listed, downloaded and deleted with the others. Elsewhere it is a ref of the run, and MLflow is given a copy of the
    manifest to show.
    """

    home: Home

    suffix = ".arrow"

    @property
    def store(self) -> Store:
        """The store that keeps them."""
        return self.home.store

    def target(self, step: int) -> RefTarget:
        """Return the content of a step's ref, which also gives its key."""
        path = None if self.home.path is None else posixpath.join(self.home.path, self.artifact(step))
        return RefTarget(
            path=path if self.home.is_ours else None,
            copy_path=None if self.home.is_ours else path,
            uri=posixpath.join(self.run.artifact_uri, self.artifact(step)) if path is None else None,
            run_id=self.run.run_id,
            step=step,
            name=self.name,
        )

    def steps(self) -> list[int]:
        backend = self.store.backend
        found: list[int] = []
        for info in list_dir(backend, posixpath.dirname(self.target(0).key))[0]:
            name = posixpath.basename(info.key)
            step = step_named(name.removeprefix("@"), self.suffix)
            if step is None or name != posixpath.basename(self.target(step).key):
                continue
            if info.size == 0 and backend.is_carrier and not self._can_be_read(step):
                continue
            found.append(step)
        return sorted(found)

    def find(self, step: int) -> Checkpoint | None:
        target = self.target(step)
        try:
            ref = self.store.ref(target.key)
        except CorruptError as error:
            if not self.store.backend.is_carrier:
                raise
            saved = _store_series.stand_ins_for(self.store, target)
            _store_series.tell(self.store, error, has_stand_in=bool(saved))
            return _StoredCheckpoint(self, step, saved[-1]) if saved else _CutCheckpoint(self, step, error)
        return _StoredCheckpoint(self, step, ref) if ref is not None and ref.kind == "checkpoint" else None

    def has(self, step: int) -> bool:
        return self.store.backend.stat(self.target(step).key) is not None

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Array],
        *,
        flavor: str,
        cuts: Mapping[str, Sequence[int]] | None,
        overwrite: bool,
        policy: Policy,
        metadata: Mapping[str, Any] | None = None,
        left_out: Mapping[str, str] | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> Saving:
        save = self.store.begin_checkpoint(
            tensors,
            flavor=flavor,
            cuts=cuts,
            policy=policy,
            metadata=metadata,
            left_out=left_out,
            watch=watch,
            series=posixpath.dirname(self.target(step).key),
            earlier=partial(self._before, step),
        )
        return _StoreSaving(self, step, save, overwrite=overwrite, watch=watch)

    def drop(self, step: int) -> None:
        """Drop the ref of a step, and what an overwriting that failed has left of it."""
        target = self.target(step)
        self.store.backend.delete(target.key)
        if self.store.backend.is_carrier:
            for ref in _store_series.stand_ins_for(self.store, target):
                self.store.drop(ref)
        _show.hide(self, step)

    def _before(self, step: int) -> Manifest | None:
        """Read the step before another; None if there is none."""
        before = max((each for each in self.steps() if each < step), default=None)
        ref = None if before is None else self.store.ref(self.target(before).key)
        return None if ref is None else self.store.manifest(ref)

    def _can_be_read(self, step: int) -> bool:
        found = self.find(step)
        return found is not None and not found.is_cut


class _StoredCheckpoint(Checkpoint):
    """A ref, and what it keeps."""

    def __init__(self, series: StoreSeries, step: int, ref: Ref) -> None:
        self.step = step
        self.created = ref.created
        self.flavor = ref.flavor
        self._series = series
        self._ref = ref

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, Reader]]:
        store = self._series.store
        manifest = store.manifest(self._ref)
        yield manifest, partial(store.read_tensors, manifest)

    def reader(self, **options: Any) -> CheckpointReader:
        from tensorcas_mlflow.reader import open_ref  # who only saves need not wait for it

        return open_ref(self._series.store, self._ref, **options)

    def drop(self) -> None:
        self._series.drop(self.step)


class _CutCheckpoint(Checkpoint):
    """A ref that cannot be read, since its save has died when it put it."""

    created = None
    flavor = None
    is_cut = True

    def __init__(self, series: StoreSeries, step: int, error: CorruptError) -> None:
        self.step = step
        self._series = series
        self._error = error

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, Reader]]:
        raise _store_series.explained(self._error) from self._error
        yield

    def reader(self, **options: Any) -> CheckpointReader:
        raise _store_series.explained(self._error) from self._error

    def drop(self) -> None:
        self._series.drop(self.step)


class _StoreSaving(Saving):
    """A pending save, and what comes after its commit."""

    def __init__(
        self,
        series: StoreSeries,
        step: int,
        save: PendingSave,
        *,
        overwrite: bool,
        watch: Callable[[int], None] | None,
    ) -> None:
        self.manifest = save.manifest
        self.n_new_bytes = save.n_new_bytes
        self._series = series
        self._step = step
        self._save = save
        self._overwrite = overwrite
        self._watch = watch

    def detach(self) -> None:
        self._save.detach()

    def finish(self) -> int:
        with self._save as save:
            save.write(watch=self._watch)
            is_shown = _show.prepare(self._series, self._step, self.manifest)
            target = self._series.target(self._step)
            try:
                save.commit(target, replace=self._overwrite)
            except BaseException:
                if is_shown:
                    _show.hide(self._series, self._step)
                raise
        self._confirm(target)
        if not is_shown:
            _show.show(self._series, self._step, self.manifest)
        return save.n_stored_bytes

    def abandon(self) -> None:
        self._save.abandon()

    def _confirm(self, target: RefTarget) -> None:
        """See that a ref that has replaced another is there.

        A collection that drops the other, because it takes the run for deleted, may have met this one.
        """
        series = self._series
        if self._overwrite and not series.home.is_ours and not series.has(self._step):
            with series.store.adopt(self.manifest) as pin:
                pin.commit(target)


def names_in_store(run: RunRoot, home: Home) -> list[str]:
    """List the names under which a store keeps checkpoints of a run."""
    probe = StoreSeries(run=run, name="x", home=home)
    folder = posixpath.dirname(posixpath.dirname(probe.target(0).key))
    store = home.store
    names: set[str] = set()
    has_cut = False
    for segment in list_dir(store.backend, folder)[1]:
        # The segment is an encoding of the name; a ref says the name itself.
        for info in list_dir(store.backend, f"{folder}/{segment}")[0]:
            try:
                ref = store.ref(info.key)
            except CorruptError as error:
                if store.backend.is_carrier:
                    _store_series.tell(store, error)
                    has_cut = True
                elif not segment.startswith("~"):
                    names.add(unquote(segment))  # whoever asks for its steps is told of the damage
                continue
            if ref is not None and ref.name is not None:
                names.add(ref.name)
                break
    if has_cut:
        # Perhaps all that is whole of some series stands in for it.
        names.update(ref.name for ref in _store_series.stand_ins(store) if ref.run_id == run.run_id and ref.name)
    return sorted(names)

"""Checkpoint series in a store reached by this process: one ref per step, and a copy of its manifest for MLflow."""

from __future__ import annotations

import logging
import os
import posixpath
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import UPLOADING, BlobInfo
from tensorcas_mlflow.base.files import new_name, sync_folder
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, CorruptError
from tensorcas_mlflow.integration._background import reports
from tensorcas_mlflow.integration._figures import as_warning
from tensorcas_mlflow.integration._home import Home, artifact_place, local_folder
from tensorcas_mlflow.integration.checkpoints._pages import note_dropped, note_step
from tensorcas_mlflow.integration.checkpoints._series import Checkpoint, RunRoot, Saving, Series, step_named
from tensorcas_mlflow.integration.checkpoints._uris import FOLDER
from tensorcas_mlflow.layout import STAND_INS, Ref, RefTarget, list_dir, read_listed_refs, unquote_segment
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader import StoreReads

if TYPE_CHECKING:
    from tensorcas_mlflow.reader import CheckpointReader, ReadArrays
    from tensorcas_mlflow.store import JoinedRows, PendingSave, Policy, Store, TensorCopy


_logger = logging.getLogger(__name__)


_MAX_FAILURES = 3
_failures: dict[str, int] = {}
"""Consecutive failed uploads, by artifact root: an unresponsive root costs minutes each time."""

_MAX_COPIES = 16
_copies: OrderedDict[tuple[str, str], tuple[int, TensorCopy]] = OrderedDict()
"""The last copied step of some series, by store and folder of refs; a stored one holds digests and no bytes."""
_lock = Lock()


def prepare(series: StoreSeries, step: int, manifest: Manifest) -> bool:
    """Create MLflow's folder for the run's artifacts, before a checkpoint is committed.

    A collection takes the absence of this folder as proof that MLflow has deleted the run. So every save checks for it:
    the run may be deleted while a process saves into it.

    Returns:
        True if the step is shown already: behind a server, only a file in a folder creates it.

    Raises:
        BackendError: It cannot be created.
        ConflictError: A file of the user's has the name of the step.
    """
    if series.store.backend.is_carrier and series.home.path is not None:
        from tensorcas_mlflow.integration.server_store import shelf_at  # of no use without a server

        is_there = bool(shelf_at(series.run.artifact_uri, "").entries(""))
        if not is_there:
            _put_copy(series, step, manifest)
        return not is_there
    folder = _plain_folder(series)
    if _is_anothers(series, step):
        raise series.in_the_way(step)
    if folder is None or (folder in _prepared and os.path.isdir(folder)):
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        # The name of the run's folder lies four folders up, in the experiment's.
        for above in (Path(folder), *Path(folder).parents[:4]):
            sync_folder(above)
    except OSError as error:
        raise BackendError("make", folder, f"{type(error).__name__}: {error}") from error
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    _prepared.add(folder)
    return False


def _is_anothers(series: StoreSeries, step: int) -> bool:
    """Tell whether a local file, not a copy of a manifest, has the artifact path of a step."""
    folder = local_folder(series.run.artifact_uri)
    if folder is None:
        return False
    try:
        with open(f"{folder}{os.sep}{series.artifact(step)}", "rb") as file:
            return not Manifest.looks_like(file.read(_HEAD_BYTES))
    except OSError:
        return False  # there is none, or the copy cannot be put there either


_HEAD_BYTES = 64 << 10

_MAX_PREPARED = 1024
_prepared: set[str] = set()
"""Local folders with durable names, up to the run's folder."""


def _plain_folder(series: StoreSeries) -> str | None:
    """The folder for the copies of a series, if MLflow itself keeps them in a local folder."""
    place = artifact_place(series.run.artifact_uri)
    if place is None or place.is_ours:
        return None
    return f"{place.root.path}{os.sep}{FOLDER}{os.sep}{series.name}"


def show(series: StoreSeries, step: int, manifest: Manifest) -> None:
    """Upload a copy of a manifest for MLflow to show."""
    if series.home.is_ours:
        return
    folder = _plain_folder(series)
    if folder is None:
        reports.submit(lambda: _upload(series, step, manifest))
        return
    # MLflow omits names like this from its listings.
    staging = f"{folder}{os.sep}{UPLOADING}{new_name()}"
    with as_warning("a copy of a checkpoint's manifest cannot be shown"):
        with open(staging, "wb", buffering=0) as file:
            file.write(manifest.stream)
        os.replace(staging, f"{folder}{os.sep}{posixpath.basename(series.artifact(step))}")


def hide(series: StoreSeries, step: int) -> None:
    """Delete MLflow's copy of a step's manifest; a missing copy is no error."""
    if series.home.is_ours:
        return
    folder = _plain_folder(series)
    if folder is None:
        # After the upload, if one is still queued.
        reports.submit(lambda: _delete(series, step))
        return
    with as_warning("a copy of a deleted checkpoint's manifest stays"):
        Path(folder, posixpath.basename(series.artifact(step))).unlink(missing_ok=True)


def _upload(series: StoreSeries, step: int, manifest: Manifest) -> None:
    root = series.run.artifact_uri
    if _failures.get(root, 0) >= _MAX_FAILURES:
        return
    _failures[root] = _failures.get(root, 0) + 1
    more = ", and no more are tried" if _failures[root] == _MAX_FAILURES else ""
    with as_warning(f"a copy of a checkpoint's manifest cannot be shown{more}"):
        _put_copy(series, step, manifest)
        _failures[root] = 0


def _put_copy(series: StoreSeries, step: int, manifest: Manifest) -> None:
    from tensorcas_mlflow.integration.server_store import shelf_at  # a process that only reads need not wait for it

    artifact = series.artifact(step)
    with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
        file = Path(scratch, posixpath.basename(artifact))
        file.write_bytes(manifest.stream)
        shelf_at(series.run.artifact_uri, posixpath.dirname(artifact)).put(file.name, file)


def _delete(series: StoreSeries, step: int) -> None:
    with as_warning("a copy of a deleted checkpoint's manifest stays"):
        get_artifact_repository(series.run.artifact_uri).delete_artifacts(series.artifact(step))


_MAX_TOLD = 4096
_told: set[tuple[str, str]] = set()
"""Refs already reported by this process, by store and key."""
_told_lock = Lock()


def stand_ins(store: Store) -> Iterator[Ref]:
    """Read the intact stand-ins."""
    for info in list_dir(store.backend, STAND_INS)[0]:
        try:
            ref = store.ref(info.key)
        except CorruptError:
            continue
        if ref is not None:
            yield ref


def stand_ins_for(store: Store, target: RefTarget) -> list[Ref]:
    """Read the stand-ins for a run's step, the latest last."""
    step = (target.run_id, target.name, target.step)
    found = [ref for ref in stand_ins(store) if (ref.run_id, ref.name, ref.step) == step]
    return sorted(found, key=lambda ref: ref.created)


def explained(error: CorruptError) -> CorruptError:
    """Describe an unreadable ref, with the remedy."""
    return CorruptError(error.key, f"{error.reason}; {_CAUSE}: delete the step, or save it again with overwrite=True")


def tell(store: Store, error: CorruptError, *, has_stand_in: bool = False) -> None:
    """Warn of an unreadable ref, once per process."""
    with _told_lock:
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

    If our artifact repository serves the run's artifacts, a checkpoint is the ref of an artifact, and is listed,
    downloaded and deleted with the others. Elsewhere it is a ref of the run, and MLflow gets a copy of the manifest to
    show.
    """

    home: Home

    suffix = ".arrow"

    @property
    def store(self) -> Store:
        """The store of the series."""
        return self.home.store

    def target(self, step: int) -> RefTarget:
        """Return the content of a step's ref; the content determines its key."""
        path = None if self.home.path is None else posixpath.join(self.home.path, self.artifact(step))
        return RefTarget(
            path=path if self.home.is_ours else None,
            copy_path=None if self.home.is_ours else path,
            uri=posixpath.join(self.run.artifact_uri, self.artifact(step)) if path is None else None,
            run_id=self.run.run_id,
            step=step,
            name=self.name,
        )

    def _listed(self) -> dict[int, BlobInfo]:
        """List the refs of the steps, by step, ascending."""
        backend = self.store.backend
        first = self.target(0)
        found: dict[int, BlobInfo] = {}
        for info in list_dir(backend, posixpath.dirname(first.key))[0]:
            name = info.key.rpartition("/@")[2]
            step = step_named(name, self.suffix)
            # A number has more texts than one; the key of a step has the text of `target`.
            if step is None or name != (str(step) if first.path is None else posixpath.basename(self.artifact(step))):
                continue
            if info.size == 0 and backend.is_carrier and not self._can_be_read(step):
                continue
            found[step] = info
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        return list(self._listed())

    def checkpoints(self) -> list[Checkpoint]:
        listed_refs = self._listed()
        refs, damaged = read_listed_refs(self.store.backend, listed_refs.values())
        found = {ref.key: ref for ref in refs}
        listed: list[Checkpoint] = []
        for step, info in listed_refs.items():
            if info.key in damaged:
                listed += self._around_damage(step)
            elif info.key in found and found[info.key].kind == "checkpoint":
                listed.append(_StoredCheckpoint(self, step, found[info.key]))
        return listed

    def find(self, step: int) -> Checkpoint | None:
        target = self.target(step)
        try:
            ref = self.store.ref(target.key)
        except CorruptError as error:
            if not self.store.backend.is_carrier:
                raise
            saved = stand_ins_for(self.store, target)
            tell(self.store, error, has_stand_in=bool(saved))
            return _StoredCheckpoint(self, step, saved[-1] if saved else error)
        return _StoredCheckpoint(self, step, ref) if ref is not None and ref.kind == "checkpoint" else None

    def has(self, step: int) -> bool:
        return self.store.backend.stat(self.target(step).key) is not None

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Array] | JoinedRows,
        *,
        flavor: str,
        cuts: Mapping[str, Sequence[int]] | None,
        overwrite: bool,
        policy: Policy,
        metadata: Mapping[str, Any] | None = None,
        left_out: Mapping[str, str] | None = None,
        watch: Callable[[int], None] | None = None,
        later: bool = False,
    ) -> Saving:
        target = self.target(step)
        series = posixpath.dirname(target.key)
        # Rows that others have stored have no bytes here to copy.
        copy = self._copied(series, step, tensors, cuts) if later and isinstance(tensors, Mapping) else None
        begin = partial(
            self.store.begin_checkpoint,
            tensors if copy is None else copy,
            flavor=flavor,
            cuts=cuts,
            policy=policy,
            metadata=metadata,
            left_out=left_out,
            watch=watch,
            series=series,
            earlier=partial(self._manifest_before, step),
        )
        return _StoreSaving(self, step, target, begin, copy, overwrite=overwrite, watch=watch)

    def _copied(
        self, series: str, step: int, tensors: Mapping[str, Array], cuts: Mapping[str, Sequence[int]] | None
    ) -> TensorCopy:
        """Copy arrays, except the chunks that the last copied step has too."""
        folder = self.store.id, series
        with _lock:
            last, before = _copies.pop(folder, (step, None))
        if before is not None and before.is_stored and not (self.has(last) and self.store.relies_on(before)):
            before = None  # a collection may have deleted its chunks, or a read found one damaged
        copy = self.store.copy(tensors, cuts=cuts, before=before, series=series)
        with _lock:
            _copies[folder] = (step, copy)
            while len(_copies) > _MAX_COPIES:
                _copies.popitem(last=False)
        return copy

    def drop(self, step: int) -> None:
        """Drop the ref of a step, and the remains of a failed overwrite of it."""
        target = self.target(step)
        self.store.backend.delete(target.key)
        if self.store.backend.is_carrier:
            for ref in stand_ins_for(self.store, target):
                self.store.drop(ref)
        hide(self, step)
        note_dropped(self, step)

    def before(self, step: int) -> Ref | None:
        """Read the ref of the step before another; None if there is none."""
        before = max((each for each in self.steps() if each < step), default=None)
        return None if before is None else self.store.ref(self.target(before).key)

    def _manifest_before(self, step: int) -> Manifest | None:
        ref = self.before(step)
        return None if ref is None else self.store.manifest(ref)

    def _can_be_read(self, step: int) -> bool:
        found = self.find(step)
        return found is not None and not found.is_cut


class _StoredCheckpoint(Checkpoint):
    """A checkpoint kept by a ref, or by one cut short when its save died."""

    def __init__(self, series: StoreSeries, step: int, ref: Ref | CorruptError) -> None:
        self.step = step
        self.is_cut = isinstance(ref, CorruptError)
        self.created = None if isinstance(ref, CorruptError) else ref.created
        self.flavor = None if isinstance(ref, CorruptError) else ref.flavor
        self._series = series
        self._ref = ref

    def _whole_ref(self) -> Ref:
        if isinstance(self._ref, CorruptError):
            raise explained(self._ref) from self._ref
        return self._ref

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, ReadArrays]]:
        store = self._series.store
        manifest = store.manifest(self._whole_ref())
        yield manifest, StoreReads(store, manifest)

    def reader(self, **options: Any) -> CheckpointReader:
        from tensorcas_mlflow.reader import open_ref  # a process that only saves need not wait for it

        return open_ref(self._series.store, self._whole_ref(), **options)

    def drop(self) -> None:
        self._series.drop(self.step)


class _StoreSaving(Saving):
    """A pending save, with the work after its commit."""

    def __init__(
        self,
        series: StoreSeries,
        step: int,
        target: RefTarget,
        begin: Callable[[], PendingSave],
        copy: TensorCopy | None,
        *,
        overwrite: bool,
        watch: Callable[[int], None] | None,
    ) -> None:
        self._series = series
        self._step = step
        self._target = target
        self._begin = begin
        self._copy = copy
        self._overwrite = overwrite
        self._watch = watch
        self._save: PendingSave | None = None
        self.n_new_bytes: int | None = None
        if copy is None:
            self._save = self._begun()
        else:
            self.n_bytes = int(copy.sizes.sum())

    def _begun(self) -> PendingSave:
        save = self._begin()
        self.n_bytes, self.n_new_bytes = save.manifest.n_bytes, save.n_new_bytes
        return save

    def finish(self) -> int:
        doubts = self._series.store.catalog.doubts()
        with self._begun() if self._save is None else self._save as save:
            self._save = save
            save.write(watch=self._watch)
            is_shown = prepare(self._series, self._step, save.manifest)
            try:
                save.commit(self._target, replace=self._overwrite)
            except BaseException:
                if is_shown:
                    hide(self._series, self._step)
                raise
        if self._copy is not None:
            self._copy.note_stored(doubts, derived=[*save.recut_rows, *(each.row for each in save.manifest.derived)])
        self._confirm(save.manifest)
        if not is_shown:
            show(self._series, self._step, save.manifest)
        if not self._series.home.is_ours:
            note_step(
                self._series,
                _plain_folder(self._series),
                self._step,
                save.manifest,
                stored_bytes=save.n_stored_bytes,
            )
        return save.n_stored_bytes

    def abandon(self) -> None:
        if self._save is not None:
            self._save.abandon()
        if self._copy is not None and not self._copy.is_stored:
            with _lock:
                # Later copies must not rely on one that nobody stores.
                for folder in [folder for folder, (_, copy) in _copies.items() if copy is self._copy]:
                    del _copies[folder]

    def _confirm(self, manifest: Manifest) -> None:
        """Check that a replacing ref still exists.

        A collection may drop the old ref because it takes the run for deleted, and hit the new one instead.
        """
        series = self._series
        if self._overwrite and not series.home.is_ours and not series.has(self._step):
            with series.store.adopt(manifest) as pin:
                pin.commit(self._target)


def names_in_store(run: RunRoot, home: Home) -> list[str]:
    """List the names of a run's checkpoint series in a store."""
    probe = StoreSeries(run=run, name="x", home=home)
    folder = posixpath.dirname(posixpath.dirname(probe.target(0).key))
    store = home.store
    names: set[str] = set()
    has_cut = False
    for segment in list_dir(store.backend, folder)[1]:
        # The segment is an encoding of the name; a ref has the name itself.
        for info in list_dir(store.backend, f"{folder}/{segment}")[0]:
            try:
                ref = store.ref(info.key)
            except CorruptError as error:
                if store.backend.is_carrier:
                    tell(store, error)
                    has_cut = True
                elif not segment.startswith("~"):
                    names.add(unquote_segment(segment))  # a later call for its steps reports the damage
                continue
            if ref is not None and ref.name is not None:
                names.add(ref.name)
                break
    if has_cut:
        # A stand-in may be the only intact ref of a series.
        names.update(ref.name for ref in stand_ins(store) if ref.run_id == run.run_id and ref.name)
    return sorted(names)

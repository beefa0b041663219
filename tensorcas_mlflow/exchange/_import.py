"""Importing: a file's tensors as a checkpoint of a store, with what the store holds already not stored again."""

from __future__ import annotations

from collections.abc import Callable

from tensorcas_mlflow._texts import count_text
from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.blob_names import list_dir
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.exchange._spill import arrays_of
from tensorcas_mlflow.file_formats import Listing, Tensors, left_out_parts
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import Policy, Ref, RefTarget, Store

_FLAVORS = dict.fromkeys(("npz", "npy", "pickle", "skops", "xgboost"), "generic")
_FLAVOR = "pytorch"
"""Of all other formats: that adapter fills modules by the tensors' names, and gives tensors of any dtype."""
_PHASES = 3
"""A tensor is put where it can be viewed, hashed, and stored."""


def import_checkpoint(
    store: Store,
    source: Listing,
    target: RefTarget,
    *,
    flavor: str | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    policy: Policy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ref:
    """Store the tensors of a file, or of several that belong together, as a checkpoint.

    The tensors are read from the mapped file, and those that cannot be viewed there from a temporary file, so that
    memory stays bounded. The manifest says what the tensors and the file's metadata say, and not where they came from:
    equal files, whatever their names, and files of one content in formats without metadata, share one. Nothing is
    unpickled.

    Args:
        store: Where to.
        source: The file, from `formats.open_listing`. It must not change meanwhile; if it does, nothing is committed.
        target: What the checkpoint is called.
        flavor: Name of the adapter that is to load it; unless given, ``generic`` for those of arrays (npz, npy, pickle,
            skops, xgboost) and ``pytorch`` for all others. Whoever loads it gives a live model to fill, or takes the
            weights only.
        allow_left_out: Whether to import a file of which some tensors cannot be stored, without them.
        overwrite: Whether a checkpoint of that name is replaced.
        policy: As for `Store.begin_checkpoint`.
        progress: Called with how much is done, and how much there is to do, in bytes of which each counts once for
            each time that it is gone through.

    Returns:
        The ref of the checkpoint; when it is returned all is on disk.

    Raises:
        ValueError: Tensors would be left out, and that was not allowed; the message names them. Or a name is one that
            no tensor may have.
        CheckpointExistsError: There is one and ``overwrite`` is False; it is untouched.
        CorruptError: The file is damaged, where that shows.
        ConflictError: The file was changed meanwhile.
        BackendError: It cannot be read, or the store not be written.
    """
    if not overwrite and store.ref(target.key) is not None:
        raise CheckpointExistsError(f"step {target.step} of run {target.run_id!r}")
    prepared = prepare_import(source, flavor=flavor, allow_left_out=allow_left_out, progress=progress)
    with store.begin_checkpoint(
        prepared.arrays,
        flavor=prepared.flavor,
        metadata=prepared.metadata,
        left_out=prepared.left_out,
        series=target.key.rpartition("/")[0],
        earlier=lambda: _earlier(store, target),
        policy=policy,
        watch=prepared.watch,
    ) as save:
        prepared.hashed(save.n_new_bytes)
        save.write(watch=prepared.watch)
        ref = save.commit(target, replace=overwrite)
    prepared.stored()
    return ref


class PreparedImport:
    """The tensors of a file, where a save can view them; and how far it has come."""

    def __init__(self, source: Listing, flavor: str, told: _Told) -> None:
        """View tensors.

        Args:
            source: The file.
            flavor: Name of the adapter that is to load them.
            told: Counts what is done.
        """
        self.flavor = flavor
        self.metadata = source.metadata
        self.left_out = source.left_out
        self._told = told
        self.arrays = arrays_of(source, watch=told.more)
        told.reach(1)

    def watch(self, n_bytes: int) -> None:
        """Take note of bytes that a save has gone through."""
        self._told.more(n_bytes)

    def hashed(self, n_new_bytes: int) -> None:
        """Take note that all is hashed, and how much of it is new."""
        self._told.reach(2)
        self._told.more(self._told.n_bytes - n_new_bytes)

    def stored(self) -> None:
        """Take note that all is stored."""
        self._told.reach(_PHASES)


def prepare_import(
    source: Listing,
    *,
    flavor: str | None = None,
    allow_left_out: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PreparedImport:
    """Do what an import does before a save begins; see `import_checkpoint`, whose arguments these are.

    Raises:
        ValueError: As there.
        CorruptError: As there.
        BackendError: The file cannot be read, or there is no room for a temporary one.
    """
    check_left_out(source, allow_left_out=allow_left_out)
    if SKELETON in source.locations:
        # What is stored under this name is read as a pickle when the checkpoint is loaded, and the file is anybody's.
        raise ValueError(f"a tensor is named {SKELETON!r}, which says something else in a store: rename it")
    told = _Told(sum(spec.n_bytes for spec in source.specs()), progress)
    return PreparedImport(source, _FLAVORS.get(source.format, _FLAVOR) if flavor is None else flavor, told)


def check_left_out(source: Tensors, *, allow_left_out: bool) -> None:
    """Refuse tensors of which some would be left out. Example inputs are no part of a model.

    Raises:
        ValueError: There are such tensors, and that is not allowed; the message names them.
    """
    left_out = left_out_parts(source.left_out)
    if left_out and not allow_left_out:
        listed = ", ".join(f"{name!r} ({kind})" for name, kind in left_out.items())
        what = count_text(len(left_out), "tensor")
        raise ValueError(f"{what} cannot be taken as such; pass allow_left_out=True to leave out: {listed}")


def _earlier(store: Store, target: RefTarget) -> Manifest | None:
    """Find the last step before, which this one may be stored as a difference from."""
    if target.step is None or target.run_id is None:
        return None
    prefix = target.key.rpartition("/")[0]
    leaves = (info.key.rpartition("/@")[2] for info in list_dir(store.backend, prefix)[0])
    steps = [int(leaf) for leaf in leaves if leaf.removeprefix("-").isdecimal()]
    before = max((step for step in steps if step < target.step), default=None)
    ref = None if before is None else store.ref(f"{prefix}/@{before}")
    return None if ref is None else store.manifest(ref)


class _Told:
    """Counts what is done, and tells it."""

    def __init__(self, n_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        self.n_bytes = n_bytes
        self._progress = progress
        self._n_done = 0

    def more(self, n_bytes: int) -> None:
        """Take note of bytes that are done."""
        self._tell(self._n_done + n_bytes)

    def reach(self, phase: int) -> None:
        """Take note that so many phases are over, with whatever nobody has told of."""
        self._tell(phase * self.n_bytes)

    def _tell(self, n_done: int) -> None:
        if self._progress is not None and n_done > self._n_done:
            self._progress(n_done, _PHASES * self.n_bytes)
        self._n_done = max(n_done, self._n_done)

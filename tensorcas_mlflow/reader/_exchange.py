"""Import and export: checkpoints from files of foreign formats, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.progress import ByteProgress
from tensorcas_mlflow.base.tensors import ALIGNMENT, Spec
from tensorcas_mlflow.base.text import count_text
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.file_formats import (
    FileHeader,
    Listing,
    TensorLocation,
    Tensors,
    WritePlan,
    left_out_parts,
    metadata_to_keep,
    plan_write,
    spilled,
)
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.reader._reader import CheckpointReader
from tensorcas_mlflow.store import Policy, Store


def arrays_of(listing: Listing, *, watch: Callable[[int], None] | None = None) -> dict[str, Array]:
    """Return all arrays of a listing, with some 16 MiB of them in memory at most.

    Tensors stored plainly in a mapped file are views of it. All others (deflated, in another order, or in a remote
    file) are copied to an unnamed temporary file, and are views of that.

    Args:
        listing: The tensors of one file or several.
        watch: Called with the bytes copied there.

    Returns:
        Read-only arrays by name, in the listing's order. A view keeps its memory alive.

    Raises:
        CorruptError: The file is detectably damaged.
        BackendError: The file cannot be read, or there is no room for a temporary file.
    """
    spilled = {name: place.spec for name, place in listing.locations.items() if not _is_mapped(listing, place)}
    views = _spill(listing, spilled, watch)
    return {name: views[name] if name in views else listing.array(name) for name in listing.locations}


def _is_mapped(listing: Listing, place: TensorLocation) -> bool:
    return place.is_plain and (
        place.n_bytes == 0 or listing.sources[place.source].view(place.start, place.n_bytes) is not None
    )


def _spill(listing: Listing, specs: dict[str, Spec], watch: Callable[[int], None] | None) -> dict[str, Array]:
    if not specs:
        return {}
    starts: dict[str, int] = {}

    def pieces() -> Iterator[bytes | memoryview]:
        end = 0
        for name in specs:
            yield bytes(-end % ALIGNMENT)
            starts[name] = end = end + -end % ALIGNMENT
            for _, piece in listing.stream([name]):
                yield piece
                end += len(piece)
                if watch is not None:
                    watch(len(piece))

    mapped = spilled(pieces())
    views = {}
    for name, spec in specs.items():
        start = starts[name]
        data = mapped[start : start + spec.n_bytes]
        views[name] = np.frombuffer(data, np.uint8).view(spec.numpy_dtype).reshape(spec.shape)
    return views


_FLAVORS = dict.fromkeys(("npz", "npy", "pickle", "skops", "xgboost"), "generic")
_FLAVOR = "pytorch"
"""Adapter for all other formats: it fills modules by the tensors' names, and returns tensors of any dtype."""
_PHASES = 3
"""Phases of an import: a tensor is made viewable, hashed, and stored."""


def import_checkpoint(
    store: Store,
    source: Listing,
    target: RefTarget,
    *,
    flavor: str | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    policy: Policy | None = None,
    progress: ByteProgress | None = None,
) -> Ref:
    """Store the tensors of a file, or of several files that belong together, as a checkpoint.

    The tensors are read from the mapped file, or from a temporary one if they cannot be viewed there, so memory stays
    bounded. The manifest records the tensors and the file's metadata, and not their source. So equal files share a
    manifest whatever their names, and so do files of equal content in formats without metadata. The header of a
    safetensors file is kept where an export would write another one. Nothing is unpickled.

    Args:
        store: The destination.
        source: The file, from `file_formats.open_listing`. It must not change meanwhile; else nothing is committed.
        target: The name of the checkpoint.
        flavor: Name of the adapter for loading it; by default ``generic`` for formats of arrays (npz, npy, pickle,
            skops, xgboost) and ``pytorch`` for all others. A load needs a live model to fill, or returns the weights
            only.
        allow_left_out: Whether to import the file without unsupported tensors.
        overwrite: Whether to replace a checkpoint of that name.
        policy: As for `Store.begin_checkpoint`.
        progress: Called with the bytes done and the bytes in total. A byte counts as a third for each of three passes.

    Returns:
        The ref of the checkpoint, already durable.

    Raises:
        ValueError: Some tensors cannot be stored, and ``allow_left_out`` is False; the message names them. Or a
            tensor's name is invalid.
        CheckpointExistsError: There is one, and ``overwrite`` is False; it is untouched.
        CorruptError: The file is detectably damaged.
        ConflictError: The file was changed meanwhile.
        BackendError: The file cannot be read, or the store cannot be written.
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
        earlier=lambda: store.manifest_before(target),
        policy=policy,
        watch=prepared.watch,
    ) as save:
        prepared.hashed(save.n_new_bytes)
        save.write(watch=prepared.watch)
        ref = save.commit(target, replace=overwrite)
    prepared.stored()
    return ref


class PreparedImport:
    """Tensors of a file, viewable by a save, with the progress of the import."""

    def __init__(self, source: Listing, flavor: str, told: _Told) -> None:
        """View tensors.

        Args:
            source: The file.
            flavor: Name of the adapter for loading them.
            told: Counts the progress.
        """
        self.flavor = flavor
        self.metadata = metadata_to_keep(source)
        self.left_out = source.left_out
        self._told = told
        self.arrays = arrays_of(source, watch=told.more)
        told.reach(1)

    def watch(self, n_bytes: int) -> None:
        """Count bytes processed by a save."""
        self._told.more(n_bytes)

    def hashed(self, n_new_bytes: int) -> None:
        """Record the end of hashing, with the size of the new content."""
        self._told.reach(2)
        self._told.more(self._told.n_bytes - n_new_bytes)

    def stored(self) -> None:
        """Record the end of storing."""
        self._told.reach(_PHASES)


def prepare_import(
    source: Listing,
    *,
    flavor: str | None = None,
    allow_left_out: bool = False,
    progress: ByteProgress | None = None,
) -> PreparedImport:
    """Run the part of an import before the save; see `import_checkpoint` for the arguments.

    Raises:
        ValueError: As there.
        CorruptError: As there.
        BackendError: The file cannot be read, or there is no room for a temporary one.
    """
    check_left_out(source, allow_left_out=allow_left_out)
    if SKELETON in source.locations:
        # A load unpickles content stored under this name, and the file is untrusted.
        raise ValueError(f"a tensor is named {SKELETON!r}, a name reserved for the skeleton: rename it")
    told = _Told(sum(spec.n_bytes for spec in source.specs()), progress)
    return PreparedImport(source, _FLAVORS.get(source.format, _FLAVOR) if flavor is None else flavor, told)


def check_left_out(source: Tensors, *, allow_left_out: bool) -> None:
    """Refuse tensors if some would be left out. Example inputs are no part of a model.

    Raises:
        ValueError: There are such tensors, and ``allow_left_out`` is False; the message names them.
    """
    left_out = left_out_parts(source.left_out)
    if left_out and not allow_left_out:
        listed = ", ".join(f"{name!r} ({kind})" for name, kind in left_out.items())
        what = count_text(len(left_out), "tensor")
        raise ValueError(f"{what} cannot be taken as such; pass allow_left_out=True to leave out: {listed}")


class _Told:
    """Counter and reporter of progress."""

    def __init__(self, n_bytes: int, progress: ByteProgress | None) -> None:
        self.n_bytes = n_bytes
        self._progress = progress
        self._n_done = 0

    def more(self, n_bytes: int) -> None:
        """Count bytes done."""
        self._tell(self._n_done + n_bytes)

    def reach(self, phase: int) -> None:
        """Record the end of this many phases, and count their unreported bytes."""
        self._tell(phase * self.n_bytes)

    def _tell(self, n_done: int) -> None:
        if self._progress is not None and n_done // _PHASES > self._n_done // _PHASES:
            self._progress(n_done // _PHASES, self.n_bytes)
        self._n_done = max(n_done, self._n_done)


def plan_export(
    checkpoint: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    match: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
    allow_left_out: bool = False,
) -> WritePlan:
    """Plan to write the tensors of an open checkpoint or of a listed file into a file or folder of another format.

    The plan reads no tensor. Its `execute` checks each chunk against its digest. Only tensors are written; the skeleton
    of a model is left out.

    Args:
        checkpoint: The tensors.
        out: The file or folder; see `file_formats.plan_write`.
        format: See `file_formats.plan_write`.
        match: Write only tensors with names that match this pattern, as in `fnmatch`: ``*`` stands for any characters,
            dots too.
        shard_bytes: See `file_formats.plan_write`.
        partitions: See `file_formats.plan_write`.
        overwrite: See `file_formats.plan_write`.
        allow_left_out: Whether to write the file without unsupported tensors.

    Raises:
        ValueError: As `file_formats.plan_write`; or no name matches; or tensors would be left out, and
            ``allow_left_out`` is False.
        ConflictError: A file is there, and may not be replaced.
    """
    chosen = checkpoint if match is None else _Matching(checkpoint, match)
    check_left_out(chosen, allow_left_out=allow_left_out)
    header = None
    if chosen is checkpoint:
        # All tensors of a file, back into its format: with the header that it had.
        if isinstance(checkpoint, CheckpointReader):
            header = checkpoint._file_header()
        elif isinstance(checkpoint, Listing):
            header = FileHeader.of(checkpoint)
    return plan_write(
        chosen,
        out,
        format=format,
        shard_bytes=shard_bytes,
        partitions=partitions,
        overwrite=overwrite,
        header=header,
    )


class _Matching:
    """The tensors with names that match a pattern."""

    def __init__(self, tensors: Tensors, pattern: str) -> None:
        self.metadata: Mapping[str, Any] = tensors.metadata
        self.left_out = {name: kind for name, kind in tensors.left_out.items() if fnmatchcase(name, pattern)}
        self._tensors = tensors
        self._specs = [spec for spec in tensors.specs() if fnmatchcase(spec.name, pattern)]
        if not self._specs:
            raise ValueError(f"no tensor has a name like {pattern!r}")

    def specs(self) -> Sequence[Spec]:
        return self._specs

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        return self._tensors.stream(names)

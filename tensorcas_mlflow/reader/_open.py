"""Functions that open a checkpoint or file of a store, or a file of this machine."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats import ByteSource, Listing, OpenSibling, list_source, open_listing
from tensorcas_mlflow.layout import TENSORS_FILE_MAGIC, Manifest, Ref
from tensorcas_mlflow.reader._contents import Contents, FileContents, StoredContents
from tensorcas_mlflow.reader._listed import CountedSource, ListedContents, StoredFileContents, StoredSource
from tensorcas_mlflow.reader._reader import CheckpointReader
from tensorcas_mlflow.store import Store


def open_ref(store: Store, ref: Ref, *, verify: bool = True, **options: Any) -> CheckpointReader:
    """Open what a ref names: a checkpoint, or a file that was taken apart.

    Args:
        store: That holds it.
        ref: Which.
        verify: Whether to check each chunk against its digest.
        options: ``framework``, ``device`` and ``naming``; see `CheckpointReader`.

    Raises:
        CorruptError: Its manifest is damaged or gone.
        FormatError: It is a file in which no tensors are known.
    """
    tally = Tally()
    metered = store.metered(tally)

    def beside(name: str) -> ByteSource:
        path = posixpath.join(posixpath.dirname(ref.path or ""), name)
        other = metered.artifact(path) if ref.path and name == posixpath.basename(name) else None
        if other is None:
            raise FormatError(f"{name!r} is not beside {ref.label}")
        return StoredSource(metered, metered.manifest(other), name=path, verify=verify)

    return open_manifest(
        metered, metered.manifest(ref), tally, label=ref.label, verify=verify, beside=beside, **options
    )


def open_manifest(
    store: Store,
    manifest: Manifest,
    tally: Tally,
    *,
    label: str,
    verify: bool = True,
    beside: OpenSibling | None = None,
    **options: Any,
) -> CheckpointReader:
    """Open a checkpoint or file by its manifest; see `open_ref`.

    Args:
        store: That holds it, counting in ``tally``.
        manifest: Which.
        tally: What is counted in.
        label: Whose it is, in words.
        verify: Whether to check each chunk against its digest.
        beside: Opens the files beside a file that it names.
        options: See `CheckpointReader`.

    Raises:
        FormatError: It is a file in which no tensors are known, or one that is not sound.
    """
    contents: Contents
    if manifest.kind == "checkpoint":
        manifest.check_names()
        contents = StoredContents(store, manifest, label=label, tally=tally, verify=verify)
    else:
        source = StoredSource(store, manifest, name=label, verify=verify)
        listing = list_source(source, beside)
        if listing is None:
            raise FormatError(f"{label} is a file in which no tensors are known")
        contents = StoredFileContents(store, manifest, source, listing, label=label, tally=tally, verify=verify)
    return CheckpointReader(contents, **options)


def open_path(
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    verify: bool = True,
    end: Callable[[], None] | None = None,
    **options: Any,
) -> CheckpointReader:
    """Open a file of this machine, or a folder of files that are one checkpoint.

    Args:
        path: A file that `tensorcas` has written by itself (``.tensors``), or one of the formats of `open_listing`.
        label: What it is called; its path unless given.
        verify: Whether to check what says its digests.
        end: Called when the reader is closed.
        options: See `CheckpointReader`.

    Raises:
        MalformedFileError: It is not what its format allows.
        FormatError: It is of no known format.
        BackendError: It cannot be read.
    """
    label = os.fspath(path) if label is None else label
    if _is_tensors_file(Path(path)):
        return CheckpointReader(FileContents(TensorsFile(path), label=label, verify=verify, end=end), **options)
    return open_listed(open_listing(path), label=label, end=end, **options)


def open_listed(
    listing: Listing, *, label: str, end: Callable[[], None] | None = None, **options: Any
) -> CheckpointReader:
    """Open what is listed of files of this machine.

    Args:
        listing: The tensors.
        label: Whose they are, in words.
        end: Called when the reader is closed.
        options: See `CheckpointReader`.
    """
    tally = Tally()
    sources = tuple(CountedSource(source, tally) for source in listing.sources)
    counted = Listing(
        format=listing.format,
        sources=sources,
        locations=listing.locations,
        metadata=listing.metadata,
        left_out=listing.left_out,
    )
    return CheckpointReader(ListedContents(counted, label=label, tally=tally, end=end), **options)


def _is_tensors_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(TENSORS_FILE_MAGIC))[:-1] == TENSORS_FILE_MAGIC[:-1]  # the last byte is the version
    except OSError:
        return False

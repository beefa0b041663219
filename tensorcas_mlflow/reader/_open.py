"""Functions to open a checkpoint or file of a store, or a local file."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader._contents import Contents, FileContents, StoredContents
from tensorcas_mlflow.reader._reader import CheckpointReader

if TYPE_CHECKING:
    from tensorcas_mlflow.file_formats import ByteSource, Listing, OpenSibling
    from tensorcas_mlflow.store import Store


def open_ref(store: Store, ref: Ref, *, verify: bool = True, **options: Any) -> CheckpointReader:
    """Open the content of a ref: a checkpoint, or a split file.

    Args:
        store: The store of the ref.
        ref: The ref to open.
        verify: Whether to check each chunk against its digest.
        options: ``framework``, ``device`` and ``naming``; see `CheckpointReader`.

    Raises:
        CorruptError: Its manifest is damaged or gone.
        FormatError: It is a file without known tensors.
    """
    tally = ReadCounter()
    metered = store.metered(tally)

    def beside(name: str) -> ByteSource:
        from tensorcas_mlflow.reader._listed import StoredSource

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
    tally: ReadCounter,
    *,
    label: str,
    verify: bool = True,
    beside: OpenSibling | None = None,
    **options: Any,
) -> CheckpointReader:
    """Open a checkpoint or file by its manifest; see `open_ref`.

    Args:
        store: The store of the manifest, counting in ``tally``.
        manifest: The manifest to open.
        tally: Counts the reads.
        label: A name of it, for messages.
        verify: Whether to check each chunk against its digest.
        beside: Opens the files named by it, beside it.
        options: See `CheckpointReader`.

    Raises:
        FormatError: It is a file without known tensors, or an invalid one.
    """
    contents: Contents
    if manifest.kind == "checkpoint":
        contents = StoredContents(store, manifest, label=label, tally=tally, verify=verify)
    else:
        from tensorcas_mlflow.file_formats import list_source
        from tensorcas_mlflow.reader._listed import StoredFileContents, StoredSource

        source = StoredSource(store, manifest, name=label, verify=verify)
        listing = list_source(source, beside)
        if listing is None:
            raise FormatError(f"{label} is a file without known tensors")
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
    """Open a local file, or a folder of files forming one checkpoint.

    Args:
        path: A self-contained file of `tensorcas` (``.tensors``), or one in a format of `open_listing`.
        label: A name for messages; its path by default.
        verify: Whether to check chunks, if the file has digests.
        end: Called when the reader is closed.
        options: See `CheckpointReader`.

    Raises:
        MalformedFileError: It violates its format.
        FormatError: It is of no known format.
        BackendError: It cannot be read.
    """
    label = os.fspath(path) if label is None else label
    if _is_tensors_file(Path(path)):
        from tensorcas_mlflow.chunk_io import TensorsFile

        return CheckpointReader(FileContents(TensorsFile(path), label=label, verify=verify, end=end), **options)
    from tensorcas_mlflow.file_formats import open_listing

    return open_listed(open_listing(path), label=label, end=end, **options)


def open_listed(
    listing: Listing, *, label: str, end: Callable[[], None] | None = None, **options: Any
) -> CheckpointReader:
    """Open a listing of local files.

    Args:
        listing: The tensors.
        label: A name of them, for messages.
        end: Called when the reader is closed.
        options: See `CheckpointReader`.
    """
    from tensorcas_mlflow.file_formats import Listing
    from tensorcas_mlflow.reader._listed import CountedSource, ListedContents

    tally = ReadCounter()
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
    from tensorcas_mlflow.layout.manifests import TENSORS_FILE_MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(TENSORS_FILE_MAGIC))[:-1] == TENSORS_FILE_MAGIC[:-1]  # the last byte is the version
    except (OSError, ValueError):
        return False

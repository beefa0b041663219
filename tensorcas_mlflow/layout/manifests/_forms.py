"""Forms: manifests that say how the content of other manifests is stored (``docs/format.md``, Forms)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout._keys import FORMS, list_blobs, list_dir
from tensorcas_mlflow.layout._records import read_ref, read_refs_around
from tensorcas_mlflow.layout.manifests._manifest import MAX_BYTES, Manifest


def forms_of(
    backend: Backend, manifest: Manifest, keys: Iterable[str] | None = None
) -> Iterator[Manifest | FormatError]:
    """Yield the forms of a manifest, and errors of those that cannot be read.

    Args:
        backend: Backend of the store.
        manifest: The manifest, maybe from a copy of it elsewhere. Its name in the store need not be known.
        keys: Keys of the forms; by default those of all manifests with this content.
    """
    if keys is None:
        keys = [info.key for info in list_dir(backend, f"{FORMS}/{manifest.digest}")[0]]
    for key in keys:
        try:
            ref = read_ref(backend, key)
            form = None if ref is None else read_form(backend, ref.manifest)
        except FormatError as error:
            yield error
            continue
        if form is not None and form.digest != manifest.digest and has_content_of(form, manifest):
            yield form if manifest.label is None else form.labelled(manifest.label)


def each_form(backend: Backend) -> Iterator[Manifest]:
    """Yield the manifests of all forms of a store; leave out damaged ones."""
    refs, _ = read_refs_around(backend, [info.key for info in list_blobs(backend, FORMS)])
    for ref in refs:
        with suppress(CorruptError):
            form = read_form(backend, ref.manifest)
            if form is not None:
                yield form.labelled(ref.label)


def read_form(backend: Backend, name: str) -> Manifest | None:
    """Read the manifest of a form; return None if it is gone, as its form may be.

    Raises:
        CorruptError: It is damaged.
        NewerFormatError: A later release wrote it.
    """
    key = f"manifests/{name}"
    try:
        return Manifest.from_blob(backend.get(key, max_bytes=MAX_BYTES), name)
    except BlobNotFoundError:
        return None
    except NewerFormatError as error:
        raise NewerFormatError(f"{key!r}", error.version, error.supported) from error
    except FormatError as error:
        raise CorruptError(key, getattr(error, "reason", str(error))) from error


def has_content_of(form: Manifest, manifest: Manifest) -> bool:
    """Tell whether two manifests have the same rows, with the same chunks; a form may be forged."""
    ours, theirs = form.columns, manifest.columns
    if (form.kind, form.chunk_bytes, len(ours)) != (manifest.kind, manifest.chunk_bytes, len(theirs)):
        return False
    every = np.arange(len(ours))
    return (
        bool(np.all(ours.equal(every, theirs, every)))
        and ours.names.to_list() == theirs.names.to_list()
        and np.array_equal(form.chunk_sizes, manifest.chunk_sizes)
    )

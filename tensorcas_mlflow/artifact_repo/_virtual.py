"""Files that are listed beside a checkpoint, made while they are downloaded, and never stored."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.artifact_repo._page import render_page
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.store import Ref, Store, payload_bytes, payload_pieces
from tensorcas_mlflow.threads import Lock

MANIFEST_ENDING = ".arrow"
PAYLOAD_ENDING = ".tensors"
PAGE_ENDING = ".html"

_MAX_SIZES = 16_384
_sizes: dict[str, int] = {}
"""Sizes of self-contained files, by the names of their manifests, which say all there is to say: a listing of many
checkpoints reads no manifest twice."""
_sizes_lock = Lock()

_leaves_out_tensors: ContextVar[bool] = ContextVar("leaves_out_tensors", default=False)
"""What `folders_without_tensors` says. MLflow's own code lists a folder in the thread that asked for its download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFile:
    """The page or the self-contained file of a checkpoint."""

    store: Store
    path: str
    """Relative to the store's root."""
    ref: Ref
    """What the artifact beside it shows."""

    @property
    def is_page(self) -> bool:
        """Whether it is the page."""
        return self.path.endswith(PAGE_ENDING)

    @property
    def n_bytes(self) -> int | None:
        """How long it is; None for a page, which would have to be made, and where the manifest cannot be read."""
        if self.is_page:
            return None
        with _sizes_lock:
            known = _sizes.get(self.ref.manifest)
        if known is not None:
            return known
        with suppress(TensorCasError):
            known = payload_bytes(self.store, self.ref)
            with _sizes_lock:
                if len(_sizes) >= _MAX_SIZES:
                    _sizes.clear()
                _sizes[self.ref.manifest] = known
        return known

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Make it; raises as `Store.iter_file` does."""
        if self.is_page:
            yield render_page(self.store, self.ref)
        else:
            yield from payload_pieces(self.store, self.store.manifest(self.ref))


def beside(store: Store, ref: Ref) -> list[VirtualFile]:
    """Name the virtual files beside what an artifact path shows; where one path has a real artifact, that goes first.

    Beside a checkpoint these are its page and its self-contained file, and beside a self-contained file its page.
    """
    stem, ending = posixpath.splitext(ref.path or "")
    endings: tuple[str, ...] = ()
    if ref.kind == "checkpoint" and ending == MANIFEST_ENDING:
        endings = PAGE_ENDING, PAYLOAD_ENDING
    elif ref.kind == "file" and ending == PAYLOAD_ENDING:
        endings = (PAGE_ENDING,)
    return [VirtualFile(store=store, path=stem + each, ref=ref) for each in endings]


def in_folder(store: Store, ref: Ref) -> list[VirtualFile]:
    """Name the virtual files beside what an artifact path shows that the download of a folder under way brings along.

    A model's self-contained file belongs to its folder, unless `folders_without_tensors` says otherwise. The
    checkpoints of a series are downloaded one by one: all steps of a run, each with all its tensors, are nothing that
    anybody wants by accident. Pages are for browsers.
    """
    if _leaves_out_tensors.get() or ref.name is not None:
        return []
    return [file for file in beside(store, ref) if not file.is_page]


@contextmanager
def folders_without_tensors(leaves_out: bool) -> Iterator[None]:
    """Say whether folders that are downloaded in a block, by the thread it runs in, go without self-contained files."""
    before = _leaves_out_tensors.set(leaves_out)
    try:
        yield
    finally:
        _leaves_out_tensors.reset(before)


def virtual_at(store: Store, path: str) -> VirtualFile | None:
    """Find the virtual file that a path, relative to the store's root, shows if nothing real is there; or None."""
    stem, ending = posixpath.splitext(path)
    if ending not in (PAGE_ENDING, PAYLOAD_ENDING) or any(store.artifacts(path)):
        return None
    for origin in (stem + MANIFEST_ENDING, stem + PAYLOAD_ENDING):
        ref = None if origin == path else store.artifact(origin)
        for file in () if ref is None else beside(store, ref):
            if file.path == path:
                return file
    return None


def write_pieces(pieces: Iterable[bytes | bytearray | memoryview], out: Path) -> None:
    """Write a local file, or none at all."""
    try:
        with out.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    except BaseException:
        out.unlink(missing_ok=True)
        raise

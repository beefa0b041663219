"""Virtual files beside an artifact: the page of a checkpoint, its self-contained file, and the page of a series."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration.pages import (
    HISTORY_PAGE,
    PAGE_ENDING,
    PAYLOAD_ENDING,
    SeriesFacts,
    history_bytes,
    history_page,
    order,
    page_bytes,
    render_page,
    run_of,
    series_of,
    step_of,
)
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store, payload_bytes, payload_pieces

_MAX_STEPS = 300
"""Steps read for the page of a series: the latest ones."""
MAX_PAGES_LISTED = 100
"""In a folder with more checkpoints their pages are not listed, only found by their paths."""
MANIFEST_ENDING = ".arrow"

_MAX_SIZES = 16_384
_sizes: dict[tuple[str, bool], int] = {}
"""Sizes of self-contained files and of pages, by the names of their manifests. A manifest never changes, so a listing
of many checkpoints reads none twice."""
_sizes_lock = Lock()

_leaves_out_tensors: ContextVar[bool] = ContextVar("leaves_out_tensors", default=False)
"""Set by `folders_without_tensors`. MLflow's own code lists a folder in the thread of the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFile:
    """The page or the self-contained file of a checkpoint."""

    store: Store
    path: str
    """Relative to the store's root."""
    ref: Ref
    """The ref shown by the artifact beside it."""

    @property
    def is_page(self) -> bool:
        """Tell whether it is the page."""
        return self.path.endswith(PAGE_ENDING)

    @property
    def n_bytes(self) -> int | None:
        """Return the size; None for an unreadable manifest."""
        key = self.ref.manifest, self.is_page
        with _sizes_lock:
            known = _sizes.get(key)
        if known is not None:
            return known
        with suppress(TensorCasError):
            known = page_bytes(self.store.manifest(self.ref)) if self.is_page else payload_bytes(self.store, self.ref)
            with _sizes_lock:
                if len(_sizes) >= _MAX_SIZES:
                    _sizes.clear()
                _sizes[key] = known
        return known

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Generate the content; raises as `Store.iter_file` does."""
        if self.is_page:
            yield render_page(self.store, self.ref)
        else:
            yield from payload_pieces(self.store, self.store.manifest(self.ref))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFile:
    """The page of a series of checkpoints, made when it is read."""

    store: Store
    path: str
    """Relative to the store's root."""
    refs: Sequence[Ref]
    """The steps, in order."""

    @property
    def n_bytes(self) -> int | None:
        """Return the size; None for an unreadable manifest."""
        page = VirtualFile(store=self.store, path=PAGE_ENDING, ref=self.refs[-1]).n_bytes
        return None if page is None else history_bytes(page, min(len(self.refs), _MAX_STEPS))

    def pieces(self) -> Iterator[bytes]:
        """Generate the content; steps with a damaged manifest are left out."""
        facts = SeriesFacts()
        for ref in self.refs[-_MAX_STEPS:]:
            with suppress(TensorCasError):
                facts.add(step_of(ref) or 0, ref.created, self.store.manifest(ref))
        last = self.refs[-1]
        n_left_out = len(self.refs) - len(facts.steps)
        page = history_page(series_of(last) or "checkpoint", run_of(last), facts, n_left_out=n_left_out)
        yield page.ljust(self.n_bytes or 0)


def history_in(store: Store, folder: str, refs: Iterable[Ref]) -> HistoryFile | None:
    """Return the page of the series in a folder; None if the folder holds no series.

    Where a server keeps the store, the steps of a series are self-contained files; one file alone is no series.

    Args:
        store: The store.
        folder: The folder's path in the store.
        refs: The artifacts in it.
    """
    steps = [ref for ref in refs if series_of(ref) is not None and step_of(ref) is not None]
    if not steps or (len(steps) == 1 and steps[0].kind == "file"):
        return None
    return HistoryFile(store=store, path=posixpath.join(folder, HISTORY_PAGE), refs=sorted(steps, key=order))


def beside(store: Store, ref: Ref) -> list[VirtualFile]:
    """List the virtual files beside an artifact; a real artifact of the same path takes precedence.

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
    """List the virtual files to include in the folder download under way.

    A model's self-contained file belongs to its folder, unless `folders_without_tensors` excludes it. The checkpoints
    of a series are downloaded one by one: a download of all steps of a run, with all their tensors, is never intended.
    Pages are for browsers.
    """
    if _leaves_out_tensors.get() or ref.name is not None:
        return []
    return [file for file in beside(store, ref) if not file.is_page]


@contextmanager
def folders_without_tensors(leaves_out: bool) -> Iterator[None]:
    """Omit self-contained files from folders downloaded by this thread within the block."""
    before = _leaves_out_tensors.set(leaves_out)
    try:
        yield
    finally:
        _leaves_out_tensors.reset(before)


def virtual_at(store: Store, path: str) -> VirtualFile | HistoryFile | None:
    """Return the virtual file at a path in the store; None if there is none or a real artifact is there."""
    stem, ending = posixpath.splitext(path)
    if ending not in (PAGE_ENDING, PAYLOAD_ENDING) or any(store.artifacts(path)):
        return None
    folder, name = posixpath.split(path)
    if name == HISTORY_PAGE:
        return history_in(store, folder, store.artifacts(folder)[0])
    for origin in (stem + MANIFEST_ENDING, stem + PAYLOAD_ENDING):
        ref = None if origin == path else store.artifact(origin)
        for file in () if ref is None else beside(store, ref):
            if file.path == path:
                return file
    return None


def write_pieces(pieces: Iterable[bytes | bytearray | memoryview], out: Path) -> None:
    """Write a complete local file, or none."""
    try:
        with out.open("wb") as file:
            for piece in pieces:
                file.write(piece)
    except BaseException:
        out.unlink(missing_ok=True)
        raise

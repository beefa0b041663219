"""Virtual files of a checkpoint: an HTML page of its tensors and changes, and its self-contained file."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, as_keys
from tensorcas_mlflow.base.text import count_text, size_text
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration._artifact_uri import store_root_for
from tensorcas_mlflow.integration.pages import (
    BLOCKED_LINKS,
    HISTORY_PAGE,
    MOST_FACTS_CHARS,
    RunFacts,
    SeriesFacts,
    Tensors,
    Value,
    document,
    history_page,
    packed_facts,
    run_facts_here,
    script,
    tensor_table,
    text,
    time_text,
    totals,
    visible,
)
from tensorcas_mlflow.layout import STEP_TEXT, Manifest, Ref, list_blobs, list_dir, step_of_text
from tensorcas_mlflow.store import Store, payload_bytes, payload_pieces

MAX_CHECKPOINTS = 50
"""Checkpoints examined per page: at most this many of the same series, and as many others."""
MAX_ROWS = 200_000
"""Rows of manifests examined per page."""
MIN_FILE_BYTES = 64 * 1024
"""Smaller files are not examined."""
MAX_BESIDE = 200
MAX_REFS = 2_000
"""Refs read to find checkpoints: at most this many of the same folder, and as many others."""

_MAX_STEPS = 300
"""Steps read for the page of a series: the latest ones."""
MAX_PAGES_LISTED = 100
"""In a folder with more checkpoints their pages are not listed, only found by their paths."""

_STEP = re.compile(rf"step-({STEP_TEXT})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of one tensor."""

    shared_with: str | None
    """A label for the earlier checkpoint with the same tensor, or None."""
    n_chunks: int
    n_new_chunks: int
    """Chunks absent from all examined checkpoints; 0 if the tensor is shared."""
    was_before: bool
    """Whether the step before has a tensor of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierContents:
    """Content of a checkpoint already present in earlier ones."""

    origins: Sequence[Origin]
    """One for each row of its manifest, in order."""
    new_chunks: Digests
    """Digests of the chunks absent from all examined checkpoints, each once."""
    n_new_bytes: int
    """Size of those chunks."""
    n_looked_at: int
    """Checkpoints with a manifest read."""
    is_complete: bool
    """True if every candidate was examined."""
    before: Ref | None
    """The step before in the same series, if any."""
    after: Ref | None
    """The step after, if any."""


def look_back(store: Store, ref: Ref, manifest: Manifest) -> EarlierContents:
    """Find the tensors and chunks of a checkpoint in earlier checkpoints.

    A tensor is shared with the earliest examined step of the same series that holds it. A tensor new to the series may
    be shared with another earlier checkpoint. Unreadable checkpoints are skipped.
    """
    candidates = _candidates(store, ref)
    series, others, is_complete = candidates.series, candidates.others, candidates.is_complete
    rows_of: dict[tuple[str | None, tuple[int, ...], bytes], list[int]] = {}
    for at, content in enumerate(manifest.columns.contents()):
        rows_of.setdefault(content, []).append(at)
    seen = _Seen(manifest)
    found: dict[int, str] = {}
    names_before: frozenset[str] = frozenset()
    n_rows = n_looked_at = 0
    earlier = [*((other, True) for other in series), *((other, False) for other in others)]
    # The latest step comes first, so the earliest step with a tensor is recorded last and stays. Tensors of the series
    # are not searched for elsewhere.
    for other, is_of_series in earlier:
        if n_rows >= MAX_ROWS:
            is_complete = False
            break
        try:
            held = store.manifest(other)
        except TensorCasError:
            is_complete = False
            continue
        n_looked_at += 1
        n_rows += len(held.rows)
        seen.add(held.digests)
        if is_of_series and other is series[0]:
            names_before = frozenset(held.columns.names.to_list())
        label = _label(other, ref, in_series=is_of_series)
        for content in held.columns.contents():
            for at in rows_of.get(content, ()):
                if is_of_series or at not in found:
                    found[at] = label
    return EarlierContents(
        origins=seen.origins(found, [name in names_before for name in manifest.columns.names.to_list()]),
        new_chunks=seen.new_chunks(),
        n_new_bytes=seen.n_new_bytes(),
        n_looked_at=n_looked_at,
        is_complete=is_complete,
        before=series[0] if series else None,
        after=candidates.after,
    )


class _Seen:
    """Chunks of a checkpoint found in other checkpoints."""

    def __init__(self, manifest: Manifest) -> None:
        self._chunk_at = manifest.columns.chunk_at
        self._keys = as_keys(manifest.digests)
        self._seen = np.zeros(len(self._keys), dtype=bool)
        self._sizes = manifest.chunk_sizes

    def add(self, digests: Digests) -> None:
        unknown = np.flatnonzero(~self._seen)
        if len(unknown) and len(digests):
            self._seen[unknown] = np.isin(self._keys[unknown], as_keys(digests))

    def origins(self, found: Mapping[int, str], were_before: Sequence[bool]) -> list[Origin]:
        n_new = np.concatenate(([0], np.cumsum(~self._seen)))
        return [
            Origin(
                shared_with=found.get(at),
                n_chunks=int(end - begin),
                n_new_chunks=0 if at in found else int(n_new[end] - n_new[begin]),
                was_before=was_before,
            )
            for at, ((begin, end), was_before) in enumerate(
                zip(pairwise(self._chunk_at.tolist()), were_before, strict=True)
            )
        ]

    def new_chunks(self) -> Digests:
        return np.ascontiguousarray(self._keys[self._first_new()]).view(np.uint8).reshape(-1, DIGEST_BYTES)

    def n_new_bytes(self) -> int:
        return int(self._sizes[self._first_new()].sum())

    def _first_new(self) -> Any:
        new = np.flatnonzero(~self._seen)
        return new[np.unique(self._keys[new], return_index=True)[1]]


class _Candidates(NamedTuple):
    """The checkpoints to look at. In both lists the latest come first.

    Among the others, checkpoints of the same run precede, and checkpoints precede files.
    """

    series: Sequence[Ref]
    """Earlier ones of the same series."""
    others: Sequence[Ref]
    is_complete: bool
    """Whether these are all."""
    after: Ref | None
    """The next one of the same series."""


def _candidates(store: Store, ref: Ref) -> _Candidates:
    near = _by_nearness(list_dir(store.backend, posixpath.dirname(ref.key))[0], ref)
    far = _latest(info for info in list_blobs(store.backend, "refs") if not _is_beside(info.key, ref))
    is_complete = len(near) <= MAX_BESIDE and len(far) <= MAX_REFS
    series: list[Ref] = []
    others: list[Ref] = []
    later = list(_refs(store, [key for key in near[MAX_BESIDE:][-1:] if key > ref.key]))
    for other in _refs(store, near[:MAX_BESIDE] + far[:MAX_REFS]):
        if other.key == ref.key or not _may_be_named(other, ref):
            continue
        if _is_of_series(other, ref):
            (series if _is_earlier(other, ref) else later).append(other)
        elif other.created <= ref.created and (other.kind == "checkpoint" or other.n_bytes >= MIN_FILE_BYTES):
            others.append(other)
    series.sort(key=_order, reverse=True)
    others.sort(key=lambda other: (_is_of_run(other, ref), other.kind == "checkpoint", other.created), reverse=True)
    later = [other for other in later if _is_of_series(other, ref)]
    return _Candidates(
        series=series[:MAX_CHECKPOINTS],
        others=others[:MAX_CHECKPOINTS],
        is_complete=is_complete and len(series) <= MAX_CHECKPOINTS and len(others) <= MAX_CHECKPOINTS,
        after=min(later, key=_order, default=None),
    )


def _refs(store: Store, keys: Iterable[str]) -> Iterator[Ref]:
    for key in keys:
        try:
            found = store.ref(key)
        except TensorCasError:
            continue
        if found is not None:
            yield found


def _by_nearness(infos: Iterable[Any], ref: Ref) -> list[str]:
    """Order the keys of a folder with the steps just before a ref first; padding makes name order numeric."""
    keys = sorted((info.key for info in infos), reverse=True)
    return [key for key in keys if key < ref.key] + [key for key in keys if key > ref.key]


def _latest(infos: Iterable[Any]) -> list[str]:
    return [info.key for info in sorted(infos, key=lambda info: info.modified_s, reverse=True)]


def _is_beside(key: str, ref: Ref) -> bool:
    return posixpath.dirname(key) == posixpath.dirname(ref.key)


def _may_be_named(other: Ref, ref: Ref) -> bool:
    # Access to one experiment of a server does not imply access to the others.
    if not config.in_mlflow_server() or (_is_of_run(other, ref) and _run_folder(other) == _run_folder(ref) is not None):
        return True
    return None not in (other.uri, ref.uri) and store_root_for(str(other.uri)) == store_root_for(str(ref.uri))


def _run_folder(ref: Ref) -> str | None:
    """Return the folder of a run's artifacts in the store; None if the ref's artifact is not in it."""
    head, middle, _ = f"/{ref.path or ''}".partition(f"/{ref.run_id}/artifacts/")
    return head + middle if middle else None


def _is_of_run(other: Ref, ref: Ref) -> bool:
    return ref.run_id is not None and other.run_id == ref.run_id


def _is_of_series(other: Ref, ref: Ref) -> bool:
    """Tell whether two refs are checkpoints of one name in one run, or models of one run."""
    if not _is_of_run(other, ref) or (other.name, other.kind) != (ref.name, ref.kind):
        return False
    if ref.model_id is not None or other.model_id is not None:
        return ref.model_id is not None and other.model_id is not None
    return _is_beside(other.key, ref)


def step_of(ref: Ref) -> int | None:
    """Return the step of a ref, from the ref or from the name of its file; None if neither has one."""
    if ref.step is not None:
        return ref.step
    match = _STEP.match(posixpath.basename(ref.path or ""))
    return step_of_text(match[1]) if match else None


def _series(ref: Ref) -> str | None:
    """Return the name of a ref's series, from the ref or from the folder of a step's file; None if it has none."""
    folder, name = posixpath.split(ref.path or "")
    if ref.kind == "checkpoint":
        return ref.name
    is_step = name.endswith(PAYLOAD_ENDING) and _STEP.match(name) is not None
    return (posixpath.basename(folder) or None) if is_step else None


def _is_earlier(other: Ref, ref: Ref) -> bool:
    if step_of(other) is None or step_of(ref) is None:
        return other.created < ref.created
    return _order(other) < _order(ref)


def _order(ref: Ref) -> tuple[int, str]:
    step = step_of(ref)
    return (-(2**63) if step is None else step), ref.created


def _label(other: Ref, ref: Ref, *, in_series: bool) -> str:
    """Return the shortest unambiguous name of a checkpoint."""
    step = step_of(other)
    if in_series and step is not None:
        return f"step {step}"
    path = other.path or ""
    if step is not None and other.step is None:
        path = posixpath.dirname(path)  # the file's own name has the step, and its folder's name the series
    words = [f"model {other.model_id}" if other.model_id else other.name or posixpath.basename(path)]
    if step is not None:
        words.append(f"step {step}")
    if other.run_id is not None and not _is_of_run(other, ref):
        words.append(f"of run {other.run_id}")
    return " ".join(filter(None, words)) or other.label


MAX_ROWS_SHOWN = 20_000
MOST_MEASURED_BYTES = 256 << 20
"""Bound of the bytes of changed tensors that a page reads to tell how much they changed."""
MOST_MEASURED_S = 2.0
"""Bound of the time that this takes."""


def render_page(store: Store, ref: Ref) -> bytes:
    """Make the page of a checkpoint.

    Args:
        store: The store of the checkpoint.
        ref: Of a checkpoint, or of a file.

    Returns:
        One self-contained HTML document, in UTF-8.

    Raises:
        CorruptError: Its manifest is damaged or gone.
    """
    manifest = store.manifest(ref)
    earlier = look_back(store, ref, manifest)
    # In a server, a forged ref must not make it ask for a run of another experiment.
    run = run_facts_here(ref.run_id) if _is_in_run(ref) else RunFacts(run_id=ref.run_id or "")
    values = _values(store, ref, manifest, earlier)
    body = _body(store, ref, manifest, earlier, run, values)
    page = "".join(document(_title(ref, run), body, script=script())).encode()
    return page.ljust(page_bytes(manifest))


def page_bytes(manifest: Manifest) -> int:
    """Return the size of the page of a checkpoint.

    A listing needs the size before anybody has made the page, so a page is filled up with spaces. The page of a
    checkpoint with names that hardly compress may be larger.
    """
    rows = range(min(len(manifest.rows), MAX_ROWS_SHOWN))
    names = len(packed_facts(Tensors.of(manifest.columns, rows), (), at=0, values={}, more={}))
    return _whole_blocks(len(script()) + _FRAME_BYTES + names + _STATE_BYTES * len(rows))


def _whole_blocks(n_bytes: int) -> int:
    """Round a size up."""
    return -(-n_bytes // _PAGE_BLOCK) * _PAGE_BLOCK


_FRAME_BYTES = 16_000
"""The page's style, and its texts."""
_STATE_BYTES = 20
"""What a page says of the change of one tensor, compressed and in base64."""
_PAGE_BLOCK = 4096
_STEP_BYTES = 420
"""What the page of a series says of one step: a row of a table, a column of the map, and figures."""
_CHARTS_BYTES = 40_000
"""Its curves, and the labels of its map."""


def _is_in_run(ref: Ref) -> bool:
    """Tell whether the artifact of a ref lies below its run or model."""
    return ref.run_id is not None and (
        not config.in_mlflow_server()
        or any(f"/{each}/" in f"/{ref.path}" for each in (ref.run_id, ref.model_id) if each)
    )


def _body(
    store: Store,
    ref: Ref,
    manifest: Manifest,
    earlier: EarlierContents,
    run: RunFacts,
    values: Mapping[int, Value],
) -> Iterator[str]:
    yield from _about(ref, manifest, run)
    yield from _neighbors(ref, run, earlier)
    yield totals(_totals(store, manifest, earlier))
    if not earlier.is_complete:
        yield f"<p>{text(_limits(earlier))}</p>\n"
    # What is new comes first; a sort keeps the order of the rest.
    order = sorted(range(len(manifest.rows)), key=lambda at: _before(earlier.origins[at])[0] == "shared")
    shown = sorted(order[:MAX_ROWS_SHOWN])
    if values and earlier.before is not None:
        yield f"<p>How much: the change since {text(_label(earlier.before, ref, in_series=True))}"
        n_left = sum(_before(earlier.origins[at])[0] != "shared" for at in shown) - len(values)
        yield f". Not measured: {count_text(n_left, 'tensor')}.</p>\n" if n_left else ".</p>\n"
    yield from tensor_table(_packed(manifest, earlier, shown, values), has_values=bool(values), has_steps=False)
    rest = order[MAX_ROWS_SHOWN:]
    if rest:
        n_bytes = int(manifest.columns.n_bytes[rest].sum())
        yield f"<p>and {len(rest):,} more tensors of {size_text(n_bytes)} together</p>\n"


def _packed(manifest: Manifest, earlier: EarlierContents, shown: Sequence[int], values: Mapping[int, Value]) -> str:
    """Return the page's data about some rows."""
    tensors = Tensors.of(manifest.columns, shown)
    dtypes = [manifest.left_out.get(name) or dtype for name, dtype in zip(tensors.names, tensors.dtypes, strict=True)]
    origins = [_before(earlier.origins[at]) for at in shown]
    states = {state: number for number, state in enumerate(dict.fromkeys(origins))}
    number = {at: number for number, at in enumerate(shown)}
    return packed_facts(
        tensors._replace(dtypes=dtypes),
        (),
        at=0,
        values={number[at]: value for at, value in values.items() if at in number},
        more={
            "states": [(kind, visible(words)) for kind, words in states],
            "state": [states[origin] for origin in origins],
        },
    )


def _values(store: Store, ref: Ref, manifest: Manifest, earlier: EarlierContents) -> dict[int, Value]:
    """Return how much rows changed since the step before, within bounds; nothing if a chunk cannot be read."""
    if earlier.before is None:
        return {}
    from tensorcas_mlflow.reader import measure_some, open_ref  # most pages are of a first step, or change nothing

    names = manifest.columns.names.to_list()
    row_of = {
        name: at for at, name in enumerate(names) if _before(earlier.origins[at])[0] != "shared" and name != SKELETON
    }
    with suppress(TensorCasError), open_ref(store, earlier.before) as before, open_ref(store, ref) as after:
        both = set(before).intersection(after)
        found = measure_some(
            before,
            after,
            [name for name in row_of if name in both],
            most_bytes=MOST_MEASURED_BYTES,
            most_s=MOST_MEASURED_S,
        )
        return {row_of[name]: (each.relative_norm, each.share_equal, each.max_absolute) for name, each in found.items()}
    return {}


def _title(ref: Ref, run: RunFacts) -> str:
    step = step_of(ref)
    if ref.model_id is not None:
        name = f"Model {ref.model_id}" + (f" of {run.name}" if run.name else "")
    elif ref.run_id is not None:
        name = (run.name or f"Run {ref.run_id}") + ("" if ref.name is None else f", {ref.name}")
    else:
        name = ref.label
    return name if step is None else f"{name}, step {step}"


def _about(ref: Ref, manifest: Manifest, run: RunFacts) -> Iterator[str]:
    if ref.run_id is not None:
        yield f"<p>of {run.run_link(f'run {ref.run_id}')}"
        if ref.model_id is not None:
            yield f", {run.link(f'model {ref.model_id}', 'experiments', run.experiment_id, 'models', ref.model_id)}"
        links = [
            run.link(f"{name} version {version}", "models", name, "versions", version)
            for name, version, model_id in run.versions
            if ref.model_id in (None, model_id)
        ]
        yield f"; registered as {', '.join(links)}" if links else ""
        yield f"</p>\n{BLOCKED_LINKS if run.experiment_id else ''}"
    by = "" if manifest.flavor is None else f" by the adapter {manifest.flavor}"
    yield f"<p>stored {text(time_text(ref.created))} UTC{text(by)}</p>\n"
    if ref.metrics:
        yield f"<p>{text(', '.join(f'{name} {value:g}' for name, value in ref.metrics.items()))}</p>\n"


def _neighbors(ref: Ref, run: RunFacts, earlier: EarlierContents) -> Iterator[str]:
    links = [
        _page_link(f"{words} {_label(other, ref, in_series=True)}", other, run)
        for words, other in (("before:", earlier.before), ("after:", earlier.after))
        if other is not None
    ]
    if links and ref.model_id is None and _series(ref) is not None and step_of(ref) is not None:
        links.append(_page_link("all steps", ref, run, HISTORY_PAGE))
    if links:
        yield f"<p>{', '.join(links)}</p>\n"


def _page_link(words: str, ref: Ref, run: RunFacts, name: str | None = None) -> str:
    """Return a link to MLflow's view of a page beside an artifact of the run: its own, or one of another name."""
    below = (ref.path or "").partition(f"{run.run_id}/artifacts/")[2]
    if not below:
        return text(words)
    page = posixpath.join(posixpath.dirname(below), name) if name else posixpath.splitext(below)[0] + PAGE_ENDING
    return run.run_link(words, "artifacts", page)


def _totals(store: Store, manifest: Manifest, earlier: EarlierContents) -> Iterator[tuple[str, str]]:
    n_bytes = manifest.n_bytes
    yield "Tensors", f"{len(manifest.rows):,}"
    yield "Size", size_text(n_bytes)
    share = f" ({100 * earlier.n_new_bytes / n_bytes:.1f} %)" if n_bytes else ""
    yield "New here", size_text(earlier.n_new_bytes) + share
    stored = _stored_bytes(store, earlier.new_chunks)
    if stored is not None:
        yield "Encoded new content", size_text(stored)


def _stored_bytes(store: Store, digests: Digests) -> int | None:
    """Return the stored size of chunks in packs; None if the index misses one of them."""
    places: Any = store.catalog.find(digests)
    if not places.found.all():
        store.catalog.refresh()
        places = store.catalog.find(digests)
    return int(places.entries["stored_bytes"].sum()) if places.found.all() else None


def _limits(earlier: EarlierContents) -> str:
    return (
        f"Compared with {earlier.n_looked_at:,} earlier checkpoints and files: at most {MAX_CHECKPOINTS} of the same "
        f"series and {MAX_CHECKPOINTS} others, the latest of each. A tensor marked as new may be in an unexamined one, "
        "and a shared tensor may be older than stated."
    )


def _before(origin: Origin) -> tuple[str, str]:
    if origin.shared_with is not None:
        return "shared", f"shared with {origin.shared_with}"
    if origin.n_chunks == 0:
        return "shared", "empty"
    if origin.n_new_chunks == origin.n_chunks:
        return ("part", "changed in all chunks") if origin.was_before else ("new", "new at this step")
    if origin.n_new_chunks == 0:
        return "part", f"rearranged: all of {origin.n_chunks:,} chunks are known"
    return "part", f"in part: {origin.n_new_chunks:,} of {origin.n_chunks:,} chunks are new"


MANIFEST_ENDING = ".arrow"
PAYLOAD_ENDING = ".tensors"
PAGE_ENDING = ".html"

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
        if page is None:
            return None
        n_steps = min(len(self.refs), _MAX_STEPS)
        # A page has 20 bytes or more for each tensor, and a history one bit for each tensor and step, in base64.
        marks = min(MOST_FACTS_CHARS, n_steps * (page // (6 * _STATE_BYTES)))
        return _whole_blocks(page + marks + n_steps * _STEP_BYTES + _CHARTS_BYTES)

    def pieces(self) -> Iterator[bytes]:
        """Generate the content; steps with a damaged manifest are left out."""
        facts = SeriesFacts()
        for ref in self.refs[-_MAX_STEPS:]:
            with suppress(TensorCasError):
                facts.add(step_of(ref) or 0, ref.created, self.store.manifest(ref))
        last = self.refs[-1]
        n_left_out = len(self.refs) - len(facts.steps)
        run = run_facts_here(last.run_id) if _is_in_run(last) else RunFacts(run_id=last.run_id or "")
        page = history_page(_series(last) or "checkpoint", run, facts, n_left_out=n_left_out)
        yield page.ljust(self.n_bytes or 0)


def history_in(store: Store, folder: str, refs: Iterable[Ref]) -> HistoryFile | None:
    """Return the page of the series in a folder; None if the folder holds no series.

    Where a server keeps the store, the steps of a series are self-contained files; one file alone is no series.

    Args:
        store: The store.
        folder: The folder's path in the store.
        refs: The artifacts in it.
    """
    steps = [ref for ref in refs if _series(ref) is not None and step_of(ref) is not None]
    if not steps or (len(steps) == 1 and steps[0].kind == "file"):
        return None
    return HistoryFile(store=store, path=posixpath.join(folder, HISTORY_PAGE), refs=sorted(steps, key=_order))


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

"""The checkpoints of a store before one: which of them have its tensors and chunks."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.digest import Digests, as_keys
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration._artifact_uri import store_root_for
from tensorcas_mlflow.layout import STEP_TEXT, Ref, is_shown, list_blobs, list_dir, step_of_text
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store

MAX_CHECKPOINTS = 50
"""Checkpoints examined per page: at most this many of the same series, and as many others."""
MAX_ROWS = 200_000
"""Rows of manifests examined per page."""
MIN_FILE_BYTES = 64 * 1024
"""Smaller files are not examined."""
MAX_BESIDE = 200
MAX_REFS = 2_000
"""Refs read to find checkpoints: at most this many of the same folder, and as many others."""

PAYLOAD_ENDING = ".tensors"
_STEP = re.compile(rf"step-({STEP_TEXT})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierContents:
    """Content of a checkpoint already present in earlier ones."""

    states: Sequence[tuple[str, str]]
    """For each row of its manifest, in order: ``new``, ``part`` or ``shared``, and that in words."""
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
    series, others, is_complete, after = _candidates(store, ref)
    rows_of: dict[tuple[str | None, tuple[int, ...], bytes], list[int]] = {}
    for at, content in enumerate(manifest.columns.contents()):
        rows_of.setdefault(content, []).append(at)
    keys = as_keys(manifest.digests)
    is_new = np.ones(len(keys), bool)
    found: dict[int, str] = {}
    names_before: frozenset[str] = frozenset()
    n_rows = n_looked_at = 0
    # The latest step comes first, so the earliest step with a tensor is recorded last and stays. Tensors of the series
    # are not searched for elsewhere.
    for number, other in enumerate([*series, *others]):
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
        unknown = np.flatnonzero(is_new)
        if len(unknown) and len(held.digests):
            is_new[unknown] = ~np.isin(keys[unknown], as_keys(held.digests))
        if number == 0 and series:
            names_before = frozenset(held.columns.names.to_list())
        label = label_of(other, ref, in_series=number < len(series))
        for content in held.columns.contents():
            for at in rows_of.get(content, ()):
                if number < len(series) or at not in found:
                    found[at] = label
    new = np.flatnonzero(is_new)
    new = new[np.unique(keys[new], return_index=True)[1]]
    return EarlierContents(
        states=_states(manifest, is_new, found, names_before),
        new_chunks=manifest.digests[new],
        n_new_bytes=int(manifest.chunk_sizes[new].sum()),
        n_looked_at=n_looked_at,
        is_complete=is_complete,
        before=series[0] if series else None,
        after=after,
    )


def _states(
    manifest: Manifest, is_new: Any, found: Mapping[int, str], names_before: Collection[str]
) -> list[tuple[str, str]]:
    ends = manifest.columns.chunk_at
    n_chunks, n_new = np.diff(ends).tolist(), np.diff(np.append(0, np.cumsum(is_new))[ends]).tolist()
    names = manifest.columns.names.to_list()
    return [_state(found.get(at), n_chunks[at], n_new[at], name in names_before) for at, name in enumerate(names)]


def _state(shared_with: str | None, n_chunks: int, n_new: int, was_before: bool) -> tuple[str, str]:
    if shared_with is not None:
        return "shared", f"shared with {shared_with}"
    if n_chunks == 0:
        return "shared", "empty"
    if n_new == n_chunks:
        return ("part", "changed in all chunks") if was_before else ("new", "new at this step")
    if n_new == 0:
        return "part", f"rearranged: all of {n_chunks:,} chunks are known"
    return "part", f"in part: {n_new:,} of {n_chunks:,} chunks are new"


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
    shown = (info for info in list_blobs(store.backend, "refs") if is_shown(info.key))
    far = _latest(info for info in shown if not _is_beside(info.key, ref))
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
    series.sort(key=order, reverse=True)
    others.sort(key=lambda other: (_is_of_run(other, ref), other.kind == "checkpoint", other.created), reverse=True)
    later = [other for other in later if _is_of_series(other, ref)]
    return _Candidates(
        series=series[:MAX_CHECKPOINTS],
        others=others[:MAX_CHECKPOINTS],
        is_complete=is_complete and len(series) <= MAX_CHECKPOINTS and len(others) <= MAX_CHECKPOINTS,
        after=min(later, key=order, default=None),
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


def series_of(ref: Ref) -> str | None:
    """Return the name of a ref's series, from the ref or from the folder of a step's file; None if it has none."""
    folder, name = posixpath.split(ref.path or "")
    if ref.kind == "checkpoint":
        return ref.name
    is_step = name.endswith(PAYLOAD_ENDING) and _STEP.match(name) is not None
    return (posixpath.basename(folder) or None) if is_step else None


def _is_earlier(other: Ref, ref: Ref) -> bool:
    if step_of(other) is None or step_of(ref) is None:
        return other.created < ref.created
    return order(other) < order(ref)


def order(ref: Ref) -> tuple[int, str]:
    """Return the place of a ref among those of its series, as a key to sort by."""
    step = step_of(ref)
    return (-(2**63) if step is None else step), ref.created


def label_of(other: Ref, ref: Ref, *, in_series: bool) -> str:
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

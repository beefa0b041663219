"""What of a checkpoint was there before it: tensor by tensor, told from manifests; no tensor is read.

The work is bounded, since a page is made while somebody waits for it: what was not looked at is said.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow import config
from tensorcas_mlflow._steps import STEP_TEXT, step_of_text
from tensorcas_mlflow._store_root import store_root_for
from tensorcas_mlflow.blob_names import list_blobs, list_dir
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import Ref, Store

MAX_CHECKPOINTS = 50
"""How many checkpoints of the same series are looked at, and how many others."""
MAX_ROWS = 200_000
"""How many rows of manifests are looked at in all."""
MIN_FILE_BYTES = 64 * 1024
"""Smaller files are not looked at."""
MAX_BESIDE = 200
MAX_REFS = 2_000
"""How many refs of the same folder, and how many others, are read to find checkpoints."""

_STEP = re.compile(rf"step-({STEP_TEXT})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one tensor comes from."""

    shared_with: str | None
    """In words, the checkpoint that held this very tensor before; None if none did."""
    n_chunks: int
    n_new_chunks: int
    """Chunks that no checkpoint looked at holds; 0 if the tensor is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What was there before a checkpoint."""

    origins: Sequence[Origin]
    """One for each row of its manifest, in order."""
    new_chunks: Digests
    """Digests of the chunks that no checkpoint looked at holds, each once."""
    n_new_bytes: int
    """Size of those chunks."""
    n_looked_at: int
    """Checkpoints whose manifests were read."""
    is_complete: bool
    """Whether all that come into question were looked at."""


def look_back(store: Store, ref: Ref, manifest: Manifest) -> Earlier:
    """Find out what of a checkpoint was there before.

    A tensor that an earlier step of the same series holds is said to be shared with the earliest such step that was
    looked at, and one that no step holds with some earlier checkpoint besides. Checkpoints that cannot be read are left
    out.
    """
    series, others, is_complete = _candidates(store, ref)
    rows_of: dict[tuple[str | None, tuple[int, ...], bytes], list[int]] = {}
    for at, content in enumerate(manifest.columns.contents()):
        rows_of.setdefault(content, []).append(at)
    seen = _Seen(manifest)
    found: dict[int, str] = {}
    n_rows = n_looked_at = 0
    earlier = [*((other, True) for other in series), *((other, False) for other in others)]
    # The latest first, so that of several steps the earliest is what is said in the end; what a step of the series
    # holds is not looked for elsewhere.
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
        label = _label(other, ref, in_series=is_of_series)
        for content in held.columns.contents():
            for at in rows_of.get(content, ()):
                if is_of_series or at not in found:
                    found[at] = label
    return Earlier(
        origins=seen.origins(found),
        new_chunks=seen.new_chunks(),
        n_new_bytes=seen.n_new_bytes(),
        n_looked_at=n_looked_at,
        is_complete=is_complete,
    )


class _Seen:
    """Which chunks of a checkpoint other checkpoints hold too."""

    def __init__(self, manifest: Manifest) -> None:
        self._chunk_at = manifest.columns.chunk_at
        self._keys = _as_keys(manifest.digests)
        self._seen = np.zeros(len(self._keys), dtype=bool)
        self._sizes = manifest.chunk_sizes

    def add(self, digests: Digests) -> None:
        unknown = np.flatnonzero(~self._seen)
        if len(unknown) and len(digests):
            self._seen[unknown] = np.isin(self._keys[unknown], _as_keys(digests))

    def origins(self, found: dict[int, str]) -> list[Origin]:
        n_new = np.concatenate(([0], np.cumsum(~self._seen)))
        return [
            Origin(
                shared_with=found.get(at),
                n_chunks=int(end - begin),
                n_new_chunks=0 if at in found else int(n_new[end] - n_new[begin]),
            )
            for at, (begin, end) in enumerate(pairwise(self._chunk_at.tolist()))
        ]

    def new_chunks(self) -> Digests:
        return np.ascontiguousarray(self._keys[self._first_new()]).view(np.uint8).reshape(-1, DIGEST_BYTES)

    def n_new_bytes(self) -> int:
        return int(self._sizes[self._first_new()].sum())

    def _first_new(self) -> Any:
        new = np.flatnonzero(~self._seen)
        return new[np.unique(self._keys[new], return_index=True)[1]]


def _as_keys(digests: Digests) -> Any:
    return np.ascontiguousarray(digests).reshape(-1, DIGEST_BYTES).view(f"V{DIGEST_BYTES}").ravel()


def _candidates(store: Store, ref: Ref) -> tuple[list[Ref], list[Ref], bool]:
    """Find the checkpoints to look at: earlier ones of the same series, others, and whether these are all.

    Of each the latest come first; of the others those of the same run, and checkpoints before files.
    """
    near = _by_nearness(list_dir(store.backend, posixpath.dirname(ref.key))[0], ref)
    far = _latest(info for info in list_blobs(store.backend, "refs") if not _is_beside(info.key, ref))
    is_complete = len(near) <= MAX_BESIDE and len(far) <= MAX_REFS
    series: list[Ref] = []
    others: list[Ref] = []
    for other in _refs(store, near[:MAX_BESIDE] + far[:MAX_REFS]):
        if other.key == ref.key or not _may_be_named(other, ref):
            continue
        if _is_of_series(other, ref):
            if _is_earlier(other, ref):
                series.append(other)
        elif other.created <= ref.created and (other.kind == "checkpoint" or other.n_bytes >= MIN_FILE_BYTES):
            others.append(other)
    series.sort(key=_order, reverse=True)
    others.sort(key=lambda other: (_is_of_run(other, ref), other.kind == "checkpoint", other.created), reverse=True)
    is_complete = is_complete and len(series) <= MAX_CHECKPOINTS and len(others) <= MAX_CHECKPOINTS
    return series[:MAX_CHECKPOINTS], others[:MAX_CHECKPOINTS], is_complete


def _refs(store: Store, keys: Iterable[str]) -> Iterator[Ref]:
    for key in keys:
        try:
            found = store.ref(key)
        except TensorCasError:
            continue
        if found is not None:
            yield found


def _by_nearness(infos: Iterable[Any], ref: Ref) -> list[str]:
    """Order the keys of a folder so that the steps just before a ref come first: names of steps are padded."""
    keys = sorted((info.key for info in infos), reverse=True)
    return [key for key in keys if key < ref.key] + [key for key in keys if key > ref.key]


def _latest(infos: Iterable[Any]) -> list[str]:
    return [info.key for info in sorted(infos, key=lambda info: info.modified_s, reverse=True)]


def _is_beside(key: str, ref: Ref) -> bool:
    return posixpath.dirname(key) == posixpath.dirname(ref.key)


def _may_be_named(other: Ref, ref: Ref) -> bool:
    # Who may see one experiment of a server's may not see the others.
    if not config.in_mlflow_server():
        return True
    return None not in (other.uri, ref.uri) and store_root_for(str(other.uri)) == store_root_for(str(ref.uri))


def _is_of_run(other: Ref, ref: Ref) -> bool:
    return ref.run_id is not None and other.run_id == ref.run_id


def _is_of_series(other: Ref, ref: Ref) -> bool:
    """Whether two refs are checkpoints of one name in one run, or models of one run."""
    if not _is_of_run(other, ref) or (other.name, other.kind) != (ref.name, ref.kind):
        return False
    if ref.model_id is not None or other.model_id is not None:
        return ref.model_id is not None and other.model_id is not None
    return _is_beside(other.key, ref)


def step_of(ref: Ref) -> int | None:
    """The step a ref is of, or that the name of its file says; None if neither says one."""
    if ref.step is not None:
        return ref.step
    match = _STEP.match(posixpath.basename(ref.path or ""))
    return step_of_text(match[1]) if match else None


def _is_earlier(other: Ref, ref: Ref) -> bool:
    if step_of(other) is None or step_of(ref) is None:
        return other.created < ref.created
    return _order(other) < _order(ref)


def _order(ref: Ref) -> tuple[int, str]:
    step = step_of(ref)
    return (-(2**63) if step is None else step), ref.created


def _label(other: Ref, ref: Ref, *, in_series: bool) -> str:
    """Name a checkpoint in as few words as tell it from the others."""
    step = step_of(other)
    if in_series and step is not None:
        return f"step {step}"
    path = other.path or ""
    if step is not None and other.step is None:
        path = posixpath.dirname(path)  # the file's own name says the step, and its folder's the series
    words = [f"model {other.model_id}" if other.model_id else other.name or posixpath.basename(path)]
    if step is not None:
        words.append(f"step {step}")
    if other.run_id is not None and not _is_of_run(other, ref):
        words.append(f"of run {other.run_id}")
    return " ".join(filter(None, words)) or other.label

"""Tensors of several checkpoints that are versions of one tensor under different names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.sketch import SURE_BITS, compare
from tensorcas_mlflow.layout import Manifest, sketched_rows


class Key(NamedTuple):
    """Facts that all versions of a tensor under one name have in common."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    chunk_bytes: int


_Size = tuple[str | None, int, int]
"""Dtype, number of bytes, and chunk size: those of a tensor and its possible base are equal."""


_MOST_SERIES = 8
"""Series whose latest versions of a tensor are compared: unrelated models of one architecture have the same names."""


@dataclass(slots=True)
class _Latest:
    """Latest version of a tensor in one series."""

    manifest: Manifest
    row: int
    is_done: bool
    words: Any = None
    """Words of its sketch; None if it has not been needed yet."""


class Kin:
    """Search for the tensors of earlier checkpoints that are related to tensors under new names.

    A wrong guess costs time and bytes: the trees of versions are chosen by the sizes of deltas.
    """

    def __init__(self, sketch: Callable[[Manifest, Any], Any]) -> None:
        """Begin without checkpoints.

        Args:
            sketch: Returns the words of rows of a manifest; see `sketches_in`.
        """
        self._sketch = sketch
        self._own: dict[Key, Key] = {}
        """For each known tensor the one it is a version of; most are their own."""
        self._latest: dict[Key, dict[Hashable, _Latest]] = {}
        """For each tensor that others are versions of, its latest version in each of the last series."""
        self._by_size: dict[_Size, list[Key]] = {}

    def add(
        self,
        manifest: Manifest,
        rows: Sequence[int],
        keys: Sequence[Key],
        are_done: Sequence[bool],
        series: Hashable = None,
    ) -> list[Key]:
        """Add tensors of a checkpoint, and return the tensor that each is a version of.

        Args:
            manifest: The checkpoint.
            rows: Numbers of the tensors.
            keys: The tensors.
            are_done: For each whether all its chunks are done.
            series: The series of the checkpoint. Its next one replaces it in comparisons, and those of other series
                do not.
        """
        n_bytes = manifest.stored.n_bytes
        sizes = [(key.dtype, int(n_bytes[row]), key.chunk_bytes) for key, row in zip(keys, rows, strict=True)]
        words: dict[Key, Any] = {}
        strangers = [at for at, key in enumerate(keys) if key not in self._own and sizes[at] in self._by_size]
        if strangers:
            is_sketched = np.isin([rows[at] for at in strangers], sketched_rows(manifest.stored)).tolist()
            strangers = [at for at, has_sketch in zip(strangers, is_sketched, strict=True) if has_sketch]
            self._find(manifest, [(keys[at], rows[at], sizes[at], are_done[at]) for at in strangers], {*keys}, words)
        owners: list[Key] = []
        for key, row, size, is_done in zip(keys, rows, sizes, are_done, strict=True):
            if key not in self._own:
                self._own[key] = key
                self._by_size.setdefault(size, []).append(key)
            owner = self._own[key]
            latest = self._latest.setdefault(owner, {})
            latest.pop(series, None)
            latest[series] = _Latest(manifest, row, is_done, words.get(key))
            if len(latest) > _MOST_SERIES:
                del latest[next(iter(latest))]
            owners.append(owner)
        return owners

    def _find(
        self,
        manifest: Manifest,
        strangers: Sequence[tuple[Key, int, _Size, bool]],
        present: set[Key],
        words: dict[Key, Any],
    ) -> None:
        """Find the tensors that strangers are versions of; note the words of the strangers."""
        present = {self._own.get(key, key) for key in present}
        candidates = {
            size: [key for key in self._by_size[size] if key not in present]
            for size in {size for _, _, size, _ in strangers}
        }
        wanted = [key for keys in candidates.values() for key in keys]
        if not wanted or (
            all(done for *_, done in strangers) and all(each.is_done for each in self._versions_of(wanted))
        ):
            return
        self._sketch_latest(wanted)
        tables = {
            size: np.stack([each.words for each in self._versions_of(keys)], axis=1)
            for size, keys in candidates.items()
            if keys
        }
        owners = {
            size: np.repeat(np.arange(len(keys)), [len(self._latest[key]) for key in keys])
            for size, keys in candidates.items()
        }
        found = self._sketch(manifest, np.array([row for _, row, _, _ in strangers]))
        is_free = {size: np.ones(len(keys), dtype=bool) for size, keys in candidates.items()}
        for (key, _, size, _), mine in zip(strangers, found, strict=True):
            words[key] = mine
            if size not in tables or not mine.any():
                continue
            likeness = compare(mine, tables[size])
            share = np.where(is_free[size][owners[size]] & (likeness.evidence >= SURE_BITS), likeness.share, 0)
            best = int(share.argmax())
            if share[best]:
                owner = int(owners[size][best])
                self._own[key] = candidates[size][owner]
                is_free[size][owner] = False

    def _versions_of(self, keys: Sequence[Key]) -> Iterator[_Latest]:
        for key in keys:
            yield from self._latest[key].values()

    def _sketch_latest(self, keys: Sequence[Key]) -> None:
        """Sketch the latest versions of tensors that have no sketch yet, all of a checkpoint at once."""
        by_manifest: dict[str, list[_Latest]] = {}
        for each in self._versions_of(keys):
            if each.words is None:
                by_manifest.setdefault(each.manifest.digest, []).append(each)
        for some in by_manifest.values():
            some.sort(key=lambda each: each.row)
            for each, mine in zip(
                some, self._sketch(some[0].manifest, np.array([each.row for each in some])), strict=True
            ):
                each.words = mine

"""Versions of tensors in several checkpoints, which are optimized together."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.base.tensors import chunk_sizes
from tensorcas_mlflow.codecs import WORD_BYTES
from tensorcas_mlflow.layout import Columns, Manifest
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_names import Key, Kin
from tensorcas_mlflow.store import LEAST_DELTA_BYTES

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of one role, dtype and shape whose versions are in the same checkpoints: one tree serves all."""

    itemsize: int
    is_float: bool
    sizes: Any
    """Sizes of the chunks of one tensor."""
    digests: Any
    """Shape ``(n_tensors, n_versions, n_chunks, 32)``; versions in the order of the checkpoints."""
    fixed_depth: Any
    """For each version its depth if all of it is done, else -1."""
    is_shallow: Any
    """For each version whether it is to be read with one base at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Distinct chunks without versions, in the order of checkpoints and tensors."""

    digests: Digests
    sizes: Any
    itemsizes: Any
    is_text: Any
    """For each chunk whether it is text, or bytes that are no tensor."""


def tracks_of(
    manifests: Sequence[Manifest],
    before: Sequence[Manifest],
    done_chunks: DoneChunks,
    sketch: Callable[[Manifest, Any], Any],
    series: Mapping[str, Hashable],
) -> tuple[list[Group], Plain]:
    """Sort the chunks of some checkpoints that are not done into groups.

    Args:
        manifests: Manifests of the checkpoints, in their order.
        before: Manifests of earlier checkpoints, whose tensors may be bases.
        done_chunks: Chunks that are done.
        sketch: See `Kin`.
        series: The series of each manifest, by digest.

    Returns:
        Groups of chunks that may have bases; and the other chunks.
    """
    tracks: dict[Key, _Track] = {}
    kin = Kin(sketch)
    plain: list[_Part] = []
    n_before = len(before)
    for at, manifest in enumerate([*before, *manifests]):
        columns, done = manifest.stored, done_chunks.are_done(manifest.stored_digests)
        names, rows = columns.names.to_list(), _rows_with_versions(columns)
        spans = [slice(*columns.chunk_at[row : row + 2].tolist()) for row in rows]
        are_done = [bool(done[span].all()) for span in spans]
        # An input of derived rows has no name. Its identity stands for one: only an equal input is the same tensor.
        keys = [
            Key(
                names[row] or columns.row(row).identity,
                columns.dtypes[columns.dtype[row]],
                columns.shape(row),
                manifest.chunk_bytes,
            )
            for row in rows
        ]
        owners = kin.add(manifest, rows, keys, are_done, series.get(manifest.digest))
        for row, key, span, is_done in zip(rows, owners, spans, are_done, strict=True):
            if key not in tracks:
                sizes = chunk_sizes(columns.n_bytes[row : row + 1], manifest.chunk_bytes)
                tracks[key] = _Track(sizes, int(columns.codec_itemsizes[row]))
            tracks[key].add(at, columns.digests[span], is_done=is_done)
        if at >= n_before:
            plain.append(_plain_part(manifest, done))
    groups: dict[tuple[Any, ...], list[_Track]] = {}
    for (name, dtype, shape, chunk_bytes), track in tracks.items():
        if track.has_work(n_before):
            if len(track.versions) == 1:
                plain.append(track.as_part())
            else:
                role = (_NUMBERS.sub("#", name), dtype, shape, chunk_bytes, tuple(track.first), tuple(track.is_done))
                groups.setdefault(role, []).append(track)
    made = [_group(role[1], each, done_chunks) for role, each in groups.items()]
    return made, _joined(plain)


class _Track:
    """Tensor of one dtype and size in several checkpoints, under one name or several."""

    def __init__(self, sizes: Any, itemsize: int) -> None:
        self.sizes = sizes
        """Sizes of its chunks."""
        self.itemsize = itemsize
        self.versions: dict[bytes, int] = {}
        """Number of each version, by its digests."""
        self.first: list[int] = []
        """For each version the checkpoint in which it first occurs."""
        self.is_done: list[bool] = []

    def add(self, checkpoint: int, digests: Digests, *, is_done: bool) -> None:
        content = digests.tobytes()
        if content not in self.versions:
            self.versions[content] = len(self.versions)
            self.first.append(checkpoint)
            self.is_done.append(is_done)

    def has_work(self, n_before: int) -> bool:
        return any(not done and first >= n_before for done, first in zip(self.is_done, self.first, strict=True))

    @property
    def digests(self) -> Any:
        """Shape ``(n_versions, n_chunks, 32)``."""
        return np.frombuffer(b"".join(self.versions), np.uint8).reshape(len(self.versions), -1, DIGEST_BYTES)

    def as_part(self) -> _Part:
        n = len(self.sizes)
        return _Part(self.digests[0], self.sizes, np.full(n, self.itemsize), np.zeros(n, dtype=bool))


@dataclass(frozen=True, slots=True)
class _Part:
    """Chunks, as in `Plain`, which may repeat."""

    digests: Digests
    sizes: Any
    itemsizes: Any
    is_text: Any


def _rows_with_versions(columns: Columns) -> list[int]:
    """Return the rows that may have bases.

    Rows with cuts of their own grow, so their chunks do not keep their places.
    """
    rows: list[int] = np.flatnonzero(_may_have_bases(columns)).tolist()
    return rows


def _may_have_bases(columns: Columns) -> Any:
    is_number = ~_is_text(columns) & np.isin(columns.codec_itemsizes, list(WORD_BYTES))
    if columns.cuts is not None:
        is_number &= ~columns.cuts.given
    return is_number & (columns.n_bytes >= LEAST_DELTA_BYTES)


def _is_text(columns: Columns) -> Any:
    return np.array([name is None or name[0] in "SU" for name in columns.dtypes], dtype=bool)[columns.dtype]


def _plain_part(manifest: Manifest, done: Any) -> _Part:
    """Return the chunks of a checkpoint that have no versions and are not done."""
    columns = manifest.stored
    rows = columns.rows_of(np.arange(len(columns.digests)))
    chosen = ~_may_have_bases(columns)[rows] & ~done
    rows = rows[chosen]
    itemsizes, is_text = np.asarray(columns.codec_itemsizes)[rows], _is_text(columns)[rows]
    return _Part(columns.digests[chosen], manifest.stored_sizes[chosen], itemsizes, is_text)


def _joined(parts: Sequence[_Part]) -> Plain:
    digests = np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(part.digests for part in parts)])
    keep = np.sort(unique_rows(digests)[1])
    columns = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])[keep]
        for name, dtype in (("sizes", np.int64), ("itemsizes", np.int64), ("is_text", bool))
    }
    return Plain(digests=np.ascontiguousarray(digests[keep]), **columns)


def _group(dtype: str, tracks: Sequence[_Track], done_chunks: DoneChunks) -> Group:
    digests = np.stack([track.digests for track in tracks])
    fixed = np.full(digests.shape[1], -1, dtype=np.int64)
    n_tensors, n_versions, n_chunks, _ = digests.shape
    is_shallow = done_chunks.must_be_shallow(digests.reshape(-1, DIGEST_BYTES))
    for version in np.flatnonzero(tracks[0].is_done).tolist():
        _, depth = done_chunks.find(np.ascontiguousarray(digests[:, version]).reshape(-1, DIGEST_BYTES))
        fixed[version] = int(depth.max())
    return Group(
        itemsize=tracks[0].itemsize,
        is_float=dtype.startswith(("float", "bfloat", "complex")),
        sizes=tracks[0].sizes,
        digests=digests,
        fixed_depth=fixed,
        is_shallow=is_shallow.reshape(n_tensors, n_versions, n_chunks).all(axis=2).any(axis=0),
    )

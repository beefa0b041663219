"""Tensors in several checkpoints, and the places of their chunks, which are optimized together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES
from tensorcas_mlflow.base.tensors import chunk_sizes
from tensorcas_mlflow.codecs import WORD_BYTES
from tensorcas_mlflow.layout.manifests import Columns, Manifest
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_encode import Place
from tensorcas_mlflow.maintenance._optimize_relatives import Relation
from tensorcas_mlflow.store import LEAST_DELTA_BYTES, is_float


class _Key(NamedTuple):
    """Facts that all versions of a tensor under one name have in common."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    chunk_bytes: int
    is_named: bool

    @classmethod
    def of(cls, manifest: Manifest, columns: Columns, row: int) -> _Key:
        # An input of derived rows has no name. Its identity stands for one: only an equal input is the same tensor.
        name = columns.name(row)
        dtype, shape = columns.dtypes[columns.dtype[row]], columns.shape(row)
        return cls(name or columns.row(row).identity, dtype, shape, manifest.chunk_bytes, is_named=bool(name))


def places_of(
    manifests: Sequence[Manifest],
    before: Sequence[Manifest],
    done_chunks: DoneChunks,
    relations: Mapping[str, Relation],
) -> Iterator[Place]:
    """Yield the places of some checkpoints with a chunk that is not done.

    Args:
        manifests: Manifests of the checkpoints, in their order.
        before: Manifests of other checkpoints, whose tensors may be bases, the likeliest last.
        done_chunks: Chunks that are done.
        relations: Relations of some checkpoints, by digest; their tensors may have other names in the related one.
    """
    tracks: dict[_Key, _Track] = {}
    own: dict[_Key, _Key] = {}
    for at, manifest in enumerate([*before, *manifests]):
        columns = manifest.stored
        keys = {row: _Key.of(manifest, columns, row) for row in np.flatnonzero(_may_have_bases(columns)).tolist()}
        if manifest.digest in relations:
            own |= _renamed(manifest, relations[manifest.digest], tracks, own)
        for row, key in keys.items():
            owner = own.get(key, key)
            if owner not in tracks:
                tracks[owner] = _Track(
                    sizes=chunk_sizes(columns.n_bytes[row : row + 1], manifest.chunk_bytes),
                    itemsize=int(columns.codec_itemsizes[row]),
                    is_float=is_float(key.dtype or ""),
                )
            span = slice(*columns.chunk_at[row : row + 2].tolist())
            tracks[owner].versions.setdefault(columns.digests[span].tobytes(), at)
    # An input of derived rows may be a version of a tensor that another checkpoint names.
    for is_named in (True, False):
        for key, track in tracks.items():
            if key.is_named is is_named:
                yield from track.places(done_chunks, len(before))
    seen: set[bytes] = set()
    for manifest in manifests:
        yield from _places_alone(manifest, done_chunks, seen)


def _renamed(
    manifest: Manifest, relation: Relation, tracks: Collection[_Key], own: Mapping[_Key, _Key]
) -> dict[_Key, _Key]:
    """Find the known tensors that the tensors of a checkpoint under new names are versions of.

    A tensor that has its relative beside it in the same checkpoint, such as a moving average, stays apart.
    """
    columns, others = manifest.columns, relation.other.columns
    keys = {row: _Key.of(manifest, columns, row) for row in relation.query.rows.tolist()}
    owners = {row: own.get(key, key) for row, key in keys.items()}
    known = {row: _Key.of(relation.other, others, row) for row in relation.sketched.rows.tolist()}
    known = {row: own.get(key, key) for row, key in known.items()}
    present = set(owners.values())
    strangers = {row for row, owner in owners.items() if owner not in tracks}
    absent = {row for row, owner in known.items() if owner in tracks and owner not in present}
    return {
        keys[row]: known[other]
        for row, other in relation.pairs(columns, strangers, absent).items()
        if _size_of(manifest, columns, row) == _size_of(relation.other, others, other)
    }


def _size_of(manifest: Manifest, columns: Columns, row: int) -> tuple[str | None, int, int]:
    """Return the facts that a tensor and its possible base have in common."""
    return columns.dtypes[columns.dtype[row]], int(columns.n_bytes[row]), manifest.chunk_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Track:
    """Tensor of one dtype and size in several checkpoints, under one name or several."""

    sizes: Any
    """Sizes of its chunks."""
    itemsize: int
    is_float: bool
    versions: dict[bytes, int] = field(default_factory=dict)
    """For each version, by its digests, the first checkpoint with it."""

    def places(self, done_chunks: DoneChunks, n_before: int) -> Iterator[Place]:
        """Yield its places with a chunk that is not done, of a checkpoint from number ``n_before`` on."""
        first = list(self.versions.values())
        digests = np.frombuffer(b"".join(self.versions), np.uint8).reshape(len(first), -1, DIGEST_BYTES)
        is_done = done_chunks.are_done(digests.reshape(-1, DIGEST_BYTES)).reshape(digests.shape[:2])
        has_work = ~is_done[np.array(first) >= n_before].all(axis=0)
        for at in np.flatnonzero(has_work).tolist():
            chunks: dict[bytes, int] = {}
            for digest, version in zip(map(bytes, digests[:, at]), first, strict=True):
                chunks.setdefault(digest, version)
            yield Place(
                digests=list(chunks),
                versions=list(chunks.values()),
                n_bytes=int(self.sizes[at]),
                itemsize=self.itemsize,
                is_float=self.is_float,
            )


def _may_have_bases(columns: Columns) -> Any:
    """Return for each row whether it may have bases.

    Rows with cuts of their own grow, so their chunks do not keep their places.
    """
    is_number = ~_is_text(columns) & np.isin(columns.codec_itemsizes, list(WORD_BYTES))
    if columns.cuts is not None:
        is_number &= ~columns.cuts.given
    return is_number & (columns.n_bytes >= LEAST_DELTA_BYTES)


def _is_text(columns: Columns) -> Any:
    return np.array([name is None or name[0] in "SU" for name in columns.dtypes], dtype=bool)[columns.dtype]


def _places_alone(manifest: Manifest, done_chunks: DoneChunks, seen: set[bytes]) -> Iterator[Place]:
    """Yield the places of the rows of a checkpoint that have no bases, each chunk once among the ``seen`` ones."""
    columns = manifest.stored
    rows = columns.rows_of(np.arange(len(columns.digests)))
    chosen = np.flatnonzero(~_may_have_bases(columns)[rows] & ~done_chunks.are_done(manifest.stored_digests))
    rows = rows[chosen]
    itemsizes, is_text = np.asarray(columns.codec_itemsizes)[rows], _is_text(columns)[rows]
    for digest, n_bytes, itemsize, text in zip(
        map(bytes, columns.digests[chosen]),
        manifest.stored_sizes[chosen].tolist(),
        itemsizes.tolist(),
        is_text.tolist(),
        strict=True,
    ):
        if digest not in seen:
            seen.add(digest)
            yield Place(digests=[digest], versions=[0], n_bytes=n_bytes, itemsize=itemsize, is_text=text)

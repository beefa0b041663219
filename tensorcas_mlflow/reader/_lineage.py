"""Lineage: the relatives of a model among all checkpoints and files of its store, and the kind of each difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tensorcas_mlflow.base.digest import unique_rows
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.sketch import is_sketched
from tensorcas_mlflow.base.tensors import offsets_of
from tensorcas_mlflow.chunk_io import LastRow
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest, sketched_rows
from tensorcas_mlflow.reader._contents import StoredContents
from tensorcas_mlflow.reader._listed import StoredFileContents
from tensorcas_mlflow.store import Likely, find_likely

if TYPE_CHECKING:
    from tensorcas_mlflow.reader._reader import CheckpointReader
    from tensorcas_mlflow.store import Store

Kind = Literal["copy", "cast", "head", "lora", "pruned", "fine-tune", "shared"]

_TEXTS: Mapping[Kind, str] = {
    "copy": "copy of",
    "cast": "cast of",
    "head": "new head on",
    "lora": "low-rank update of",
    "pruned": "pruned from",
    "fine-tune": "fine-tune of",
    "shared": "shares tensors with",
}
_TEXTS_OF_NEWER: Mapping[Kind, str] = {
    "copy": "copied to",
    "cast": "cast to",
    "head": "given a new head in",
    "lora": "updated at low rank in",
    "pruned": "pruned to",
    "fine-tune": "fine-tuned to",
    "shared": "shares tensors with",
}
"""The same for relatives stored after the model."""
_N_LIKELY = 12
"""Number of the likeliest relatives to compare by values."""
_N_TENSORS = 8
"""Number of tensors to compare in the search for the nearest one."""
_HEAD_BYTES = 4 << 20
"""Bytes to read of each tensor; a larger one is judged by its beginning."""
_BATCH = 16
"""Number of tensors to read at once."""
_MOST_RANKED = 24
"""Number of matrices whose rank is estimated; the others count as any change."""
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relative of a model, and how the newer of the two differs from the older."""

    label: str
    """The relative in words: its artifact path, or its run and step."""
    run_id: str | None
    name: str | None
    step: int | None
    path: str | None
    is_older: bool
    """True if the relative was stored before the model."""
    kind: Kind
    """Kind of the difference, judged by the words that differ.

    ``copy``: all compared tensors are equal. ``cast``: the same values in another dtype. ``head``: a few tensors are
    new or changed, all others equal. ``lora``: the differences have a low rank, as merged adapters have. ``pruned``:
    numbers became zero. ``shared``: most of what differs is unrelated, so only some tensors are common: a frozen
    embedding, or tables of constants. ``fine-tune``: everything else.
    """
    share_equal: float
    """Share of equal numbers among the compared ones, after a cast to the dtype of the newer model."""
    n_compared: int
    """Number of tensors in both, of as many elements each."""
    changed: tuple[str, ...]
    """Names of the compared tensors that differ, in the newer model."""
    added: tuple[str, ...]
    """Names of the newer model's large tensors without a counterpart."""
    removed: tuple[str, ...]
    """Names of the older model's large tensors without a counterpart."""

    def __str__(self) -> str:
        said = f"{(_TEXTS if self.is_older else _TEXTS_OF_NEWER)[self.kind]} {self.label}"
        parts = [f"{self.share_equal:.1%} of numbers equal"]
        for names, what in (
            (self.changed, f"of {self.n_compared} differ"),
            (self.added, "large new"),
            (self.removed, "large gone"),
        ):
            if names:
                more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
                parts.append(f"{len(names)} {what}: {', '.join(names[:_MOST_SHOWN])}{more}")
        return f"{said} ({'; '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The relatives of one model in its store. It is true if there is any."""

    label: str
    """The model in words."""
    relatives: tuple[Relation, ...] = field(default=())
    """The relatives, the nearest first."""

    @property
    def parent(self) -> Relation | None:
        """The nearest relative stored before the model, of any kind but ``shared``; None if there is none."""
        return next((each for each in self.relatives if each.is_older and each.kind != "shared"), None)

    def __bool__(self) -> bool:
        return bool(self.relatives)

    def __str__(self) -> str:
        if not self.relatives:
            return f"{self.label}: no relative in the store"
        return "\n".join([f"{self.label}:", *(f"  {relation}" for relation in self.relatives)])


def lineage(reader: CheckpointReader, *, most: int = 5) -> Lineage:
    """Find the relatives of a model among all checkpoints and files of its store.

    The search compares sketches (``docs/design/caches.md``), so names, runs and dtypes may differ. It then reads the
    beginning of each tensor of the nearest relatives.

    Args:
        reader: The model: a checkpoint or file of a store.
        most: Maximum number of relatives to return.

    Raises:
        ValueError: The reader's content is a part, or lies in no store.
        TensorCasError: The model, or the list of refs, cannot be read.
    """
    contents = reader._contents
    if not isinstance(contents, StoredContents | StoredFileContents):
        raise ValueError(f"{reader.label} lies in no store, or is a part of a checkpoint: open a whole one of a store")
    store = contents._store
    manifest = contents.manifest if isinstance(contents, StoredContents) else contents._manifest
    own, likely = find_likely(store, manifest, most=_N_LIKELY)
    model = _Model(store, manifest)
    created = min((ref.created for ref in own), default="")
    found: list[tuple[float, Likely, _Pair]] = []
    for each in likely:
        with suppress(NotFoundError, FormatError, BackendError):
            other = _Model(store, each.manifest)
            is_older = each.refs[0].created <= created
            pair = _Pair.of(other, model, each.rows) if is_older else _Pair.of(model, other, _swapped(each.rows))
            found.append((pair.distance(), each, pair))
    found.sort(key=lambda one: (one[0], -one[1].likeness))
    relatives: list[Relation] = []
    for _, each, pair in found[:most]:
        with suppress(NotFoundError, FormatError, BackendError):
            relatives.append(pair.relation(each.refs[0], is_older=pair.newer is model))
    return Lineage(label=reader.label, relatives=tuple(relatives))


def _swapped(rows: Mapping[int, int]) -> dict[int, int]:
    return {their: own for own, their in rows.items()}


class _Model:
    """Tensors of one manifest, by the number of their row."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self.manifest = manifest
        columns = manifest.columns
        self.names = columns.names.to_list()
        self.rows: list[int] = sketched_rows(columns).tolist()
        self.n_elements = columns.n_bytes // np.maximum(columns.itemsizes, 1)
        self.is_tensor = columns.is_tensor
        is_real = np.array([is_sketched(dtype) for dtype in columns.dtypes], dtype=bool)
        self.holds_reals = is_real[columns.dtype] & (columns.n_bytes > 0)
        """True for each row of real numbers; tensors of others, and empty ones, are compared by digest."""

    def size(self, row: int) -> int:
        """Return the size of a tensor in bytes."""
        return int(self.manifest.columns.n_bytes[row])

    def dtype(self, row: int) -> Any:
        """Return the dtype of a tensor."""
        columns = self.manifest.columns
        return parse_dtype(columns.dtypes[columns.dtype[row]] or "uint8")

    def digests(self, row: int) -> bytes:
        """Return the digests of a tensor."""
        digests: bytes = self.manifest.columns.row(row).digests.tobytes()
        return digests

    def heads(self, rows: Mapping[int, int]) -> dict[int, Any]:
        """Read the first elements of tensors, as many as given for each, in one read."""
        columns, sizes = self.manifest.columns, self.manifest.chunk_sizes
        chunks: list[Any] = []
        for row, n_elements in rows.items():
            begin, end = columns.chunk_at[row : row + 2].tolist()
            ends = np.cumsum(sizes[begin:end])
            n_bytes = n_elements * self.dtype(row).itemsize
            chunks.append(np.arange(begin, min(end, begin + int(ends.searchsorted(n_bytes)) + 1)))
        every = np.concatenate(chunks)
        _, first, number = unique_rows(np.ascontiguousarray(columns.digests[every]))
        begins = offsets_of(sizes[every[first]])
        block = np.empty(int(begins[-1]), np.uint8)
        outs = [block.data[start:stop] for start, stop in pairwise(begins.tolist())]
        self._store.chunks.read_chunks(self.manifest, every[first], outs, verify=True, last=LastRow())
        found: dict[int, Any] = {}
        places = np.split(number, np.cumsum([len(each) for each in chunks])[:-1])
        for (row, n_elements), mine in zip(rows.items(), places, strict=True):
            dtype = self.dtype(row)
            data = np.concatenate([np.frombuffer(outs[at], np.uint8) for at in mine.tolist()])
            found[row] = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)[:n_elements]
        return found


@dataclass(slots=True, kw_only=True)
class _Sums:
    """Sums over one compared tensor, or many."""

    n: int = 0
    n_equal: int = 0
    square: float = 0.0
    """Sum of the squared differences; a number that became zero counts nothing."""
    square_before: float = 0.0

    @property
    def change(self) -> float:
        """Norm of the change, relative to that of the numbers before; at most 1: unrelated numbers have more."""
        return min(1.0, math.sqrt(self.square / self.square_before)) if self.square_before else float(self.square > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two models and the tensors they have in common."""

    older: _Model
    newer: _Model
    rows: Mapping[int, int]
    """Rows of the older model by those of the newer one."""

    @classmethod
    def of(cls, older: _Model, newer: _Model, rows: Mapping[int, int]) -> _Pair:
        """Pair the tensors of two models.

        Args:
            older: The older model.
            newer: The newer one.
            rows: Pairs by sketches: rows of the older model by those of the newer one. Names add more.
        """
        pairs = dict(rows)
        numbers = {name: row for row, name in enumerate(older.names) if older.is_tensor[row] and name}
        taken = set(pairs.values())
        ends = Counter(_prefixes(newer.names[new], older.names[old]) for new, old in pairs.items())
        [(mine, their)] = [each for each, _ in ends.most_common(1)] or [("", "")]
        for row, name in enumerate(newer.names):
            if row in pairs or not newer.is_tensor[row] or not name:
                continue
            for wanted in (their + name.removeprefix(mine), name):
                other = numbers.get(wanted)
                if other is not None and other not in taken and newer.n_elements[row] == older.n_elements[other]:
                    pairs[row] = other
                    taken.add(other)
                    break
        return cls(older=older, newer=newer, rows=pairs)

    def distance(self) -> float:
        """Return the distance of the two: the mean of the relative changes of the largest tensors."""
        largest = sorted(filter(self._has_reals, self.rows), key=lambda row: (-self.newer.size(row), row))[:_N_TENSORS]
        total = n_bytes = 0.0
        for row, (older, newer) in self._heads(largest, 1 << 16).items():
            sums = _Sums()
            _compare(older, newer, sums)
            total += self.newer.size(row) * sums.change
            n_bytes += self.newer.size(row)
        return total / n_bytes if n_bytes else math.inf

    def relation(self, ref: Ref, *, is_older: bool) -> Relation:
        """Compare all tensors; the arguments describe the relative."""
        changed: list[str] = []
        sizes: Counter[str] = Counter()
        total = _Sums()
        for row, kind, sums in self._kinds():
            total.n, total.n_equal = total.n + sums.n, total.n_equal + sums.n_equal
            sizes[kind] += self.newer.size(row)
            if kind not in ("copy", "cast"):
                changed.append(self.newer.names[row])
        old_rows = set(self.rows.values())
        added = [self.newer.names[row] for row in self.newer.rows if row not in self.rows]
        removed = [self.older.names[row] for row in self.older.rows if row not in old_rows]
        return Relation(
            label=ref.label,
            run_id=ref.run_id,
            name=ref.name,
            step=ref.step,
            path=ref.path,
            is_older=is_older,
            kind=_kind_of(sizes, n_compared=len(self.rows), n_changed=len(changed), n_added=len(added)),
            share_equal=total.n_equal / total.n if total.n else 0.0,
            n_compared=len(self.rows),
            changed=tuple(changed),
            added=tuple(added),
            removed=tuple(removed),
        )

    def _kinds(self) -> Iterator[tuple[int, Kind, _Sums]]:
        """Judge each pair of tensors."""
        waiting: list[int] = []
        n_ranked = 0
        for row, other in sorted(self.rows.items()):
            if self.newer.dtype(row) == self.older.dtype(other) and self.newer.digests(row) == self.older.digests(
                other
            ):
                n = int(self.newer.n_elements[row])
                yield row, "copy", _Sums(n=n, n_equal=n)
            elif self._has_reals(row):
                waiting.append(row)
            else:
                yield row, "fine-tune", _Sums(n=int(self.newer.n_elements[row]))
        while waiting:
            some, waiting = waiting[:_BATCH], waiting[_BATCH:]
            for row, (older, newer) in self._heads(some, _HEAD_BYTES).items():
                sums = _Sums()
                cast = _compare(older, newer, sums)
                kind = _plain_kind(older, newer, cast, sums)
                if kind == "fine-tune" and n_ranked < _MOST_RANKED:
                    n_ranked += 1
                    if _has_low_rank(newer, cast, self.newer.manifest.columns.shape(row)):
                        kind = "lora"
                # A large tensor is judged by its beginning, and counts whole.
                n = int(self.newer.n_elements[row])
                yield row, kind, _Sums(n=n, n_equal=int(sums.n_equal * n / max(1, sums.n)))

    def _has_reals(self, row: int) -> bool:
        """Tell whether a pair of tensors holds real numbers, so that their differences can be measured."""
        return bool(self.newer.holds_reals[row] and self.older.holds_reals[self.rows[row]])

    def _heads(self, rows: Sequence[int], most_bytes: int) -> dict[int, tuple[Any, Any]]:
        """Read the first elements of paired tensors, as many of each, by the row of the newer one."""
        counts: dict[int, int] = {}
        for row in rows:
            itemsize = max(self.newer.dtype(row).itemsize, self.older.dtype(self.rows[row]).itemsize)
            counts[row] = max(1, most_bytes // itemsize)
        if not counts:
            return {}
        newer = self.newer.heads(counts)
        older = self.older.heads({self.rows[row]: n for row, n in counts.items()})
        return {row: (older[self.rows[row]], newer[row]) for row in rows}


def _plain_kind(older: Any, newer: Any, cast: Any, sums: _Sums) -> Kind:
    """Judge the difference of two tensors, their shapes aside."""
    if sums.n_equal == sums.n:
        return "copy" if older.dtype == newer.dtype else "cast"
    if sums.n_equal >= 0.99 * sums.n and older.dtype != newer.dtype:
        return "cast"
    differs = cast != newer
    if float((newer[differs] == 0).mean()) > 0.95 and int(differs.sum()) > sums.n // 100:
        return "pruned"
    return "shared" if sums.change >= 1 else "fine-tune"


def _prefixes(one: str, other: str) -> tuple[str, str]:
    """Return the beginnings of two names, without the parts they share at their ends."""
    mine, their = one.split("."), other.split(".")
    while mine and their and mine[-1] == their[-1]:
        del mine[-1], their[-1]
    return tuple(".".join([*parts, ""]) if parts else "" for parts in (mine, their))  # type: ignore[return-value]


def _compare(older: Any, newer: Any, sums: _Sums) -> Any:
    """Add two tensors to sums, and return the older one in the dtype of the newer one."""
    with np.errstate(all="ignore"):
        cast = older.astype(newer.dtype)
        sums.n += len(newer)
        sums.n_equal += int(np.count_nonzero((cast == newer) | ((cast != cast) & (newer != newer))))
        before, after = cast.astype(np.float32), newer.astype(np.float32)
        counts = (after != 0) & np.isfinite(before) & np.isfinite(after)
        before, after = before[counts].astype(np.float64), after[counts].astype(np.float64)
        sums.square += float(((after - before) ** 2).sum())
        sums.square_before += float((before**2).sum())
    return cast


_BLOCK = 256
_LEAST_SIDE = 32


def _has_low_rank(newer: Any, older: Any, shape: Sequence[int]) -> bool:
    """Tell whether the change of a matrix has most of its energy in few directions."""
    if len(shape) < 2:
        return False
    n_columns = int(np.prod(shape[1:]))
    n_rows = min(len(newer) // max(1, n_columns), _BLOCK)
    if min(n_rows, n_columns) < _LEAST_SIDE:
        return False
    block = np.s_[: n_rows * n_columns]
    with np.errstate(all="ignore"):
        change = (newer[block].astype(np.float64) - older[block].astype(np.float64)).reshape(n_rows, n_columns)
    change = change[:, :_BLOCK]
    if not np.isfinite(change).all():
        return False
    gram = change.T @ change if change.shape[0] >= change.shape[1] else change @ change.T
    energy = np.cumsum(np.linalg.eigvalsh(gram)[::-1])
    return bool(energy[-1] > 0 and int((energy < 0.9 * energy[-1]).sum()) + 1 <= min(change.shape) // 4)


def _kind_of(sizes: Mapping[str, int], *, n_compared: int, n_changed: int, n_added: int) -> Kind:
    """Judge the difference of two models by the bytes of their tensors of each kind."""
    n_bytes = sum(sizes.values())
    equal = sizes["copy"] + sizes["cast"]
    if n_changed == 0 and n_added == 0:
        return "cast" if sizes["cast"] > sizes["copy"] else "copy"
    if n_changed + n_added <= max(2, n_compared // 10) and 2 * equal >= n_bytes:
        return "head"
    changes: tuple[Kind, ...] = ("pruned", "lora", "fine-tune", "shared")
    return max(changes, key=lambda kind: sizes[kind])

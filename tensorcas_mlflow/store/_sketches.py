"""Search for delta bases by sketches: the tensors of an earlier checkpoint or file under other names.

A wrong guess costs bytes and never correctness, like each guess of a base.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo, map_requests
from tensorcas_mlflow.base.digest import DIGEST_BYTES, unique_rows
from tensorcas_mlflow.base.sketch import (
    HEAD_ELEMENTS,
    LEAST_SKETCHED_BYTES,
    LIKELY_BITS,
    N_WORDS,
    SURE_BITS,
    can_tell,
    compare,
)
from tensorcas_mlflow.base.tensors import distinct, offsets_of
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io import ChunkReader
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref, is_shown, list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Columns, Manifest, Row, read_sketches, sketched_rows
from tensorcas_mlflow.store._sketching import sketch_rows, words_in
from tensorcas_mlflow.store._sources import Source


def query_of(source: Source, rows: Mapping[int, Row]) -> Sketched:
    """Sketch those of some tensors of a save that have sketches and bytes at hand.

    Args:
        source: The rows of the save, and their bytes.
        rows: The tensors, by number.
    """
    columns = source.columns
    numbers = sketched_rows(columns)
    numbers = numbers[np.isin(numbers, list(rows))]
    words = sketch_rows(source, numbers)
    are_known = words.any(axis=1)
    return Sketched.of("", columns, numbers[are_known], words[are_known])


_MOST_SKETCHES = 200_000
"""Bound of the sketches a process keeps for a store; the oldest of too many are forgotten."""
_MOST_READ = 256
"""Bound of the manifests read by one search; the next one reads more of them."""
_LEAST_READ = 8
"""The same for a small save."""
_READ_BYTES = 4 << 20
"""Size of a save for each manifest that its search reads: a search takes a few percent of the time of a save."""
_MOST_FETCHED = 8
"""Bound of the manifests one search fetches from an object store."""
FETCH_BYTES = 1 << 20
"""Size of a save for each manifest that its search fetches."""
_FETCHED_SHARE = 1 / 16
"""Largest manifest that a search fetches from an object store, as a share of the save."""
_REFS_A_READ = 8
"""Number of refs a search looks at for each manifest; a logged model is some ten files."""
_LEAST_SHARE = 1 / 4
"""Models of less than this share of a save's size are read after all others."""
_MOST_READ_BYTES = 64 << 20
_LEAST_DECODED_BYTES = 1 << 20
MOST_DECODED_BYTES = 32 << 20
"""Bounds of the chunks read by one search, for checkpoints without sketches; between them it is a share of the save."""
_DECODED_SHARE = 1 / 4
_BATCH_BYTES = 32 << 20
"""Approximate bound of the chunk bytes held in memory while a manifest is sketched."""
_MOST_LISTED = 20_000
_LISTING_S = 60.0
"""Least time between two listings of a store's refs by searches."""
_N_QUERIES = 16
_LEAST_LIKENESS = 1 / 16
"""Likeness of the least related models."""
_MOST_SHARED = 1 / 2
"""Likeness from which a single tensor makes two models relatives."""
_LEAST_TOTAL_BITS = 100.0
"""Evidence of all tensors together that makes two models relatives."""
SURE = 0.9
"""Likeness from which a search looks for nothing nearer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketched:
    """Sketches of the tensors of one checkpoint or file."""

    manifest: str
    """Its name."""
    rows: Any
    """Numbers of the sketched rows."""
    n_bytes: Any
    """Size of each."""
    n_elements: Any
    words: Any
    """The words of each, shape ``(n, 32)``."""
    is_whole: bool = True
    """Whether these are all tensors of the manifest that can have sketches, and some words of each are known."""

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return _digest(self.manifest)

    @property
    def largest(self) -> Any:
        """Positions of the tensors to compare: the largest ones with a sketch."""
        largest = np.argsort(-self.n_bytes, kind="stable")
        return largest[self.words[largest].any(axis=1)][:_N_QUERIES]

    @property
    def n_compared_bytes(self) -> int:
        """Size of the tensors to compare."""
        return int(self.n_bytes[self.largest].sum())

    @classmethod
    def of(cls, name: str, columns: Columns, rows: Any, words: Any) -> Sketched:
        """Describe sketches.

        Args:
            name: Name of the manifest.
            columns: Its rows.
            rows: Numbers of the sketched rows.
            words: Their words.
        """
        n_bytes = columns.n_bytes[rows]
        n_elements = n_bytes // np.maximum(columns.itemsizes[rows], 1)
        is_whole = bool(words.any(axis=1).all())
        return cls(manifest=name, rows=rows, n_bytes=n_bytes, n_elements=n_elements, words=words, is_whole=is_whole)

    @classmethod
    def stored(cls, name: str, manifest: Manifest) -> Sketched | None:
        """Return the sketches in a manifest's blob; None if it has none."""
        found = read_sketches(manifest.sketches, manifest.columns)
        return None if found is None else cls.of(name, manifest.columns, *found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The nearest checkpoint or file by its sketches."""

    sketched: Sketched
    likeness: float
    """1 if all compared tensors are equal, 0 if none is related."""


class Search(NamedTuple):
    """Result of a search by sketches."""

    nearest: Match | None
    """The nearest checkpoint or file, of equally near ones the latest; None if none is related."""
    strangers: Set[str]
    """Digests of those asked for without a related tensor; none if the words of a compared one tell nothing."""


class Sketches:
    """Sketches in one store, as far as this process has written or read them. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: OrderedDict[str, Sketched] = OrderedDict()
        self._n = 0
        self._table: _Table | None = None
        self._seen: set[tuple[str, int, float]] = set()
        self._unread: list[BlobInfo] = []
        self._listed_s = -math.inf

    def note(self, key: str, found: Sketched) -> None:
        """Remember sketches.

        Args:
            key: The series or the manifest they belong to; they replace earlier ones.
            found: The sketches.
        """
        with self._lock:
            before = self._by_key.pop(key, None)
            self._by_key[key] = found
            self._n += len(found.rows) - (0 if before is None else len(before.rows))
            while self._n > _MOST_SKETCHES and len(self._by_key) > 1:
                self._n -= len(self._by_key.popitem(last=False)[1].rows)
            self._table = None

    def get(self, manifest: str) -> Sketched | None:
        """Return the sketches of a manifest that were noted under its digest."""
        with self._lock:
            return self._by_key.get(_digest(manifest))

    def forget(self, manifest: str) -> None:
        """Forget the sketches of a manifest that is gone."""
        with self._lock:
            for key in [key for key, each in self._by_key.items() if each.manifest == manifest]:
                self._n -= len(self._by_key.pop(key).rows)
            self._table = None

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Remember the sketches of manifests at hand, the latest first, unless they are known."""
        known = self.digests()
        for manifest in reversed([each for each in manifests if each.sketches and each.digest not in known]):
            if (found := Sketched.stored(manifest.digest, manifest)) is not None:
                self.note(manifest.digest, found)

    def digests(self) -> Set[str]:
        """Return the digests of all manifests with known sketches."""
        return self._whole().numbers.keys()

    def keys(self) -> Set[str]:
        """Return the keys of all sketches."""
        return self._by_key.keys()

    def unread(self, backend: Backend) -> list[BlobInfo]:
        """Return refs not passed to `see` before, the latest first: the last ref of each series, and those of files.

        The refs are listed anew once these are read, but not at every search. The first listing of an object store is
        left to the search for recent manifests: a process that created the store needs none.
        """
        if backend.is_remote and self._listed_s == -math.inf:
            return []
        if not self._unread and time.monotonic() - self._listed_s >= _LISTING_S:
            self.take(listed_refs(backend))
        return self._unread

    def take(self, refs: Sequence[BlobInfo]) -> None:
        """Take a listing of all refs, the latest first, that somebody has made."""
        latest: dict[str, BlobInfo] = {}
        for info in refs:
            latest.setdefault(info.key.rpartition("/")[0] if info.key.startswith("refs/runs/") else info.key, info)
        listed = list(latest.values())[:_MOST_LISTED]
        with self._lock:
            self._listed_s = time.monotonic()
            self._unread = [info for info in listed if _facts(info) not in self._seen]
            self._seen.intersection_update(map(_facts, listed))

    def see(self, infos: Iterable[BlobInfo]) -> None:
        """Remember that refs have been looked at."""
        with self._lock:
            self._seen.update(map(_facts, infos))
            self._unread = [info for info in self._unread if _facts(info) not in self._seen]

    def search(self, query: Sketched, among: Collection[Manifest] = ()) -> Search:
        """Find the checkpoint or file with the nearest tensors of the same sizes, and strangers among some.

        Args:
            query: Sketches of the new tensors; the largest ones are compared.
            among: Manifests of possible strangers.
        """
        table = self._whole()
        taken, is_near = np.zeros(len(table.parts)), np.zeros(len(table.parts), dtype=bool)
        for at, evidence, share in table.compared(query, other_dtypes=False):
            taken += share * query.n_bytes[at]
            is_near |= evidence >= LIKELY_BITS
        parts = {digest: table.numbers[digest] for each in among if (digest := each.digest) in table.numbers}
        strangers = {each for each, part in parts.items() if not is_near[part] and table.parts[part].is_whole}
        if strangers and not all(map(can_tell, query.words[query.largest])):
            strangers = set()
        if not taken.any():
            return Search(None, strangers)
        best = len(taken) - 1 - int(taken[::-1].argmax())
        match = Match(sketched=table.parts[best], likeness=float(taken[best] / query.n_compared_bytes))
        return Search(match, strangers)

    def relatives(self, query: Sketched) -> list[Match]:
        """Find all related checkpoints and files, in any dtypes, the nearest first.

        Several tensors prove a relation together, each with little evidence. A single one proves it only if it is most
        of the model: unrelated models may have a table of constants in common.

        Args:
            query: Sketches of a model; its largest tensors are compared.
        """
        table = self._whole()
        taken, total = np.zeros(len(table.parts)), np.zeros(len(table.parts))
        n_sure = np.zeros(len(table.parts), dtype=np.int64)
        compared: set[bytes] = set()
        for at, evidence, share in table.compared(query, other_dtypes=True):
            taken += share * query.n_bytes[at]
            words = query.words[at].tobytes()
            if words not in compared:
                compared.add(words)
                n_sure += evidence >= SURE_BITS
                total += np.minimum(evidence, SURE_BITS)
        likeness = taken / max(1, query.n_compared_bytes)
        is_related = (n_sure > 1) | ((n_sure == 1) & (likeness >= _MOST_SHARED)) | (total >= _LEAST_TOTAL_BITS)
        is_related &= likeness >= _LEAST_LIKENESS
        order = sorted(is_related.nonzero()[0].tolist(), key=lambda at: (-likeness[at], -at))
        return [Match(sketched=table.parts[at], likeness=float(likeness[at])) for at in order]

    def has_any(self, n_elements: int) -> bool:
        """Tell whether there is a sketch of a tensor with so many elements."""
        alike = self._whole().of_size(n_elements, None)
        return bool(alike.stop > alike.start)

    def like(
        self, evidence: Callable[[Any], Any], n_elements: int, least: float, without_bytes: int | None
    ) -> list[Sketched]:
        """Return the checkpoints and files with a tensor for which there is evidence, the latest last.

        Args:
            evidence: Returns the evidence in bits for sketches, one column each.
            n_elements: Number of the tensor's elements.
            least: Least evidence.
            without_bytes: Size of tensors that do not count.
        """
        table = self._whole()
        found = table.of_size(n_elements, None)
        alike = np.arange(found.start, found.stop)
        if without_bytes is not None:
            alike = alike[table.n_bytes[alike] != without_bytes]
        if not len(alike):
            return []
        is_likely = evidence(table.words[:, alike]) >= least
        return [table.parts[number] for number in distinct(table.owner[alike[is_likely]]).tolist()]

    def _whole(self) -> _Table:
        with self._lock:
            if self._table is None:
                self._table = _Table.of(list(self._by_key.values()))
            return self._table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """All sketches of a store, column by column, sorted by the tensors' numbers of elements and sizes."""

    parts: Sequence[Sketched]
    numbers: Mapping[str, int]
    """Their numbers, by the digests of their manifests."""
    owner: Any
    rows: Any
    n_bytes: Any
    n_elements: Any
    words: Any
    """Shape ``(32, n)``."""

    @classmethod
    def of(cls, parts: Sequence[Sketched]) -> _Table:
        none = np.empty(0, dtype=np.int64)
        owner = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
        n_bytes = np.concatenate([none, *(part.n_bytes for part in parts)])
        n_elements = np.concatenate([none, *(part.n_elements for part in parts)])
        rows = np.concatenate([none, *(part.rows for part in parts)])
        words = np.concatenate([np.empty((0, N_WORDS), np.uint16), *(part.words for part in parts)])
        order = np.lexsort((n_bytes, n_elements))
        return cls(
            parts=parts,
            numbers={part.digest: number for number, part in enumerate(parts)},
            owner=owner[order],
            rows=rows[order],
            n_bytes=n_bytes[order],
            n_elements=n_elements[order],
            words=np.ascontiguousarray(words[order].T),
        )

    def compared(self, query: Sketched, *, other_dtypes: bool) -> Iterator[tuple[int, Any, Any]]:
        """Compare the largest tensors of a model with those of all parts.

        Args:
            query: Sketches of the model.
            other_dtypes: Whether tensors of as many elements of another size count.

        Yields:
            The position of a tensor in the query, and for each part the evidence and the likeness of its nearest one.
        """
        for at in query.largest.tolist():
            alike = self.of_size(int(query.n_elements[at]), None if other_dtypes else int(query.n_bytes[at]))
            found = compare(query.words[at], self.words[:, alike])
            some = (found.evidence > 0).nonzero()[0]
            owner, evidence, share = self.owner[alike][some], found.evidence[some], found.share[some]
            best, most = np.zeros(len(self.parts)), np.zeros(len(self.parts))
            if other_dtypes:
                # The more tensors are compared, the more evidence chance gives to one of them.
                counts = np.bincount(self.owner[alike], minlength=len(self.parts))
                np.maximum.at(most, owner, evidence - np.log2(counts[owner]))
            else:
                np.maximum.at(most, owner, evidence)
            is_near = evidence >= (LIKELY_BITS if other_dtypes else SURE_BITS)
            np.maximum.at(best, owner[is_near], share[is_near])
            yield at, most, best

    def of_size(self, n_elements: int, n_bytes: int | None) -> slice:
        """Find the tensors of this many elements, and of this size unless that is None."""
        begin, end = self.n_elements.searchsorted([n_elements, n_elements + 1]).tolist()
        if n_bytes is None:
            return slice(begin, end)
        first, last = self.n_bytes[begin:end].searchsorted([n_bytes, n_bytes + 1]).tolist()
        return slice(begin + first, begin + last)


_lock = Lock()
_of_store: dict[str, Sketches] = {}
_listed: dict[str, Sketches] = {}


def sketches_of(store_id: str) -> Sketches:
    """Return the sketches of a store that this process knows."""
    with _lock:
        return _of_store.setdefault(store_id, Sketches())


def listed_sketches_of(store_id: str) -> Sketches:
    """Return the sketches of all manifests of a store that a search for relatives has read."""
    with _lock:
        return _listed.setdefault(store_id, Sketches())


def note_saved(store_id: str, series: str | None, name: str, manifest: Manifest) -> None:
    """Remember the sketches of a committed save."""
    if (found := Sketched.stored(name, manifest)) is not None:
        sketches_of(store_id).note(series or name, found)


class SketchedStore(Protocol):
    """The parts of an open store that a search needs."""

    backend: Backend
    chunk_bytes: int
    id: str

    @property
    def chunks(self) -> ChunkReader:
        """The reader of the store's chunks."""

    def ref(self, key: str) -> Ref | None:
        """Read a ref; see `Store.ref`."""


def listed_refs(backend: Backend) -> list[BlobInfo]:
    """List the refs of a store, the latest first."""
    refs = [info for info in list_blobs(backend, "refs") if is_shown(info.key)]
    return sorted(refs, key=lambda info: -info.modified_s)


def read_more(store: SketchedStore, n_bytes: int) -> list[Manifest]:
    """Read sketches that other processes have stored: the latest checkpoint of each series, and files.

    One call reads a bounded number of manifests, the latest first, and much smaller models last. A later call goes on.
    From an object store it fetches few manifests, several at a time, and no chunks.

    Args:
        store: The store.
        n_bytes: Size of the save. A larger one reads more.

    Returns:
        The manifests read that have sketches.
    """
    known, backend = sketches_of(store.id), store.backend
    if backend.is_remote:
        most, most_bytes = min(_MOST_FETCHED, n_bytes // FETCH_BYTES), int(_FETCHED_SHARE * n_bytes)
    else:
        most, most_bytes = min(_MOST_READ, max(_LEAST_READ, n_bytes // _READ_BYTES)), MAX_BYTES

    def ref_of(info: BlobInfo) -> Ref | None:
        with suppress(NotFoundError, FormatError, BackendError):
            return store.ref(info.key)
        return None

    def manifest_of(ref: Ref) -> Manifest | None:
        with suppress(NotFoundError, FormatError, BackendError):
            return read_manifest(store, ref.manifest, max_bytes=most_bytes)
        return None

    refs: list[tuple[BlobInfo, Ref]] = []
    small: list[tuple[BlobInfo, Ref]] = []
    done: list[BlobInfo] = []
    at_hand = known.digests()
    infos = known.unread(backend)[: most * _REFS_A_READ] if most else []
    read = map_requests(backend, ref_of, infos, window=_MOST_FETCHED)
    for info, ref in zip(infos, read, strict=False):
        is_tiny = ref is not None and ref.kind == "file" and ref.n_bytes < LEAST_SKETCHED_BYTES
        if ref is None or is_tiny or _digest(ref.manifest) in at_hand:
            done.append(info)
        elif _most_bytes_of(ref, store.chunk_bytes) < _LEAST_SHARE * n_bytes:
            small.append((info, ref))
        else:
            refs.append((info, ref))
            if len(refs) == most:
                break
    refs = [*refs, *small][:most]
    found: list[tuple[Manifest, Sketched]] = []
    left_bytes = _MOST_READ_BYTES
    left_decoded_bytes = min(MOST_DECODED_BYTES, max(_LEAST_DECODED_BYTES, int(_DECODED_SHARE * n_bytes)))
    manifests = map_requests(backend, manifest_of, [ref for _, ref in refs])
    for (info, ref), manifest in zip(refs, manifests, strict=True):
        done.append(info)
        if manifest is None:
            continue
        left_bytes -= len(manifest.stream)
        each = Sketched.stored(ref.manifest, manifest)
        if each is None and left_decoded_bytes > 0 and not backend.is_remote:
            with suppress(NotFoundError, FormatError, BackendError):
                each = compute_sketches(store, ref.manifest, manifest, most_bytes=left_decoded_bytes)
            columns = manifest.columns
            left_decoded_bytes -= int(_head_bytes(columns, sketched_rows(columns), manifest.chunk_bytes).sum())
        if each is not None:
            found.append((manifest, each))
        if left_bytes < 0:
            break
    known.see(done)
    for _, each in reversed(found):
        known.note(each.manifest, each)
    return [manifest for manifest, _ in found]


def _facts(info: BlobInfo) -> tuple[str, int, float]:
    return info.key, info.size, info.modified_s


def _most_bytes_of(ref: Ref, chunk_bytes: int) -> int:
    """Return a bound of the size of a ref's tensors; the size of a checkpoint is that of its manifest."""
    return ref.n_bytes if ref.kind == "file" else ref.n_bytes // DIGEST_BYTES * chunk_bytes


def _digest(manifest: str) -> str:
    """Return the digest of a manifest, given its name."""
    return manifest.partition(".")[0]


def read_manifest(store: SketchedStore, name: str, *, max_bytes: int = MAX_BYTES) -> Manifest:
    """Read a manifest by its name, unless its blob is larger than a bound."""
    return Manifest.from_blob(store.backend.get(f"manifests/{name}", max_bytes=max_bytes), name)


def _head_bytes(columns: Columns, rows: Any, chunk_bytes: int) -> Any:
    """Return about the number of bytes to read for the sketch of each of some rows."""
    return np.minimum(columns.n_bytes[rows], np.maximum(chunk_bytes, HEAD_ELEMENTS * columns.itemsizes[rows]))


def compute_sketches(
    store: SketchedStore, name: str, manifest: Manifest, *, most_bytes: int | None = None
) -> Sketched | None:
    """Sketch the tensors of a manifest from its stored chunks.

    Args:
        store: The store.
        name: Name of the manifest.
        manifest: The manifest.
        most_bytes: Bound of the bytes read; the largest tensors come first. None for all tensors.
    """
    columns = manifest.columns
    # A derived tensor is evaluated whole, which costs more than a base for it may save.
    every = rows = sketched_rows(columns)
    rows = rows[~np.isin(rows, [each.row for each in manifest.derived])] if manifest.derived else rows
    if most_bytes is not None:
        rows = rows[np.argsort(-columns.n_bytes[rows], kind="stable")]
        rows = np.sort(rows[np.cumsum(_head_bytes(columns, rows, manifest.chunk_bytes)) <= most_bytes])
    words = _words_of(store, manifest, manifest.stored_rows.searchsorted(rows))
    found = Sketched.of(name, columns, rows, words)
    return replace(found, is_whole=found.is_whole and len(rows) == len(every)) if words.any() else None


def _words_of(store: SketchedStore, manifest: Manifest, rows: Any) -> Any:
    """Return the sketches of rows of `Manifest.stored` from their chunks."""
    columns, sizes = manifest.stored, manifest.stored_sizes

    def read(chunks: Any) -> dict[int, Any]:
        unique, first, number = unique_rows(columns.digests[chunks])
        block = np.empty(int(sizes[chunks][first].sum()), np.uint8).data
        at = offsets_of(sizes[chunks][first]).tolist()
        outs = [block[begin:end] for begin, end in pairwise(at)]
        store.chunks.read(unique, outs, verify=True)
        return {chunk: outs[place] for chunk, place in zip(chunks.tolist(), number.tolist(), strict=True)}

    words = np.zeros((len(rows), N_WORDS), dtype=np.uint16)
    at = np.cumsum(_head_bytes(columns, rows, manifest.chunk_bytes)) // _BATCH_BYTES
    for begin, end in pairwise([*at.searchsorted(distinct(at)).tolist(), len(rows)]):
        words[begin:end] = words_in(columns, rows[begin:end], sizes, read)
    return words


class Relative:
    """An earlier checkpoint or file with tensors related to those of a save, under the names of the save."""

    def __init__(self, parent: Manifest, sketches: Sketched) -> None:
        self.parent = parent
        self._sketches = sketches
        self._found: dict[str, Row] = {}
        self.renamed = parent
        """The parent's rows, each as a tensor of the save."""
        self.is_renamed = False
        """True if a tensor has another name, dtype or shape there."""

    def learn(self, query: Sketched, rows: Mapping[int, Row]) -> None:
        """Find the parent's tensors that are related to tensors of the save.

        Args:
            query: Sketches of tensors of the save.
            rows: Tensors of the save, by number.
        """
        table = _Table.of([self._sketches])
        found = dict(self._found)
        for at, number in enumerate(query.rows.tolist()):
            row = rows[number]
            alike = table.of_size(int(query.n_elements[at]), int(query.n_bytes[at]))
            if alike.start == alike.stop or row.spec.name in found or not query.words[at].any():
                continue
            likeness = compare(query.words[at], table.words[:, alike])
            share = np.where(likeness.evidence >= SURE_BITS, likeness.share, 0)
            best = int(share.argmax())
            if share[best]:
                other = self.parent.columns.row(int(table.rows[alike][best]))
                self.is_renamed |= other.spec != row.spec
                found[row.spec.name] = replace(other, spec=row.spec)
        if len(found) > len(self._found):
            self._found = found
            parent = self.parent.in_full(store_id=self.parent.store_id)
            self.renamed = replace(parent, rows=list(found.values()), sketches=b"", hints=b"", left_out={})


def find_relative(
    store: SketchedStore, query: Sketched, rows: Mapping[int, Row], candidates: Sequence[Manifest]
) -> tuple[Relative | None, Set[str]]:
    """Find the nearest earlier checkpoint or file by sketches.

    Args:
        store: The store.
        query: See `Relative.learn`.
        rows: See there.
        candidates: Manifests at hand; others are read.

    Returns:
        It, or None; and the digests of the candidates that are strangers, see `Search`.
    """
    known = sketches_of(store.id)
    known.learn(candidates)
    match, strangers = known.search(query, candidates)
    if match is None or match.likeness < SURE:
        with suppress(NotFoundError, FormatError, BackendError):
            if read := read_more(store, int(query.n_bytes.sum())):
                candidates = [*candidates, *read]
                match, strangers = known.search(query, candidates)
    if match is None:
        return None, strangers
    try:
        name, sketches = match.sketched.manifest, match.sketched
        at_hand = {each.digest: each for each in candidates}
        parent = at_hand.get(_digest(name)) or read_manifest(store, name)
        if len(sketches.rows) < len(sketched_rows(parent.columns)):
            sketches = compute_sketches(store, sketches.manifest, parent) or sketches
    except (NotFoundError, FormatError, BackendError):
        known.forget(match.sketched.manifest)
        return None, strangers
    relative = Relative(parent, sketches)
    relative.learn(query, rows)
    return relative, strangers

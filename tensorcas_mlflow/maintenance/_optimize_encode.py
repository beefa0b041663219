"""Encoding of chunks anew: each in full or as a delta against its best neighbour, unless the saved copy is smaller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, Digests
from tensorcas_mlflow.base.engines import Engine, map_in_order
from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    RAW,
    SHUFFLE_ZSTD,
    WORD_BYTES,
    ZSTD,
    Codec,
    Effort,
    Transform,
    can_shuffle,
    choose_codings,
    choose_transform,
    codec_numbered,
    estimate_share,
    is_sparse,
    typesize_of,
)
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError, FormatError, NotFoundError
from tensorcas_mlflow.layout.packs import (
    MAX_DEPTH,
    TABLE_BASE_BYTES,
    TABLE_ENTRY,
    Base,
    Payload,
    bases_of,
    decode_chunk,
    is_delta,
    is_possible,
    pack_key,
)
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_tree import IN_FULL, choose_bases
from tensorcas_mlflow.maintenance._workers import StoreAt
from tensorcas_mlflow.store import CLEARLY_SMALLER, LEAST_DELTA_BYTES, Store, passes_of
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_MOST_STORED_BASES = 3
"""Stored chunks that are read and compared with those to encode at a place: the latest that are no deltas of deltas."""
_LEAST_ESTIMATED_BYTES = 8 << 10
"""A shorter chunk is encoded to learn its size: too few words tell their entropy."""
_FEW_WORDS = 4
"""Deltas of few words are encoded to learn their size if at most one word in so many changes."""
_PASSES_OF_INTEGERS = 2 / 3
"""Cost of decoding a delta of integers: it is never grouped, which takes twice the time. Three make a chain."""
_LEAST_GROUPED_BYTES = 32 << 10
"""Groups have headers and codes of their own, too expensive for fewer bytes."""
_TEXT_LEVEL = 19
_LEAST_PART_BYTES = 1 << 20
"""Decoded bytes of chunks for which a worker's task is worth its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Distinct chunks at one place of a tensor in several checkpoints: each may be the base of others."""

    digests: Sequence[bytes]
    """The chunks; those to encode, once `clusters_of` has parted the others."""
    versions: Sequence[int]
    """Number of the first checkpoint of each."""
    n_bytes: int
    """Size of each."""
    itemsize: int
    is_float: bool = False
    is_text: bool = False
    """Whether it is text, or bytes that are no tensor."""
    number: int = 0
    """Position in its block."""
    bases: Sequence[Base] = ()
    """Chunks at the place that are stored and stay, and may be bases."""
    is_shallow: Sequence[bool] = ()
    """For each chunk whether it is to be read with few bases, for which it may grow."""

    @property
    def total_bytes(self) -> int:
        """Bytes of its chunks."""
        return self.n_bytes * len(self.digests)


class SavedCopy(NamedTuple):
    """A stored copy of a chunk that is not done."""

    pack: str
    entry: Any
    base: bytes | None
    """Its base if it is a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Places with chunks that are stored as deltas against each other."""

    places: Sequence[Place]
    saved: Mapping[bytes, SavedCopy]
    """Copies of the chunks so far, by digest."""
    outside: Mapping[bytes, tuple[Base, int]]
    """Chunks that are done and may be bases, by digest; with their sizes."""
    earlier: Mapping[bytes, tuple[Base, int]]
    """The same of chunks in earlier blocks of the pack: the bases of copies so far. No pack has them yet."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the chunks to encode."""
        return sum(place.total_bytes for place in self.places)


T = TypeVar("T")


def in_batches(items: Iterable[T], n_bytes: int, bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of some items, each of at least some bytes except the last one."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        batch.append(item)
        batch_bytes += bytes_of(item)
        if batch_bytes >= n_bytes:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def read_by_digest(store: Store, digests: Digests, sizes: Any) -> dict[bytes, memoryview]:
    """Read chunks, each checked against its digest.

    Args:
        store: Store to read.
        digests: Distinct digests.
        sizes: Sizes of the chunks.

    Returns:
        Chunks by digest, without those that were collected meanwhile, and without damaged ones: their packs stay, and
        `verify` reports them.

    Raises:
        BackendError: The storage failed.
    """
    if len(digests) == 0:
        return {}
    stops = np.cumsum(sizes)
    block = np.empty(int(stops[-1]), dtype=np.uint8).data
    outs = [block[stop - size : stop] for stop, size in zip(stops.tolist(), np.asarray(sizes).tolist(), strict=True)]
    return dict(_read(store, digests, outs))


def _read(store: Store, digests: Digests, outs: list[memoryview]) -> Iterator[tuple[bytes, memoryview]]:
    """Read chunks; if one cannot be read, read each half, as few cannot."""
    try:
        store.chunks.read(digests, outs, verify=True)
    except (ChunkNotFoundError, CorruptChunkError) as error:
        if len(outs) > 1:
            middle = len(outs) // 2
            yield from _read(store, digests[:middle], outs[:middle])
            yield from _read(store, digests[middle:], outs[middle:])
        elif isinstance(error, CorruptChunkError):
            _log.warning("left as it is: %s", error)
    else:
        yield from zip(map(bytes, digests), outs, strict=True)


def read_bases(backend: Backend, bases: Iterable[tuple[Base, int]]) -> dict[bytes, Buffer]:
    """Read the bases of deltas, each from the very pack that the delta will name, and check them.

    Args:
        backend: Backend of the store.
        bases: Distinct bases, and their sizes.

    Returns:
        Chunks by digest, without those that are gone or damaged there.

    Raises:
        BackendError: The storage failed.
    """
    reader = p.Bases(backend)

    def read(named: tuple[Base, int]) -> tuple[bytes, Buffer] | None:
        base, n_bytes = named
        try:
            return base.digest, reader.copy(base, n_bytes)
        except (NotFoundError, FormatError):
            return None

    return dict(each for each in threads.ordered_map(read, bases, waits=backend.is_remote) if each is not None)


def saved_copies(store: Store, digests: Digests) -> dict[bytes, SavedCopy]:
    """Return a copy of each of some chunks, as the catalog knows it."""
    places = store.catalog.find(digests)
    found: dict[bytes, SavedCopy] = {}
    for at in np.flatnonzero(places.found & is_possible(places.entries)).tolist():
        entry = places.entries[at]
        [base] = bases_of(entry.reshape(1)) if is_delta(entry) else [None]
        digest = None if base is None else base.digest
        found[digests[at].tobytes()] = SavedCopy(places.packs[int(places.pack[at])], entry, digest)
    return found


def clusters_of(
    block: Sequence[Place],
    done_chunks: DoneChunks,
    relied: Set[str],
    taken: dict[bytes, tuple[Base, int] | None],
    saved: Mapping[bytes, SavedCopy],
) -> list[Cluster]:
    """Find the chunks of a block that are not done, and the done ones that may be their bases or are so far.

    Args:
        block: Places.
        done_chunks: Chunks that are done.
        relied: Packs in which chunks that are done may be bases.
        taken: Chunks of the pack so far, by digest, as bases with their sizes; None for one that could not be read.
            This call adds those of the block, with None.
        saved: Copies of chunks that are not done; see `saved_copies`.
    """
    members = list(dict.fromkeys(digest for place in block for digest in place.digests))
    bases = [copy.base for digest in members if (copy := saved.get(digest)) is not None and copy.base is not None]
    wanted = _as_rows(dict.fromkeys([*members, *bases]))
    packs, depth = done_chunks.find(wanted)
    is_done = dict(zip(map(bytes, wanted), done_chunks.are_done(wanted).tolist(), strict=True))
    is_shallow = dict(zip(map(bytes, wanted), done_chunks.must_be_shallow(wanted).tolist(), strict=True))
    outside = {
        digest: Base(pack=name, digest=digest, depth=n)
        for digest, name, n in zip(map(bytes, wanted), packs, depth.tolist(), strict=True)
        if name is not None and name in relied
    }
    places: list[Place] = []
    place_of: dict[bytes, int] = {}
    for number, place in enumerate(block):
        new = [at for at, digest in enumerate(place.digests) if not is_done[digest] and digest not in taken]
        near = [base for digest in place.digests if (base := outside.get(digest)) is not None and base.depth <= 1]
        chosen = [place.digests[at] for at in new]
        taken.update(dict.fromkeys(chosen))
        place_of.update(dict.fromkeys(chosen, len(places)))
        if new:
            places.append(
                replace(
                    place,
                    digests=chosen,
                    versions=[place.versions[at] for at in new],
                    number=number,
                    bases=near[-_MOST_STORED_BASES:],
                    is_shallow=[is_shallow[digest] for digest in chosen],
                )
            )
    return list(_joined(places, place_of, saved, outside, taken))


def _joined(
    places: Sequence[Place],
    place_of: Mapping[bytes, int],
    saved: Mapping[bytes, SavedCopy],
    outside: Mapping[bytes, Base],
    taken: Mapping[bytes, tuple[Base, int] | None],
) -> Iterator[Cluster]:
    """Join places with chunks that were saved as deltas against each other."""
    first = list(range(len(places)))

    def root(at: int) -> int:
        while first[at] != at:
            first[at] = at = first[first[at]]
        return at

    for digest, at in place_of.items():
        copy = saved.get(digest)
        if copy is not None and copy.base is not None and copy.base in place_of:
            first[root(at)] = root(place_of[copy.base])
    joined: dict[int, list[Place]] = {}
    for at, place in enumerate(places):
        joined.setdefault(root(at), []).append(place)
    for some in joined.values():
        mine = {digest: saved[digest] for place in some for digest in place.digests if digest in saved}
        named = {base.digest: (base, place.n_bytes) for place in some for base in place.bases}
        earlier: dict[bytes, tuple[Base, int]] = {}
        for copy in mine.values():
            if copy.base is not None and copy.base in outside:
                named.setdefault(copy.base, (outside[copy.base], int(copy.entry["raw_bytes"])))
            elif copy.base is not None and (written := taken.get(copy.base)) is not None:
                earlier[copy.base] = written
        yield Cluster(places=some, saved=mine, outside=named, earlier=earlier)


def _as_rows(digests: Iterable[bytes]) -> Digests:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


class _Made(NamedTuple):
    """Encoding of a chunk, and the base that it needs."""

    digest: bytes
    codec: Codec
    typesize: int
    data: Buffer
    base: bytes | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of its payload, and of its row in the table of a pack."""
        return _row_bytes(memoryview(self.data).nbytes, self.base)


def _row_bytes(n_stored: int, base: bytes | None) -> int:
    return n_stored + TABLE_ENTRY.itemsize + (0 if base is None else TABLE_BASE_BYTES)


class Encoders:
    """Workers that read and encode chunks of one store."""

    def __init__(self, store: Store, engine: Engine) -> None:
        """Start nothing yet.

        Raises:
            DirectAccessError: The store is reached through an MLflow server.
        """
        self._place = StoreAt.of(store)
        self._engine = engine

    def encode(self, clusters: Sequence[Cluster], effort: Effort) -> Iterator[_Made]:
        """Encode the chunks of clusters that can be read."""
        n_bytes = sum(cluster.n_bytes for cluster in clusters) // (2 * self._engine.n_workers)
        parts = in_batches(clusters, max(_LEAST_PART_BYTES, n_bytes), lambda cluster: cluster.n_bytes)
        items = ((part, effort) for part in parts)
        for made in map_in_order(self._engine, partial(_encode_in_worker, self._place), items):
            yield from made


def _encode_in_worker(place: StoreAt, item: tuple[Sequence[Cluster], Effort]) -> list[_Made]:
    """Read and encode a part of a block."""
    return [made._replace(data=bytes(made.data)) for made in _encode_all(place.open_store(), *item)]


def _encode_all(store: Store, clusters: Sequence[Cluster], effort: Effort) -> Iterator[_Made]:
    """Read, check and encode the chunks of clusters that can be read."""
    sizes = {digest: n_bytes for cluster in clusters for digest, (_, n_bytes) in cluster.earlier.items()}
    sizes |= {digest: place.n_bytes for cluster in clusters for place in cluster.places for digest in place.digests}
    raws: dict[bytes, Buffer] = {**read_by_digest(store, _as_rows(sizes), list(sizes.values()))}
    outside = {digest: named for cluster in clusters for digest, named in cluster.outside.items()}
    bases = read_bases(store.backend, outside.values())
    for made in threads.ordered_map(lambda cluster: _encode_cluster(store, cluster, raws, bases, effort), clusters):
        yield from made


def payloads_of(
    store: Store, clusters: Sequence[Cluster], pack: str, effort: Effort, encoders: Encoders | None = None
) -> Iterator[Payload]:
    """Read, check and encode chunks.

    Args:
        store: Store to optimize.
        clusters: Chunks to encode.
        pack: Name of the pack that the payloads go into.
        effort: Effort for each chunk.
        encoders: Workers that read and encode; by default this process does.

    Yields:
        Payloads, those of a version together and after all their bases, without chunks that cannot be read.
    """
    outside = {
        digest: base
        for cluster in clusters
        for digest, (base, _) in chain(cluster.outside.items(), cluster.earlier.items())
    }
    where = {
        digest: (version, place)
        for cluster in clusters
        for place in cluster.places
        for digest, version in zip(place.digests, place.versions, strict=True)
    }
    bases: dict[bytes, Base | None] = {}
    depths: dict[bytes, int] = {}
    encoded = _encode_all(store, clusters, effort) if encoders is None else encoders.encode(clusters, effort)
    chunks: list[_Made] = []
    for made in encoded:
        base = None
        if made.base is not None:
            base = outside.get(made.base) or Base(pack=pack, digest=made.base, depth=depths[made.base])
        bases[made.digest], depths[made.digest] = base, 0 if base is None else base.depth + 1
        chunks.append(made)

    def order(made: _Made) -> tuple[bool, int, int, int]:
        version, place = where[made.digest]
        # Raw chunks are aligned, which takes room behind others. They have no bases.
        return made.codec is not RAW, depths[made.digest], version, place.number

    before = None
    for made in sorted(chunks, key=order):
        version, place = where[made.digest]
        yield Payload(
            digest=made.digest,
            raw_bytes=place.n_bytes,
            codec=made.codec,
            typesize=made.typesize,
            data=made.data,
            # A small chunk is copied sooner than mapped, and its alignment may take more room than this run saves.
            begins_row=place.n_bytes >= LEAST_DELTA_BYTES and before != (version, place.number - 1),
            base=bases[made.digest],
            effort=int(effort),
        )
        before = version, place.number


def _encode_cluster(
    store: Store, cluster: Cluster, raws: Mapping[bytes, Buffer], bases: Mapping[bytes, Buffer], effort: Effort
) -> list[_Made]:
    """Encode the chunks of a cluster anew, or leave them as they were saved if they take no more room so.

    Returns:
        The chunks that were read, each after its base.
    """
    made = [each for place in cluster.places for each in _encode_place(place, raws, bases, effort)]
    if not cluster.saved or any(any(place.is_shallow) for place in cluster.places):
        return made
    places = {digest: place for place in cluster.places for digest in place.digests if digest in raws}
    named = _saved_bases(cluster, places, raws)
    now = sum(each.row_bytes for each in made)
    least = sum(_row_bytes(int(cluster.saved[each].entry["stored_bytes"]), base) for each, base in named.items())
    if not named or least > now:
        return made
    # A chunk whose base nobody keeps is stored in full.
    in_full = [_encode_plain(digest, raws[digest], places[digest], effort) for digest in places if digest not in named]
    if least + sum(each.row_bytes for each in in_full) > now:
        return made
    kept = {each.digest: each for each in in_full}
    for digest, base in named.items():
        copy = _read_saved(
            store, digest, cluster.saved[digest], None if base is None else raws.get(base, bases.get(base))
        )
        kept[digest] = copy or _encode_plain(digest, raws[digest], places[digest], effort)
    return list(kept.values())


def _saved_bases(
    cluster: Cluster, places: Mapping[bytes, Place], raws: Mapping[bytes, Buffer]
) -> dict[bytes, bytes | None]:
    """Return the chunks that can stay as they were saved, each after its base, with their bases."""
    depths = {digest: base.depth for digest, (base, _) in cluster.outside.items()}
    depths |= {digest: base.depth for digest, (base, _) in cluster.earlier.items() if digest in raws}
    waiting: dict[bytes, bytes | None] = {}
    for digest, place in places.items():
        copy = cluster.saved.get(digest)
        if copy is None or copy.entry["raw_bytes"] != place.n_bytes:
            depths[digest] = 0
        else:
            waiting[digest] = copy.base
    found: dict[bytes, bytes | None] = {}
    while waiting:
        ready = [digest for digest, base in waiting.items() if base is None or base in depths]
        if not ready:  # a base is lost, or two copies need each other
            lost = [digest for digest, base in waiting.items() if base not in waiting] or list(waiting)[:1]
            depths |= dict.fromkeys(lost, 0)
            waiting = {digest: base for digest, base in waiting.items() if digest not in depths}
        for digest in ready:
            base = waiting.pop(digest)
            depths[digest] = 0 if base is None else depths[base] + 1
            if depths[digest] <= MAX_DEPTH:
                found[digest] = base
            else:
                depths[digest] = 0
    return found


def _read_saved(store: Store, digest: bytes, copy: SavedCopy, base: Buffer | None) -> _Made | None:
    """Read a payload as it was saved, and check what it decodes to; None if it is bad."""
    entry = copy.entry
    stored = memoryview(bytearray(int(entry["stored_bytes"])))
    try:
        store.backend.read_into(pack_key(copy.pack), int(entry["offset"]), stored)
        decode_chunk(entry, stored, base)
    except (NotFoundError, FormatError):
        return None
    return _Made(digest, codec_numbered(int(entry["codec"])), int(entry["typesize"]), stored, copy.base)


def _encode_place(
    place: Place, raws: Mapping[bytes, Buffer], bases: Mapping[bytes, Buffer], effort: Effort
) -> Iterator[_Made]:
    """Encode the chunks of a place that were read, each after its base."""
    stored = [base for base in place.bases if base.digest in bases]
    new = [digest for digest in place.digests if digest in raws]
    nodes = [*(base.digest for base in stored), *new]
    data = [*(bases[base.digest] for base in stored), *(raws[digest] for digest in new)]
    if len(nodes) < 2:
        yield from (_encode_plain(digest, raws[digest], place, effort) for digest in new)
        return
    shallow = dict(zip(place.digests, place.is_shallow, strict=True))
    is_shallow = [shallow.get(digest, False) for digest in nodes]
    fixed = [*(base.depth for base in stored), *[-1] * len(new)]
    full = np.array([_size_in_full(raw, place) for raw in data])
    sizes = np.full((len(nodes), len(nodes)), np.inf)
    for at in range(len(stored), len(nodes)):
        for of in range(len(nodes)):
            if of != at:
                sizes[of, at] = _size_as_delta(data[at], data[of], place)
    passes = passes_of(sizes / place.n_bytes) if place.is_float else np.full(sizes.shape, _PASSES_OF_INTEGERS)
    tree = choose_bases(full, sizes, passes, fixed=fixed, is_shallow=is_shallow)
    for at in _bases_first(tree)[len(stored) :]:
        of = tree[at]
        if of == IN_FULL:
            yield _encode_plain(nodes[at], data[at], place, effort)
        else:
            yield _encode_delta(nodes[at], data[at], nodes[of], data[of], place, effort, full[at], is_shallow[at])


def _bases_first(tree: Sequence[int]) -> list[int]:
    """Return the numbers of versions, those in full first, and each after its base."""

    def depth(at: int) -> int:
        return 0 if tree[at] == IN_FULL else 1 + depth(tree[at])

    return sorted(range(len(tree)), key=depth)


def _size_in_full(raw: Buffer, place: Place) -> float:
    if place.n_bytes < _LEAST_ESTIMATED_BYTES:
        return min(len(PLANES.encode_as(raw, place.itemsize, None)), place.n_bytes)
    return place.n_bytes * min(1.0, estimate_share(raw, place.itemsize))


def _size_as_delta(raw: Buffer, base: Buffer, place: Place) -> float:
    if place.n_bytes < _LEAST_ESTIMATED_BYTES:
        return len(DELTA.encode_as(raw, place.itemsize, base, Transform.PLAIN))
    if place.is_float and is_sparse(raw, place.itemsize, base, _FEW_WORDS):
        return len(DELTA.encode_as(raw, place.itemsize, base, Transform.SPARSE))
    return place.n_bytes * estimate_share(raw, place.itemsize, base=base)


def _encode_delta(
    digest: bytes,
    raw: Buffer,
    base_digest: bytes,
    base: Buffer,
    place: Place,
    effort: Effort,
    full: float,
    is_shallow: bool,
) -> _Made:
    """Encode a chunk as a delta, or in full if that is not clearly larger."""
    transform, unit = Transform.PLAIN, 1
    if place.is_float and place.n_bytes >= _LEAST_GROUPED_BYTES:
        codings = choose_codings(raw, place.itemsize, base=base)
        transform, unit = choose_transform(raw, place.itemsize, base, codings)
        if is_shallow and transform is Transform.GROUPED:  # it takes twice the time of the others
            transform, unit = Transform.PLAIN, 1
    delta = DELTA.encode_as(raw, place.itemsize, base, transform, effort, unit=unit)
    made = _Made(digest, DELTA, place.itemsize, delta, base_digest)
    if len(delta) < CLEARLY_SMALLER * full and place.itemsize > 1:
        return made
    plain = _encode_plain(digest, raw, place, effort)
    return made if len(delta) < CLEARLY_SMALLER * memoryview(plain.data).nbytes else plain


def _encode_plain(digest: bytes, raw: Buffer, place: Place, effort: Effort) -> _Made:
    """Try the codecs that may fit, and return the smallest result; raw if that gains little."""
    n_bytes, itemsize = place.n_bytes, place.itemsize
    made: list[_Made] = []
    if place.is_text:
        frame = ZSTD.encode_at(raw, _TEXT_LEVEL) if effort is Effort.SMALL else ZSTD.encode(raw, 1)
        made.append(_Made(digest, ZSTD, 1, frame))
    elif n_bytes >= 32:
        typesize = typesize_of(itemsize)
        if itemsize in WORD_BYTES:
            made.append(_Made(digest, PLANES, typesize, PLANES.encode_as(raw, itemsize, None, effort)))
        elif can_shuffle(n_bytes, itemsize):
            made.append(_Made(digest, SHUFFLE_ZSTD, typesize, SHUFFLE_ZSTD.encode(raw, itemsize)))
        frame = ZSTD.encode(raw, 1)
        if effort is Effort.SMALL and (not made or len(frame) < len(made[0].data)):
            frame = ZSTD.encode_at(raw, _TEXT_LEVEL)
        made.append(_Made(digest, ZSTD, typesize, frame))
    best = min(made, key=lambda each: len(each.data), default=None)
    if best is None or len(best.data) >= CLEARLY_SMALLER * n_bytes:  # a raw chunk can be memory-mapped
        return _Made(digest, RAW, 1, raw)
    return best

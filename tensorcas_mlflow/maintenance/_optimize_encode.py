"""Blocks of chunks that are read, encoded and written together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
    codec_numbered,
    typesize_of,
)
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError, FormatError, NotFoundError
from tensorcas_mlflow.layout import (
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
from tensorcas_mlflow.maintenance._optimize_done import SHALLOW_DEPTH, DoneChunks
from tensorcas_mlflow.maintenance._optimize_tracks import Group, Plain
from tensorcas_mlflow.maintenance._optimize_tree import IN_FULL, StoredVersion, Tree
from tensorcas_mlflow.maintenance._workers import StoreAt
from tensorcas_mlflow.store import LEAST_DELTA_BYTES, Store
from tensorcas_mlflow.store import protocol as p

BLOCK_BYTES = 48 << 20
"""Decoded bytes of a block. So many are held at once, besides their encoded bytes."""

_ALONE = Tree(stored=(StoredVersion(IN_FULL),), transforms=(), depths=(0,), shares=(1.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Chunks at the same places in several versions, and the storage of these versions."""

    digests: Any
    """Shape ``(n_versions, n_places, 32)``."""
    sizes: Any
    """Size of the chunks at each place."""
    itemsizes: Any
    is_text: Any
    tree: Tree

    @property
    def n_bytes(self) -> int:
        """Bytes of all its chunks; equal ones count each time."""
        return int(self.sizes.sum()) * len(self.digests)

    @property
    def flat(self) -> Any:
        """Digests of all chunks, one after the other."""
        return np.ascontiguousarray(self.digests).reshape(-1, DIGEST_BYTES)


def blocks_of_group(group: Group, tree: Tree) -> Iterator[Block]:
    """Divide a group into blocks, each with all versions of some chunks."""
    n_tensors, n_versions, n_chunks, _ = group.digests.shape
    digests = group.digests.transpose(1, 0, 2, 3).reshape(n_versions, n_tensors * n_chunks, DIGEST_BYTES)
    sizes = np.tile(group.sizes, n_tensors)
    for part in _slices(sizes, BLOCK_BYTES // n_versions):
        n = part.stop - part.start
        yield Block(
            digests=digests[:, part],
            sizes=sizes[part],
            itemsizes=np.full(n, group.itemsize),
            is_text=np.zeros(n, dtype=bool),
            tree=tree,
        )


def blocks_of_plain(plain: Plain) -> Iterator[Block]:
    """Divide chunks without versions into blocks."""
    for part in _slices(plain.sizes, BLOCK_BYTES):
        yield Block(
            digests=plain.digests[None, part],
            sizes=plain.sizes[part],
            itemsizes=plain.itemsizes[part],
            is_text=plain.is_text[part],
            tree=_ALONE,
        )


def units_of(blocks: Iterator[Block], n_bytes: int) -> Iterator[Sequence[Block]]:
    """Yield sequences of blocks of about some bytes."""
    unit: list[Block] = []
    unit_bytes = 0
    for block in blocks:
        unit.append(block)
        unit_bytes += block.n_bytes
        if unit_bytes >= n_bytes:
            yield unit
            unit, unit_bytes = [], 0
    if unit:
        yield unit


def _slices(sizes: Any, most_bytes: int) -> Iterator[slice]:
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
        yield slice(begin, end)
        begin = end


_log = logging.getLogger(__name__)


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

    return dict(each for each in backend.ordered_map(read, bases) if each is not None)


_CLEARLY_SMALLER = 0.97
"""Share of its size in full below which a chunk is stored as a delta."""
_LEAST_GAIN = 0.97
"""Share of its size below which a chunk is stored encoded. A raw chunk can be memory-mapped."""
_TEXT_LEVEL = 19
_LEAST_PART_BYTES = 1 << 20
"""Decoded bytes of chunks for which a worker's task is worth its start."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Chunk to encode."""

    digest: bytes
    n_bytes: int
    itemsize: int
    is_text: bool
    share: float
    """Share of its size that it is likely to take."""
    base: bytes | None
    transform: Transform
    begins_run: bool
    is_shallow: bool
    """Whether it is to be read with few bases, for which it may grow."""


class SavedCopy(NamedTuple):
    """A stored copy of a chunk that is not done."""

    pack: str
    entry: Any
    base: bytes | None
    """Its base if it is a delta."""


@dataclass(frozen=True, slots=True)
class Work:
    """Chunks of a block to encode."""

    jobs: Sequence[_Job]
    """Bases come before their deltas."""
    outside: Mapping[bytes, Base]
    """Chunks that are done and may be bases, by digest."""
    saved: Mapping[bytes, SavedCopy]
    """Copies of the chunks so far, by digest."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the chunks to encode."""
        return sum(job.n_bytes for job in self.jobs)


_Encoded = tuple[Codec, int, Buffer]
"""Codec, element size and payload of a chunk."""


class Encoders:
    """Workers that read and encode chunks of one store."""

    def __init__(self, store: Store, engine: Engine) -> None:
        """Start nothing yet.

        Raises:
            DirectAccessError: The store is reached through an MLflow server.
        """
        self._place = StoreAt.of(store)
        self._engine = engine

    def encode(self, work: Work, effort: Effort) -> list[_Encoded | None]:
        """Return for each chunk its encoding; None if it cannot be read."""
        encoded: list[_Encoded | None] = [None] * len(work.jobs)
        n_bytes = max(_LEAST_PART_BYTES, work.n_bytes // (2 * self._engine.n_workers))
        parts = list(_parts_of(work, n_bytes))
        items = ((Work(*_chosen(work, part)), effort) for part in parts)
        for part, found in zip(
            parts, map_in_order(self._engine, partial(_encode_in_worker, self._place), items), strict=True
        ):
            for at, each in zip(part, found, strict=True):
                encoded[at] = each
        return encoded


def _parts_of(work: Work, n_bytes: int) -> Iterator[list[int]]:
    """Divide chunks, by number, into parts of about some bytes; a delta is in the part of its base."""
    group_of: dict[bytes, list[int]] = {}
    groups: list[list[int]] = []
    for at, job in enumerate(work.jobs):
        group = None if job.base is None else group_of.get(job.base)
        if group is None:
            groups.append(group := [])
        group.append(at)
        group_of[job.digest] = group
    part: list[int] = []
    part_bytes = 0
    for group in groups:
        part += group
        part_bytes += sum(work.jobs[at].n_bytes for at in group)
        if part_bytes >= n_bytes:
            yield part
            part, part_bytes = [], 0
    if part:
        yield part


def _chosen(work: Work, part: Sequence[int]) -> tuple[Sequence[_Job], Mapping[bytes, Base], Mapping[bytes, SavedCopy]]:
    """Return some chunks of a work, those that are done and are bases of theirs, and no other copies."""
    jobs = [work.jobs[at] for at in part]
    bases = {job.base for job in jobs if job.base is not None}
    return jobs, {digest: base for digest, base in work.outside.items() if digest in bases}, {}


def _encode_in_worker(place: StoreAt, item: tuple[Work, Effort]) -> list[_Encoded | None]:
    """Read and encode a part of a block."""
    work, effort = item
    encoded = _encode_all(place.open_store(), work, effort)
    return [None if each is None else (each[0], each[1], bytes(each[2])) for each in encoded]


def _encode_all(store: Store, work: Work, effort: Effort) -> Iterator[_Encoded | None]:
    """Read, check and encode chunks; None for one that cannot be read."""
    jobs, outside = work.jobs, work.outside
    digests = np.frombuffer(b"".join(job.digest for job in jobs), np.uint8).reshape(-1, DIGEST_BYTES)
    raws: dict[bytes, Buffer] = {**read_by_digest(store, digests, [job.n_bytes for job in jobs])}
    named = {job.base: job.n_bytes for job in jobs if job.base is not None and job.base in outside}
    raws |= read_bases(store.backend, [(outside[base], n_bytes) for base, n_bytes in named.items()])

    def encode(job: _Job) -> _Encoded | None:
        raw = raws.get(job.digest)
        if raw is None:
            return None
        return _encode(raw, None if job.base is None else raws.get(job.base), job, effort)

    return threads.ordered_map(encode, jobs)


def payloads_of(
    store: Store, work: Work, pack: str, effort: Effort, encoders: Encoders | None = None
) -> Iterator[Payload]:
    """Read, check and encode chunks.

    Args:
        store: Store to optimize.
        work: Chunks to encode.
        pack: Name of the pack that the payloads go into.
        effort: Effort for each chunk.
        encoders: Workers that read and encode; by default this process does.

    Yields:
        Payloads, those of a version together and after all their bases, without chunks that cannot be read.
    """
    encoded = _encode_all(store, work, effort) if encoders is None else encoders.encode(work, effort)
    made = [
        None if each is None else _Made(each, job.base if each[0] is DELTA else None)
        for job, each in zip(work.jobs, encoded, strict=True)
    ]
    depths: dict[bytes, int] = {}
    before = -1
    for at, each in _with_saved(store, work, made, effort):
        job, (codec, typesize, data) = work.jobs[at], each.encoded
        base = None
        if each.base is not None:
            base = work.outside.get(each.base) or Base(pack=pack, digest=each.base, depth=depths[each.base])
        depths[job.digest] = 0 if base is None else base.depth + 1
        yield Payload(
            digest=job.digest,
            raw_bytes=job.n_bytes,
            codec=codec,
            typesize=typesize,
            data=data,
            begins_row=job.begins_run or at != before + 1,
            base=base,
            effort=int(effort),
        )
        before = at


class _Made(NamedTuple):
    """Encoding of a chunk, and the base that it needs."""

    encoded: _Encoded
    base: bytes | None

    @property
    def n_bytes(self) -> int:
        """Bytes of its payload, and of its row in the table of a pack."""
        return _row_bytes(memoryview(self.encoded[2]).nbytes, self.base)


def _row_bytes(n_stored: int, base: bytes | None) -> int:
    return n_stored + TABLE_ENTRY.itemsize + (0 if base is None else TABLE_BASE_BYTES)


def _with_saved(store: Store, work: Work, made: Sequence[_Made | None], effort: Effort) -> Iterator[tuple[int, _Made]]:
    """Leave chunks as they were saved where all that depend on each other take no more room so.

    Yields:
        Chunks by number, each after its base, and what to store of them.
    """
    bases, order = _saved_order(work, made)
    saved_bytes = {
        at: _row_bytes(int(work.saved[work.jobs[at].digest].entry["stored_bytes"]), base) for at, base in bases.items()
    }
    kept: set[int] = set()
    in_full: dict[int, _Made] = {}
    for members in _groups_of(work, made, bases):
        stay = [at for at in members if at in bases]
        now = sum(each.n_bytes for at in members if (each := made[at]) is not None)
        least = sum(saved_bytes[at] for at in stay)
        if not stay or least > now or any(work.jobs[at].is_shallow for at in members):
            continue
        # A base that nobody keeps is lost to these; they are stored in full.
        others = {at: _encode_in_full(store, work.jobs[at], effort) for at in members if at not in bases}
        if least + sum(each.n_bytes for each in others.values() if each is not None) <= now:
            kept.update(members)
            in_full |= {at: each for at, each in others.items() if each is not None}
    copies = _read_saved(store, work, {at: bases[at] for at in order if at in kept and at in bases}, effort)
    found = [(at, each) for at, each in enumerate(made) if at not in kept and each is not None]
    found += [(at, copy) for at in order if at in kept and (copy := copies.get(at) or in_full.get(at)) is not None]
    # Raw chunks are aligned, which takes room behind others. They have no bases.
    yield from sorted(found, key=lambda each: each[1].encoded[0] is not RAW)


def _saved_order(work: Work, made: Sequence[_Made | None]) -> tuple[dict[int, bytes | None], list[int]]:
    """Find the chunks that can stay as they were saved.

    Returns:
        The base of each of them, which is among the chunks or done; and the numbers of all chunks, each after its base.
    """
    numbers = {job.digest: at for at, job in enumerate(work.jobs) if made[at] is not None}
    bases: dict[int, bytes | None] = {}
    depths: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    ready: deque[int] = deque()
    for digest, at in numbers.items():
        copy = work.saved.get(digest)
        if copy is None or copy.entry["raw_bytes"] != work.jobs[at].n_bytes:
            ready.append(at)
        elif copy.base is None or copy.base in work.outside:
            bases[at] = copy.base
            ready.append(at)
        elif (base := numbers.get(copy.base)) is not None:
            bases[at] = copy.base
            after.setdefault(base, []).append(at)
        else:
            ready.append(at)
    order: list[int] = []
    while ready:
        at = ready.popleft()
        named = bases.get(at)
        if named is not None:
            outside = work.outside.get(named)
            depths[at] = 1 + (depths[numbers[named]] if outside is None else outside.depth)
            if depths[at] > MAX_DEPTH:
                del bases[at]
        if at not in bases or named is None:
            depths[at] = 0
        order.append(at)
        ready.extend(after.pop(at, ()))
    for ring in after.values():  # two copies, each of which needs the other
        for at in ring:
            del bases[at]
            order.append(at)
    return bases, order


def _groups_of(work: Work, made: Sequence[_Made | None], bases: Mapping[int, bytes | None]) -> Iterator[Sequence[int]]:
    """Yield the readable chunks that depend on each other, in the new encodings or the saved ones."""
    numbers = {job.digest: at for at, job in enumerate(work.jobs)}
    first = list(range(len(made)))

    def root(at: int) -> int:
        while first[at] != at:
            first[at] = at = first[first[at]]
        return at

    for at, each in enumerate(made):
        for base in (None if each is None else each.base, bases.get(at)):
            if base is not None and base in numbers:
                first[root(at)] = root(numbers[base])
    groups: dict[int, list[int]] = {}
    for at, each in enumerate(made):
        if each is not None:
            groups.setdefault(root(at), []).append(at)
    yield from groups.values()


def _encode_in_full(store: Store, job: _Job, effort: Effort) -> _Made | None:
    """Encode one chunk without a base; None if it cannot be read."""
    raws = read_by_digest(store, np.frombuffer(job.digest, np.uint8).reshape(1, -1), [job.n_bytes])
    return _Made(_encode_plain(raws[job.digest], job, effort), None) if raws else None


def _read_saved(store: Store, work: Work, bases: Mapping[int, bytes | None], effort: Effort) -> dict[int, _Made]:
    """Read payloads as they were saved, and check what they decode to; encode a chunk in full whose payload is bad."""
    jobs = {at: work.jobs[at] for at in bases}
    n_bytes = {job.digest: job.n_bytes for job in jobs.values()}
    sizes = {job.digest: job.n_bytes for job in work.jobs}  # a base may be longer than its delta
    n_bytes |= {base: sizes[base] for base in bases.values() if base is not None and base not in work.outside}
    digests = np.frombuffer(b"".join(n_bytes), np.uint8).reshape(-1, DIGEST_BYTES)
    raws: dict[bytes, Buffer] = {**read_by_digest(store, digests, list(n_bytes.values()))}
    named = {base: jobs[at].n_bytes for at, base in bases.items() if base is not None and base in work.outside}
    raws |= read_bases(store.backend, [(work.outside[base], size) for base, size in named.items()])
    made: dict[int, _Made] = {}
    for at, base in bases.items():
        pack, entry, _ = work.saved[jobs[at].digest]
        stored = memoryview(bytearray(int(entry["stored_bytes"])))
        try:
            store.backend.read_into(pack_key(pack), int(entry["offset"]), stored)
            decode_chunk(entry, stored, None if base is None else raws.get(base))
            made[at] = _Made((codec_numbered(int(entry["codec"])), int(entry["typesize"]), stored), base)
        except (NotFoundError, FormatError):
            if (raw := raws.get(jobs[at].digest)) is not None:
                made[at] = _Made(_encode_plain(raw, jobs[at], effort), None)
    return made


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


def work_of(
    block: Block, done_chunks: DoneChunks, relied: Set[str], taken: set[bytes], saved: Mapping[bytes, SavedCopy]
) -> Work:
    """Find the chunks of a block that are not done, and their bases.

    Args:
        block: Block to encode.
        done_chunks: Chunks that are done.
        relied: Packs in which chunks that are done may be bases.
        taken: Digests of the chunks in the pack of this block; this call adds those of the block.
        saved: Copies of chunks that are not done; see `saved_copies`.
    """
    n_versions, n_places, _ = block.digests.shape
    packs, depth = done_chunks.find(block.flat)
    is_shallow = done_chunks.must_be_shallow(block.flat).tolist()
    outside: dict[bytes, Base] = {}
    texts = [[block.digests[version, place].tobytes() for place in range(n_places)] for version in range(n_versions)]
    for version in range(n_versions):
        for place, digest in enumerate(texts[version]):
            at = version * n_places + place
            name = packs[at]
            if name is not None and name in relied:
                outside[digest] = Base(pack=name, digest=digest, depth=int(depth[at]))
    jobs: list[_Job] = []
    depth_of = {digest: base.depth for digest, base in outside.items()}
    depths = block.tree.depths
    sizes, itemsizes, is_text = block.sizes.tolist(), block.itemsizes.tolist(), block.is_text.tolist()
    for version in sorted(range(n_versions), key=lambda each: (depths[each], each)):
        stored = block.tree.stored[version]
        before = None
        for place, digest in enumerate(texts[version]):
            if packs[version * n_places + place] is not None or digest in taken:
                continue
            base = None
            if stored.base != IN_FULL and sizes[place] >= LEAST_DELTA_BYTES:
                base = texts[stored.base][place]
                most = depths[version]
                if is_shallow[version * n_places + place]:  # a checkpoint that is restored fast may share single chunks
                    most = min(most, SHALLOW_DEPTH)
                # A chunk that another tensor made deep, or that nobody holds, is no base; nor is the chunk itself.
                if base == digest or depth_of.get(base, MAX_DEPTH) >= most:
                    base = None
            taken.add(digest)
            depth_of[digest] = 0 if base is None else depth_of[base] + 1
            jobs.append(
                _Job(
                    digest=digest,
                    n_bytes=sizes[place],
                    itemsize=itemsizes[place],
                    is_text=is_text[place],
                    share=block.tree.shares[version],
                    base=base,
                    transform=block.tree.transforms[stored.hop] if base is not None else Transform.PLAIN,
                    begins_run=before != place - 1,
                    is_shallow=bool(is_shallow[version * n_places + place]),
                )
            )
            before = place
    mine = {job.digest: copy for job in jobs if (copy := saved.get(job.digest)) is not None}
    others = sorted({copy.base for copy in mine.values() if copy.base is not None} - outside.keys())
    if others:
        packs, depth = done_chunks.find(np.frombuffer(b"".join(others), np.uint8).reshape(-1, DIGEST_BYTES))
        for at, (digest, name) in enumerate(zip(others, packs, strict=True)):
            if name is not None and name in relied:
                outside[digest] = Base(pack=name, digest=digest, depth=int(depth[at]))
    return Work(jobs, outside, mine)


def _encode(raw: Buffer, base: Buffer | None, job: _Job, effort: Effort) -> _Encoded:
    if base is None:
        return _encode_plain(raw, job, effort)
    delta = DELTA.encode_as(raw, job.itemsize, base, job.transform, effort)
    if len(delta) <= job.share * job.n_bytes:
        return DELTA, job.itemsize, delta
    plain = _encode_plain(raw, job, effort)
    if len(delta) < _CLEARLY_SMALLER * memoryview(plain[2]).nbytes:
        return DELTA, job.itemsize, delta
    return plain


def _encode_plain(raw: Buffer, job: _Job, effort: Effort) -> _Encoded:
    """Try the codecs that may fit, and return the smallest result; raw if that gains little."""
    made: list[_Encoded] = []
    if job.is_text:
        made.append((ZSTD, 1, ZSTD.encode_at(raw, _TEXT_LEVEL) if effort is Effort.SMALL else ZSTD.encode(raw, 1)))
    elif job.n_bytes >= 32:
        typesize = typesize_of(job.itemsize)
        if job.itemsize in WORD_BYTES:
            made.append((PLANES, typesize, PLANES.encode_as(raw, job.itemsize, None, effort)))
        elif can_shuffle(job.n_bytes, job.itemsize):
            made.append((SHUFFLE_ZSTD, typesize, SHUFFLE_ZSTD.encode(raw, job.itemsize)))
        frame = ZSTD.encode(raw, 1)
        if effort is Effort.SMALL and (not made or len(frame) < len(made[0][2])):
            frame = ZSTD.encode_at(raw, _TEXT_LEVEL)
        made.append((ZSTD, typesize, frame))
    made.append((RAW, 1, raw))
    best = min(made, key=lambda each: memoryview(each[2]).nbytes)
    return best if memoryview(best[2]).nbytes < _LEAST_GAIN * job.n_bytes else (RAW, 1, raw)

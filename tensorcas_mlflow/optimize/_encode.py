"""From the chunks of a block to what a pack takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from tensorcas_mlflow.optimize._blocks import Block
from tensorcas_mlflow.optimize._holdings import Holdings
from tensorcas_mlflow.optimize._reading import read_bases, read_chunks
from tensorcas_mlflow.optimize._tracks import LEAST_DELTA_BYTES
from tensorcas_mlflow.optimize._tree import IN_FULL

from tensorcas_mlflow import threads
from tensorcas_mlflow.codecs import (
    DELTA,
    PLANES,
    RAW,
    SHUFFLE_ZSTD,
    WORD_BYTES,
    ZSTD,
    Buffer,
    Codec,
    Effort,
    Transform,
    can_shuffle,
    typesize_of,
)
from tensorcas_mlflow.digest import DIGEST_BYTES
from tensorcas_mlflow.pack import MAX_DEPTH, Base, Payload
from tensorcas_mlflow.store import Store

_CLEARLY_SMALLER = 0.97
"""A delta is stored only if it takes less than this share of what the chunk takes in full."""
_LEAST_GAIN = 0.97
"""What does not shrink to less than this share is stored raw, and can then be mapped."""
_TEXT_LEVEL = 19


class Spent(IntEnum):
    """What is spent on a chunk; numbers on disk, in the order of what is better. Saves write 0."""

    BALANCED = 1
    """What saves do, with bases chosen among all checkpoints."""
    SMALL = 2
    """Several ways are tried for each chunk, and slow ones too."""

    @property
    def effort(self) -> Effort:
        """What codecs are told."""
        return Effort.SMALL if self is Spent.SMALL else Effort.BALANCED


@dataclass(frozen=True, slots=True)
class _Job:
    """A chunk to encode."""

    digest: bytes
    n_bytes: int
    itemsize: int
    is_text: bool
    share: float
    """What share of its size it is likely to take."""
    base: bytes | None
    transform: Transform
    begins_run: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do in a block."""

    jobs: Sequence[_Job]
    """Bases before what is to be added to them."""
    outside: Mapping[bytes, Base]
    """By its digest, what is done and may be a base."""

    @property
    def n_bytes(self) -> int:
        """Of the chunks to encode."""
        return sum(job.n_bytes for job in self.jobs)


def payloads_of(store: Store, work: Work, pack: str, spent: Spent) -> Iterator[Payload]:
    """Read, check and encode chunks.

    Args:
        store: Which.
        work: What to do.
        pack: Name of the pack that the payloads go into.
        spent: On each.

    Yields:
        Payloads, those of a version next to each other and behind all of their bases. What cannot be read is left out.
    """
    jobs, outside = work.jobs, work.outside
    digests = np.frombuffer(b"".join(job.digest for job in jobs), np.uint8).reshape(-1, DIGEST_BYTES)
    raws: dict[bytes, Buffer] = {**read_chunks(store, digests, [job.n_bytes for job in jobs])}
    named = {job.base: job.n_bytes for job in jobs if job.base is not None and job.base in outside}
    raws |= read_bases(store.backend, [(outside[base], n_bytes) for base, n_bytes in named.items()])

    def encode(job: _Job) -> tuple[Codec, int, Buffer]:
        return _encode(raws[job.digest], None if job.base is None else raws.get(job.base), job, spent)

    there = [job for job in jobs if job.digest in raws]
    depths: dict[bytes, int] = {}
    for job, (codec, typesize, data) in zip(there, threads.ordered_map(encode, there), strict=True):
        base = None
        if codec is DELTA and job.base is not None:
            base = outside.get(job.base) or Base(pack=pack, digest=job.base, depth=depths[job.base])
        depths[job.digest] = 0 if base is None else base.depth + 1
        yield Payload(
            digest=job.digest,
            raw_bytes=job.n_bytes,
            codec=codec,
            typesize=typesize,
            data=data,
            begins_row=job.begins_run,
            base=base,
            effort=int(spent),
        )


def work_of(block: Block, holdings: Holdings, relied: Set[str], taken: set[bytes]) -> Work:
    """Find out what of a block is not done, and how it is to be encoded.

    Args:
        block: Which.
        holdings: Says which of its chunks are done, and where.
        relied: Packs in which chunks that are done may be bases.
        taken: Digests of what the pack is given that the block goes into; those of this block are put in.
    """
    n_versions, n_places, _ = block.digests.shape
    packs, depth = holdings.find(block.flat)
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
                # What another tensor has made deep, or nobody has, is no base; nor is the chunk itself.
                if base == digest or depth_of.get(base, MAX_DEPTH) >= depths[version]:
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
                )
            )
            before = place
    return Work(jobs, outside)


def _encode(raw: Buffer, base: Buffer | None, job: _Job, spent: Spent) -> tuple[Codec, int, Buffer]:
    if base is None:
        return _encode_plain(raw, job, spent)
    delta = DELTA.encode_as(raw, job.itemsize, base, job.transform, spent.effort)
    if len(delta) <= job.share * job.n_bytes:
        return DELTA, job.itemsize, delta
    plain = _encode_plain(raw, job, spent)
    if len(delta) < _CLEARLY_SMALLER * memoryview(plain[2]).nbytes:
        return DELTA, job.itemsize, delta
    return plain


def _encode_plain(raw: Buffer, job: _Job, spent: Spent) -> tuple[Codec, int, Buffer]:
    """Try the codecs that may fit, and take what is smallest; raw where that gains little."""
    made: list[tuple[Codec, int, Buffer]] = []
    if job.is_text:
        made.append((ZSTD, 1, ZSTD.encode_at(raw, _TEXT_LEVEL) if spent is Spent.SMALL else ZSTD.encode(raw, 1)))
    elif job.n_bytes >= 32:
        typesize = typesize_of(job.itemsize)
        if job.itemsize in WORD_BYTES:
            made.append((PLANES, typesize, PLANES.encode_as(raw, job.itemsize, None, spent.effort)))
        elif can_shuffle(job.n_bytes, job.itemsize):
            made.append((SHUFFLE_ZSTD, typesize, SHUFFLE_ZSTD.encode(raw, job.itemsize)))
        frame = ZSTD.encode(raw, 1)
        if spent is Spent.SMALL and (not made or len(frame) < len(made[0][2])):
            frame = ZSTD.encode_at(raw, _TEXT_LEVEL)
        made.append((ZSTD, typesize, frame))
    made.append((RAW, 1, raw))
    best = min(made, key=lambda each: memoryview(each[2]).nbytes)
    return best if memoryview(best[2]).nbytes < _LEAST_GAIN * job.n_bytes else (RAW, 1, raw)

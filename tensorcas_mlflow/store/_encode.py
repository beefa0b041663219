"""Encoder of a save: from new chunks to pack payloads, on all threads, a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow.base import config, threads
from tensorcas_mlflow.base.digest import Buffer, Digests, digest, digest_each
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.chunk_io import StoredChunks
from tensorcas_mlflow.codecs import DELTA, RAW, Codec, Effort, encode_best
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.layout.packs import (
    ENTRY,
    RAW_ALIGNMENT,
    STORED_DIGEST_BYTES,
    Entries,
    Mask,
    PayloadGroup,
    is_delta,
)
from tensorcas_mlflow.native import core
from tensorcas_mlflow.store._base_plans import NAMED, BasePlan, FoundBases
from tensorcas_mlflow.store._choose import (
    CLEARLY_SMALLER,
    LEAST_DELTA_BYTES,
    MAX_PASSES,
    MAX_SAVED_DEPTH,
    Chooser,
    EncodingChoice,
    Policy,
    PossibleBase,
    SeriesChoices,
    sample_number,
)
from tensorcas_mlflow.store._recent import LEAST_ROW_BYTES
from tensorcas_mlflow.store._sources import Pieces, Source


def new_chooser(policy: Policy, recent: SeriesChoices | None = None) -> Chooser:
    """Create the chooser for the tensors of one save; see `Chooser`."""
    effort = Effort.SMALL if policy is Policy.SMALL else Effort.BALANCED
    return Chooser(max_depth=MAX_SAVED_DEPTH, max_passes=MAX_PASSES, effort=effort, recent=recent)


_ENCODING = np.dtype(
    [
        ("plain_share", "<f8"),
        ("itemsize", "<u4"),
        ("effort", "u1"),
        ("has_codings", "u1"),
        ("has_delta", "u1"),
        ("has_delta_codings", "u1"),
        ("transform", "u1"),
        ("unit", "u1"),
        ("codings", "S8"),
        ("delta_codings", "S8"),
        ("unused", "V6"),
    ]
)
"""A choice, in the form that the compiled encoder reads (``native/src/encode.h``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEncodings:
    """Encodings of some chunks, one entry a chunk."""

    table: Any
    """The choices, rows of `_ENCODING`."""
    choice: Any
    """The number of each chunk's choice among these; -1 for chunks too small to be examined one by one."""
    has_base: Mask
    """Flags of the chunks with a possible base."""
    named: Any
    """The possible bases, rows of `NAMED`."""
    bases: Sequence[Buffer | None]
    """The same bases, decoded; None if the encoder decodes it."""
    stored: StoredChunks | None = None
    """Bases that the encoder decodes."""
    number: Any
    """The number of each base among these; -1 for others."""

    @classmethod
    def new(cls, choices: Sequence[EncodingChoice], choice: Any) -> ChunkEncodings:
        """Describe chunks without bases; see the attributes."""
        return cls(
            table=np.array([_encoding_row(each) for each in choices], dtype=_ENCODING),
            choice=choice,
            has_base=np.zeros(len(choice), dtype=bool),
            named=np.zeros(len(choice), dtype=NAMED),
            bases=[None] * len(choice),
            number=np.full(len(choice), -1, dtype=np.int32),
        )

    def with_bases(self, at: Any, found: FoundBases, fits: Mask) -> ChunkEncodings:
        """Add bases; at most one call may leave bases to the encoder.

        Args:
            at: Numbers of the chunks.
            found: Their bases.
            fits: Flags of the bases to use.
        """
        bases = list(self.bases)
        for number, base, is_used in zip(at.tolist(), found.data, fits.tolist(), strict=True):
            bases[number] = base if is_used else None
        self.has_base[at], self.named[at], self.number[at] = fits, found.named, np.where(fits, found.number, -1)
        return replace(self, bases=bases, stored=self.stored or found.stored)

    def some(self, part: slice) -> ChunkEncodings:
        """Return the encodings of neighbours among these chunks."""
        if part == slice(0, len(self.choice)):
            return self
        return replace(
            self,
            choice=self.choice[part],
            has_base=self.has_base[part],
            named=self.named[part],
            bases=self.bases[part],
            number=self.number[part],
        )


class Encodings:
    """The encodings of one save. For one thread: the one that draws the chunks the others encode."""

    def __init__(
        self, source: Source, chunks: Any, policy: Policy, plan: BasePlan | None, chooser: Chooser | None = None
    ) -> None:
        """Begin without any choice.

        Args:
            source: Source of the bytes.
            chunks: Numbers of the chunks to encode, ascending.
            policy: Encoding effort.
            plan: Possible bases, protected by the save's intent.
            chooser: The choices for earlier batches of the same stream, under the same policy.
        """
        self._source = source
        self._chunks = chunks
        self._plan = plan or None  # an empty one finds no base
        columns = source.columns
        is_tensor = np.array([name is not None and name[0] not in "SU" for name in columns.dtypes], dtype=bool)
        self._is_chosen = is_tensor[columns.dtype] & (columns.n_bytes >= LEAST_ROW_BYTES) & (policy is not Policy.FAST)
        self._chooser = chooser or new_chooser(policy)
        self._choices: dict[int, EncodingChoice] = {}
        if self._plan is not None:
            rows = distinct(columns.rows_of(chunks[self._plan.has(chunks)]))
            rows = rows[self._is_chosen[rows]]
            if len(rows):  # the first tensor asked for decides the depth of bases
                self._choice(int(rows[np.argmax(columns.n_bytes[rows])]))
            if self._chooser.passes < 1.0:
                # In full, small tensors would take more than all sparse deltas.
                is_small = is_tensor[columns.dtype] & (columns.n_bytes >= LEAST_DELTA_BYTES)
                rows = distinct(columns.rows_of(chunks[self._plan.has(chunks)]))
                self._is_chosen[rows] |= is_small[rows]

    def of(self, pieces: Pieces, *, is_decoded: bool = False) -> ChunkEncodings | None:
        """Return the encodings of chunks; None if all are too small to be examined one by one.

        Args:
            pieces: The chunks.
            is_decoded: Whether to decode all bases here; see `BasePlan.bases`.
        """
        chosen = self._is_chosen[pieces.rows].nonzero()[0]
        if len(chosen) == 0:
            return None
        row = pieces.rows[chosen]
        rows = distinct(row)
        row = rows.searchsorted(row)
        of_row = [self._choice(number) for number in rows.tolist()]
        choices = {id(choice): choice for choice in of_row}  # tensors of one role share one
        numbers = {key: number for number, key in enumerate(choices)}
        choice = np.full(len(pieces.data), -1, dtype=np.int32)
        choice[chosen] = np.array([numbers[id(each)] for each in of_row], dtype=np.int32)[row]
        out = ChunkEncodings.new(list(choices.values()), choice)
        if self._plan is not None:
            depth = np.array([-1 if each.delta is None else each.delta.depth for each in of_row])[row]
            passes = np.array([0.0 if each.delta is None else each.delta.passes for each in of_row])
            depth[~self._plan.has(pieces.chunks[chosen])] = -1
            depths = distinct(depth[depth >= 0]).tolist()
            is_here = is_decoded
            # All but a few small tensors have bases of one depth. The encoder takes one set of tables.
            if len(depths) > 1:
                depths.sort(key=lambda each: -np.count_nonzero(depth == each))
            for each in depths:
                at = chosen[depth == each]
                cost = passes[row[depth == each]]
                found = self._plan.bases(pieces.chunks[at], pieces.digests[at], each, cost, is_decoded=is_here)
                # A manifest of another writer may have a chunk of another size at a place.
                fits = found.is_found & (found.sizes == [len(pieces.data[number]) for number in at.tolist()])
                out = out.with_bases(at, found, fits)
                is_here = True
        return out

    def close(self) -> None:
        """Close the packs of the bases."""
        if self._plan is not None:
            self._plan.close()

    def _choice(self, row: int) -> EncodingChoice:
        choice = self._choices.get(row)
        if choice is None:
            columns = self._source.columns
            begin, end = columns.chunk_at[row : row + 2].tolist()
            mine = self._chunks[self._chunks.searchsorted(begin) : self._chunks.searchsorted(end)]
            based = mine[:0] if self._plan is None else mine[self._plan.has(mine)]
            number = int(based[sample_number(len(based))] if len(based) else mine[sample_number(len(mine))])

            def sample(depth: int | None) -> tuple[Buffer, list[PossibleBase]]:
                pieces = next(self._source.pieces(np.array([number])))
                [raw] = pieces.data
                if self._plan is None or not len(based) or depth == -1:
                    return raw, []
                behind = self._plan.behind(number, depth)
                self._plan.remember(pieces.digests, raw)
                return raw, [base for base in behind if len(base.data) == memoryview(raw).nbytes]

            choice = self._choices[row] = self._chooser.choice(
                columns.name(row),
                columns.dtypes[columns.dtype[row]] or "",
                int(self._source.itemsizes[row]),
                sample,
                n_bytes=int(self._source.sizes[number]),
                depths=self._plan.depths(number) if self._plan is not None and len(based) else (),
            )
        return choice


GROUP_BYTES = 2 << 20
"""Bytes of one thread's task: enough to make its handover cheap, and few enough for all threads to have some."""
GROUP_PIECES = 1 << 10
_LEAST_GROUP_BYTES = 256 << 10
"""Handing over fewer bytes takes longer than encoding them."""
_BASED_BYTES = 32 << 20
"""The bases of so many bytes are looked up together."""
_LEAST_LAST_BYTES = 512 << 10
"""Bound of the shrinking of the last groups."""
_MOST_ALONE_BYTES = 512 << 10
"""The calling thread encodes so many bytes by itself: another thread would hardly have begun."""
_MOST_COPIED_BYTES = 8 << 20
"""The same for bytes that are hashed and copied, and not compressed."""
_SMALL_BYTES = 8 << 10
"""If there are many chunks below this size, some are encoded first to see whether the others would shrink."""
_JOINED_BYTES = 16 << 10
"""Parts smaller than this on average are joined: writing each by itself would take longer."""

OriginOf = Callable[[int], "str | None"]
KeepChunks = Callable[[Digests, Sequence[Buffer]], None]
"""Receives chunks with their final bytes, and their digests; on any thread."""


def encode_chunks(
    source: Source,
    chunks: Any,
    policy: Policy,
    plan: BasePlan | None = None,
    chooser: Chooser | None = None,
    keep: KeepChunks | None = None,
    *,
    leaves_text: bool = False,
) -> Iterator[PayloadGroup]:
    """Encode some chunks of a source.

    Args:
        source: Source of the bytes.
        chunks: Ascending numbers, counted over all rows.
        policy: Encoding effort.
        plan: Possible bases, protected by the save's intent.
        chooser: The choices for earlier batches of the same stream, if there were any.
        keep: Receives the chunks as they are stored.
        leaves_text: Whether text stays raw: the database compresses it together with earlier text.

    Yields:
        Groups, in the order of the chunks.

    Raises:
        ConflictError: The bytes differ from those hashed.
    """
    if not len(chunks):
        return  # and import no codec
    columns = source.columns
    # Bytes without a description may look like numbers.
    is_text = np.array([name is None or name[0] in "SU" for name in columns.dtypes], dtype=bool)[columns.dtype]
    is_text &= source.itemsizes == 1
    # Small amounts are divided among the threads: the caller is waiting.
    n_bytes = int(source.sizes[chunks].sum())
    is_least = n_bytes <= 2 * _LEAST_GROUP_BYTES  # and so is the share of a thread, whatever their number
    most_bytes = _LEAST_GROUP_BYTES if is_least else min(GROUP_BYTES, max(_LEAST_GROUP_BYTES, _share(n_bytes)))
    one_by_one = n_bytes <= (_MOST_COPIED_BYTES if policy is Policy.FAST else _MOST_ALONE_BYTES)
    encodings = Encodings(source, chunks, policy, plan, chooser)
    origin = source.origin if source.is_live else None
    try:
        yield from encode_pieces(
            source.pieces(chunks, most_bytes=_BASED_BYTES) if plan else source.pieces(chunks),
            policy,
            is_text=is_text,
            leaves_text=leaves_text,
            origin=origin,
            encodings=encodings,
            keep=keep,
            most_bytes=most_bytes,
            one_by_one=one_by_one,
            n_bytes=None if one_by_one else n_bytes,
        )
    finally:
        encodings.close()


_MOVED_PASSES = 0.1
"""Estimated cost of decoding a moved delta; see `MAX_PASSES`."""
_SURELY_SMALLER = 1 / 8
"""A moved delta of at most this share of its chunk is not compared with the chunk in full."""


def encode_moved(source: Source, chunks: Any, plan: BasePlan, offset_of: Mapping[int, int]) -> Iterator[PayloadGroup]:
    """Encode chunks that are likely to be parts of longer ones.

    Args:
        source: Source of the bytes.
        chunks: Ascending numbers, counted over all rows.
        plan: The longer chunks.
        offset_of: Place of each chunk's bytes in its longer one.

    Raises:
        ConflictError: The bytes differ from those hashed.
    """
    for pieces in source.pieces(chunks):
        data = pieces.data
        if source.is_live and not pieces.are_hashed:
            data = _checked_copies(pieces, source.origin, _copy)
        found = plan.bases(pieces.chunks, pieces.digests, MAX_SAVED_DEPTH - 1, _MOVED_PASSES)
        encoded: list[_Encoded] = []
        for raw, chunk, itemsize, base in zip(
            data, pieces.chunks.tolist(), pieces.itemsizes.tolist(), found.data, strict=True
        ):
            n_bytes, offset = len(raw), offset_of[chunk]
            delta = None
            if base is not None and memoryview(base).nbytes >= offset + n_bytes:
                delta = DELTA.encode_moved(raw, itemsize, base, offset)
            if delta is None or len(delta) > _SURELY_SMALLER * n_bytes:
                plain = encode_best(raw, itemsize)
                if delta is None or len(delta) >= CLEARLY_SMALLER * memoryview(plain[2]).nbytes:
                    encoded.append(plain)
                    continue
            encoded.append((DELTA, itemsize, delta))
        sizes = np.fromiter(map(len, data), dtype=np.int64, count=len(data))
        groups, parts = _laid_out(encoded, sizes, pieces)
        for group, part in zip(groups, parts, strict=True):
            _name_bases(group.entries, found.named[part])
            yield group


def encode_pieces(
    batches: Iterable[Pieces],
    policy: Policy,
    *,
    is_text: Any = None,
    leaves_text: bool = False,
    origin: OriginOf | None = None,
    encodings: Encodings | None = None,
    keep: KeepChunks | None = None,
    most_bytes: int = GROUP_BYTES,
    one_by_one: bool = False,
    n_bytes: int | None = None,
) -> Iterator[PayloadGroup]:
    """Encode chunks, in groups.

    Args:
        batches: Consumed only as results are taken, so memory stays bounded. The bases of a batch are read together.
        policy: Encoding effort.
        is_text: For each row whether it is text, or bytes outside of tensors. By default the element size decides.
        leaves_text: Whether text stays raw.
        origin: Returns the owner of a row's bytes, if the owner may change them; None if nobody else has them.
        encodings: Encodings of the chunks of large tensors; None to decide chunk by chunk.
        keep: See `encode_chunks`.
        most_bytes: Maximum bytes of a group, unless it is a single chunk.
        one_by_one: Whether the calling thread encodes all groups.
        n_bytes: Bytes of all batches. If they are known, the last groups are smaller; see `groups_of`.

    Yields:
        Input of a pack writer, in the order of the chunks.

    Raises:
        ConflictError: Bytes differ from those hashed.
    """
    encode = partial(_encode, policy=policy, is_text=is_text, leaves_text=leaves_text, origin=origin, keep=keep)

    def with_encodings() -> Iterator[tuple[Pieces, ChunkEncodings | None]]:
        n_left = n_bytes
        for batch in batches:
            of_batch = encodings.of(batch) if encodings else None
            sizes = [len(piece) for piece in batch.data]
            n_left = None if n_left is None else n_left - sum(sizes)
            for part in groups_of(sizes, most_bytes, n_after=n_left):
                yield batch.some(part), of_batch and of_batch.some(part)

    apply = map if one_by_one else threads.ordered_map
    for encoded in apply(encode, with_encodings()):
        if isinstance(encoded, Pieces):
            assert encodings is not None
            encoded = encode((encoded, encodings.of(encoded, is_decoded=True)))
            assert not isinstance(encoded, Pieces)
        yield from encoded


def groups_of(sizes: Any, most_bytes: int = GROUP_BYTES, *, n_after: int | None = None) -> Iterator[slice]:
    """Split chunks, given by their sizes, into neighbours encoded together.

    Args:
        sizes: Sizes of the chunks.
        most_bytes: Maximum bytes of a group, unless it is a single chunk.
        n_after: Bytes that follow these chunks. If they are known, the last groups are smaller, so that all threads
            end at about the same time.
    """
    if n_after is None and len(sizes) <= GROUP_PIECES and sum(sizes) <= most_bytes:
        if len(sizes):
            yield slice(0, len(sizes))
        return
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        most = most_bytes
        if n_after is not None:
            most = min(most, max(_LEAST_LAST_BYTES, _share(int(ends[-1]) - before + n_after)))
        end = max(int(np.searchsorted(ends, before + most, side="right")), begin + 1)
        end = min(end, begin + GROUP_PIECES)
        yield slice(begin, end)
        begin = end


def _share(n_bytes: int) -> int:
    """Return half of a thread's part of some bytes."""
    return n_bytes // (2 * config.n_threads())


def _encode(
    group: tuple[Pieces, ChunkEncodings | None],
    *,
    policy: Policy,
    is_text: Any,
    leaves_text: bool,
    origin: OriginOf | None,
    keep: KeepChunks | None,
) -> list[PayloadGroup] | Pieces:
    """Encode a group; return its chunks if the compiled encoder cannot decode a base."""
    pieces, encodings = group
    data, checks = pieces.data, origin is not None and not pieces.are_hashed
    if checks and keep is not None:
        assert origin is not None
        # Only small saves keep their chunks, and a small copy takes less time than a switch to another thread.
        data, checks = _checked_copies(pieces, origin, bytes), False
    if keep is not None:
        # A view would keep more memory than its chunk.
        keep(pieces.digests, [bytes(each) for each in data] if pieces.are_hashed else data)
    sizes = np.fromiter(map(len, data), dtype=np.int64, count=len(data))
    text = pieces.itemsizes == 1 if is_text is None else is_text[pieces.rows]
    is_candidate = text if policy is Policy.FAST else np.ones(len(data), dtype=bool)
    if leaves_text:
        is_candidate = is_candidate & ~text
    is_sampled = is_candidate & (sizes < _SMALL_BYTES) & ~text
    if encodings is not None:
        is_sampled &= encodings.choice < 0
    call = _Call(pieces, data, is_candidate, is_sampled, encodings)
    return call.groups() if call.run(origin, checks=checks) else pieces


def _name_bases(entries: Entries, named: Any) -> None:
    deltas = is_delta(entries).nonzero()[0]
    entries["depth"][deltas] = named["depth"][deltas] + 1
    entries["base_pack"][deltas], entries["base_digest"][deltas] = named["pack"][deltas], named["digest"][deltas]


def _changed_meanwhile(owner: str | None) -> ConflictError:
    return ConflictError(f"{owner} was changed while it was saved: save it again")


_AS_IT_IS, _BY_ELEMENTS = -2, -1
"""Instead of the number of an encoding: the chunk is stored raw, or `encode_best` decides."""


def _encoding_row(choice: EncodingChoice) -> tuple[Any, ...]:
    delta = choice.delta
    delta_codings = None if delta is None else delta.codings
    return (
        choice.plain_share,
        choice.itemsize,
        choice.effort,
        choice.codings is not None,
        delta is not None,
        delta_codings is not None,
        0 if delta is None else delta.transform,
        1 if delta is None else delta.unit,
        bytes(choice.codings or ()),
        bytes(delta_codings or ()),
        b"",
    )


class _Call:
    """One call of the compiled encoder, for a group of chunks."""

    def __init__(
        self,
        pieces: Pieces,
        data: list[Any],
        is_candidate: Any,
        is_sampled: Any,
        encodings: ChunkEncodings | None,
    ) -> None:
        """Describe the chunks.

        Args:
            pieces: The chunks.
            data: Their bytes.
            is_candidate: Flags of the chunks to encode; the others stay raw.
            is_sampled: Flags of the small ones: if there are many and a sample gains little, all of them stay raw;
                otherwise the samples show which codings to try on the others.
            encodings: See `Encodings.of`.
        """
        self._pieces = pieces
        self._data = data
        self._is_sampled = is_sampled
        self._how = np.where(is_candidate, _BY_ELEMENTS, _AS_IT_IS).astype(np.int32)
        self._bases: Sequence[Any] | None = None
        self._named: Any = None
        self._tables: Any = None
        self._choices = np.empty(0, dtype=_ENCODING)
        if encodings is not None:
            np.copyto(self._how, encodings.choice, where=is_candidate & (encodings.choice >= 0))
            self._choices = encodings.table
            if encodings.has_base.any():
                self._bases, self._named = encodings.bases, encodings.named
            if encodings.stored is not None:
                self._tables = (*encodings.stored.tables, encodings.number)
        self._entries: Entries = np.empty(len(data), dtype=ENTRY)

    def run(self, origin: OriginOf | None, *, checks: bool) -> bool:
        """Encode.

        Args:
            origin: See `encode_pieces`.
            checks: Whether to copy each chunk first, and to check the copy against its digest.

        Returns:
            Whether every base decodes to its digest; else nothing is encoded.

        Raises:
            ConflictError: A chunk differs from its digest.
        """
        pieces = self._pieces
        changed, baseless, payloads, self._first, self._first_bytes = core.encode_group(
            self._data,
            self._bases,
            np.maximum(pieces.itemsizes, 1).astype(np.uint32),
            self._how,
            self._is_sampled,
            np.ascontiguousarray(pieces.begins_row),
            np.ascontiguousarray(pieces.digests),
            self._choices,
            checks,
            self._entries.view(np.uint8),
            self._named,
            self._tables,
        )
        if changed >= 0:
            assert origin is not None
            raise _changed_meanwhile(origin(int(pieces.rows[changed])))
        self._payloads = memoryview(payloads)
        return bool(baseless < 0)

    def groups(self) -> list[PayloadGroup]:
        """Return the result; see `_laid_out`."""
        groups: list[PayloadGroup] = []
        for begin, end, rows in (
            (0, self._first_bytes, slice(0, self._first)),
            (self._first_bytes, len(self._payloads), slice(self._first, len(self._data))),
        ):
            if rows.start < rows.stop:
                groups.append(
                    PayloadGroup(
                        entries=self._entries[rows],
                        parts=[self._payloads[begin:end]],
                        n_bytes=end - begin,
                        is_aligned=rows.start == self._first,
                    )
                )
        return groups


def _checked_copies(pieces: Pieces, origin: OriginOf, copy: Callable[[memoryview], Any]) -> list[Any]:
    """Copy chunks, and check that the copies have the hashed digests.

    The arrays may belong to a live model. Bytes stored under another digest would damage every checkpoint with
    the chunk, so the save verifies and stores a copy.

    Raises:
        ConflictError: They do not.
    """
    copies = [piece if type(piece) is bytes else copy(piece) for piece in pieces.data]
    changed = (digest_each(copies) != pieces.digests).any(axis=1).nonzero()[0]
    if len(changed):
        raise _changed_meanwhile(origin(int(pieces.rows[changed[0]])))
    return copies


def _copy(piece: memoryview) -> memoryview:
    if len(piece) < _JOINED_BYTES:
        return memoryview(bytes(piece))
    # Unlike `bytes`, this lets other threads run meanwhile.
    return np.frombuffer(piece, np.uint8).copy().data


_Encoded = tuple[Codec, int, Buffer]
"""A chunk's codec, its typesize, and the payload."""


def _laid_out(encoded: list[_Encoded], n_raw: Any, pieces: Pieces) -> tuple[list[PayloadGroup], list[slice]]:
    """Lay out encoded chunks: a tensor with a raw first chunk begins at a multiple of 64.

    Returns:
        One group or two, and the chunks of each: a tensor's continuation must stay adjacent to its beginning, whatever
        begins after it.
    """
    is_aligned = np.array([codec is RAW for codec, _, _ in encoded], dtype=bool) & pieces.begins_row
    begin = int(is_aligned.argmax())
    parts = [slice(0, begin), slice(begin, len(encoded))] if begin else [slice(0, len(encoded))]
    return [_group_of(encoded[part], n_raw[part], pieces.digests[part], is_aligned[part]) for part in parts], parts


def _group_of(encoded: list[_Encoded], n_raw: Any, digests: Digests, is_aligned: Any) -> PayloadGroup:
    codecs, typesizes, stored = zip(*encoded, strict=True)
    entries = np.zeros(len(stored), dtype=ENTRY)
    entries["digest"] = digests
    entries["stored_digest"] = digests[:, :STORED_DIGEST_BYTES]
    entries["codec"] = [codec.number for codec in codecs]
    entries["typesize"] = typesizes
    entries["raw_bytes"] = n_raw
    sizes = np.fromiter(map(len, stored), dtype=np.int64, count=len(stored))
    entries["stored_bytes"] = sizes
    for at in np.flatnonzero(entries["codec"] != RAW.number).tolist():
        entries["stored_digest"][at] = np.frombuffer(digest(stored[at])[:STORED_DIGEST_BYTES], np.uint8)
    offsets, gaps = _offsets(sizes, is_aligned)
    entries["offset"] = offsets
    n_bytes = int(offsets[-1] + sizes[-1])
    parts: list[Any] = list(stored)
    if gaps.any():
        parts = [part for gap, payload in zip(gaps.tolist(), stored, strict=True) for part in (bytes(gap), payload)]
    if n_bytes < _JOINED_BYTES * len(stored):
        parts = [b"".join(parts)]
    return PayloadGroup(entries=entries, parts=parts, n_bytes=n_bytes, is_aligned=bool(is_aligned[0]))


def _offsets(sizes: Any, is_aligned: Any) -> tuple[Any, Any]:
    """Return the starts of consecutive payloads, some aligned to 64, and the gap before each."""
    if not is_aligned.any():
        return np.cumsum(sizes) - sizes, np.zeros_like(sizes)
    # An aligned payload and its unaligned successors form a run; each run but the last is padded.
    begins = np.flatnonzero(is_aligned | (np.arange(len(sizes)) == 0))
    n_bytes = np.add.reduceat(sizes, begins)
    filled = -(-n_bytes // RAW_ALIGNMENT) * RAW_ALIGNMENT
    shift = np.cumsum(filled - n_bytes) - (filled - n_bytes)
    n_members = np.diff(begins, append=len(sizes))
    offsets = np.cumsum(sizes) - sizes + np.repeat(shift, n_members)
    return offsets, np.diff(offsets, prepend=0) - np.concatenate(([0], sizes[:-1]))

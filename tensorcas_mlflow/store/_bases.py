"""Search for the delta bases of a save: by series, sketch or tensor name in earlier checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from tensorcas_mlflow.backends import BlobInfo, map_requests
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, Digests
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.chunk_io import MOST_SAVED_BYTES, Catalog, ChunkReader
from tensorcas_mlflow.codecs import computes_exactly
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError, TensorNotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest, Row
from tensorcas_mlflow.store._base_plans import BasePlan
from tensorcas_mlflow.store._choose import (
    LEAST_DELTA_BYTES,
    MAX_SAVED_DEPTH,
    RecentChoices,
    sample_number,
    share_against,
)
from tensorcas_mlflow.store._derivations import (
    LEAST_DERIVED_BYTES,
    MOST_DERIVED_BYTES,
    Derivations,
    Derived,
    with_equal_rows,
)
from tensorcas_mlflow.store._recent import LEAST_ROW_BYTES, RECENT, may_be_base
from tensorcas_mlflow.store._sketches import (
    FETCH_BYTES,
    SURE,
    Relative,
    Sketched,
    SketchedStore,
    find_relative,
    listed_refs,
    query_of,
    read_more,
    sketches_of,
)
from tensorcas_mlflow.store._sources import Source, Words

_N_LARGEST = 4
"""Number of tensors, the largest changed ones, used to find the nearest earlier checkpoint."""
_N_COMPARED = 4
_MOST_SMALL_ROWS = 1024
"""With more tensors, a file's save looks for bases of the large ones alone: each tensor takes some microseconds."""
_LEAST_WITH_SMALL_BYTES = 4 << 20
"""With fewer new bytes, a save looks for bases of large tensors alone: small ones take a few hundred bytes more."""
_LEAST_GAIN = 1 / 4
"""Bytes that deltas have to save for each byte of their bases that an object store delivers (``docs/design/codecs.md``,
Bases in an object store)."""
_MOST_ROWS = 20_000

_NOWHERE: Mapping[str, int] = MappingProxyType({})


def matching_row(row: Row, chunk_bytes: int, candidate: Manifest, places: Mapping[str, int] = _NOWHERE) -> Row | None:
    """Find the same tensor in another checkpoint: its name, dtype and shape, in chunks with the same ends.

    Args:
        row: The tensor.
        chunk_bytes: The store's chunk size.
        candidate: The other checkpoint or file.
        places: Numbers of rows in the saved file, by name. A file may describe a tensor only after its bytes:
            until then it is compared with the tensor of the same number, and chunks of the same sizes.
    """
    if candidate.chunk_bytes != chunk_bytes:
        return None
    if row.spec.dtype is None:
        place = places.get(row.spec.name, len(candidate.rows))
        if place >= len(candidate.rows):
            return None
        other = candidate.rows[place]
        # Its size is unknown too while its bytes arrive.
        n_chunks = len(row.digests)
        ends, other_ends = row.ends(chunk_bytes)[:n_chunks], other.ends(chunk_bytes)[:n_chunks]
        return other if other.spec.dtype is not None and np.array_equal(ends, other_ends) else None
    try:
        found: Row | None = candidate.row(row.spec.name)
    except (TensorNotFoundError, FormatError):  # two of its many rows may have one name
        found = None
    if found is None or found.spec.dtype is None:
        found = candidate.input_named(row.spec.name)
    if found is None:
        return None
    other = found
    is_same = (other.spec.dtype, other.spec.shape) == (row.spec.dtype, row.spec.shape)
    return other if is_same and np.array_equal(other.ends(chunk_bytes), row.ends(chunk_bytes)) else None


def _largest(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.spec.n_bytes)[:_N_LARGEST]


_Compared = tuple[Manifest, list[tuple[Row, "Row | None"]]]
"""A candidate, and the largest tensors of a save, each with its own tensor of the same name, dtype and size."""


def nearest(compared: Iterable[_Compared], share_of: Callable[[Row, Row], float]) -> Manifest | None:
    """Choose the checkpoint with the smallest encoding of the largest tensors as differences from it.

    Args:
        compared: The candidates, the likeliest first; the first wins a tie.
        share_of: Estimates the share of its size a row takes as a delta against a candidate's matching row.
    """

    def taken(candidate: _Compared) -> float:
        # Tensors absent from a candidate are stored in full.
        return sum(row.spec.n_bytes * (1.0 if other is None else share_of(row, other)) for row, other in candidate[1])

    return min(compared, key=taken, default=(None,))[0]


def compared_with(
    rows: Iterable[Row], chunk_bytes: int, candidates: Iterable[Manifest], places: Mapping[str, int] = _NOWHERE
) -> list[_Compared]:
    """Return the first candidates with any of the largest tensors, at most four.

    Args:
        rows: The new rows of the save.
        chunk_bytes: The store's chunk size.
        candidates: Earlier checkpoints, the likeliest first.
        places: See `matching_row`.
    """
    largest = _largest(rows)
    pairs = ((each, [(row, matching_row(row, chunk_bytes, each, places)) for row in largest]) for each in candidates)
    return list(islice((each for each in pairs if any(other is not None for _, other in each[1])), _N_COMPARED))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselessTensors:
    """Tensors whose new chunks need bases."""

    source: Source
    new: Any
    """Numbers of its new chunks with bytes at hand, ascending."""
    rows: Mapping[int, Row]
    """The tensors, by their numbers in the source; no two of one name."""

    @classmethod
    def of(cls, source: Source, new: Any) -> BaselessTensors:
        """Find the tensors large enough for deltas.

        Args:
            source: The rows of a save, and their bytes.
            new: See the attribute.
        """
        columns = source.columns
        numbers = distinct(columns.rows_of(new))
        numbers = numbers[columns.n_bytes[numbers] >= _least_row_bytes(source, new)]
        if len(numbers) > _MOST_SMALL_ROWS:
            numbers = numbers[columns.n_bytes[numbers] >= LEAST_ROW_BYTES]
        is_tensor = columns.is_tensor[numbers]
        if source.first_row is not None:
            is_tensor |= np.array([columns.name(number) != "" for number in numbers.tolist()], dtype=bool)
        numbers = numbers[is_tensor][:_MOST_ROWS]
        # A file may have many tensors without a name; the last one represents them, here and in other files.
        by_name = {columns.name(number): number for number in numbers.tolist()}
        return cls(source=source, new=new, rows={number: source.rows[number] for number in sorted(by_name.values())})

    @property
    def places(self) -> Mapping[str, int]:
        """Numbers of the tensors in their file, by name; empty if names alone identify them."""
        first = self.source.first_row
        return {} if first is None else {row.spec.name: first + number for number, row in self.rows.items()}

    def chunks_of(self, number: int) -> tuple[Any, Any]:
        """Return the new chunks of a tensor: their numbers, and those counted from its own first chunk."""
        begin, end = (int(at) for at in self.source.columns.chunk_at[number : number + 2])
        mine = self.new[slice(*self.new.searchsorted((begin, end)).tolist())]
        return mine, mine - begin


def nearest_parent(
    catalog: Catalog, reader: ChunkReader, wanted: BaselessTensors, chunk_bytes: int, candidates: Sequence[Manifest]
) -> Manifest | None:
    """Choose the earlier checkpoint with the bases of tensors.

    Args:
        catalog: The store's.
        reader: The store's.
        wanted: The tensors, at least one.
        chunk_bytes: The store's chunk size.
        candidates: Earlier checkpoints and files, the likeliest first.

    Returns:
        None if none has any of the tensors.
    """
    rows = list(wanted.rows.values())
    if len(candidates) == 1 and any(matching_row(row, chunk_bytes, candidates[0], wanted.places) for row in rows):
        return candidates[0]
    compared = compared_with(rows, chunk_bytes, candidates, wanted.places)
    if len(compared) < 2:
        return compared[0][0] if compared else None
    if reader.is_remote:
        catalog.take_hints_of([candidate for candidate, _ in reversed(compared)])
    numbers = {row.spec.name: number for number, row in wanted.rows.items()}
    places: dict[str, int] = {}
    """The place of the chunk that stands for a tensor, counted from its first."""
    samples: dict[str, Buffer] = {}
    for row in _largest(rows):
        mine, at = wanted.chunks_of(numbers[row.spec.name])
        sample = sample_number(len(mine))
        places[row.spec.name] = int(at[sample])
        [samples[row.spec.name]] = next(wanted.source.pieces(mine[[sample]])).data
    pairs = [(row, other) for _, pairs in compared for row, other in pairs if other is not None]
    stored = _read_some(catalog, reader, [other.digests[places[row.spec.name]].tobytes() for row, other in pairs])

    def share(row: Row, other: Row) -> float:
        base = stored.get(other.digests[places[row.spec.name]].tobytes())
        itemsize = int(wanted.source.itemsizes[numbers[row.spec.name]])
        return 1.0 if base is None else share_against(samples[row.spec.name], base, itemsize)

    return nearest(compared, share)


def _read_some(catalog: Catalog, reader: ChunkReader, keys: Sequence[bytes]) -> Mapping[bytes, Buffer]:
    """Read chunks by their digests, all at once, without those that no pack has.

    If one is unreadable, only those are returned that this process remembers.
    """
    wanted = dict.fromkeys(keys)
    known = {key: some[0] for key in wanted if (some := catalog.recent.find(_as_digests([key]))) is not None}
    digests = _as_digests([key for key in wanted if key not in known])
    found = catalog.find_sound(digests, ())
    for refresh in (catalog.look_at_hinted, catalog.refresh):
        if found.found.all():
            break
        refresh()
        found = catalog.find_sound(digests, ())
    # A read of a chunk that is gone would look through every pack.
    digests = digests[found.found]
    outs = [memoryview(bytearray(size)) for size in found.entries["raw_bytes"][found.found].tolist()]
    try:
        if outs:
            reader.read(digests, outs, verify=True)
    except (NotFoundError, FormatError, BackendError):
        return known
    if sum(map(len, outs)) <= MOST_SAVED_BYTES:
        catalog.recent.note(digests, outs)
    return known | dict(zip(map(bytes, digests), outs, strict=True))


def _as_digests(keys: Sequence[bytes]) -> Digests:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, DIGEST_BYTES)


def plan_bases(
    catalog: Catalog, reader: ChunkReader, wanted: BaselessTensors, chunk_bytes: int, parent: Manifest
) -> BasePlan | None:
    """Find possible bases of new chunks: the chunks at their places in an earlier checkpoint or file.

    Returns:
        None if there are none.
    """
    chunks: list[Any] = []
    found: list[Digests] = []
    rows_at = wanted.places
    for number, row in wanted.rows.items():
        mine, places = wanted.chunks_of(number)
        moves = wanted.source.moves.get(number)
        if moves is not None:
            has_size = moves.sizes[places] == wanted.source.sizes[mine]
            chunks.append(mine[has_size])
            found.append(moves.digests[places[has_size]])
            continue
        other = matching_row(row, chunk_bytes, parent, rows_at)
        if other is not None:
            chunks.append(mine)
            found.append(other.digests[places])
    if not chunks:
        return None
    plan = BasePlan(catalog, reader, np.concatenate(chunks), np.ascontiguousarray(np.concatenate(found)))
    return plan or None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedParts:
    """Chunks of a save that are likely to be parts of longer stored ones."""

    chunks: Any
    """Their numbers, ascending."""
    offset_of: Mapping[int, int]
    """Place of each in its longer chunk."""
    plan: BasePlan
    """The longer chunks."""

    @classmethod
    def of(cls, catalog: Catalog, reader: ChunkReader, source: Source, new: Any) -> MovedParts | None:
        """Find them among the new chunks of a save; None if there are none."""
        chunks: list[Any] = []
        digests: list[Digests] = []
        offsets: list[Any] = []
        for number, moves in sorted(source.moves.items()):
            begin, end = source.columns.chunk_at[number : number + 2].tolist()
            mine = new[slice(*new.searchsorted((begin, end)).tolist())]
            sizes = source.sizes[mine]
            mine = mine[(moves.sizes[mine - begin] > sizes) & (sizes >= LEAST_DELTA_BYTES)]
            chunks.append(mine)
            digests.append(moves.digests[mine - begin])
            offsets.append(moves.offsets[mine - begin])
        if not sum(map(len, chunks)):
            return None
        every = np.concatenate(chunks)
        plan = BasePlan(catalog, reader, every, np.ascontiguousarray(np.concatenate(digests)))
        offset_of = dict(zip(every.tolist(), np.concatenate(offsets).tolist(), strict=True))
        return cls(chunks=every, offset_of=offset_of, plan=plan) if plan else None


def plan_on_the_same_rows(
    catalog: Catalog, reader: ChunkReader, source: Source, new: Any, parent: Manifest
) -> BasePlan | None:
    """Find possible bases like `plan_bases`, in a checkpoint with the rows of the save in the same order."""
    columns = source.columns
    is_wanted = columns.is_tensor & (columns.n_bytes >= _least_row_bytes(source, new))
    chunks = new[is_wanted[columns.rows_of(new)]]
    if not len(chunks):
        return None
    return BasePlan(catalog, reader, chunks, np.ascontiguousarray(parent.digests[chunks])) or None


def _least_row_bytes(source: Source, new: Any) -> int:
    """Return the least size of a tensor that may have a base in a save of some new chunks."""
    return LEAST_DELTA_BYTES if np.add.reduce(source.sizes[new]) >= _LEAST_WITH_SMALL_BYTES else LEAST_ROW_BYTES


def _wholly_new(source: Source, new: Any, open_row: Row | None) -> Any:
    """Return the numbers of large rows with all of their chunks so far new and at hand.

    Args:
        source: The rows of a save, and their bytes.
        new: Numbers of its new chunks, ascending.
        open_row: See `Parents.derive`.
    """
    columns = source.columns
    of_new = columns.rows_of(new)
    numbers = distinct(of_new)
    counts = of_new.searchsorted(numbers, side="right") - of_new.searchsorted(numbers)
    is_large = columns.n_bytes[numbers] >= LEAST_DERIVED_BYTES
    if open_row is not None:
        is_large |= (numbers == len(columns) - 1) & (open_row.spec.n_bytes >= LEAST_DERIVED_BYTES)
    is_whole = counts == (columns.chunk_at[numbers + 1] - columns.chunk_at[numbers])
    is_input = np.isin(numbers, list(source.inputs))
    numbers = numbers[is_whole & is_large & ~is_input]
    if source.first_row is None:
        # Only a file has tensors of unknown types.
        numbers = numbers[columns.is_tensor[numbers]]
    return numbers[source.holds(columns.chunk_at[numbers])]


def _derivable(source: Source, numbers: Any, open_row: Row | None) -> dict[int, Row]:
    """Return those of some rows that are not too large, and have a name if their type is unknown."""
    last = len(source.columns) - 1
    rows = {
        number: open_row if open_row is not None and number == last else source.columns.row(number)
        for number in numbers.tolist()
    }
    return {
        number: row
        for number, row in rows.items()
        if row.spec.n_bytes <= MOST_DERIVED_BYTES and (row.spec.dtype is not None or row.spec.name != "")
    }


_FAR_SHARE = 0.05
"""Share of its size from which a tensor may be nearer to a mean of two bases than to one."""
_MOST_MERGED = 8
"""Number of relatives among which a search looks for the inputs of a mean."""
_MERGED_SHARE = 1 / 8
"""Bound of the bytes read of these relatives, as a share of the save: a search takes a few percent of its time."""
_N_LATEST = 3
_N_LOOKED_AT = 48
"""Number of refs to check; a logged model is some ten files, and one of them holds its tensors."""
_MOST_AT_ONCE = 8
"""Bound of the refs requested at once from an object store."""

FindParent = Callable[[], Manifest | None]


class ParentStore(SketchedStore, Protocol):
    """The parts of an open store needed to search for a parent."""

    catalog: Catalog

    @property
    def choices(self) -> RecentChoices:
        """Choices for the series saved by this process in the store."""

    def manifest(self, ref: Ref) -> Manifest:
        """Read the manifest of a ref; see `Store.manifest`."""


@dataclass(slots=True, kw_only=True)
class Parents:
    """Search for the earlier state of one checkpoint or file, if there is something to store."""

    store: ParentStore
    series: str | None = None
    """Name of its series, the same for each of its steps; None if it is in none."""
    earlier: FindParent | None = None
    """Reads the last checkpoint of that series, if this process has not written it."""
    nearest: Manifest | None = field(default=None, init=False)
    """Result of the search for the last save, or the last batch of a stream."""
    seen: Sequence[Manifest] = field(default=(), init=False)
    """The manifests that may have tables of the last save with other rows, the likeliest first."""
    is_on_the_same_rows: bool = field(default=False, init=False)
    """Whether the last step of the series has the rows of the save in the same order."""
    words: Words | None = field(default=None, init=False)
    """Sketches of the tensors of a save, made by the search; None for a stream, whose batches have parts of them."""
    _relative: Relative | None = field(default=None, init=False)
    """The checkpoint or file found by its sketches."""

    _derivations: Derivations | None = field(default=None, init=False)
    _has_read_more: bool = field(default=False, init=False)
    """Whether this search has read sketches of other processes."""
    _is_worth_fetching: bool = field(default=False, init=False)
    """True if the bases are worth fetching; decided once for all batches of a stream."""
    _is_too_far: bool = field(default=False, init=False)

    @property
    def is_step(self) -> bool:
        """True if this process knows an earlier step of the series."""
        return self.series is not None and RECENT.named(self.store.id, self.series) is not None

    def plan(self, source: Source, new: Any) -> BasePlan | None:
        """Find possible bases of new chunks.

        Args:
            source: The rows of the save, and their bytes.
            new: Numbers of its new chunks, ascending.

        Returns:
            None if there are none; nor through a carrier, which serves whole packs only; nor if an object store would
            have to deliver more bytes than they are worth.
        """
        if self.store.backend.is_carrier or self._is_too_far:
            return None
        plan = self._find(source, new[source.holds(new)])
        if plan is not None and plan.n_far_bytes and not self._is_worth_fetching:
            self._is_worth_fetching = plan.gain_bytes(source) >= _LEAST_GAIN * plan.n_far_bytes
            if not self._is_worth_fetching:
                self._is_too_far = True
                return None
        return plan

    def derive(
        self, source: Source, new: Any, plan: BasePlan | None, open_row: Row | None = None
    ) -> dict[int, Derived]:
        """Find rows whose bytes are a function of stored rows.

        Args:
            source: The rows of the save, and their bytes.
            new: Numbers of its new chunks, ascending.
            plan: Result of `plan` for these chunks.
            open_row: The last row in its likely final form, if not all of its chunks have arrived.

        Returns:
            The rows by number; none through a carrier, like bases.
        """
        last = None if self.series is None else RECENT.named(self.store.id, self.series)
        # The series finds the bases of its own steps.
        if self.store.backend.is_carrier or (last is not None and not last.derived):
            return {}
        numbers = _wholly_new(source, new, open_row)
        if not len(numbers):
            return {}
        recent = RECENT.of(self.store.id)
        if last is None and not self._has_read_more:
            self._has_read_more = True
            # The search for bases has looked for those of sketched rows; a quantized file has few or none.
            sketches_of(self.store.id).learn(recent)
            with suppress(NotFoundError, FormatError, BackendError):
                read_more(self.store, int(source.sizes[new].sum()))
        if not recent and not sketches_of(self.store.id).digests():
            return {}
        if not computes_exactly():
            # The proof would hold in this thread only, and no other process could read the rows.
            return {}
        rows = _derivable(source, numbers, open_row)
        if self._derivations is None:
            self._derivations = Derivations(self.store)
        based = {number for number in rows if plan is not None and plan.has(source.columns.chunk_at[[number]]).any()}
        if based and self.nearest is not None and last is None:
            based = self._derivations.with_bases(source, {number: rows[number] for number in based}, self.nearest)
        candidates = [*([] if self.nearest is None else [self.nearest]), *recent]
        alone = {number: row for number, row in rows.items() if number not in based}
        found = self._derivations.find(source, alone, candidates)
        if based and last is None:
            left = {number: row for number, row in rows.items() if number not in found}
            if not self._derivations.has_looked_for_means:
                self._derivations.look_for_means(source, left, self._relatives(source, plan, left, based))
            found |= self._derivations.find_means(source, left)
        return with_equal_rows(source, found)

    def _relatives(
        self, source: Source, plan: BasePlan | None, rows: Mapping[int, Row], based: Collection[int]
    ) -> list[str]:
        """Return the names of the manifests nearest to rows with bases; none if these save most of the bytes."""
        n_bytes = sum(row.spec.n_bytes for row in rows.values())
        most = min(_MOST_MERGED, int(_MERGED_SHARE * n_bytes) // self.store.chunk_bytes)
        if most < 2:
            return []
        relatives = sketches_of(self.store.id).relatives(query_of(source, rows))[:most]
        if len(relatives) < 2 or not self._is_far(source, plan, {number: rows[number] for number in based}):
            return []
        return [match.sketched.manifest for match in relatives]

    def _is_far(self, source: Source, plan: BasePlan | None, rows: Mapping[int, Row]) -> bool:
        """Tell whether the largest of some rows takes many bytes as a delta against its base."""
        largest = max(rows, key=lambda number: rows[number].spec.n_bytes)
        chunk = source.columns.chunk_at[[largest]] + sample_number(len(rows[largest].digests))
        behind = [] if plan is None else plan.behind(int(chunk[0]), MAX_SAVED_DEPTH)
        if not behind:
            return False
        [raw] = next(source.pieces(chunk)).data
        return share_against(raw, behind[0].data, int(source.itemsizes[largest])) > _FAR_SHARE

    def _find(self, source: Source, new: Any) -> BasePlan | None:
        """Find possible bases, whatever they cost."""
        store = self.store
        last = None if self.series is None else RECENT.named(store.id, self.series)
        is_like = last is not None and source.first_row is None and last.chunk_bytes == store.chunk_bytes
        if last is not None and is_like and source.columns.is_laid_out_like(last.columns):
            self.nearest, self.seen, self.is_on_the_same_rows = last, [last], True
            return plan_on_the_same_rows(store.catalog, store.chunks, source, new, last)
        wanted = BaselessTensors.of(source, new)
        if not wanted.rows:
            return None
        plan = None
        if self._relative is not None:
            self._relative.learn(query_of(source, wanted.rows), wanted.rows)
            self.nearest = self._relative.renamed
        if self.nearest is not None:
            plan = plan_bases(store.catalog, store.chunks, wanted, store.chunk_bytes, self.nearest)
        if plan is None:
            query = None if self.is_step else query_of(source, wanted.rows)
            if query is not None and source.first_row is None:
                self.words = Words(query.rows, query.words)
            candidates = self._candidates(query)
            related = self._related(candidates, query, wanted)
            self.nearest = nearest_parent(store.catalog, store.chunks, wanted, store.chunk_bytes, related)
            if self._relative is not None and self.nearest is not self._relative.renamed:
                self._relative = None
            # Strangers are seen, too: rows that have moved show in no sketch.
            self.seen = [*([] if self.nearest is None else [self.nearest]), *related, *candidates]
            if self.nearest is not None:
                if store.backend.is_remote:
                    store.catalog.take_hints_of([self.nearest if self._relative is None else self._relative.parent])
                plan = plan_bases(store.catalog, store.chunks, wanted, store.chunk_bytes, self.nearest)
        return plan

    def _related(self, candidates: list[Manifest], query: Sketched | None, wanted: BaselessTensors) -> list[Manifest]:
        """Return the candidates that are not told apart from the save by their sketches.

        The checkpoint or file nearest by its sketches comes first, its tensors named as in the save.
        """
        self._relative = None
        if query is None or not len(query.rows):
            return candidates
        self._has_read_more = True
        self._relative, strangers = find_relative(self.store, query, wanted.rows, candidates)
        names = {row.spec.name for row in _largest(wanted.rows.values())}
        if names <= {wanted.rows[number].spec.name for number in query.rows.tolist()}:
            candidates = [each for each in candidates if each.digest not in strangers]
        if self._relative is None:
            return candidates
        if self._relative.is_renamed:
            return [self._relative.renamed, *candidates]
        # Names find all of its tensors, even those without a sketch.
        parent, self._relative = self._relative.parent, None
        return [parent, *(each for each in candidates if each.digest != parent.digest)]

    def note(self, manifest: Manifest) -> None:
        """Remember a committed manifest."""
        RECENT.note(self.store.id, self.series or manifest.digest, manifest)

    def _candidates(self, query: Sketched | None) -> list[Manifest]:
        """Return earlier checkpoints and files that may have bases, the likeliest first.

        Args:
            query: Sketches of the tensors without bases; None for a step of a series.
        """
        if self.series is not None:
            last = RECENT.named(self.store.id, self.series)
            with suppress(NotFoundError, FormatError, BackendError):
                last = last or (self.earlier() if self.earlier else None)
            if last is not None:
                return [last]
        recent = RECENT.of(self.store.id)
        if RECENT.is_searched(self.store.id) or self._are_enough(recent, query):
            return recent
        found = self._latest(query)
        for digest, manifest in reversed(found.items()):
            RECENT.note(self.store.id, digest, manifest)
        if len(found) == _N_LATEST or not self._are_enough(list(found.values()), query):
            RECENT.note_searched(self.store.id)
        return RECENT.of(self.store.id)

    def _are_enough(self, candidates: Sequence[Manifest], query: Sketched | None) -> bool:
        """Tell whether a small save needs no more manifests from an object store: one of its candidates is related.

        Another one may be nearer, so a save reads more of them the larger it is.
        """
        if query is None or not self.store.backend.is_remote or not candidates:
            return False
        if len(candidates) < min(_N_LATEST, 1 + int(query.n_bytes.sum()) // FETCH_BYTES):
            return False
        known = sketches_of(self.store.id)
        known.learn(candidates)
        match = known.search(query).nearest
        return match is not None and match.likeness >= SURE

    def _latest(self, query: Sketched | None) -> dict[str, Manifest]:
        """Read the latest checkpoints and files with different tensors: by their digests, the latest first.

        Args:
            query: See `_candidates`.
        """
        found: dict[str, Manifest] = {}
        with suppress(NotFoundError, FormatError, BackendError):
            refs, known = listed_refs(self.store.backend), sketches_of(self.store.id)
            known.take(refs)
            looked_at: list[BlobInfo] = []
            for info, ref in self._read_refs(refs[:_N_LOOKED_AT]):
                looked_at.append(info)
                if ref is None or (ref.kind == "file" and ref.n_bytes < LEAST_ROW_BYTES):
                    continue
                digest = ref.manifest.partition(".")[0]
                if digest in found or not may_be_base(manifest := self.store.manifest(ref)):
                    continue
                found[digest] = manifest
                if len(found) == _N_LATEST or self._are_enough(list(found.values()), query):
                    break
            if self.store.backend.is_remote:
                known.see(looked_at)  # a folder's manifest without sketches is sketched from its chunks
        return found

    def _read_refs(self, infos: Sequence[BlobInfo]) -> Iterator[tuple[BlobInfo, Ref | None]]:
        """Read refs: of an object store first one, which is often enough, and then more and more at once."""
        backend, begin, n_at_once = self.store.backend, 0, 1
        while some := infos[begin : begin + n_at_once]:
            yield from zip(some, map_requests(backend, self.store.ref, [info.key for info in some]), strict=True)
            begin += len(some)
            n_at_once = min(2 * n_at_once, _MOST_AT_ONCE)

"""Reader of tensors: locate, plan, read, decode, verify; the retries where packs move or copies are damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Buffer, Digests
from tensorcas_mlflow.base.tensors import Offsets, bytes_of, distinct
from tensorcas_mlflow.chunk_io._catalog import Catalog
from tensorcas_mlflow.chunk_io._decode import ChainLinks, Wanted
from tensorcas_mlflow.chunk_io._fetch import Damage, Load, check_links, check_sizes, damage_of
from tensorcas_mlflow.chunk_io._map import map_rows, mappable
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._plan import ChosenRows, OpenFiles, Planner, Target, check_outs, new_arrays
from tensorcas_mlflow.chunk_io._stored import OpenPacks
from tensorcas_mlflow.chunk_io._ways import ReadPlan, Way, way_of_environment
from tensorcas_mlflow.errors import (
    BlobNotFoundError,
    ChunkNotFoundError,
    CorruptChunkError,
    DerivedTensorError,
    FormatError,
)
from tensorcas_mlflow.layout import FORMS, list_dir
from tensorcas_mlflow.layout.manifests import Columns, Manifest, Row, Rows
from tensorcas_mlflow.layout.packs import pack_key, pack_name

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io._cache import ExtentCache
    from tensorcas_mlflow.chunk_io._derive import LastRow
    from tensorcas_mlflow.layout.manifests import Derivation


class ChunkOwner(NamedTuple):
    """The checkpoint or file of some consecutive chunks."""

    label: str | None = None
    """Its name in words; None if it is unknown."""
    rows: Sequence[Row] = ()
    """All rows that count in the chunks' numbers."""
    first: int = 0
    """Number of the first of the chunks, counted over all rows."""
    numbers: Any = None
    """Numbers of the chunks, counted over all rows, if they do not follow each other."""
    tell: Callable[[Any], tuple[str, ...]] | None = None
    """Returns the names of some chunks' tensors, by the chunks' numbers, if the rows do not tell them."""
    manifest: Manifest | None = None
    """Manifest that the chunks are of, whose form may say how they are stored; None if it is unknown."""

    def names(self, chunks: Any) -> tuple[str, ...]:
        """Return the names of some chunks' tensors, by the chunks' numbers; stretches of a file have no name."""
        if self.tell is not None:
            return self.tell(np.asarray(chunks) + self.first)
        return names_of(self.rows, np.asarray(chunks) + self.first if self.numbers is None else self.numbers[chunks])


def names_of(rows: Sequence[Row], chunks: Any) -> tuple[str, ...]:
    """Return the names of some chunks' tensors, by the chunks' numbers counted over all rows."""
    columns = rows.columns if isinstance(rows, Rows) else Columns.of_rows(rows)
    at = np.unique(columns.rows_of(chunks))
    return tuple(name for row in at.tolist() if row < len(columns) and (name := columns.name(row)))


NOBODY = ChunkOwner()


_FILE_BATCH_BYTES = 16 << 20
_MAX_ATTEMPTS = 100
"""Maximum number of moves of a chunk during one read. Each move takes a whole collection during the read. Many in a row
occur only if rewriting collections run without a pause and the reader hardly runs."""
_MOST_FORMS = 64
"""Bound of the forms that a reader keeps."""

R = TypeVar("R")


class ChunkReader:
    """Reader of the chunks of one store, through the local cache.

    Every method raises:
        ChunkNotFoundError: No pack of this store holds a chunk.
        CorruptChunkError: A chunk is damaged. Without ``verify`` it shows only if decoding fails.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        *,
        cache: ExtentCache | None = None,
        store_id: str = "",
    ):
        """Create a reader.

        Args:
            backend: The backend of the packs.
            catalog: The catalog of that backend.
            cache: Cache of reads on local disk; None caches nothing.
            store_id: Id of the store in the cache.
        """
        self._backend = backend
        self._catalog = catalog
        self._cache = cache
        self._store_id = store_id
        self.is_remote = backend.is_remote
        """True if a read of the storage is a request to another machine."""
        self._forms: dict[str, Manifest] = {}
        """Forms that reads have needed so far, by the digest of their manifest."""

    def _by_form(self, manifest: Manifest, n_parts: int, read: Callable[[Manifest, Offsets], None]) -> None:
        """Read parts of a manifest's content, each by the manifest or by one of its forms.

        Args:
            manifest: The manifest.
            n_parts: Number of the parts, such as rows.
            read: Reads some parts, given by their numbers, as one manifest says that they are stored.
        """
        parts = np.arange(n_parts)
        try:
            self._by_one(manifest, parts, read)
        except (ChunkNotFoundError, FormatError):
            if n_parts < 2 or not self._form_keys(manifest):
                raise
            # Perhaps packs hold some parts, and a form makes the others.
            for part in np.split(parts, n_parts):
                self._by_one(manifest, part, read)

    def _by_one(self, manifest: Manifest, parts: Offsets, read: Callable[[Manifest, Offsets], R]) -> R:
        """Read parts of a manifest's content, all by the manifest or all by one form."""
        found: ChunkNotFoundError | FormatError | None = None
        for way in self._manifests_of(manifest):
            try:
                if isinstance(way, FormatError):
                    raise way
                result = read(way, parts)
            except (ChunkNotFoundError, FormatError) as error:
                # Damage tells more than that another manifest's chunks are not there.
                if found is None or (isinstance(found, ChunkNotFoundError) and isinstance(error, FormatError)):
                    found = error
                continue
            if way is manifest:
                self._forms.pop(manifest.digest, None)
            else:
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                self._forms[manifest.digest] = way
            return result
        assert found is not None
        raise found

    def _manifests_of(self, manifest: Manifest) -> Iterator[Manifest | FormatError]:
        """Yield the manifests that may say how a content is stored, until one is read; the likeliest first."""
        if manifest.digest in self._forms:
            yield self._forms[manifest.digest]
        yield manifest
        if not (keys := self._form_keys(manifest)):
            return
        from tensorcas_mlflow.layout.manifests import forms_of  # a read that finds all chunks in packs needs none

        forms = []
        for form in forms_of(self._backend, manifest, keys):
            forms.append(form)
            yield form
        # A form costs less to find than the tables of all packs, so these come last.
        self._catalog.refresh_from_packs()
        yield manifest
        yield from forms

    def _form_keys(self, manifest: Manifest) -> Sequence[str]:
        return [info.key for info in list_dir(self._backend, f"{FORMS}/{manifest.digest}")[0]]

    def tensors(
        self,
        manifest: Manifest,
        names: Iterable[str] | None,
        *,
        verify: bool,
        out: Mapping[str, Array] | None = None,
        copy: bool | None = None,
        way: Way | None = None,
    ) -> dict[str, Array]:
        """Read whole tensors; see `Store.read_tensors`.

        Raises:
            TensorNotFoundError: A name has no tensor.
            ValueError: An array to fill does not fit.
        """
        wanted = manifest.names() if names is None else list(names)
        columns = manifest.columns
        rows = np.arange(len(columns)) if names is None else manifest.numbers(wanted)
        outs = {} if out is None else check_outs(columns, rows, wanted, out)
        arrays = self.rows(manifest, rows, verify=verify, outs=outs, copy=copy, way=way)
        return dict(zip(wanted, arrays, strict=True))

    def rows(
        self,
        manifest: Manifest,
        rows: Offsets,
        *,
        verify: bool,
        outs: Mapping[int, Array] | None = None,
        copy: bool | None = None,
        is_private: bool = False,
        way: Way | None = None,
    ) -> list[Array]:
        """Read whole rows by their numbers; otherwise like `tensors`.

        Args:
            manifest: A manifest of this store.
            rows: Numbers of the rows.
            verify: Whether to check every chunk. The chunks of derived rows are always checked.
            outs: Arrays to fill, by position among ``rows``, checked by `check_outs`.
            copy: See `Store.read_tensors`.
            is_private: Whether views of mapped packs are writable; writes never reach the packs.
            way: See `Store.read_tensors`.

        Returns:
            An array a row, in their order.
        """
        found: dict[int, Array] = {}

        def read(each: Manifest, some: Offsets) -> None:
            arrays = self._rows(
                each,
                rows[some],
                verify=verify,
                outs={at: outs[place] for at, place in enumerate(some.tolist()) if place in outs} if outs else {},
                copy=copy,
                is_private=is_private,
                way=way,
                needed_by=rows[some],
            )
            found.update(zip(some.tolist(), arrays, strict=True))

        self._by_form(manifest, len(rows), read)
        return [found[at] for at in range(len(rows))]

    def _rows(
        self,
        manifest: Manifest,
        rows: Offsets,
        *,
        verify: bool,
        outs: Mapping[int, Array],
        copy: bool | None,
        is_private: bool,
        way: Way | None,
        needed_by: Offsets,
    ) -> list[Array]:
        """Read rows as one manifest says that they are stored; see `rows`.

        The numbers of inputs of derived rows follow the content's. Errors name the tensors among ``needed_by``.
        """
        columns = manifest.table
        if manifest.derived and (derived := manifest.derivations(rows)):
            stored = np.delete(np.arange(len(rows)), list(derived))
            outs_of_stored = {at: outs[place] for at, place in enumerate(stored.tolist()) if place in outs}
            read = self._rows(
                manifest,
                rows[stored],
                verify=verify,
                outs=outs_of_stored,
                copy=copy,
                is_private=is_private,
                way=way,
                needed_by=rows,
            )
            made = dict(zip(stored.tolist(), read, strict=True))
            known = dict(zip(rows[stored].tolist(), read, strict=True))
            return self._with_derived(manifest, derived, made, known, outs, verify=verify, way=way)
        is_all = len(rows) == len(columns) and bool((rows == np.arange(len(rows))).all())
        digests = columns.digests if is_all else columns.digests[columns.chunks_of(rows)]
        mapped: dict[int, Array] = {}
        if copy is False and not outs:
            chosen = digests if verify else None
            mapped = self._map(columns, rows, digests, manifest.chunk_bytes, chosen, is_private=is_private)
            if len(mapped) == len(rows):
                return [mapped[at] for at in range(len(rows))]
        left = np.delete(np.arange(len(rows)), list(mapped)) if mapped else np.arange(len(rows))
        if mapped:
            digests = columns.digests[columns.chunks_of(rows[left])]
        arrays, target = new_arrays(columns, rows[left], manifest.chunk_bytes, outs)
        owner = _owner(manifest, rows[left], needed_by)
        self._read(Wanted(digests=digests, target=target, verify=verify), owner, way)
        if not mapped:
            return list(arrays)
        found = dict(zip(left.tolist(), arrays, strict=True)) | mapped
        return [found[at] for at in range(len(rows))]

    def _with_derived(
        self,
        manifest: Manifest,
        derived: Mapping[int, Derivation],
        made: dict[int, Array],
        known: Mapping[int, Array],
        outs: Mapping[int, Array],
        *,
        verify: bool,
        way: Way | None,
    ) -> list[Array]:
        """Evaluate the derived rows of one read, and return all its arrays.

        Args:
            manifest: A manifest of this store.
            derived: The derived rows, by position among all rows of the read.
            made: The arrays of the other rows, by position.
            known: The same arrays, by row.
            outs: Arrays to fill, by position.
            verify: Whether to check the chunks of the inputs too.
            way: See `Store.read_tensors`.
        """
        from tensorcas_mlflow.chunk_io._derive import room_for

        places: dict[int, list[int]] = {}
        for at, each in derived.items():
            places.setdefault(each.row, []).append(at)

        def room(each: Derivation) -> Array:
            array = outs.get(places[each.row][0])
            return room_for(manifest, each) if array is None else array

        def use(each: Derivation, array: Array) -> None:
            for at in places[each.row]:
                made[at] = array
                if outs.get(at, array) is not array:
                    made[at] = outs[at]
                    made[at][...] = array

        self._evaluate(
            manifest,
            list({each.row: each for each in derived.values()}.values()),
            room,
            use,
            known=known,
            verify=verify,
            way=way,
        )
        return [made[at] for at in range(len(made))]

    def _evaluate(
        self,
        manifest: Manifest,
        derivations: Sequence[Derivation],
        make_room: Callable[[Derivation], Array],
        use: Callable[[Derivation, Array], None],
        *,
        known: Mapping[int, Array],
        verify: bool,
        way: Way | None = None,
    ) -> None:
        """Evaluate derived rows; see `DerivedRows.evaluate`."""
        from tensorcas_mlflow.chunk_io._derive import DerivedRows  # few checkpoints have derived rows

        made = np.array([each.row for each in derivations])

        # The numbers of inputs are of this manifest alone, so its form is found by who called, for the whole read.
        def read(row: int) -> Array:
            return self._rows(
                manifest,
                np.array([row]),
                verify=verify,
                outs={},
                copy=False,
                is_private=False,
                way=way,
                needed_by=made,
            )[0]

        try:
            DerivedRows(manifest, derivations, read, known).evaluate(make_room, use)
        except DerivedTensorError:
            if not verify:
                # Perhaps an input is damaged: then that is the error.
                rows = sorted({row for each in derivations for row in each.inputs})
                self._check(manifest, np.array(rows), made)
            raise

    @property
    def can_check(self) -> bool:
        """True if `check` reads local files; it would read each remote chunk twice."""
        return self._cache is None and not self._backend.is_remote

    def open_packs(self) -> OpenPacks | None:
        """Return an opener of packs for the encoder, which decodes bases itself; None if it cannot read these packs."""
        is_local = self._cache is None and not self._backend.is_remote
        return OpenPacks(self._backend) if is_local else None

    def n_far_bytes(self, places: Places) -> int:
        """Return the stored bytes of the found chunks of a remote store that are not in the cache."""
        far = np.flatnonzero(places.found)
        if self._cache is not None:
            far = np.setdiff1d(far, self._find_cached(self._cache, places, far))
        return int(places.entries["stored_bytes"][far].astype(np.int64).sum())

    def kept(self, pack: str, pieces: Iterable[Buffer]) -> Iterable[Buffer]:
        """Put the bytes of a new pack into the cache, where later saves find their bases, and pass them on.

        Args:
            pack: Its name.
            pieces: Its bytes, in pieces that end where chunks end. Nobody changes them any more.
        """
        return pieces if self._cache is None else self._cache.kept(self._store_id, pack, pieces)

    def check(self, manifest: Manifest, rows: Offsets, *, by_form: bool = True) -> None:
        """Check that the store holds an intact copy of every chunk of some rows, by their numbers.

        The check reads the stored bytes of each chunk, and of the bases of deltas, and compares them with the digests
        in the tables of their packs. It decodes only chunks with a damaged copy, to find an intact one. It evaluates
        derived rows.

        Args:
            manifest: A manifest of this store.
            rows: The rows.
            by_form: Whether a form of the manifest may say how chunks are stored that packs lack.
        """
        if by_form:
            self._by_form(manifest, len(rows), lambda each, some: self._check(each, rows[some], rows[some]))
        else:
            self._check(manifest, rows, rows)

    def _check(self, manifest: Manifest, rows: Offsets, needed_by: Offsets) -> None:
        columns = manifest.table
        derived = list(manifest.derivations(rows).values())
        rows = _with_sources(rows, derived)
        digests, sizes = columns.digests[columns.chunks_of(rows)], columns.chunk_sizes(manifest.chunk_bytes, rows)
        owner = _owner(manifest, rows, needed_by)
        everything = np.arange(len(digests))
        places = self._locate(digests, frozenset(), everything, owner)
        suspects = everything if check_sizes(places, sizes) else self._suspects(places)
        for first, stop in _runs(suspects, sizes):
            block = np.empty(int(sizes[first:stop].sum()), dtype=np.uint8).data
            target = Target.of_block(block, sizes[first:stop])
            some = Wanted(digests=digests[first:stop], target=target, verify=True)
            self._read(some, owner._replace(first=first))
        if derived:
            from tensorcas_mlflow.chunk_io._derive import room_for

            self._evaluate(manifest, derived, partial(room_for, manifest), _drop, known={}, verify=True)

    def check_derived(self, manifest: Manifest, derivation: Derivation, inputs: Mapping[int, Array]) -> None:
        """Evaluate a derived row, and compare it with its digests.

        Args:
            manifest: A manifest of this store.
            derivation: The derived row.
            inputs: Inputs that are in memory and checked, by number; others are read.

        Raises:
            DerivedTensorError: The function gives other bytes.
            CorruptChunkError: A chunk of an input is damaged.
            ChunkNotFoundError: A chunk of an input is gone.
        """
        from tensorcas_mlflow.chunk_io._derive import room_for

        try:
            self._evaluate(manifest, [derivation], partial(room_for, manifest), _drop, known=inputs, verify=True)
        except ChunkNotFoundError:  # an optimization has stored the content in another way since
            self.check(manifest, np.array([derivation.row]))

    def _suspects(self, places: Places) -> Any:
        """Return the chunks that an ordinary read has to look at: those with a damaged link, or all if a pack moved."""
        try:
            links = ChainLinks.of([places, *self._catalog.follow(places)])
            with Load(self._backend, self._cache, self._store_id, way_of_environment()) as load:
                return load.suspects(links)
        except BlobNotFoundError:
            return np.arange(len(places.found))

    def explain(
        self, manifest: Manifest, names: Iterable[str] | None, *, copy: bool | None = None, way: Way | None = None
    ) -> ReadPlan:
        """Return the plan `tensors` would follow now; see `Store.explain`."""
        return self._by_one(manifest, np.arange(0), lambda each, _: self._explain(each, names, copy, way))

    def _explain(self, manifest: Manifest, names: Iterable[str] | None, copy: bool | None, way: Way | None) -> ReadPlan:
        columns = manifest.table
        wanted = np.arange(len(manifest.columns)) if names is None else manifest.numbers(names)
        rows = _with_sources(wanted, manifest.derivations(wanted).values())
        digests = columns.digests[columns.chunks_of(rows)]
        owner = _owner(manifest, rows, wanted)
        places = self._locate(digests, frozenset(), np.arange(len(digests)), owner)
        mapped = mappable(places, columns, rows, manifest.chunk_bytes) if copy is False else rows[:0]
        counts = columns.chunk_at[rows + 1] - columns.chunk_at[rows]
        is_mapped = np.isin(np.arange(len(rows)), mapped)
        chunks = np.flatnonzero(~np.repeat(is_mapped, counts))
        with OpenFiles(self._backend) as files:
            planner = Planner(self._backend, files, way or way_of_environment())
            held = chunks[:0] if self._cache is None else self._find_cached(self._cache, places, chunks)
            packs = planner.reads(places, np.setdiff1d(chunks, held))
        return ReadPlan(
            n_tensors=len(wanted),
            n_bytes=int(columns.n_bytes[wanted].sum()),
            n_mapped=len(mapped),
            n_cached=len(held),
            packs=packs,
        )

    def _find_cached(self, cache: ExtentCache, places: Places, chunks: Any) -> Any:
        """Return the chunks the cache holds, by number."""
        held = [
            mine[cache.open_pack(self._store_id, pack).find(entries["offset"], entries["stored_bytes"]).held]
            for pack, mine in places.by_pack(chunks)
            for entries in [places.entries.take(mine)]
        ]
        return np.concatenate([chunks[:0], *held])

    def _map(
        self,
        columns: Columns,
        rows: Offsets,
        digests: Digests,
        chunk_bytes: int,
        expected: Digests | None,
        *,
        is_private: bool,
    ) -> dict[int, Array]:
        """Memory-map rows stored raw and in one piece; return arrays by position among the rows."""
        places = self._catalog.find(digests)
        for refresh in (partial(self._catalog.look_at_latest, digests), self._catalog.refresh):
            if places.found.all():
                break
            refresh()
            places = self._catalog.find(digests)
        with OpenFiles(self._backend) as files:
            return map_rows(files, places, columns, rows, chunk_bytes, expected, is_private=is_private)

    def pieces(self, manifest: Manifest, *, verify: bool) -> Iterator[memoryview]:
        """Yield the bytes of all rows, one after the other, some 16 MiB at a time."""
        from tensorcas_mlflow.chunk_io._derive import LastRow

        sizes = manifest.columns.chunk_sizes(manifest.chunk_bytes)
        stops = sizes.cumsum()
        last = LastRow()
        begin = 0
        while begin < len(sizes):
            base = int(stops[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(stops, base + _FILE_BATCH_BYTES, side="right")))
            block = np.empty(int(stops[end - 1]) - base, dtype=np.uint8).data
            target = Target.of_block(block, sizes[begin:end])
            read = partial(self._read_piece, begin=begin, target=target, verify=verify, last=last)
            self._by_form(manifest, len(target), read)
            yield block
            begin = end

    def _read_piece(
        self, manifest: Manifest, some: Offsets, *, begin: int, target: Target, verify: bool, last: LastRow
    ) -> None:
        """Read some of the chunks from some number on into a target, as one manifest says that they are stored."""
        chunks = some + begin
        if manifest.derived or len(some) < len(target):
            outs = [target.view(chunk) for chunk in some.tolist()]
            self._read_chunks(manifest, chunks, outs, verify=verify, last=last)
        else:
            owner = ChunkOwner(manifest.label, manifest.rows, first=begin, manifest=manifest)
            self._read(Wanted(digests=manifest.digests[chunks], target=target, verify=verify), owner)

    def read_chunks(
        self, manifest: Manifest, chunks: Offsets, outs: Sequence[memoryview], *, verify: bool, last: LastRow
    ) -> None:
        """Read chunks of a manifest's content, each into a buffer of its size.

        Args:
            manifest: A manifest of this store.
            chunks: Numbers of the chunks, counted over all rows, ascending.
            outs: Buffer of each.
            verify: Whether to check each against its digest. The chunks of derived rows are always checked.
            last: The derived row that the caller read last. It is freed after its last chunk.
        """

        def read(each: Manifest, some: Offsets) -> None:
            self._read_chunks(each, chunks[some], [outs[at] for at in some.tolist()], verify=verify, last=last)

        self._by_form(manifest, len(chunks), read)

    def _read_chunks(
        self, manifest: Manifest, chunks: Offsets, outs: Sequence[memoryview], *, verify: bool, last: LastRow
    ) -> None:
        columns = manifest.columns
        if not manifest.derived:
            owner = ChunkOwner(manifest.label, manifest.rows, numbers=chunks, manifest=manifest)
            self.read(columns.digests[chunks], list(outs), verify=verify, owner=owner)
            return
        row_of = columns.rows_of(chunks)
        is_derived = np.isin(row_of, [each.row for each in manifest.derived])
        stored = np.flatnonzero(~is_derived)
        owner = ChunkOwner(manifest.label, manifest.rows, numbers=chunks[stored], manifest=manifest)
        buffers = [outs[at] for at in stored.tolist()]
        self.read(columns.digests[chunks[stored]], buffers, verify=verify, owner=owner)
        for row in distinct(row_of[is_derived]).tolist():
            data = last.get(row)
            if data is None:
                last.clear()
                data = self._evaluated(manifest, row, verify=verify)
                last.keep(row, data)
            first, n_chunks = int(columns.chunk_at[row]), int(columns.chunk_at[row + 1] - columns.chunk_at[row])
            ends = manifest.rows[row].ends(manifest.chunk_bytes)
            mine = np.flatnonzero(row_of == row)
            numbers = chunks[mine] - first
            for at, end in zip(mine.tolist(), ends[numbers].tolist(), strict=True):
                outs[at][:] = data[end - len(outs[at]) : end]
            if numbers[-1] == n_chunks - 1:
                last.clear()

    def _evaluated(self, manifest: Manifest, row: int, *, verify: bool) -> memoryview:
        """Return the bytes of a derived row."""
        from tensorcas_mlflow.chunk_io._derive import room_for

        [derivation] = manifest.derivations(np.array([row])).values()
        array = room_for(manifest, derivation)
        self._evaluate(manifest, [derivation], lambda _: array, _drop, known={}, verify=verify)
        return bytes_of(array)

    def read(self, digests: Digests, outs: list[memoryview], *, verify: bool, owner: ChunkOwner = NOBODY) -> None:
        """Read chunks, each into a buffer of its size.

        If a chunk is damaged in one pack and intact in another, the intact copy is used.

        Args:
            digests: The chunks.
            outs: Buffer of each.
            verify: Whether to check each against its digest.
            owner: Owner of the chunks, for errors.
        """
        self._read(Wanted(digests=digests, target=Target.of_buffers(outs), verify=verify), owner)

    def _read(self, wanted: Wanted, owner: ChunkOwner, way: Way | None = None) -> None:
        if way is None:
            way = way_of_environment()
        everything = np.arange(len(wanted.target))
        damaged = self._read_from(wanted, everything, frozenset(), owner, way)
        if any(damage.error is None for damage in damaged):
            # The index may be the damaged part: a pack's table carries a digest of its own.
            self._catalog.refresh_from_packs()
            damaged = self._read_from(wanted, _chunks_of(damaged), frozenset(), owner, way)
        if damaged:
            self._read_other_copies(wanted, damaged, owner, way)

    def _read_other_copies(self, wanted: Wanted, damaged: list[Damage], owner: ChunkOwner, way: Way | None) -> None:
        """Read chunks with one damaged copy from other packs; an error reports the first copy."""
        lost: list[Damage] = []
        waiting = [(frozenset[str](), damaged, damaged)]
        while waiting:
            without, found, told = waiting.pop()
            first = {damage.chunk: damage for damage in told}
            by_pack: dict[str, list[Damage]] = {}
            for damage in found:
                by_pack.setdefault(pack_name(damage.key), []).append(damage)
                if damage.error is None:
                    is_of = damage.base or wanted.digests[damage.chunk].tobytes()
                    self._catalog.distrust(pack_name(damage.key), is_of)
            for pack, group in by_pack.items():
                chunks, besides = _chunks_of(group), without | {pack}
                places = self._catalog.find(wanted.digests[chunks], besides)
                lost += [first[chunk] for chunk in chunks[~places.found].tolist()]
                again = self._read_from(wanted, chunks[places.found], besides, owner, way)
                if again:
                    waiting.append((besides, again, [first[damage.chunk] for damage in again]))
        if not lost:
            return
        damage = min(lost, key=lambda each: (each.error is not None, each.chunk))
        if damage.error is not None:
            raise damage.error
        names = owner.names(sorted(each.chunk for each in lost))
        digest_text = wanted.digests[damage.chunk].tobytes().hex()
        raise CorruptChunkError(digest_text, damage.key, damage.reason, owner.label, names)

    def _read_from(
        self, wanted: Wanted, chunks: Any, without: frozenset[str], owner: ChunkOwner, way: Way | None
    ) -> list[Damage]:
        """Read some of the wanted chunks, avoiding some packs; return the damaged copies."""
        part = wanted if len(chunks) == len(wanted.target) else wanted.some(chunks)
        n_moves = 0
        while True:
            places = self._locate(part.digests, without, chunks, owner)
            try:
                return self._read_at(places, part, chunks, way)
            except BlobNotFoundError:
                # A collector has moved a chunk before this read; its new place is in the index.
                used = {places.packs[number] for number in np.unique(places.pack)}
                is_whole, bases = self._catalog.find_chains(places)
                moved = {pack_name(key) for key in self._backend.missing(map(pack_key, used | bases))}
                n_moves += 1
                # The catalog already misses the packs another thread has found missing.
                if n_moves >= _MAX_ATTEMPTS or not (moved or not is_whole.all()):
                    raise
                self._catalog.miss(moved)
                if n_moves > 1:
                    # A long idle reader may know of a chunk in very many packs that collections have emptied.
                    self._catalog.miss_all_gone()
                self._catalog.refresh()

    def _locate(self, digests: Digests, without: frozenset[str], chunks: Any, owner: ChunkOwner) -> Places:
        """Look up chunks.

        Raises:
            ChunkNotFoundError: No pack holds one. If the manifest that needs it has a form, only the index was asked.
        """
        for places in self._look_ups(digests, without, owner):
            if places.found.all():
                return places
        if self._catalog.refusal is not None:
            raise self._catalog.refusal
        missing = np.flatnonzero(~places.found)
        names, suspects = owner.names(chunks[missing]), tuple(self._catalog.suspects())
        digest_text = digests[missing[0]].tobytes().hex()
        raise ChunkNotFoundError(digest_text, len(missing), owner.label, names, suspects)

    def _look_ups(self, digests: Digests, without: frozenset[str], owner: ChunkOwner) -> Iterator[Places]:
        """Look up chunks again and again, each time in more packs."""
        catalog = self._catalog
        yield catalog.find(digests, without)
        catalog.look_at_latest(digests)
        yield catalog.find(digests, without)
        catalog.refresh()
        yield catalog.find(digests, without)
        if owner.manifest is not None and self._form_keys(owner.manifest):
            return
        # Read the packs twice: a chunk moved during the listing may be in a new pack not yet listed. They come last, as
        # the tables of all packs cost the most.
        for _ in range(2):
            catalog.refresh_from_packs()
            yield catalog.find(digests, without)

    def _read_at(self, places: Places, wanted: Wanted, numbers: Any, way: Way | None) -> list[Damage]:
        """Read chunks from places; return the damaged ones, by ``numbers``.

        Raises:
            BlobNotFoundError: A pack is gone: one of these, or one needed to decode their chunks.
        """
        whole = np.arange(len(wanted.target))
        reasons = check_sizes(places, wanted.target.n_bytes)
        own = ChainLinks(places=places, begins=np.arange(len(whole) + 1))
        found = [damage_of(own, chunk, 0, reason) for chunk, reason in reasons.items()]
        possible = np.delete(whole, list(reasons)) if reasons else whole
        places = places if not reasons else places.some(possible)
        links = ChainLinks.of([places, *self._catalog.follow(places)])
        impossible = self._impossible(links, wanted.target.n_bytes[possible])
        found += [damage._replace(chunk=int(possible[damage.chunk])) for damage in impossible]
        if impossible:
            left = np.delete(np.arange(len(possible)), [damage.chunk for damage in impossible])
            links, possible = links.some(left), possible[left]
        with Load(self._backend, self._cache, self._store_id, way) as load:
            damaged = load.read(links, wanted if len(possible) == len(whole) else wanted.some(possible))
        found += [damage._replace(chunk=int(possible[damage.chunk])) for damage in damaged]
        return [damage._replace(chunk=int(numbers[damage.chunk])) for damage in found]

    @staticmethod
    def _impossible(links: ChainLinks, sizes: Any) -> list[Damage]:
        """Return the chunks with impossible entries among their links, before an entry costs memory."""
        if len(links.places.found) == len(sizes):
            return []
        found: dict[int, Damage] = {}
        for link, reason in check_links(links, sizes).items():
            chunk = int(np.searchsorted(links.begins, link, side="right")) - 1
            found[chunk] = damage_of(links, chunk, link - int(links.begins[chunk]), reason)
        return list(found.values())


def _owner(manifest: Manifest, rows: Offsets, needed_by: Offsets) -> ChunkOwner:
    """Return the owner of the chunks of some rows, by their numbers in the table.

    Args:
        manifest: Their manifest.
        rows: The rows.
        needed_by: The rows of the content that need them; errors name the tensors among these.
    """
    chosen = ChosenRows(manifest.table, rows)
    if not manifest.derived:
        return ChunkOwner(label=manifest.label, rows=chosen, manifest=manifest)

    def tell(chunks: Any) -> tuple[str, ...]:
        counts = manifest.table.chunk_at[rows + 1] - manifest.table.chunk_at[rows]
        return manifest.names_needing(np.repeat(rows, counts)[chunks], among=needed_by)

    return ChunkOwner(label=manifest.label, rows=chosen, tell=tell, manifest=manifest)


def _with_sources(rows: Offsets, derived: Iterable[Derivation]) -> Offsets:
    """Replace the derived rows among some rows by the rows they are made of."""
    found = list(derived)
    if not found:
        return rows
    made = [each.row for each in found]
    sources = [row for each in found for row in each.inputs]
    return distinct(np.concatenate([rows[~np.isin(rows, made)], np.array(sources, dtype=np.int64)]))


def _drop(_derivation: Derivation, _array: Array) -> None:
    """Forget an evaluated row."""


def _runs(chunks: Any, sizes: Any) -> Iterator[tuple[int, int]]:
    """Return runs of consecutive chunks, of some 16 MiB each."""
    begins = sizes.cumsum() - sizes
    of_batch = begins[chunks] // _FILE_BATCH_BYTES
    borders = np.flatnonzero((np.diff(chunks) != 1) | (np.diff(of_batch) != 0)) + 1
    for run in np.split(chunks, borders) if len(chunks) else ():
        yield int(run[0]), int(run[-1]) + 1


def _chunks_of(damaged: Sequence[Damage]) -> Any:
    return np.array(sorted(damage.chunk for damage in damaged), dtype=np.intp)

"""Inventory of a store: its packs, chunks, delta bases, manifests and refs, as arrays.

`Inventory` is a value built from manifests and from the tables of packs. A census keeps one between collections. Two
inventories merge into one. `PackTables` holds the tables themselves, for work that has to know where a chunk lies.
`BaseLinks` follows deltas to their bases and back, over the rows of either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, map_requests
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, as_keys, prefixes, unique_rows
from tensorcas_mlflow.base.tensors import Offsets
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, StarvedError
from tensorcas_mlflow.layout import Ref, RefSeen, form_key, list_blobs
from tensorcas_mlflow.layout.manifests import Manifest, forms_of
from tensorcas_mlflow.layout.packs import (
    ENTRY,
    IN_FULL,
    MAX_DEPTH,
    NOWHERE,
    Entries,
    Mask,
    Positions,
    Table,
    as_names,
    base_rows,
    is_delta,
    make_table,
)
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

RowNumbers = Any
"""One-dimensional array of integers."""
NO_BASE = np.uint32(0xFFFFFFFF)
"""Base of a chunk that is stored in full."""
NO_DIGESTS: Digests = np.empty((0, DIGEST_BYTES), np.uint8)
NO_ENTRIES: Entries = np.empty(0, ENTRY)
_FOLD_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class BaseLinks:
    """Links from deltas to their bases, over the rows of a table."""

    base: Positions
    """For each row that is a delta the row of its base, or `NOWHERE`; `IN_FULL` for the others."""

    def decodable(self, there: Mask) -> Mask:
        """Return for each row whether it and all its bases are among some rows."""
        decodable: Mask = ~self.with_dependents(~there | (self.base == NOWHERE))
        return decodable

    def with_dependents(self, rows: Mask) -> Mask:
        """Add to some rows all deltas that take one of them to decode."""
        found = rows.copy()
        deltas = np.flatnonzero(self.base >= 0)
        for _ in range(MAX_DEPTH if len(deltas) and rows.any() else 0):
            found[deltas] |= found[self.base[deltas]]
        return found

    def bases_of(self, rows: Mask) -> Mask:
        """Return for each row whether one of some rows takes it to decode."""
        bases = np.zeros(len(self.base), dtype=bool)
        chosen = self.base[rows]
        while len(chosen := np.unique(chosen[chosen >= 0])) and not bases[chosen].all():
            bases[chosen] = True
            chosen = self.base[chosen]
        return bases


@dataclass(frozen=True, kw_only=True, eq=False)
class Inventory:
    """Manifests and packs, and the chunks each of them names or holds. A *chunk* is a position in ``digests``.

    Manifests and packs never change, so an inventory stays true. It does not say that a blob still exists: list first.

    Neighbouring manifests are alike. A *span* says that all manifests from one position up to another name one chunk,
    so a history of steps that differ little has as many spans as chunks.
    """

    digests: Digests
    """Distinct digests, ascending."""
    manifests: tuple[str, ...]
    """Names, none twice."""
    manifest_bytes: RowNumbers
    """For each manifest the size of its blob."""
    sums: RowNumbers
    """For each manifest the sum of the first eight bytes of its distinct digests: a checksum of the spans."""
    span_chunk: RowNumbers
    """Spans are sorted by chunk, then by position; those of one chunk neither overlap nor touch."""
    span_start: RowNumbers
    span_stop: RowNumbers
    packs: tuple[str, ...]
    """Names, none twice."""
    pack_bytes: RowNumbers
    """For each pack its size."""
    entry_pack: RowNumbers
    """For each entry of a pack's table a position in ``packs``, ascending."""
    entry_chunk: RowNumbers
    entry_bytes: RowNumbers
    """For each entry the bytes of the encoded chunk."""
    entry_base: RowNumbers
    """For each entry that is a delta its base, a chunk; `NO_BASE` for the others."""
    entry_base_pack: RowNumbers
    """For each entry that is a delta the pack of its base, a position in ``base_packs``; `NO_BASE` for the others."""
    entry_effort: RowNumbers
    """For each entry the effort spent on it; see `Payload.effort`."""
    base_packs: tuple[str, ...]
    """Names, none twice. These packs may be gone."""
    refs: Mapping[RefSeen, str] = field(default_factory=dict)
    """For each ref of a remote store the manifest it names."""

    @Lazy
    def position(self) -> dict[str, int]:
        """Position of each manifest, by name."""
        return {name: at for at, name in enumerate(self.manifests)}

    @Lazy
    def sizes(self) -> dict[str, int]:
        """Size of each pack, by name."""
        return dict(zip(self.packs, self.pack_bytes.tolist(), strict=True))

    @property
    def is_consistent(self) -> bool:
        """True if the spans agree with the checksum of each manifest."""
        prefix = prefixes(self.digests)[self.span_chunk]
        change = np.zeros(len(self.manifests) + 1, dtype=np.uint64)
        np.add.at(change, self.span_start, prefix)
        np.subtract.at(change, self.span_stop, prefix)
        return bool((np.cumsum(change, dtype=np.uint64)[:-1] == self.sums).all())

    def chunks_of(self, manifests: Collection[str]) -> Mask:
        """Return for each chunk whether one of some manifests names it. Unknown manifests are ignored."""
        chosen = np.zeros(len(self.manifests) + 1, dtype=np.int64)
        chosen[[self.position[name] + 1 for name in manifests if name in self.position]] = 1
        before = np.cumsum(chosen)
        named = np.zeros(len(self.digests), dtype=bool)
        named[self.span_chunk[before[self.span_stop] > before[self.span_start]]] = True
        return named

    def find(self, digests: Digests) -> RowNumbers:
        """Return for each digest its chunk, or -1."""
        wanted = prefixes(digests)
        at = np.searchsorted(self._prefix, wanted)
        found = np.full(len(digests), -1, dtype=np.int64)
        open_ = np.arange(len(digests))
        # Two digests with one prefix are a chance in 2**64, or made on purpose.
        while len(open_):
            open_ = open_[at[open_] < len(self.digests)]
            open_ = open_[self._prefix[at[open_]] == wanted[open_]]
            is_hit = (self.digests[at[open_]] == digests[open_]).all(axis=1)
            found[open_[is_hit]] = at[open_[is_hit]]
            open_ = open_[~is_hit]
            at[open_] += 1
        return found

    def marked(self, chunks: RowNumbers) -> Mask:
        """Return for each chunk whether it is one of some, which may repeat; -1 is none."""
        is_one = np.zeros(len(self.digests), dtype=bool)
        is_one[chunks[chunks >= 0]] = True
        return is_one

    @Lazy
    def _prefix(self) -> Any:
        return prefixes(self.digests)

    def only(self, *, manifests: Collection[str], packs: Mapping[str, int]) -> Inventory:
        """Keep only some manifests and packs (names and sizes), and the chunks in them; drop the refs."""
        is_kept = np.array([name in manifests for name in self.manifests], dtype=bool)
        before = np.concatenate([[0], np.cumsum(is_kept)])
        start, stop = before[self.span_start], before[self.span_stop]
        has_any = start < stop
        spans = _normal(self.span_chunk[has_any], start[has_any], stop[has_any])
        is_there = np.array([packs.get(name) == size for name, size in self.sizes.items()], dtype=bool)
        rows = is_there[self.entry_pack]
        is_used = np.zeros(len(self.digests), dtype=bool)
        is_used[spans[0]] = True
        is_used[self.entry_chunk[rows]] = True
        base, base_pack = self.entry_base[rows], self.entry_base_pack[rows]
        deltas = base != NO_BASE
        is_used[base[deltas]] = True
        number = np.cumsum(is_used) - 1
        base[deltas] = number[base[deltas]]
        base_packs, base_pack[deltas] = _only_used(self.base_packs, base_pack[deltas])
        return Inventory(
            digests=self.digests[is_used],
            manifests=tuple(name for name, keep in zip(self.manifests, is_kept, strict=True) if keep),
            manifest_bytes=self.manifest_bytes[is_kept],
            sums=self.sums[is_kept],
            span_chunk=number[spans[0]].astype(np.uint32),
            span_start=spans[1],
            span_stop=spans[2],
            packs=tuple(name for name, keep in zip(self.packs, is_there, strict=True) if keep),
            pack_bytes=self.pack_bytes[is_there],
            entry_pack=(np.cumsum(is_there) - 1)[self.entry_pack[rows]].astype(np.uint32),
            entry_chunk=number[self.entry_chunk[rows]].astype(np.uint32),
            entry_bytes=self.entry_bytes[rows],
            entry_base=base,
            entry_base_pack=base_pack,
            entry_effort=self.entry_effort[rows],
            base_packs=base_packs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of chunks in some packs, one row each."""

    packs: tuple[str, ...]
    pack: RowNumbers
    """For each row a position in ``packs``."""
    chunk: RowNumbers
    """For each row a chunk of the inventory."""
    stored_bytes: RowNumbers
    effort: RowNumbers
    links: BaseLinks


def copies_in(inventory: Inventory, packs: Collection[str]) -> Copies:
    """List the copies that some packs hold. A base in any other pack is nowhere."""
    is_there = np.array([name in packs for name in inventory.packs], dtype=bool)
    rows = is_there[inventory.entry_pack] if len(inventory.packs) else np.zeros(0, dtype=bool)
    names = tuple(name for name, there in zip(inventory.packs, is_there, strict=True) if there)
    pack, chunk = (np.cumsum(is_there) - 1)[inventory.entry_pack[rows]], inventory.entry_chunk[rows]
    return Copies(
        packs=names,
        pack=pack,
        chunk=chunk,
        stored_bytes=inventory.entry_bytes[rows].astype(np.int64),
        effort=inventory.entry_effort[rows],
        links=BaseLinks(_base_of_rows(inventory, rows, names, pack, chunk)),
    )


def _base_of_rows(
    inventory: Inventory, entries: Mask, packs: Sequence[str], pack: RowNumbers, chunk: RowNumbers
) -> Positions:
    """Return for each row the row of its base; see `BaseLinks.base`.

    Args:
        inventory: Inventory of the rows.
        entries: For each entry of the inventory whether it is a row.
        packs: As `Copies.packs`.
        pack: As `Copies.pack`.
        chunk: As `Copies.chunk`.
    """
    base = np.full(len(pack), IN_FULL, dtype=np.int64)
    base_chunk, base_pack = inventory.entry_base[entries], inventory.entry_base_pack[entries]
    deltas = np.flatnonzero(base_chunk != NO_BASE)
    if len(deltas) == 0:
        return base
    position = {name: at for at, name in enumerate(packs)}
    place = np.array([position.get(name, -1) for name in inventory.base_packs], dtype=np.int64)[base_pack[deltas]]
    keys = pack.astype(np.int64) << 32 | chunk
    order = np.argsort(keys, kind="stable")
    wanted = place << 32 | base_chunk[deltas]
    at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    is_found = (keys[order][at] == wanted) & (place >= 0)
    base[deltas] = NOWHERE
    base[deltas[is_found]] = order[at[is_found]]
    return base


def inventory_of_manifests(named: Sequence[tuple[str, int, Digests]]) -> Inventory:
    """Build an inventory of manifests.

    Args:
        named: For each manifest its name, the size of its blob, and its digests, which may repeat. Neighbours should
            be alike.
    """
    digests, _, chunk = unique_rows(np.concatenate([NO_DIGESTS, *(each for _, _, each in named)]))
    at = np.repeat(np.arange(len(named), dtype=np.uint64), [len(each) for _, _, each in named])
    pairs = np.unique((chunk.astype(np.uint64) << np.uint64(32)) | at)
    chunk, at = (pairs >> np.uint64(32)).astype(np.uint32), (pairs & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    sums = np.zeros(len(named), dtype=np.uint64)
    np.add.at(sums, at, prefixes(digests)[chunk])
    spans = _normal(chunk, at, at + np.uint32(1))
    return _inventory(
        digests=digests,
        manifests=tuple(name for name, _, _ in named),
        manifest_bytes=np.array([n_bytes for _, n_bytes, _ in named], dtype=np.uint64),
        sums=sums,
        spans=spans,
    )


def inventory_of_packs(tables: Mapping[str, Entries], sizes: Mapping[str, int]) -> Inventory:
    """Build an inventory of packs from their tables and sizes."""
    lengths = [len(table) for table in tables.values()]
    entries = np.concatenate([NO_ENTRIES, *tables.values()])
    deltas = is_delta(entries)
    digests, _, chunk = unique_rows(np.concatenate([entries["digest"], entries["base_digest"][deltas]]))
    base, base_pack = np.full(len(entries), NO_BASE), np.full(len(entries), NO_BASE)
    base[deltas] = chunk[len(entries) :]
    names, base_pack[deltas] = np.unique(as_names(entries["base_pack"][deltas]), return_inverse=True)
    return _inventory(
        digests=digests,
        packs=tuple(tables),
        pack_bytes=np.array([sizes[name] for name in tables], dtype=np.uint64),
        entry_pack=np.repeat(np.arange(len(tables), dtype=np.uint32), lengths),
        entry_chunk=chunk[: len(entries)].astype(np.uint32),
        entry_bytes=np.ascontiguousarray(entries["stored_bytes"]),
        entry_base=base,
        entry_base_pack=base_pack,
        entry_effort=np.ascontiguousarray(entries["effort"]),
        base_packs=tuple(name.tobytes().hex() for name in names),
    )


def merge_inventories(parts: Sequence[Inventory]) -> Inventory:
    """Merge inventories, without their refs. The first one that knows a manifest or a pack wins."""
    apart: list[Inventory] = []
    manifests: set[str] = set()
    packs: set[str] = set()
    for part in parts:
        if not manifests.isdisjoint(part.manifests) or not packs.isdisjoint(part.packs):
            others = {name: size for name, size in part.sizes.items() if name not in packs}
            part = part.only(manifests=set(part.manifests) - manifests, packs=others)
        apart.append(part)
        manifests.update(part.manifests)
        packs.update(part.packs)
    if len(apart) == 1:
        return apart[0]
    digests, _, chunk = unique_rows(np.concatenate([NO_DIGESTS, *(part.digests for part in apart)]))
    begin = np.cumsum([0, *(len(part.digests) for part in apart)])
    first = np.cumsum([0, *(len(part.manifests) for part in apart)])
    pack = np.cumsum([0, *(len(part.packs) for part in apart)])
    numbered = list(enumerate(apart))
    base_packs = sorted({name for part in apart for name in part.base_packs})
    base_number = {name: np.uint32(at) for at, name in enumerate(base_packs)}
    bases = [
        _moved(part.entry_base, part.entry_base_pack, chunk[begin[n] : begin[n + 1]], part.base_packs, base_number)
        for n, part in numbered
    ]
    spans = _normal(
        _join([chunk[part.span_chunk + begin[n]] for n, part in numbered]),
        _join([part.span_start + first[n] for n, part in numbered]),
        _join([part.span_stop + first[n] for n, part in numbered]),
    )
    return _inventory(
        digests=digests,
        manifests=tuple(name for part in apart for name in part.manifests),
        manifest_bytes=np.concatenate([_NO_SIZES, *(part.manifest_bytes for part in apart)]),
        sums=np.concatenate([_NO_SIZES, *(part.sums for part in apart)]),
        spans=spans,
        packs=tuple(name for part in apart for name in part.packs),
        pack_bytes=np.concatenate([_NO_SIZES, *(part.pack_bytes for part in apart)]),
        entry_pack=_join([part.entry_pack + pack[n] for n, part in numbered]),
        entry_chunk=_join([chunk[part.entry_chunk + begin[n]] for n, part in numbered]),
        entry_bytes=_join([part.entry_bytes for part in apart]),
        entry_base=_join([base for base, _ in bases]),
        entry_base_pack=_join([base_pack for _, base_pack in bases]),
        entry_effort=np.concatenate([_NO_EFFORTS, *(part.entry_effort for part in apart)]),
        base_packs=tuple(base_packs),
    )


def _moved(
    base: RowNumbers, base_pack: RowNumbers, chunk: RowNumbers, names: Sequence[str], number: Mapping[str, np.uint32]
) -> tuple[RowNumbers, RowNumbers]:
    """Renumber the bases of entries.

    Args:
        base: As `Inventory.entry_base`.
        base_pack: As `Inventory.entry_base_pack`.
        chunk: For each chunk its new number.
        names: As `Inventory.base_packs`.
        number: The new position of each of those.
    """
    base, base_pack = base.copy(), base_pack.copy()
    deltas = base != NO_BASE
    base[deltas] = chunk[base[deltas]]
    if deltas.any():
        base_pack[deltas] = np.array([number[name] for name in names], np.uint32)[base_pack[deltas]]
    return base, base_pack


def _only_used(names: tuple[str, ...], number: RowNumbers) -> tuple[tuple[str, ...], RowNumbers]:
    """Drop the names that no number points to, and renumber the rest."""
    used, again = np.unique(number, return_inverse=True)
    return tuple(names[at] for at in used.tolist()), again.astype(np.uint32)


_NONE = np.empty(0, np.uint32)
_NO_SIZES = np.empty(0, np.uint64)
_NO_EFFORTS = np.empty(0, np.uint8)


def _inventory(*, spans: tuple[RowNumbers, RowNumbers, RowNumbers] = (_NONE, _NONE, _NONE), **given: Any) -> Inventory:
    """Make an inventory; a column that is not given is empty."""
    nothing = {"manifests": (), "manifest_bytes": _NO_SIZES, "sums": _NO_SIZES, "packs": (), "pack_bytes": _NO_SIZES}
    entries = dict.fromkeys(("entry_pack", "entry_chunk", "entry_bytes", "entry_base", "entry_base_pack"), _NONE)
    chunk, start, stop = spans
    return Inventory(
        **{
            **nothing,
            **entries,
            "entry_effort": _NO_EFFORTS,
            "base_packs": (),
            "span_chunk": chunk,
            "span_start": start,
            "span_stop": stop,
            **given,
        }
    )


def _join(parts: Sequence[RowNumbers]) -> RowNumbers:
    return np.concatenate([_NONE, *parts]).astype(np.uint32)


def _normal(chunk: RowNumbers, start: RowNumbers, stop: RowNumbers) -> tuple[RowNumbers, RowNumbers, RowNumbers]:
    """Sort spans and join those that touch. Spans of one chunk must not overlap."""
    order = np.argsort((chunk.astype(np.uint64) << np.uint64(32)) | start.astype(np.uint64), kind="stable")
    chunk, start, stop = chunk[order], start[order], stop[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (chunk[1:] != chunk[:-1]) | (start[1:] != stop[:-1])
    ends = np.append(begins[1:], True) if len(order) else begins
    return chunk[begins].astype(np.uint32), start[begins].astype(np.uint32), stop[ends].astype(np.uint32)


class PackTables:
    """Tables of the packs of a store. A pack never changes, so each table is read once."""

    def __init__(self, backend: Backend) -> None:
        """Read nothing yet; see `refresh`."""
        self.entries: dict[str, Entries] = {}
        """Table of each pack that can be read, by name."""
        self.sizes: dict[str, int] = {}
        """Size of each pack there is, by name."""
        self.faults: dict[str, FormatError | BackendError] = {}
        """Error of each pack whose table cannot be read, by name."""
        self._backend = backend

    def refresh(self, *, again: bool = False) -> list[str]:
        """List the packs, read the tables of new ones, and forget packs that are gone.

        Args:
            again: Whether to try packs again whose tables could not be read before.

        Returns:
            Names of the packs that were read, or tried.
        """
        self.sizes = dict(p.list_packs(self._backend))
        self.entries = {name: self.entries[name] for name in self.sizes if name in self.entries}
        self.faults = {} if again else {name: each for name, each in self.faults.items() if name in self.sizes}
        new = {name: size for name, size in self.sizes.items() if name not in self.entries and name not in self.faults}
        for name, found in read_tables(self._backend, new):
            if found is None:
                del self.sizes[name]
            elif isinstance(found, FormatError | BackendError):
                self.faults[name] = found
            else:
                self.entries[name] = found
        return list(new)

    def table(self) -> Table:
        """Return all chunks of the packs that can be read."""
        return make_table(self.entries)


def links_of(table: Table) -> BaseLinks:
    """Find the bases of the deltas in a table."""
    return BaseLinks(base_rows(table))


def read_tables(
    backend: Backend, packs: Mapping[str, int]
) -> Iterator[tuple[str, Entries | FormatError | BackendError | None]]:
    """Read the tables of packs, in a remote store many at once.

    Args:
        backend: Backend of the store.
        packs: Names and sizes.

    Yields:
        For each pack its name and its table, or the error that says why it cannot be read, or None if it is gone.

    Raises:
        StarvedError: This process has no memory or no files left.
    """

    def read(name: str) -> Entries | FormatError | BackendError | None:
        try:
            return p.read_pack_table(backend, name, size=packs[name])
        except BlobNotFoundError:
            return None
        except StarvedError:
            raise
        except (FormatError, BackendError) as error:
            return error

    return zip(packs, map_requests(backend, read, packs), strict=True)


def disk_bytes(backend: Backend) -> int:
    """Return the bytes of all files of a store, or of all its objects in a bucket: its size on the disk."""
    return sum(file.size for file in backend.files())


def list_manifests(backend: Backend) -> dict[str, int]:
    """List the manifests of a store: names and sizes."""
    return {info.key.removeprefix("manifests/"): info.size for info in list_blobs(backend, "manifests")}


def read_holders(store: Store) -> tuple[dict[str, list[Ref]], dict[str, FormatError | BackendError]]:
    """Read all refs of a store.

    Returns:
        Refs by the name of their manifest; and the errors of refs that cannot be read, by key.

    Raises:
        BackendError: The storage failed to list the refs.
    """
    holders: dict[str, list[Ref]] = {}
    faults: dict[str, FormatError | BackendError] = {}
    for info in list(list_blobs(store.backend, "refs")):
        try:
            ref = store.ref(info.key)
        except (FormatError, BackendError) as error:
            faults[info.key] = error
            continue
        if ref is not None:
            holders.setdefault(ref.manifest, []).append(ref)
    return holders, faults


def stands(store: Store, ref: Ref) -> bool:
    """Tell whether a ref still names its manifest. A ref that cannot be read may."""
    try:
        now = store.ref(ref.key)
    except (FormatError, BackendError):
        return True
    return now is not None and now.manifest == ref.manifest


def manifest_of(store: Store, refs: Sequence[Ref]) -> Manifest | None:
    """Read the manifest of some refs; return None if nobody names it any more, and it may be collected.

    Raises:
        CorruptError: It cannot be read, and a ref still names it; or that ref cannot be read.
    """
    try:
        return store.manifest(refs[0])
    except CorruptError:
        for ref in refs:
            now = store.ref(ref.key)
            if now is not None and now.manifest == ref.manifest:
                raise
        return None


def formed_manifests(holders: Mapping[str, Sequence[Ref]]) -> frozenset[str]:
    """Return the manifests that have forms.

    Args:
        holders: Refs of a store by the name of their manifest.
    """
    return frozenset(ref.of for refs in holders.values() for ref in refs if ref.of is not None)


def as_stored(store: Store, name: str, manifest: Manifest, formed: frozenset[str]) -> Manifest:
    """Return the manifest that says how the content of a manifest is stored: its form, if that can be read.

    Args:
        store: The store.
        name: Name of the manifest.
        manifest: The manifest.
        formed: Manifests that have forms.
    """
    if name in formed:
        with suppress(BackendError):
            # Another name of the content may have another form, and its own may be damaged.
            forms = chain(forms_of(store.backend, manifest, [form_key(name)]), forms_of(store.backend, manifest))
            return next((form for form in forms if isinstance(form, Manifest)), manifest)
    return manifest


class DigestSet:
    """Set of digests, with the sizes of their chunks, that keeps a bounded number of repeated ones."""

    def __init__(self) -> None:
        self._parts: list[Digests] = [NO_DIGESTS]
        self._sizes: list[Offsets] = [np.empty(0, np.int64)]
        self._n_new = 0

    def add(self, digests: Digests, sizes: Offsets | None = None) -> None:
        """Add digests, which may repeat, and the bytes of each chunk; 0 unless given."""
        self._parts.append(digests)
        self._sizes.append(np.zeros(len(digests), np.int64) if sizes is None else sizes)
        self._n_new += len(digests)
        if self._n_new > _FOLD_ROWS:
            self.digests()

    def digests(self) -> Digests:
        """Return the digests, each once, ascending."""
        unique, first, _ = unique_rows(np.concatenate(self._parts))
        self._parts, self._sizes, self._n_new = [unique], [np.concatenate(self._sizes)[first]], 0
        return unique

    def n_bytes(self) -> int:
        """Return the bytes of the chunks, each counted once."""
        self.digests()
        return int(self._sizes[0].sum())


def is_among(digests: Digests, others: Digests) -> Mask:
    """Return for each of some digests whether it is one of others."""
    both: Mask = np.isin(as_keys(digests), as_keys(others))
    return both

"""Verification of a store: check every ref, its manifest, and every chunk that it names. Changes nothing."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, damages_of
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import as_keys, hex_of, unique_rows
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.progress import Watcher, counted, ignore
from tensorcas_mlflow.base.text import content_text, count_text
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NewerFormatError,
    NotFoundError,
    StarvedError,
    in_words,
)
from tensorcas_mlflow.layout import REF_TABLES, Ref, find_strangers, list_blobs, read_ref_tables, strangers_text
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest, read_hints, read_pack_hints
from tensorcas_mlflow.layout.packs import (
    PACK_MAGIC,
    Entries,
    Mask,
    Table,
    is_possible,
    list_segments,
    make_table,
    open_segment,
    pack_key,
    sizes_text,
    with_bases,
)
from tensorcas_mlflow.maintenance._belied import belied_packs
from tensorcas_mlflow.maintenance._chunks import ChunkFault, Verdict, part_of, shard_of
from tensorcas_mlflow.maintenance._inventory import (
    PackTables,
    as_stored,
    formed_manifests,
    links_of,
    read_holders,
    stands,
)
from tensorcas_mlflow.maintenance._verify_derived import DerivedChecks, Underivable
from tensorcas_mlflow.maintenance._workers import check_all
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_N_NAMES = 3
"""Fields of an entry that a segment of the index repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A blob or chunk of a store that is not as it should be, and what it breaks. Printing it says so in words."""

    key: str | None
    """The blob at fault, ``packs/….pack`` for a chunk; None for a chunk that no pack is known to have held."""
    reason: str
    checkpoint: str | None = None
    """The checkpoint or file that suffers, in words; None where none does."""
    tensors: tuple[str, ...] = ()
    """Tensors of it that suffer."""

    def __str__(self) -> str:
        where = [in_words(self.checkpoint, self.tensors), self.key or ""]
        return f"{', '.join(filter(None, where))}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Report of a verification. Printing it says so in words."""

    n_refs: int
    """Checkpoints and files that were checked."""
    n_packs: int
    n_chunks: int
    """Chunks in the packs, needed or not."""
    n_read: int = 0
    """Chunks that were read; a chunk that lies in several packs counts each time."""
    full: bool
    """True if chunks were decoded and compared with their digests, and not only their stored bytes."""
    seed: int | None = None
    """Seed that draws the same sample again; None where none was drawn."""
    problems: tuple[Problem, ...]
    """Empty for a sound store."""
    strangers: tuple[str, ...] = ()
    """Foreign files between the blobs. Nothing reads or deletes them."""

    def __str__(self) -> str:
        how_many = {0: "none of them", self.n_chunks: "every one"}.get(self.n_read, f"{self.n_read} of them")
        if self.n_chunks == 0:
            how_many = "every one" if self.full else "none of them"
        how = " as it is stored" if self.n_read and not self.full else ""
        chunks = f"{count_text(self.n_chunks, 'chunk')}, {how_many} read{how}"
        found = count_text(len(self.problems), "problem") if self.problems else "no problem found"
        summary = f"{content_text(self.n_refs)}, {count_text(self.n_packs, 'pack')}, {chunks}: {found}"
        notes = [f"note: {strangers_text(self.strangers)} ignored"] if self.strangers else []
        return "\n".join([*map(str, self.problems), *notes, summary])


def verify(
    store: Store,
    *,
    full: bool = False,
    sample: float | None = None,
    part: tuple[int, int] | None = None,
    seed: int | None = None,
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> VerifyReport:
    """Check every ref, its manifest, and every chunk that it names.

    Without any of ``full``, ``sample`` and ``part`` no chunk is read: each is looked up in the packs' tables. A read
    covers all chunks in packs, also those that nothing needs, because the next save may rely on them.

    Others may write, read and collect meanwhile. What is committed later is not checked.

    Args:
        store: Store to check.
        full: Whether to decode each chunk and compare it with its digest, and to evaluate derived tensors. Else the
            stored bytes of chunks are compared with the digest that the pack's table has of them, which is faster and
            finds all that has changed since it was written.
        sample: Read only a share of the chunks, from 0 to 1, drawn at random.
        part: Read only the k-th of n parts of the chunks: ``(k, n)``. A chunk is always in the same part, so n calls
            read all.
        seed: Draws the same sample again.
        engine: Workers that read the chunks; by default this process does, on all cores. The report is the same.
        watch: Told the bytes that have been read.

    Raises:
        BackendError: The storage failed to list its blobs, or a worker does not find the store.
        DirectAccessError: There are workers, and the store is reached through an MLflow server.
        ValueError: There is no such share or part.
    """
    damages = damages_of(store.backend)
    try:
        report = _verify(store, full=full, sample=sample, part=part, seed=seed, engine=engine, watch=watch)
    except CorruptError as error:
        if not damages:
            raise
        # A damaged listing may hide any blob.
        problem = Problem(key=error.key, reason=f"only the database was checked: {error.reason}")
        report = VerifyReport(n_refs=0, n_packs=0, n_chunks=0, full=full, problems=(problem,))
    named = {problem.key for problem in report.problems}
    of_database = (
        Problem(key=damage.key, reason=damage.reason, checkpoint=p.label_of(damage.key))
        for damage in damages
        if damage.key not in named
    )
    return replace(report, problems=(*of_database, *report.problems))


def _verify(
    store: Store,
    *,
    full: bool,
    sample: float | None,
    part: tuple[int, int] | None,
    seed: int | None,
    engine: Engine | None,
    watch: Watcher,
) -> VerifyReport:
    """Check all but the database; see `verify`."""
    seed = secrets.randbits(32) if seed is None else seed
    k, n = part or (1, 1)
    share = 1.0 if sample is None else sample
    if not 0 <= share <= 1 or not 1 <= k <= n:
        raise ValueError(f"a sample is from 0 to 1, and a part the k-th of n: {sample}, {part}")
    holders, faults = read_holders(store)
    unreadable = [
        Problem(key=key, reason=reason_of(error), checkpoint=p.label_of(key)) for key, error in faults.items()
    ]
    packs = _Packs(store)
    damage = _Damage(lost={}, copies={})
    if full or sample is not None or part is not None:
        # All copies of a chunk are chosen or none.
        chosen = part_of(packs.table.prefix, k, n)
        if share < 1.0:
            chosen &= _scatter(packs.table.prefix, seed) < share
        damage = _read_chunks(store, packs, chosen, decode=full, engine=engine, watch=watch)
    if full or not store.backend.is_remote:
        packs.check_heads()
    needed: set[bytes] = set()
    derived = DerivedChecks(store) if full else None
    formed = formed_manifests(holders)
    check = partial(_check, store, packs, formed=formed, damage=damage.lost, needed=needed, derived=derived)
    found = [problem for refs in holders.values() for problem in check(refs)]
    if derived is not None:
        found += [problem for fault in derived.finish() for problem in _underivable(store, fault)]
    found += [*_unneeded(damage, needed), *_format_problems(store), *_small_blob_problems(store.backend, packs)]
    return VerifyReport(
        n_refs=sum(ref.of is None for refs in holders.values() for ref in refs),
        n_packs=len(packs.table.packs),
        n_chunks=len(packs.table),
        n_read=damage.n_read,
        full=full,
        seed=None if sample is None else seed,
        problems=(*unreadable, *packs.problems, *found),
        strangers=find_strangers(store.backend),
    )


def reason_of(error: Exception) -> str:
    """Return the reason of an error, without the name of the blob.

    Raises:
        StarvedError: The error is one, which says nothing of any blob.
    """
    if isinstance(error, StarvedError):
        raise error
    return str(getattr(error, "reason", error))


# --- packs and their tables


class _Packs:
    """Packs of a store, and the problems of their tables."""

    def __init__(self, store: Store) -> None:
        self.problems: list[Problem] = []
        self.table: Table = make_table({})
        """All chunks that can be read; a delta only with its bases."""
        self._backend = store.backend
        self._tables = PackTables(store.backend)
        self._lost: list[str] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the tables of new packs, and forget packs that are gone."""
        for name in self._tables.refresh():
            key, fault = pack_key(name), self._tables.faults.get(name)
            if fault is not None:
                self.problems.append(Problem(key=key, reason=reason_of(fault)))
            elif name in self._tables.entries:
                faults = _faults_of(self._tables.entries[name])
                self.problems += [Problem(key=key, reason=reason) for reason in faults]
        self.table = with_bases(self._tables.table())

    def check_heads(self) -> None:
        """Check that packs begin with the magic bytes, which nobody needs to read them."""
        names = list(self._tables.entries)
        for found in threads.ordered_map(self._head_problem, names, waits=self._backend.is_remote):
            if found is not None:
                self.problems.append(found)

    def _head_problem(self, name: str) -> Problem | None:
        key, head = pack_key(name), bytearray(len(PACK_MAGIC))
        try:
            self._backend.read_into(key, 0, memoryview(head))
        except BlobNotFoundError:
            return None
        except (FormatError, BackendError) as error:
            return Problem(key=key, reason=reason_of(error))
        return None if head == PACK_MAGIC else Problem(key=key, reason="it does not begin as a pack (nothing is lost)")

    def entries_of(self, name: str) -> Entries | None:
        """Return the table of a pack; None if it is gone or cannot be read."""
        return self._tables.entries.get(name)

    def lost(self) -> list[str]:
        """Return the keys of packs that cannot be read, and of packs that the index names and that do not exist."""
        if self._lost is None:
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> list[str]:
        named: set[str] = set()
        for info in list_blobs(self._backend, "index"):
            name, _, ending = info.key.removeprefix("index/").partition(".")
            if ending == "loose":
                named.add(name)
            elif ending == "segment":
                with contextlib.suppress(BlobNotFoundError, FormatError):
                    named.update(open_segment(self._backend, info.key).packs)
        there = {name for name, _ in p.list_packs(self._backend)}
        return sorted(pack_key(name) for name in (named - there) | self._tables.faults.keys())


def _faults_of(entries: Entries) -> Iterator[str]:
    """Find what is wrong with a table that hashes to its digest, and that no writer has written."""

    def first(wrong: Any) -> str:
        more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
        return f"chunk {hex_of(entries['digest'][int(np.flatnonzero(wrong)[0])])}{more}"

    impossible = ~is_possible(entries)
    if impossible.any():
        yield f"its table gives impossible sizes of {first(impossible)}"
    unknown = ~np.isin(entries["codec"], list(CODECS))
    if unknown.any():
        yield f"its table gives a codec that this release does not know for {first(unknown)}"
    order = np.argsort(entries["offset"], kind="stable")
    starts = entries["offset"][order].astype(np.int64)
    stops = starts + entries["stored_bytes"][order]
    overlaps = np.zeros(len(order), dtype=bool)
    overlaps[order[1:]] = starts[1:] < stops[:-1]
    if overlaps.any():
        yield f"its table lets {first(overlaps)} overlap with another chunk"
    _, at, _ = unique_rows(np.ascontiguousarray(entries["digest"]))
    again = np.ones(len(entries), dtype=bool)
    again[at] = False
    if again.any():
        yield f"its table names {first(again)} twice"


# --- chunks that are read


_Lost = Mapping[bytes, tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """Chunks that were found damaged."""

    lost: _Lost
    """Chunks without a sound copy, by their digests: the pack of one copy, and the reason."""
    copies: Mapping[str, list[str]]
    """Damaged copies of other chunks, by pack: the reasons."""
    n_read: int = 0
    """Chunks that were read, copies counted."""


def _read_chunks(
    store: Store, packs: _Packs, chosen: Mask, *, decode: bool, engine: Engine | None, watch: Watcher
) -> _Damage:
    """Check the chunks of some rows of the packs' tables, shard by shard.

    Args:
        store: Store of the packs.
        packs: Packs of the store.
        chosen: For each row whether to read it.
        decode: See `check_chunks`.
        engine: Workers that read; see `check_all`.
        watch: Told the bytes that have been read.
    """
    table = packs.table
    fits = is_possible(table.entries)
    is_read = chosen & fits
    shard = shard_of(table, None if is_read.all() else is_read)
    on_read = counted(watch, shard.stored_bytes)
    checked = check_all(store, shard, decode=decode, engine=engine, on_read=on_read)
    impossible = {
        row: ChunkFault(verdict=Verdict.BAD, reason=sizes_text(table.entries[row]))
        for row in np.flatnonzero(chosen & ~fits).tolist()
    }
    if checked.gone:
        packs.refresh()
    bad = {row: fault.reason for row, fault in {**impossible, **checked.faults}.items() if not fault.gone}
    return _sort_out(table, bad, checked.gone, n_read=len(checked.row))


def _sort_out(table: Table, bad: Mapping[int, str], gone: Set[str], *, n_read: int) -> _Damage:
    """Separate chunks without a sound copy from chunks that have another."""
    if not bad:
        return _Damage(lost={}, copies={}, n_read=n_read)
    is_sound = np.ones(len(table), dtype=bool)
    is_sound[list(bad)] = False
    is_sound &= np.array([name not in gone for name in table.packs], dtype=bool)[table.pack]
    links = links_of(table)
    is_sound_alone, is_sound = is_sound, links.decodable(is_sound)
    bad = {**bad, **dict(_dependents(table, links.base, bad, is_sound_alone, is_sound))}
    keys = as_keys(table.entries["digest"])
    has_other = dict(zip(bad, np.isin(keys[list(bad)], keys[is_sound]).tolist(), strict=True))
    lost: dict[bytes, tuple[str, str]] = {}
    copies: dict[str, list[str]] = {}
    for row, reason in bad.items():
        said = f"chunk {hex_of(table.entries['digest'][row])} is damaged: {reason}"
        if has_other[row]:
            copies.setdefault(table.key_of(row), []).append(said)
        else:
            lost.setdefault(table.entries["digest"][row].tobytes(), (table.key_of(row), said))
    return _Damage(lost=lost, copies=copies, n_read=n_read)


def _dependents(
    table: Table, base: Any, bad: Mapping[int, str], is_sound_alone: Mask, is_sound: Mask
) -> Iterator[tuple[int, str]]:
    """Yield the deltas that take a damaged chunk to decode, and why.

    Args:
        table: Table of all packs.
        base: For each row the row of its base; see `BaseLinks.base`.
        bad: Reasons of damaged chunks, by row.
        is_sound_alone: For each row whether it is sound, whatever its bases are.
        is_sound: For each row whether it and its bases are sound.
    """
    for row in np.flatnonzero(is_sound_alone & ~is_sound).tolist():
        at = int(base[row])
        while is_sound_alone[at] and base[at] >= 0:
            at = int(base[at])
        # A base whose pack is gone is no damage: the chunk was moved, or is missed later.
        if at in bad:
            said = f"its base, chunk {hex_of(table.entries['digest'][at])} in {table.key_of(at)}, is damaged"
            yield row, f"{said}: {bad[at]}"


def _scatter(numbers: Any, seed: int) -> Any:
    """Map numbers to pseudo-random ones from 0 to 1, the same for one seed (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(seed % (1 << 64)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed.astype(np.float64) / float(1 << 64)


# --- manifests and the chunks they name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """Chunks of a manifest that have one fault."""

    key: str | None
    reason: str
    chunks: Any
    """Their numbers among the stored chunks of the manifest, ascending."""


def _check(
    store: Store,
    packs: _Packs,
    refs: list[Ref],
    *,
    formed: frozenset[str],
    damage: _Lost,
    needed: set[bytes],
    derived: DerivedChecks | None,
) -> list[Problem]:
    """Check the manifest that some refs name, and that its chunks exist and are sound.

    Args:
        store: Store of the refs.
        packs: Packs in which its chunks are looked up.
        refs: All refs of one manifest.
        formed: Manifests with forms, which say where their chunks are.
        damage: Chunks of which no copy is sound.
        needed: Set of those that refs need; this call adds to it.
        derived: Check of derived rows, to which this call adds those of the manifest; None to evaluate none.
    """
    key = f"manifests/{refs[0].manifest}"
    try:
        manifest = store.manifest(refs[0])
        manifest.check_names()
    except (FormatError, BackendError) as error:
        # What was dropped meanwhile may be collected already.
        still = [ref for ref in refs if stands(store, ref)]
        return [Problem(key=key, reason=reason_of(error), checkpoint=ref.label) for ref in still]
    if manifest.store_id != store.id:
        reason = f"it is of store {manifest.store_id}, and this is {store.id}"
        return [Problem(key=key, reason=reason, checkpoint=ref.label) for ref in refs]
    if all(ref.of is not None for ref in refs):
        return []  # a form is checked with the checkpoint that it stores
    unhinted = []
    is_hint = not manifest.hints or read_pack_hints(manifest.hints) is not None
    if not is_hint and read_hints(manifest.hints, manifest.stored_digests) is None:
        unhinted.append(
            Problem(key=key, reason="its hints are damaged (nothing is lost, and the index is asked instead)")
        )
    if (packs.table.find(manifest.stored_digests) < 0).any():
        manifest = as_stored(store, refs[0].manifest, manifest, formed)
    faults = [*_misplaced(packs, manifest), *_undecodable(manifest, damage, needed)]
    if derived is not None and not faults:
        for fault in derived.add(refs, manifest):
            unhinted += _underivable(store, fault)
    if not faults:
        return unhinted
    return unhinted + [
        Problem(
            key=fault.key,
            reason=fault.reason,
            checkpoint=ref.label,
            tensors=manifest.names_of_stored(fault.chunks),
        )
        for ref in refs
        if stands(store, ref)
        for fault in faults
    ]


def _misplaced(packs: _Packs, manifest: Manifest) -> Iterator[_Broken]:
    """Find the chunks of a manifest that no pack holds, or that have another size there."""
    digests = manifest.stored_digests
    at = packs.table.find(digests)
    if (at < 0).any():
        # Perhaps a collector has moved them since the packs were listed.
        packs.refresh()
        at = packs.table.find(digests)
    missing = np.flatnonzero(at < 0)
    if len(missing):
        lost = packs.lost()
        hint = f"; lost or unreadable are {', '.join(lost[:_N_NAMES])}" if len(lost) > 1 else ""
        if not lost and (once := _saved_in(manifest, missing)):
            hint = f"; when it was saved it lay in {', '.join(once[:_N_NAMES])}"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        reason = f"no pack that can be read holds chunk {hex_of(digests[missing[0]])}{more}{hint}"
        yield _Broken(key=lost[0] if len(lost) == 1 else None, reason=reason, chunks=missing)
    there = np.flatnonzero(at >= 0)
    said = packs.table.entries["raw_bytes"][at[there]]
    wrong = there[said != manifest.stored_sizes[there]]
    if len(wrong):
        first = int(at[wrong[0]])
        n_bytes = int(packs.table.entries["raw_bytes"][first])
        reason = (
            f"its table says chunk {hex_of(digests[wrong[0]])} has {n_bytes} bytes, and the manifest says another size"
        )
        yield _Broken(key=packs.table.key_of(first), reason=reason, chunks=wrong)


def _undecodable(manifest: Manifest, damage: _Lost, needed: set[bytes]) -> Iterator[_Broken]:
    """Find the chunks of a manifest that cannot be decoded, those of one pack together."""
    if not damage:
        return
    keys = as_keys(manifest.stored_digests)
    bad = np.frombuffer(b"".join(damage), dtype=keys.dtype)
    by_pack: dict[str, list[int]] = {}
    for number in np.flatnonzero(np.isin(keys, bad)).tolist():
        wanted = manifest.stored_digests[number].tobytes()
        needed.add(wanted)
        by_pack.setdefault(damage[wanted][0], []).append(number)
    for key, numbers in by_pack.items():
        yield _Broken(
            key=key,
            reason=_and_more(damage[manifest.stored_digests[numbers[0]].tobytes()][1], len(numbers)),
            chunks=np.array(numbers),
        )


def _underivable(store: Store, fault: Underivable) -> Iterator[Problem]:
    """Report a derived row whose function does not give its bytes."""
    row = fault.derivation.row
    name = fault.manifest.columns.name(row)
    for ref in fault.refs:
        if stands(store, ref):
            yield Problem(
                key=f"manifests/{ref.manifest}",
                reason=f"row {row} cannot be derived: {reason_of(fault.error)}",
                checkpoint=ref.label,
                tensors=(name,) if name else (),
            )


def _unneeded(damage: _Damage, needed: Set[bytes]) -> Iterator[Problem]:
    """Report the damaged chunks that no checkpoint suffers from, those of one pack together."""
    by_pack: dict[str, list[str]] = {}
    for found, (key, reason) in damage.lost.items():
        if found not in needed:
            by_pack.setdefault(key, []).append(reason)
    for key, reasons in by_pack.items():
        yield Problem(key=key, reason=f"{_and_more(reasons[0], len(reasons))}; nothing needs it yet")
    for key, reasons in damage.copies.items():
        yield Problem(key=key, reason=f"{_and_more(reasons[0], len(reasons))}; another pack has a whole copy")


def _and_more(reason: str, n_chunks: int) -> str:
    return reason if n_chunks == 1 else f"{reason}, and {count_text(n_chunks - 1, 'more damaged chunk')}"


def _saved_in(manifest: Manifest, chunks: Any) -> list[str]:
    """Return the packs in which some chunks, by their numbers, lay when the manifest was written, if it says so."""
    _, _, which = unique_rows(manifest.stored_digests)
    hints = read_hints(manifest.hints, manifest.stored_digests)
    if hints is None:
        return []
    return [pack_key(hints.packs[at]) for at in np.unique(hints.pack[which[chunks]]).tolist()]


# --- the other blobs


def _format_problems(store: Store) -> Iterator[Problem]:
    """Check the blob that says which store this is. It may have changed since the store was opened."""
    try:
        if Store.open_backend(store.backend).id != store.id:
            yield Problem(key="format", reason=f"it is another store's, and this was {store.id}")
    except (FormatError, NotFoundError, BackendError) as error:
        yield Problem(key="format", reason=reason_of(error))


def _small_blob_problems(backend: Backend, packs: _Packs) -> Iterator[Problem]:
    """Find the intents, condemned lists and segments that cannot be read, and the segments that are wrong."""
    for info in list(list_blobs(backend, "intents")):
        try:
            p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            # A commit may have been writing it just then, and has turned it into a ref since.
            if not isinstance(error, CorruptError) or _is_listed(backend, info.key):
                yield Problem(key=info.key, reason=_reason_and(error, "gc frees it once its grace is over"))
    try:
        p.read_condemned(backend)
    except FormatError as error:
        yield Problem(key=getattr(error, "key", None), reason=f"{reason_of(error)} (gc refuses to work until it goes)")
    for key, found in read_ref_tables(backend, list_blobs(backend, REF_TABLES)):
        if isinstance(found, FormatError):
            yield Problem(key=key, reason=_reason_and(found, "nothing is lost, and gc frees it"))
    for info in list_segments(backend):
        try:
            belied = belied_packs(open_segment(backend, info.key), packs.table, packs.entries_of)
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            yield Problem(key=info.key, reason=_reason_and(error, "nothing is lost, and gc frees it"))
            continue
        for name in belied:
            yield Problem(key=info.key, reason=f"it contradicts the table of pack {name}: remove it")


def _reason_and(error: Exception, outcome: str) -> str:
    """Return the reason of an error and its outcome. What a later release wrote, gc does not touch."""
    return reason_of(error) if isinstance(error, NewerFormatError) else f"{reason_of(error)} ({outcome})"


def _is_listed(backend: Backend, key: str) -> bool:
    return any(info.key == key for info in list_blobs(backend, "intents"))

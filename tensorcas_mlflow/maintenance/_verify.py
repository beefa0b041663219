"""From every ref to its manifest to its chunks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow._progress import Watcher, ignore
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import find_strangers, list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, hex_of, unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NewerFormatError,
    NotFoundError,
)
from tensorcas_mlflow.hints import read_hints
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, pack_key, read_segment
from tensorcas_mlflow.maintenance._verify_chunks import NO_DAMAGE, Choice, Damage, read_chunks
from tensorcas_mlflow.maintenance._verify_packs import Packs
from tensorcas_mlflow.maintenance._verify_report import Problem, VerifyReport, reason_of
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import Entries
from tensorcas_mlflow.store import Ref, Store
from tensorcas_mlflow.store import protocol as p

_SAID = ("digest", "stored_digest", "offset", "stored_bytes", "raw_bytes", "codec", "typesize")


def small_blob_problems(backend: Backend, packs: Packs) -> Iterator[Problem]:
    """Give the intents, condemned lists and segments that cannot be read, and the segments that are wrong."""
    for info in list(list_blobs(backend, "intents")):
        try:
            p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            # A commit may have been writing it just then, and has turned it into a ref since.
            if not isinstance(error, CorruptError) or _is_listed(backend, info.key):
                yield Problem(key=info.key, reason=_reason_and(error, "gc removes it once its grace is over"))
    try:
        p.read_condemned(backend)
    except FormatError as error:
        yield Problem(key=getattr(error, "key", None), reason=f"{reason_of(error)} (gc refuses to work until it goes)")
    for info in list(list_blobs(backend, "index")):
        if not info.key.endswith(".arrow"):
            continue
        try:
            table = read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            yield Problem(key=info.key, reason=_reason_and(error, "nothing is lost, and gc removes it"))
            continue
        for name in _belied(table, packs) if table.is_checked else ():
            yield Problem(key=info.key, reason=f"it says other things of pack {name} than that itself: remove it")


def _reason_and(error: Exception, outcome: str) -> str:
    """Say what is wrong with a blob and what comes of it: what a later release wrote, gc does not touch."""
    return reason_of(error) if isinstance(error, NewerFormatError) else f"{reason_of(error)} ({outcome})"


def _is_listed(backend: Backend, key: str) -> bool:
    return any(info.key == key for info in list_blobs(backend, "intents"))


def _belied(table: Table, packs: Packs) -> Iterator[str]:
    """Name packs of which a segment does not say what their own tables say."""
    for number, name in enumerate(table.packs):
        entries = packs.entries_of(name)
        if entries is not None and _as_said(table.entries[table.pack == number]) != _as_said(entries):
            yield name


def _as_said(entries: Entries) -> bytes:
    """Write entries so that equal ones are equal bytes, in whatever order they stand."""
    columns = [np.ascontiguousarray(entries[name]).view(np.uint8).reshape(len(entries), -1) for name in _SAID]
    rows = np.concatenate(columns, axis=1) if len(entries) else np.empty((0, 1), np.uint8)
    return b"".join(sorted(row.tobytes() for row in rows))


_N_NAMES = 3

Lost = Mapping[bytes, tuple[str, str]]


def verify(
    store: Store,
    *,
    full: bool = False,
    sample: float | None = None,
    part: tuple[int, int] | None = None,
    seed: int | None = None,
    watch: Watcher = ignore,
) -> VerifyReport:
    """Look at every ref, its manifest, and every chunk that it names.

    Without any of ``full``, ``sample`` and ``part`` no chunk is read: each is looked for in the packs' tables. What is
    read are chunks in packs, also those that nothing needs, because the next save may rely on them.

    A store may be written, read and collected meanwhile; what is committed later is not looked at.

    Args:
        store: Which.
        full: Whether to decode what is read and compare it with its digest. Else stored bytes are compared with the
            digests that the packs' tables have of them, which is faster and finds all that has changed since it was
            written.
        sample: Read only a share of the chunks, from 0 to 1, drawn at random.
        part: Read only the k-th of n parts of the chunks: ``(k, n)``. A chunk is always in the same part, so n calls
            read all.
        seed: Draws the same sample again.
        watch: Told how far the reading has come.

    Raises:
        BackendError: The storage failed to list what it holds.
        ValueError: There is no such share or part.
    """
    seed = secrets.randbits(32) if seed is None else seed
    choice = Choice(part=part or (1, 1), share=1.0 if sample is None else sample, seed=seed)
    if not 0 <= choice.share <= 1 or not 1 <= choice.part[0] <= choice.part[1]:
        raise ValueError(f"a sample is from 0 to 1, and a part the k-th of n: {sample}, {part}")
    refs, unreadable = _read_refs(store)
    packs = Packs(store.backend)
    damage = NO_DAMAGE
    if full or sample is not None or part is not None:
        damage = read_chunks(store.backend, packs, choice, decode=full, watch=watch)
    if full or not store.backend.is_remote:
        packs.check_heads()
    needed: set[bytes] = set()
    found = [problem for holders in refs for problem in _check(store, packs, holders, damage.lost, needed)]
    found += [*_unneeded(damage, needed), *_format_problems(store), *small_blob_problems(store.backend, packs)]
    return VerifyReport(
        n_refs=sum(map(len, refs)),
        n_packs=len(packs.table.packs),
        n_chunks=len(packs.table),
        n_read=damage.n_read,
        full=full,
        seed=None if sample is None else seed,
        problems=(*unreadable, *packs.problems, *found),
        strangers=find_strangers(store.backend),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What is wrong with some chunks of a manifest."""

    key: str | None
    reason: str
    chunks: Any
    """Their numbers in the manifest, ascending."""


def _read_refs(store: Store) -> tuple[list[list[Ref]], list[Problem]]:
    """Read the refs of a store, those of one manifest together."""
    by_manifest: dict[str, list[Ref]] = {}
    problems: list[Problem] = []
    for info in list_blobs(store.backend, "refs"):
        try:
            ref = store.ref(info.key)
        except (FormatError, BackendError) as error:
            problems.append(Problem(key=info.key, reason=reason_of(error), checkpoint=p.label_of(info.key)))
            continue
        if ref is not None:
            by_manifest.setdefault(ref.manifest, []).append(ref)
    return list(by_manifest.values()), problems


def _check(store: Store, packs: Packs, refs: list[Ref], damage: Lost, needed: set[bytes]) -> list[Problem]:
    """Check the manifest that some refs name, and that its chunks are there and sound.

    Args:
        store: Whose.
        packs: Where its chunks are looked for.
        refs: All refs of one manifest.
        damage: Chunks of which no copy is sound.
        needed: Those of them that are needed are put in here.
    """
    key = f"manifests/{refs[0].manifest}"
    try:
        manifest = store.manifest(refs[0])
        manifest.check_names()
    except (FormatError, BackendError) as error:
        # What was dropped meanwhile may be collected already.
        still = [ref for ref in refs if _stands(store, ref)]
        return [Problem(key=key, reason=reason_of(error), checkpoint=ref.label) for ref in still]
    if manifest.store_id != store.id:
        reason = f"it is of store {manifest.store_id}, and this is {store.id}"
        return [Problem(key=key, reason=reason, checkpoint=ref.label) for ref in refs]
    unhinted = []
    if manifest.hints and read_hints(manifest.hints, unique_rows(manifest.digests)[0]) is None:
        unhinted.append(
            Problem(key=key, reason="its hints are damaged (nothing is lost, and the index is asked instead)")
        )
    faults = [*_misplaced(packs, manifest), *_undecodable(manifest, damage, needed)]
    if not faults:
        return unhinted
    return unhinted + [
        Problem(
            key=fault.key, reason=fault.reason, checkpoint=ref.label, tensors=p.names_of(manifest.rows, fault.chunks)
        )
        for ref in refs
        if _stands(store, ref)
        for fault in faults
    ]


def _stands(store: Store, ref: Ref) -> bool:
    """Tell whether a ref is still there and says the same: what was dropped meanwhile may be collected."""
    try:
        now = store.ref(ref.key)
    except (FormatError, BackendError):
        return True
    return now is not None and now.manifest == ref.manifest


def _misplaced(packs: Packs, manifest: Manifest) -> Iterator[_Fault]:
    """Give the chunks of a manifest that are nowhere, or are there in another size."""
    digests = manifest.digests
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
            hint = f"; when it was saved it was to be found in {', '.join(once[:_N_NAMES])}"
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        reason = f"no pack that can be read holds chunk {hex_of(digests[missing[0]])}{more}{hint}"
        yield _Fault(key=lost[0] if len(lost) == 1 else None, reason=reason, chunks=missing)
    there = np.flatnonzero(at >= 0)
    said = packs.table.entries["raw_bytes"][at[there]]
    wrong = there[said != manifest.chunk_sizes[there]]
    if len(wrong):
        first = int(at[wrong[0]])
        n_bytes = int(packs.table.entries["raw_bytes"][first])
        reason = (
            f"its table says chunk {hex_of(digests[wrong[0]])} has {n_bytes} bytes, and the manifest another number"
        )
        yield _Fault(key=packs.table.key_of(first), reason=reason, chunks=wrong)


def _undecodable(manifest: Manifest, damage: Lost, needed: set[bytes]) -> Iterator[_Fault]:
    """Give the chunks of a manifest that cannot be decoded, those of one pack together."""
    if not damage:
        return
    keys = manifest.digests.view(f"V{DIGEST_BYTES}").ravel()
    bad = np.frombuffer(b"".join(damage), dtype=f"V{DIGEST_BYTES}")
    by_pack: dict[str, list[int]] = {}
    for number in np.flatnonzero(np.isin(keys, bad)).tolist():
        wanted = manifest.digests[number].tobytes()
        needed.add(wanted)
        by_pack.setdefault(damage[wanted][0], []).append(number)
    for key, numbers in by_pack.items():
        yield _Fault(
            key=key,
            reason=_and_more(damage[manifest.digests[numbers[0]].tobytes()][1], len(numbers)),
            chunks=np.array(numbers),
        )


def _unneeded(damage: Damage, needed: Set[bytes]) -> Iterator[Problem]:
    """Give the damaged chunks that no checkpoint suffers from, those of one pack together."""
    by_pack: dict[str, list[str]] = {}
    for found, (key, reason) in damage.lost.items():
        if found not in needed:
            by_pack.setdefault(key, []).append(reason)
    for key, reasons in by_pack.items():
        yield Problem(key=key, reason=f"{_and_more(reasons[0], len(reasons))}; nothing needs it yet")
    for key, reasons in damage.copies.items():
        yield Problem(key=key, reason=f"{_and_more(reasons[0], len(reasons))}; another pack has a whole copy")


def _format_problems(store: Store) -> Iterator[Problem]:
    """Look at the blob that says which store this is, which may have changed since the store was opened."""
    try:
        if Store.open_backend(store.backend).id != store.id:
            yield Problem(key="format", reason=f"it is another store's, and this was {store.id}")
    except (FormatError, NotFoundError, BackendError) as error:
        yield Problem(key="format", reason=reason_of(error))


def _and_more(reason: str, n_chunks: int) -> str:
    return reason if n_chunks == 1 else f"{reason}, and {n_chunks - 1} more chunks are damaged"


def _saved_in(manifest: Manifest, chunks: Any) -> list[str]:
    """Name the packs in which some chunks, by their numbers in a manifest, lay when it was written, if it says so."""
    different, _, which = unique_rows(manifest.digests)
    hints = read_hints(manifest.hints, different)
    if hints is None:
        return []
    return [pack_key(hints.packs[at]) for at in np.unique(hints.pack[which[chunks]]).tolist()]

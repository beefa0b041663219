"""From every ref to its manifest to its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import DIGEST_BYTES, hex_of, unique_rows
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError
from tensorcas_mlflow.hints import read_hints
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, pack_key, read_segment
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.store import Ref, Store
from tensorcas_mlflow.store import protocol as p
from tensorcas_mlflow.verify._packs import Damage, Packs, read_all
from tensorcas_mlflow.verify._report import Problem, VerifyReport, reason_of

_N_NAMES = 3


def verify(store: Store, *, full: bool = False) -> VerifyReport:
    """Look at every ref, its manifest, and every chunk that it names.

    A store may be written, read and collected meanwhile; what is committed later is not looked at.

    Args:
        store: Which.
        full: Whether to read every chunk of every pack too, and compare it with its digest: also chunks that nothing
            needs, because the next save may rely on them. Without it chunks are looked for in the packs' tables.

    Raises:
        BackendError: The storage failed to list what it holds.
    """
    refs, unreadable = _read_refs(store)
    packs = Packs(store.backend)
    damage = read_all(store.backend, packs) if full else {}
    needed: set[bytes] = set()
    found = [problem for holders in refs for problem in _check(store, packs, holders, damage, needed)]
    found += [*_unneeded(damage, needed), *_check_protocol(store.backend)]
    return VerifyReport(
        n_refs=sum(map(len, refs)),
        n_packs=len(packs.table.packs),
        n_chunks=len(packs.table),
        full=full,
        problems=(*unreadable, *packs.problems, *found),
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
    for info in store.backend.list("refs"):
        try:
            ref = store.ref(info.key)
        except (FormatError, BackendError) as error:
            problems.append(Problem(key=info.key, reason=reason_of(error)))
            continue
        if ref is not None:
            by_manifest.setdefault(ref.manifest, []).append(ref)
    return list(by_manifest.values()), problems


def _check(store: Store, packs: Packs, refs: list[Ref], damage: Damage, needed: set[bytes]) -> list[Problem]:
    """Check the manifest that some refs name, and that its chunks are there and sound.

    Args:
        store: Whose.
        packs: Where its chunks are looked for.
        refs: All refs of one manifest.
        damage: Chunks that cannot be decoded.
        needed: Those of them that are needed are put in here.
    """
    key = f"manifests/{refs[0].manifest}"
    try:
        manifest = store.manifest(refs[0])
    except (FormatError, BackendError) as error:
        # What was dropped meanwhile may be collected already.
        still = [ref for ref in refs if _stands(store, ref)]
        return [Problem(key=key, reason=reason_of(error), checkpoint=ref.label) for ref in still]
    if manifest.store_id != store.id:
        reason = f"it is of store {manifest.store_id}, and this is {store.id}"
        return [Problem(key=key, reason=reason, checkpoint=ref.label) for ref in refs]
    faults = [*_misplaced(packs, manifest), *_undecodable(manifest, damage, needed)]
    if not faults:
        return []
    return [
        Problem(key=fault.key, reason=fault.reason, checkpoint=ref.label, tensors=_names(manifest, fault.chunks))
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
    wrong = there[said != _chunk_sizes(manifest)[there]]
    if len(wrong):
        first = int(at[wrong[0]])
        n_bytes = int(packs.table.entries["raw_bytes"][first])
        reason = (
            f"its table says chunk {hex_of(digests[wrong[0]])} has {n_bytes} bytes, and the manifest another number"
        )
        yield _Fault(key=packs.table.key_of(first), reason=reason, chunks=wrong)


def _undecodable(manifest: Manifest, damage: Damage, needed: set[bytes]) -> Iterator[_Fault]:
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
    for found, (key, reason) in damage.items():
        if found not in needed:
            by_pack.setdefault(key, []).append(reason)
    for key, reasons in by_pack.items():
        yield Problem(key=key, reason=f"{_and_more(reasons[0], len(reasons))}; nothing needs it yet")


def _and_more(reason: str, n_chunks: int) -> str:
    return reason if n_chunks == 1 else f"{reason}, and {n_chunks - 1} more chunks are damaged"


def _names(manifest: Manifest, chunks: Any) -> tuple[str, ...]:
    """Name the tensors that some chunks, by their numbers in a manifest, belong to."""
    counts = np.fromiter((len(row.digests) for row in manifest.rows), np.int64, len(manifest.rows))
    rows = np.unique(np.searchsorted(np.cumsum(counts), chunks, side="right"))
    return tuple(manifest.rows[row].spec.name for row in rows.tolist())


def _saved_in(manifest: Manifest, chunks: Any) -> list[str]:
    """Name the packs in which some chunks, by their numbers in a manifest, lay when it was written, if it says so."""
    different, _, which = unique_rows(manifest.digests)
    hints = read_hints(manifest.hints, different)
    if hints is None:
        return []
    return [pack_key(hints.packs[at]) for at in np.unique(hints.pack[which[chunks]]).tolist()]


def _chunk_sizes(manifest: Manifest) -> Any:
    """Say how long each chunk of a manifest is."""
    sizes: list[int] = []
    for row in manifest.rows:
        # Nearly all of 100,000 tensors are one chunk, whose size needs no arrays to be made.
        if len(row.digests) == 1:
            sizes.append(row.spec.n_bytes)
        else:
            sizes.extend(np.diff(row.ends(manifest.chunk_bytes), prepend=0).tolist())
    return np.array(sizes, dtype=np.int64)


def _check_protocol(backend: Backend) -> Iterator[Problem]:
    """Give the small blobs that savers and collectors leave for each other and that cannot be read."""
    for info in list(backend.list("intents")):
        try:
            p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            # A commit may have been writing it just then, and has turned it into a ref since.
            if backend.stat(info.key) is not None:
                yield Problem(key=info.key, reason=f"{reason_of(error)} (gc removes it once its grace is over)")
    try:
        p.read_condemned(backend)
    except FormatError as error:
        yield Problem(key=getattr(error, "key", None), reason=f"{reason_of(error)} (gc refuses to work until it goes)")
    for info in list(backend.list("index")):
        if not info.key.endswith(".arrow"):
            continue
        try:
            read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            yield Problem(key=info.key, reason=f"{reason_of(error)} (nothing is lost, and gc removes it)")

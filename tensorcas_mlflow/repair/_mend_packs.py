"""Damaged packs: what is good of them goes into new packs, the rest into quarantine, and they go as a collector's do.

A repair does not ask what is needed, which damage may keep from being known. It deletes a pack only when every chunk
of it that can be read lies, checked, in another pack that nobody has condemned (``docs/design/protocol.md``, A repair).
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.index import Table, pack_key
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import Payload
from tensorcas_mlflow.repair._bases import anchored, revive
from tensorcas_mlflow.repair._chunks import NO_DIGESTS, Verdict, as_keys, look_at
from tensorcas_mlflow.repair._holdings import Holdings
from tensorcas_mlflow.repair._lists import Lists, read_lists
from tensorcas_mlflow.repair._quarantine import Piece, Quarantine
from tensorcas_mlflow.repair._sources import Sources
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_ROUNDS = 4
"""How often collectors may condemn what was copied, before the packs are left for another repair."""


@dataclass(slots=True, kw_only=True)
class Mended:
    """What was done about packs."""

    n_quarantined: int = 0
    """Stretches of packs put aside."""
    n_healed: int = 0
    """Chunks brought from elsewhere."""
    n_fenced: int = 0
    """Saves under way that relied on what is lost."""
    gone: set[str] = field(default_factory=set)
    """Keys of damaged packs that were deleted."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys of damaged packs that were left as they are, and why."""


def mend_packs(
    store: Store,
    holdings: Holdings,
    needed: Digests,
    sources: Sources,
    quarantine: Quarantine,
    *,
    may_be_written: bool,
) -> Mended:
    """Put damaged packs out of use, and bring what is lost from elsewhere.

    Args:
        store: Whose.
        holdings: As it was looked at when the plan was made.
        needed: Chunks that refs need.
        sources: Where lost ones may be had.
        quarantine: Where damaged bytes go.
        may_be_written: Whether a pack without a table may be one that is still being written, and is left alone.

    Raises:
        BackendError: The storage failed; another repair goes on from there.
    """
    done = Mended()
    backend = store.backend
    replaced = _replace_unread(store, holdings, sources, done)
    for name in sorted(holdings.packs):
        failure = holdings.packs[name].failure
        if failure is not None:
            done.left[pack_key(name)] = _unread(name, failure)
    held = anchored(backend, holdings) & holdings.damaged()
    for name in held:
        done.left[pack_key(name)] = "a delta that cannot be read may need it: repair again when all can be read"
    doomed = frozenset(
        name
        for name in sorted(holdings.damaged() - held)
        if _put_aside(store, holdings, name, quarantine, done, may_be_written=may_be_written)
    )
    condemned = f"condemned/{uuid.uuid4().hex}"
    if doomed:
        # Before anything is copied: a collector that sees the copies sees that the originals are none any more.
        backend.put_new(condemned, [p.condemned_bytes(doomed, frozenset())])
        # And deltas against what goes that are committed all the same were written by now, and are copied too.
        done.n_fenced = _fence(backend, lambda intent: intent.bases & doomed)
    safe = _copy(store, holdings, doomed, needed, sources, done)
    done.n_healed += revive(store, holdings, sources, needed)
    relied_on = np.concatenate([_owed(holdings, doomed), as_keys(holdings.baseless())])
    lost = relied_on[~np.isin(relied_on, holdings.good())]
    if doomed:
        done.n_fenced += _fence(backend, lambda intent: np.isin(as_keys(_needed_by(backend, intent)), lost).any())
        going = {
            name
            for name in doomed & holdings.packs.keys()
            if np.isin(_owed(holdings, frozenset({name})) if name in replaced else _kept(holdings, name), safe).all()
        }
        p.begin_generation(backend)
        # The copies that count may be others', who were killed before these were durable. And what is damaged must not
        # come back in a crash when no list names it any more: a collection may take it for the better copy.
        backend.settle("packs")
        for name in sorted(going):
            backend.delete(pack_key(name))
        backend.settle("packs")
        store.catalog.forget(going)
        backend.delete(condemned)
        done.gone = {pack_key(name) for name in going}
        for name in (doomed & holdings.packs.keys()) - going:
            done.left[pack_key(name)] = "not all of its good chunks could be copied: repair again"
    return done


def _replace_unread(store: Store, holdings: Holdings, sources: Sources, done: Mended) -> frozenset[str]:
    """Bring the chunks that cannot be read from elsewhere, so that packs may go of which nothing else is missing.

    Returns:
        Names of the packs that may go once each of their chunks, also of those, is safe.
    """
    unread = holdings.unread()
    if len(unread) == 0:
        return frozenset()
    wanted = unique_rows(unread[~np.isin(as_keys(unread), holdings.good())])[0]
    brought = _Counted(sources.payloads(wanted))
    p.write_packs(store.backend, store.catalog, iter(brought))
    done.n_healed += brought.n
    holdings.look()
    return holdings.give_up_replaced()


def _kept(holdings: Holdings, name: str) -> Any:
    """The good chunks of a pack, and those whose bases lie in it: each digest as one value."""
    return as_keys(np.concatenate([holdings.packs[name].entries["digest"], holdings.dependents({name})]))


def _put_aside(
    store: Store, holdings: Holdings, name: str, quarantine: Quarantine, done: Mended, *, may_be_written: bool
) -> bool:
    """Look at the damage of a pack once more, and keep the bytes; returns whether the pack may go."""
    pack = holdings.packs[name]
    try:
        if not pack.has_table:
            if may_be_written:
                done.left[pack_key(name)] = "a save through an MLflow server may still be writing it"
                return False
            if _has_table(store.backend, name):
                raise _UnsteadyError
        for piece in pack.damage:
            if piece.entry is not None and not _is_still_bad(store.backend, name, piece):
                raise _UnsteadyError
        for piece in pack.damage:
            try:
                done.n_quarantined += quarantine.keep(piece)
            except (BackendError, CorruptError) as error:
                if error.key != piece.key:
                    raise  # it was read, and cannot be kept: a full disk is no reason to give anything up
                if not holdings.is_given_up(name):
                    done.left[pack_key(name)] = _unread(name, error.reason)
                    return False
                bare = dataclasses.replace(piece, n_bytes=0, reason=f"{piece.reason}; {error.reason}")
                done.n_quarantined += quarantine.keep(bare)
        for piece in pack.baseless:
            done.n_quarantined += quarantine.keep(piece)
    except BlobNotFoundError:
        return False  # a collector has removed it
    except _UnsteadyError:
        # Not the bytes are to blame, but the way to them.
        done.left[pack_key(name)] = "what was damaged can be read now: look after the machine, its memory and its disks"
        return False
    return True


def _unread(name: str, reason: str) -> str:
    remedy = f"`tensorcas repair --abandon {pack_key(name)}` gives up what of it cannot be read"
    return f"it cannot be read: {reason}; {remedy}"


class _UnsteadyError(Exception):
    """The second look at a blob has shown something else than the first."""


def _has_table(backend: Backend, name: str) -> bool:
    try:
        p.read_pack_table(backend, name)
    except (CorruptError, BackendError):
        return False
    return True


def _is_still_bad(backend: Backend, name: str, piece: Piece) -> bool:
    entries = np.array([piece.entry])
    [look] = look_at(backend, [name], np.zeros(1, np.int64), entries)
    if look.verdict is Verdict.GONE:
        raise BlobNotFoundError(piece.key)
    return look.verdict is not Verdict.GOOD


def _copy(
    store: Store, holdings: Holdings, doomed: frozenset[str], needed: Digests, sources: Sources, done: Mended
) -> Any:
    """Copy until every good chunk of the doomed packs lies elsewhere; returns the digests of all that does."""
    backend = store.backend
    old: frozenset[str] | None = None
    first: Lists | None = None
    for attempt in range(_ROUNDS):
        # Lists before packs: a copy that somebody deletes in between is still on a list, or gone already.
        lists = read_lists(backend)
        holdings.look()
        first, old = first or lists, old if old is not None else frozenset(holdings.packs)
        usable = frozenset(holdings.packs) - doomed - lists.packs
        if lists.damaged:
            # Nobody knows what it names. What was written since it was seen cannot be among it.
            usable = usable - old if lists.damaged.keys() == first.damaged.keys() else frozenset()
        safe = holdings.good(usable)
        everywhere = holdings.table()
        keys = as_keys(everywhere.entries["digest"])
        owed = np.isin(keys, _owed(holdings, doomed)) & ~np.isin(keys, safe)
        lost = needed[~np.isin(as_keys(needed), keys)] if attempt == 0 else NO_DIGESTS
        if not owed.any() and len(lost) == 0:
            return safe
        if attempt < _ROUNDS - 1:
            brought = _Counted(sources.payloads(lost))
            p.write_packs(backend, store.catalog, _both(_payloads(backend, everywhere, owed), brought))
            done.n_healed += brought.n
    return safe


def _owed(holdings: Holdings, doomed: frozenset[str]) -> Any:
    """What doomed packs hold or should, and what is a delta against that: each digest as one value."""
    parts = [holdings.dependents(doomed)]
    for name in doomed & holdings.packs.keys():
        pack = holdings.packs[name]
        parts.append(pack.entries["digest"])
        parts += [piece.entry["digest"].reshape(1, DIGEST_BYTES) for piece in pack.damage if piece.entry is not None]
    return as_keys(np.concatenate(parts))


class _Counted:
    """Payloads that are counted as they are drawn."""

    def __init__(self, payloads: Iterator[Payload]) -> None:
        self._payloads = payloads
        self.n = 0

    def __iter__(self) -> Iterator[Payload]:
        for payload in self._payloads:
            self.n += 1
            yield payload


def _both(first: Iterator[Payload], second: _Counted) -> Iterator[Payload]:
    yield from first
    yield from second


def _payloads(backend: Backend, table: Table, wanted: Any) -> Iterator[Payload]:
    """Read chunks to be copied, each once, checked anew, in the order they lie in."""
    rows = np.flatnonzero(wanted)
    rows = rows[unique_rows(np.ascontiguousarray(table.entries["digest"][rows]))[1]]
    entries, pack = table.entries[rows], table.pack[rows]
    end = (-1, -1)
    bases = p.Bases(backend)
    for look in look_at(backend, table.packs, pack, entries):
        if look.verdict is not Verdict.GOOD:
            _log.warning("a chunk of %s cannot be copied: %s", table.key_of(int(rows[look.row])), look.reason)
            continue
        entry = entries[look.row]
        begin = (int(pack[look.row]), int(entry["offset"]))
        # What lay without a gap stays so: the chunks of one raw tensor can still be mapped as one.
        try:
            yield bases.payload(entry, look.stored, begins_row=begin != end)
        except (NotFoundError, FormatError) as error:
            _log.warning("a chunk of %s cannot be copied: %s", table.key_of(int(rows[look.row])), error)
            continue
        end = (begin[0], begin[1] + int(entry["stored_bytes"]))


def _fence(backend: Backend, relies_on_it: Callable[[p.Intent], Any]) -> int:
    """Withdraw the intents of saves that rely on what is lost: they begin again, and write what they hold in memory."""
    n_fenced = 0
    for info in list(list_blobs(backend, "intents")):
        try:
            intent = p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except (BlobNotFoundError, FormatError):
            continue
        if not intent.through_carrier and relies_on_it(intent):
            n_fenced += backend.withdraw(info.key, info.token)
    return n_fenced


def _needed_by(backend: Backend, intent: p.Intent) -> Digests:
    """The chunks that a save relies on."""
    return _said_by_manifest(backend, intent.manifest) if intent.digests is None else intent.digests


def _said_by_manifest(backend: Backend, name: str) -> Digests:
    """What a save relies on whose commit has half turned its intent into a ref; nothing if that cannot be read."""
    try:
        return Manifest.from_blob(backend.get(f"manifests/{name}", max_bytes=MAX_BYTES), name).digests
    except (BlobNotFoundError, FormatError):
        return NO_DIGESTS

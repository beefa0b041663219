"""Damaged packs: what is good of them goes into new packs, the rest into quarantine, and they go as a collector's do.

A repair does not ask what is needed, which damage may keep from being known. It deletes a pack only when every chunk
of it that can be read lies, checked, in another pack that nobody has condemned (``docs/design/protocol.md``, A repair).
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.index import Table, pack_key
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._chunks import Shard, Verdict, check, read, shard_of
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, as_keys
from tensorcas_mlflow.maintenance._quarantine import Piece, Quarantine
from tensorcas_mlflow.maintenance._repair_records import Lists, read_lists
from tensorcas_mlflow.maintenance._sources import Sources
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import MAX_DEPTH, Payload, is_delta
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


def anchored(backend: Backend, checked: CheckedPacks) -> frozenset[str]:
    """Name the packs of the bases of deltas that could not be read: those are as they were once they can be read again.

    Where the table of a pack could not be read that may hold deltas, nobody knows which these are: then all are held.
    """
    packs = checked.packs.values()
    if any(pack.failure is not None and not pack.unread for pack in packs) and _has_deltas(checked):
        return frozenset(checked.packs)
    bases = p.Bases(backend)
    found: set[str] = set()
    for pack in packs:
        for piece in pack.unread if pack.failure is not None else ():
            try:
                for name in bases.chain(piece.entry):
                    found.add(name)
            except (NotFoundError, FormatError, BackendError):
                continue  # as far as it can be followed
    return frozenset(found)


def _has_deltas(checked: CheckedPacks) -> bool:
    tables = [pack.entries for pack in checked.packs.values()]
    return any(is_delta(table).any() for table in tables) or any(pack.baseless for pack in checked.packs.values())


def bases_wanted(checked: CheckedPacks, lost: Digests) -> Digests:
    """Give the chunks with which lost ones could be decoded that are there as deltas without their bases."""
    bases = {piece.entry["digest"].tobytes(): piece.entry["base_digest"] for piece in _baseless(checked)}
    found: list[Any] = []
    waiting = [digest.tobytes() for digest in lost]
    while waiting:
        base = bases.pop(waiting.pop(), None)
        if base is not None:
            found.append(base)
            waiting.append(base.tobytes())
    return np.array(found, np.uint8).reshape(-1, lost.shape[1]) if found else NO_DIGESTS


def would_be_good(checked: CheckedPacks, good: Any) -> Any:
    """Add to the digests of good chunks, each as one value, those that could be decoded with them."""
    known = {bytes(key) for key in good.tolist()}
    pieces = _baseless(checked)
    for _ in range(MAX_DEPTH):
        more = {piece.entry["digest"].tobytes() for piece in pieces if piece.entry["base_digest"].tobytes() in known}
        if more <= known:
            break
        known |= more
    return np.array(sorted(known), dtype=good.dtype)


def revive(store: Store, checked: CheckedPacks, sources: Sources, needed: Digests) -> int:
    """Write in full what is lost but for a delta, where another copy of its base is there or to be had.

    A base is named by its digest too, so a copy that hashes right is as good as the one that is lost.

    Args:
        store: Whose.
        checked: As they are; looked at again if anything was written.
        sources: Where bases may be had.
        needed: Chunks that refs need.

    Returns:
        How many chunks were written.
    """
    lost = needed[_lacks(checked, needed)]
    wanted = bases_wanted(checked, lost)
    if len(wanted) == 0:
        return 0
    useful = {digest.tobytes() for digest in (*lost, *wanted)}
    n_written = _write(store, checked, sources.payloads(unique_rows(wanted[_lacks(checked, wanted)])[0]))
    for _ in range(MAX_DEPTH):
        n_more = _write(store, checked, _decoded(store.backend, checked, useful))
        n_written += n_more
        if n_more == 0:
            break
    return n_written


def _lacks(checked: CheckedPacks, digests: Digests) -> Any:
    return ~np.isin(as_keys(digests), checked.good())


def _write(store: Store, checked: CheckedPacks, payloads: Iterator[Payload]) -> int:
    """Write chunks, look again if there were any, and return how many."""
    n = 0

    def counted() -> Iterator[Payload]:
        nonlocal n
        for payload in payloads:
            n += 1
            yield payload

    p.write_packs(store.backend, store.catalog, counted())
    if n:
        checked.look()
    return n


def _decoded(backend: Backend, checked: CheckedPacks, useful: Set[bytes]) -> Iterator[Payload]:
    """Decode deltas without bases, each chunk once, where a good chunk is another copy of the base.

    Args:
        backend: Of the store.
        checked: Of the store.
        useful: Digests of the chunks that are wanted.
    """
    table = checked.table()
    bases = p.Bases(backend)
    left = set(useful) - {digest.tobytes() for digest in table.entries["digest"]}
    for piece in _baseless(checked):
        entry = piece.entry
        [row] = table.find(entry["base_digest"].reshape(1, -1)).tolist()
        if row < 0 or entry["digest"].tobytes() not in left:
            continue
        try:
            base = table.entries[row]
            raw = bases.decoded(base, _stored(backend, table.key_of(row), base))
            payload = bases.in_full(entry, _stored(backend, piece.key, entry), begins_row=False, base=raw)
        except (NotFoundError, FormatError, BackendError) as error:
            _log.warning("a delta in %s cannot be decoded with another copy of its base: %s", piece.key, error)
            continue
        left.remove(payload.digest)
        yield payload


def _stored(backend: Backend, key: str, entry: Any) -> memoryview:
    block = memoryview(bytearray(int(entry["stored_bytes"])))
    backend.read_into(key, int(entry["offset"]), block)
    return block


def _baseless(checked: CheckedPacks) -> list[Piece]:
    return [piece for pack in checked.packs.values() for piece in pack.baseless]


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
    checked: CheckedPacks,
    needed: Digests,
    sources: Sources,
    quarantine: Quarantine,
    *,
    may_be_written: bool,
) -> Mended:
    """Put damaged packs out of use, and bring what is lost from elsewhere.

    Args:
        store: Whose.
        checked: As it was looked at when the plan was made.
        needed: Chunks that refs need.
        sources: Where lost ones may be had.
        quarantine: Where damaged bytes go.
        may_be_written: Whether a pack without a table may be one that is still being written, and is left alone.

    Raises:
        BackendError: The storage failed; another repair goes on from there.
    """
    done = Mended()
    backend = store.backend
    replaced = _replace_unread(store, checked, sources, done)
    for name in sorted(checked.packs):
        failure = checked.packs[name].failure
        if failure is not None:
            done.left[pack_key(name)] = _unread(name, failure)
    held = anchored(backend, checked) & checked.damaged()
    for name in held:
        done.left[pack_key(name)] = "a delta that cannot be read may need it: repair again when all can be read"
    doomed = frozenset(
        name
        for name in sorted(checked.damaged() - held)
        if _put_aside(store, checked, name, quarantine, done, may_be_written=may_be_written)
    )
    condemned = f"condemned/{uuid.uuid4().hex}"
    if doomed:
        # Before anything is copied: a collector that sees the copies sees that the originals are none any more.
        backend.put_new(condemned, [p.condemned_bytes(doomed, frozenset())])
        # And deltas against what goes that are committed all the same were written by now, and are copied too.
        done.n_fenced = _fence(backend, lambda intent: intent.bases & doomed)
    safe = _copy(store, checked, doomed, needed, sources, done)
    done.n_healed += revive(store, checked, sources, needed)
    relied_on = np.concatenate([_owed(checked, doomed), as_keys(checked.baseless())])
    lost = relied_on[~np.isin(relied_on, checked.good())]
    if doomed:
        done.n_fenced += _fence(backend, lambda intent: np.isin(as_keys(_needed_by(backend, intent)), lost).any())
        going = {
            name
            for name in doomed & checked.packs.keys()
            if np.isin(_owed(checked, frozenset({name})) if name in replaced else _kept(checked, name), safe).all()
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
        for name in (doomed & checked.packs.keys()) - going:
            done.left[pack_key(name)] = "not all of its good chunks could be copied: repair again"
    return done


def _replace_unread(store: Store, checked: CheckedPacks, sources: Sources, done: Mended) -> frozenset[str]:
    """Bring the chunks that cannot be read from elsewhere, so that packs may go of which nothing else is missing.

    Returns:
        Names of the packs that may go once each of their chunks, also of those, is safe.
    """
    unread = checked.unread()
    if len(unread) == 0:
        return frozenset()
    wanted = unique_rows(unread[~np.isin(as_keys(unread), checked.good())])[0]
    brought = _Counted(sources.payloads(wanted))
    p.write_packs(store.backend, store.catalog, iter(brought))
    done.n_healed += brought.n
    checked.look()
    return checked.give_up_replaced()


def _kept(checked: CheckedPacks, name: str) -> Any:
    """The good chunks of a pack, and those whose bases lie in it: each digest as one value."""
    return as_keys(np.concatenate([checked.packs[name].entries["digest"], checked.dependents({name})]))


def _put_aside(
    store: Store, checked: CheckedPacks, name: str, quarantine: Quarantine, done: Mended, *, may_be_written: bool
) -> bool:
    """Look at the damage of a pack once more, and keep the bytes; returns whether the pack may go."""
    pack = checked.packs[name]
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
                if not checked.is_given_up(name):
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
    row = np.zeros(1, np.int64)
    shard = Shard(packs=(name,), pack=row, entries=np.array([piece.entry]), row=row)
    fault = check(backend, shard, decode=True).faults.get(0)
    if fault is not None and fault.verdict is Verdict.GONE:
        raise BlobNotFoundError(piece.key)
    return fault is not None


def _copy(
    store: Store, checked: CheckedPacks, doomed: frozenset[str], needed: Digests, sources: Sources, done: Mended
) -> Any:
    """Copy until every good chunk of the doomed packs lies elsewhere; returns the digests of all that does."""
    backend = store.backend
    old: frozenset[str] | None = None
    first: Lists | None = None
    for attempt in range(_ROUNDS):
        # Lists before packs: a copy that somebody deletes in between is still on a list, or gone already.
        lists = read_lists(backend)
        checked.look()
        first, old = first or lists, old if old is not None else frozenset(checked.packs)
        usable = frozenset(checked.packs) - doomed - lists.packs
        if lists.damaged:
            # Nobody knows what it names. What was written since it was seen cannot be among it.
            usable = usable - old if lists.damaged.keys() == first.damaged.keys() else frozenset()
        safe = checked.good(usable)
        everywhere = checked.table()
        keys = as_keys(everywhere.entries["digest"])
        owed = np.isin(keys, _owed(checked, doomed)) & ~np.isin(keys, safe)
        lost = needed[~np.isin(as_keys(needed), keys)] if attempt == 0 else NO_DIGESTS
        if not owed.any() and len(lost) == 0:
            return safe
        if attempt < _ROUNDS - 1:
            brought = _Counted(sources.payloads(lost))
            p.write_packs(backend, store.catalog, _both(_payloads(backend, everywhere, owed), brought))
            done.n_healed += brought.n
    return safe


def _owed(checked: CheckedPacks, doomed: frozenset[str]) -> Any:
    """What doomed packs hold or should, and what is a delta against that: each digest as one value."""
    parts = [checked.dependents(doomed)]
    for name in doomed & checked.packs.keys():
        pack = checked.packs[name]
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
    end = (-1, -1)
    bases = p.Bases(backend)
    for look in (look for _, looks in read(backend, shard_of(table, rows)) for look in looks):
        if look.fault is not None:
            _log.warning("a chunk of %s cannot be copied: %s", table.key_of(look.row), look.fault.reason)
            continue
        entry = table.entries[look.row]
        begin = (int(table.pack[look.row]), int(entry["offset"]))
        # What lay without a gap stays so: the chunks of one raw tensor can still be mapped as one.
        try:
            yield bases.payload(entry, look.stored, begins_row=begin != end)
        except (NotFoundError, FormatError) as error:
            _log.warning("a chunk of %s cannot be copied: %s", table.key_of(look.row), error)
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

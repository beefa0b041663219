"""Repair of damaged packs: good chunks go into new packs, the rest goes into quarantine, and the packs are deleted.

A repair does not ask what is needed, because damage may hide it. It deletes a pack only when every chunk
of it that can be read lies, checked, in another pack that nobody has condemned (``docs/design/protocol.md``, A repair).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Digests, as_keys, unique_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NotFoundError,
    StarvedError,
)
from tensorcas_mlflow.layout import list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.layout.packs import MAX_DEPTH, Entries, Payload, Table, is_delta, is_possible, pack_key
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._chunks import Shard, Verdict, check_chunks, read_chunks, shard_of
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, NO_ENTRIES
from tensorcas_mlflow.maintenance._quarantine import keep_pack
from tensorcas_mlflow.maintenance._repair_records import read_lists
from tensorcas_mlflow.maintenance._sources import Sources
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


def heal(store: Store, checked: CheckedPacks, sources: Sources, needed: Digests) -> int:
    """Write lost chunks that sources have, and those that only a delta without its base holds.

    A base is named by its digest too, so any copy that hashes to it is as good as the lost one.

    Args:
        store: Store that is repaired.
        checked: Its packs; new ones are read if this call writes any.
        sources: Sources of chunks, and of bases.
        needed: Chunks that refs need.

    Returns:
        Number of chunks written.
    """
    n_written = _take(store, checked, sources, needed)
    lost = needed[_lacks(checked, needed)]
    bases = _bases_wanted(checked, lost)
    if len(bases) == 0:
        return n_written
    n_written += _take(store, checked, sources, bases)
    useful = {digest.tobytes() for digest in (*lost, *bases)}
    for _ in range(MAX_DEPTH):
        n_more = _write(store, checked, _decoded(store.backend, checked, useful))
        n_written += n_more
        if n_more == 0:
            break
    return n_written


def _take(store: Store, checked: CheckedPacks, sources: Sources, wanted: Digests) -> int:
    """Write the chunks that no pack holds, as far as a source has them."""
    lost = unique_rows(wanted[_lacks(checked, wanted)])[0]
    return _write(store, checked, sources.payloads(lost))


def _bases_wanted(checked: CheckedPacks, lost: Digests) -> Digests:
    """Return the bases of lost chunks that still exist as deltas, and the bases of those."""
    bases = {entry["digest"].tobytes(): entry["base_digest"] for _, entry in _baseless(checked)}
    found: list[Any] = []
    waiting = [digest.tobytes() for digest in lost]
    while waiting:
        base = bases.pop(waiting.pop(), None)
        if base is not None:
            found.append(base)
            waiting.append(base.tobytes())
    return np.array(found, np.uint8).reshape(-1, lost.shape[1]) if found else NO_DIGESTS


def _lacks(checked: CheckedPacks, digests: Digests) -> Any:
    return ~np.isin(as_keys(digests), checked.good())


def _write(store: Store, checked: CheckedPacks, payloads: Iterator[Payload]) -> int:
    """Write chunks, read the new packs, and return the number of chunks."""
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
        backend: Backend of the store.
        checked: Packs of the store.
        useful: Digests of the wanted chunks.
    """
    table = checked.table()
    bases = p.Bases(backend)
    left = set(useful) - {digest.tobytes() for digest in table.entries["digest"]}
    for key, entry in _baseless(checked):
        [row] = table.find(entry["base_digest"].reshape(1, -1)).tolist()
        if row < 0 or entry["digest"].tobytes() not in left:
            continue
        try:
            base = table.entries[row]
            raw = bases.decoded(base, _stored(backend, table.key_of(row), base))
            payload = bases.in_full(entry, _stored(backend, key, entry), begins_row=False, base=raw)
        except (NotFoundError, FormatError, BackendError) as error:
            _log.warning("a delta in %s cannot be decoded with another copy of its base: %s", key, error)
            continue
        left.remove(payload.digest)
        yield payload


def _stored(backend: Backend, key: str, entry: Any) -> memoryview:
    block = memoryview(bytearray(int(entry["stored_bytes"])))
    backend.read_into(key, int(entry["offset"]), block)
    return block


def _baseless(checked: CheckedPacks) -> Iterator[tuple[str, Any]]:
    """Yield the deltas without bases, each with the key of its pack."""
    for name, pack in checked.packs.items():
        for entry in pack.baseless:
            yield pack_key(name), entry


_ROUNDS = 4
"""Times that collectors may condemn the copies, before the repair leaves the packs for another one."""


@dataclass(slots=True, kw_only=True)
class Mended:
    """Result of the repair of packs."""

    n_quarantined: int = 0
    """Packs put into quarantine."""
    n_healed: int = 0
    """Chunks taken from sources, decoded with another copy of their base, or encoded anew."""
    n_fenced: int = 0
    """Saves under way that relied on a lost chunk."""
    gone: set[str] = field(default_factory=set)
    """Keys of damaged packs that were deleted."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys of damaged packs that were left as they are, and why."""


def mend_packs(
    store: Store, checked: CheckedPacks, needed: Digests, sources: Sources, *, may_be_written: bool
) -> Mended:
    """Replace damaged packs, and take lost chunks from sources.

    Args:
        store: Store that is repaired.
        checked: Its packs as the plan found them.
        needed: Chunks that refs need.
        sources: Sources of lost chunks.
        may_be_written: Whether a pack without a table may still be arriving; it is left alone then.

    Raises:
        BackendError: The storage failed; another repair goes on from there.
    """
    done = Mended()
    backend = store.backend
    # The unreadable chunks first, so that the packs they lie in may go.
    done.n_healed += _take(store, checked, sources, checked.unread())
    replaced = checked.give_up_replaced()
    for name in sorted(checked.packs):
        failure = checked.packs[name].failure
        if failure is not None:
            done.left[pack_key(name)] = _unread(name, failure)
    doomed: frozenset[str] = frozenset()
    if done.left and checked.has_deltas():
        # One that cannot be read may be needed later, and with it any pack that may hold its base.
        done.left |= {pack_key(name): MAY_BE_BASE for name in checked.damaged()}
    else:
        damaged = sorted(checked.damaged())
        doomed = frozenset(
            name for name in damaged if _put_aside(backend, checked, name, done, may_be_written=may_be_written)
        )
    condemned = f"condemned/{new_name()}"
    old = frozenset(checked.packs)
    if doomed:
        # Before anything is copied: a collector that sees the copies sees that the originals do not count.
        backend.put_new(condemned, [p.condemned_bytes(doomed, frozenset())])
        # Deltas against these packs that are committed all the same were written by now, and are copied too.
        done.n_fenced = _fence(backend, lambda intent: intent.bases & doomed)
        done.n_healed += _write(store, checked, _encoded_anew(backend, checked, doomed))
    done.n_healed += heal(store, checked, sources, needed)
    if doomed:
        safe = _copy(store, checked, doomed, old)
        relied_on = np.concatenate([_owed(checked, doomed), as_keys(checked.baseless())])
        lost = relied_on[~np.isin(relied_on, checked.good())]
        done.n_fenced += _fence(backend, lambda intent: np.isin(as_keys(_needed_by(backend, intent)), lost).any())
        doomed &= checked.packs.keys()
        going = {
            name
            for name in doomed
            if np.isin(_owed(checked, frozenset({name})) if name in replaced else _kept(checked, name), safe).all()
        }
        _delete_packs(store, going, condemned)
        done.gone = {pack_key(name) for name in going}
        done.left |= {pack_key(name): _NOT_COPIED for name in doomed - going}
    return done


MAY_BE_BASE = "a delta that cannot be read may need it: repair again when all can be read, or is given up"
_NOT_COPIED = "not all of its good chunks could be copied: repair again"


def _delete_packs(store: Store, packs: set[str], condemned: str) -> None:
    """Delete packs, and then the list that names them."""
    backend = store.backend
    p.begin_generation(backend)
    # The copies that count may be of writers killed before these were durable. And a damaged pack must not
    # come back in a crash once no list names it: a collection may take it for the better copy.
    backend.settle("packs")
    for name in sorted(packs):
        backend.delete(pack_key(name))
    backend.settle("packs")
    store.catalog.forget(packs)
    backend.delete(condemned)


def _kept(checked: CheckedPacks, name: str) -> Any:
    """Return the good chunks of a pack and the chunks whose bases lie in it, each digest as one value."""
    return as_keys(np.concatenate([checked.packs[name].entries["digest"], checked.dependents({name})]))


def _put_aside(backend: Backend, checked: CheckedPacks, name: str, done: Mended, *, may_be_written: bool) -> bool:
    """Check the damage of a pack again, and put its bytes into quarantine; return whether the pack may go."""
    pack, key = checked.packs[name], pack_key(name)
    if not pack.has_table and may_be_written:
        done.left[key] = "a save through an MLflow server may still be writing it"
        return False
    try:
        if not (_are_still_bad(backend, name, pack.bad) if pack.has_table else not _has_table(backend, name)):
            # The bytes are sound, and the way to them is not.
            done.left[key] = "the damaged bytes can be read now: check the memory and the disks of this machine"
            return False
        done.n_quarantined += keep_pack(backend, name, pack.size, is_given_up=checked.is_given_up(name))
    except BlobNotFoundError:
        return False  # a collector has removed it
    except (BackendError, CorruptError) as error:
        if error.key != key:
            raise  # it was read, and cannot be kept: a full disk is no reason to give anything up
        done.left[key] = _unread(name, error.reason)
        return False
    return True


def _unread(name: str, reason: str) -> str:
    remedy = f"`tensorcas repair --abandon {pack_key(name)}` gives up its unreadable parts"
    return f"it cannot be read: {reason}; {remedy}"


def _has_table(backend: Backend, name: str) -> bool:
    try:
        p.read_pack_table(backend, name)
    except (CorruptError, BackendError):
        return False
    return True


def _are_still_bad(backend: Backend, name: str, bad: Entries) -> bool:
    """Read chunks of a pack again; return whether none of them is good."""
    pack = np.zeros(len(bad), np.int64)
    shard = Shard(packs=(name,), pack=pack, entries=bad, row=np.arange(len(bad)))
    faults = check_chunks(backend, shard, decode=True).faults
    if any(fault.verdict is Verdict.GONE for fault in faults.values()):
        raise BlobNotFoundError(pack_key(name))
    return len(faults) == len(bad)


def _encoded_anew(backend: Backend, checked: CheckedPacks, doomed: frozenset[str]) -> Iterator[Payload]:
    """Encode in full, each once, the chunks that decode although their bytes have changed, and the deltas on them."""
    good, had = checked.good(), set[bytes]()
    bases = p.Bases(backend)
    for name, pack in checked.packs.items():
        bad = pack.bad[is_possible(pack.bad)] if name in doomed else NO_ENTRIES
        entries = np.concatenate([bad, pack.entries[is_delta(pack.entries)]])
        for entry in entries[~np.isin(as_keys(np.ascontiguousarray(entries["digest"])), good)]:
            if entry["digest"].tobytes() in had:
                continue
            try:
                stored = _stored(backend, pack_key(name), entry)
                payload = bases.in_full(entry, stored, begins_row=False, base=bases.of(entry))
            except StarvedError:
                raise
            except (NotFoundError, FormatError, BackendError):
                continue
            had.add(payload.digest)
            yield payload


def _copy(store: Store, checked: CheckedPacks, doomed: frozenset[str], old: frozenset[str]) -> Any:
    """Copy until every good chunk of the doomed packs lies elsewhere; return the digests of all that do.

    Deltas in packs that appear after the repair's list do not count: a collector may be about to delete their bases,
    and not have seen them. The repair itself writes none.

    Args:
        store: Store that is repaired.
        checked: Its packs.
        doomed: Packs that the repair is about to delete.
        old: Packs that the repair had seen before it made its list.
    """
    backend = store.backend
    first = read_lists(backend)
    checked.look()
    seen = frozenset(checked.packs)
    for attempt in range(_ROUNDS):
        # Lists before packs: a copy that somebody deletes in between is still on a list, or gone already.
        lists = read_lists(backend)
        checked.look()
        late = {name for name, pack in checked.packs.items() if name not in old and is_delta(pack.entries).any()}
        usable = frozenset(checked.packs) - doomed - lists.packs - late
        if lists.damaged:
            # Nobody knows which packs it names. Packs written since it was seen are not among them.
            usable = usable - seen if lists.damaged.keys() == first.damaged.keys() else frozenset()
        safe = checked.good(usable)
        everywhere = checked.table()
        keys = as_keys(everywhere.entries["digest"])
        owed = np.isin(keys, _owed(checked, doomed)) & ~np.isin(keys, safe)
        if not owed.any():
            return safe
        if attempt < _ROUNDS - 1:
            p.write_packs(backend, store.catalog, _payloads(backend, everywhere, owed))
    return safe


def _owed(checked: CheckedPacks, doomed: frozenset[str]) -> Any:
    """Return the chunks that doomed packs hold or should hold, and deltas against them; each digest as one value."""
    packs = [checked.packs[name] for name in doomed & checked.packs.keys()]
    digests = [each["digest"] for pack in packs for each in (pack.entries, pack.bad)]
    return as_keys(np.concatenate([checked.dependents(doomed), *digests]))


def _payloads(backend: Backend, table: Table, wanted: Any) -> Iterator[Payload]:
    """Read chunks to be copied, each once, checked anew, in the order they lie in."""
    rows = np.flatnonzero(wanted)
    rows = rows[unique_rows(np.ascontiguousarray(table.entries["digest"][rows]))[1]]
    end = (-1, -1)
    bases = p.Bases(backend)
    for look in (look for _, looks in read_chunks(backend, shard_of(table, rows)) for look in looks):
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
    """Withdraw the intents of saves that rely on a lost chunk: they begin again, and write it from memory."""
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
    """Return the chunks that a save relies on."""
    return _said_by_manifest(backend, intent.manifest) if intent.digests is None else intent.digests


def _said_by_manifest(backend: Backend, name: str) -> Digests:
    """Return the chunks of a half-committed save, by its manifest; nothing if that cannot be read."""
    try:
        return Manifest.from_blob(backend.get(f"manifests/{name}", max_bytes=MAX_BYTES), name).stored_digests
    except (BlobNotFoundError, FormatError):
        return NO_DIGESTS

"""Writer's side of the commit protocol (``docs/design/protocol.md``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import MOST_SHARED_BYTES, Backend, DamagedError, Token
from tensorcas_mlflow.base.digest import Buffer, Digests, unique_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.chunk_io import MOST_SAVED_BYTES, Catalog, Places
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    FencedError,
)
from tensorcas_mlflow.layout import Condemnation, Ref, RefTarget, intent_bytes, new_ref, read_condemned, ref_bytes
from tensorcas_mlflow.layout.manifests import Manifest, hint_bytes, pack_hint_bytes
from tensorcas_mlflow.layout.packs import (
    TARGET_BYTES,
    Mask,
    Packed,
    PackWriter,
    PayloadGroup,
    is_delta,
    new_pack_name,
    pack_key,
    pack_name,
)
from tensorcas_mlflow.store._base_plans import BasePlan
from tensorcas_mlflow.store._bases import MovedParts, Parents
from tensorcas_mlflow.store._choose import Chooser, Policy, SeriesChoices
from tensorcas_mlflow.store._derivations import places_of_inputs, with_derived
from tensorcas_mlflow.store._encode import encode_chunks, encode_moved, new_chooser
from tensorcas_mlflow.store._sketches import note_saved
from tensorcas_mlflow.store._sketching import FIRST_BYTES, STEP_BYTES, sketched
from tensorcas_mlflow.store._sources import CountBytes, NoSource, Source

WrittenIntent = tuple[str, Token]
"""Key and token of an intent."""


KeepPack = Callable[[str, Iterable[Buffer]], Iterable[Buffer]]
"""Takes the name of a new pack and its bytes, keeps them for later saves, and passes them on."""


def declare(backend: Backend, manifest_name: str, digests: Digests, bases: Collection[str] = ()) -> WrittenIntent:
    """Create the intent of a save: from now on every collector sees the chunks it relies on.

    Args:
        bases: Packs of the bases of deltas the save may write.
    """
    key = f"intents/{new_name()}"
    intent = intent_bytes(manifest_name, digests, bases=bases, through_carrier=backend.is_carrier)
    return key, backend.put_new(key, [intent], durable=False)


def look(backend: Backend, catalog: Catalog) -> Condemnation:
    """Read the condemned lists, after creating an intent, and check that the intent is in the store this object opened.

    A save goes on if the database is damaged: a repair needs time, and a training has none.

    Raises:
        CorruptError: A list is unreadable.
        StoreNotFoundError: The store is gone.
        ConflictError: Another store is in its place.
    """
    try:
        condemned = read_condemned(backend)
    except DamagedError:
        condemned = Condemnation(lists=(), generation=None, is_unknown=True)
    catalog.identity.check(condemned.generation)
    return condemned


def probe(
    backend: Backend,
    catalog: Catalog,
    digests: Digests,
    condemned: Condemnation,
    *,
    check_bases: Callable[[], Iterable[str]] = tuple,
    n_bytes: int | None = None,
    before: Places | None = None,
    look_again: Callable[[], Condemnation] | None = None,
    is_fresh: bool = False,
) -> Mask:
    """Find the chunks to write: probe the index, then check that every pack to be relied on exists.

    A save whose intent is withdrawn may write a delta at any later time, and a collector that has not seen it may be
    about to delete the base. The lists are read again if a delta is found that was unknown before the first reading
    (``docs/design/protocol.md``, Deltas).

    Args:
        digests: Distinct digests, named by an intent older than the reading of ``condemned``.
        condemned: Blobs not to be relied on.
        check_bases: Called once; checks other packs to be relied on, and returns the names of those that exist.
        n_bytes: The size of the chunks that this process does not know, if it is known; see `Catalog.refresh`.
        before: Places of the chunks as they were known before the reading of ``condemned``.
        look_again: Reads the condemned lists again; None if a later save repeats this probe and relies on nothing here.
        is_fresh: Whether the same upload has refreshed this process's view of the index before.

    Returns:
        For each digest whether the chunk is missing.
    """
    if condemned.is_unknown:
        check_bases()
        return np.ones(len(digests), bool)
    seen = catalog.seen(condemned.generation)
    doomed = set(condemned.packs)
    bases: Iterable[str] | None = None
    is_known = False
    while True:
        if bases is None:
            # For a remote store, refresh this process's view of the index only if it lacks a chunk.
            is_known = is_fresh or (backend.is_remote and bool(catalog.find_sound(digests, doomed).found.all()))
        if not is_known:
            # Repeated if a pack turned out to be gone: its collector has put the needed chunks elsewhere before.
            seen |= catalog.refresh(n_bytes=n_bytes)
        if bases is None:
            # After the listing of a remote store's packs, which shows most of them.
            bases = check_bases()
            seen |= set(map(pack_key, bases))
        places = catalog.find_sound(digests, doomed)
        used = {pack_key(places.packs[number]) for number in distinct(places.pack[places.found]).tolist()}
        # A delta without its base is no copy.
        used |= set(map(pack_key, catalog.find_chains(places)[1]))
        unseen = used - seen
        gone = backend.missing(unseen) if unseen else set()
        seen |= used - gone
        if not gone:
            if look_again is None or not _has_new_deltas(places, before):
                missing: Mask = ~places.found
                return missing
            condemned = look_again()
            doomed, seen, before = set(condemned.packs), catalog.seen(condemned.generation), places
        catalog.forget({pack_name(key) for key in gone})
        is_known = False


def _has_new_deltas(places: Places, before: Places | None) -> bool:
    """Tell whether deltas among some chunks lie in packs that were not known to hold one of the chunks before."""
    deltas = places.found & is_delta(places.entries)
    if not deltas.any():
        return False
    packs = {places.packs[number] for number in distinct(places.pack[deltas]).tolist()}
    if before is not None:
        packs -= {before.packs[number] for number in distinct(before.pack[before.found]).tolist()}
    return bool(packs)


def write_packs(
    backend: Backend,
    catalog: Catalog,
    payloads: Iterator[Packed],
    condemned: Condemnation,
    *,
    names: Iterable[str] = (),
    note: Callable[[str, Packed], None] | None = None,
    keep: KeepPack | None = None,
) -> int:
    """Write chunks into new packs, durable on return, and add the packs to the index.

    Args:
        condemned: The condemned lists, read after the intent was created.
        names: Names of the first packs, drawn before; those of further ones are drawn here.
        note: Called with the name of a pack and each payload about to go into it.
        keep: See `KeepPack`.

    Returns:
        Size of the packs.
    """
    n_bytes = 0
    for name, writer, pieces in _new_packs(backend, payloads, names=names, note=note):
        backend.put_new(pack_key(name), pieces if keep is None else keep(name, pieces))
        n_bytes += publish(catalog, {name: writer}, condemned)
    return n_bytes


def put_packs(
    backend: Backend,
    payloads: Iterator[Packed],
    beside: Iterable[tuple[str, bytes]],
    keep: KeepPack | None = None,
) -> dict[str, PackWriter]:
    """Write chunks into new packs needed only by a later commit, in a database with their markers; see `put_all`.

    Args:
        beside: Other new blobs, by key, that need not wait for the packs.
        keep: See `KeepPack`.

    Returns:
        The packs by name, for `publish`.
    """
    packs: dict[str, PackWriter] = {}

    def blobs() -> Iterator[tuple[str, Iterable[Buffer]]]:
        for name, writer, pieces in _new_packs(backend, payloads):
            packs[name] = writer
            yield pack_key(name), pieces if keep is None else keep(name, pieces)
            if backend.has_database:
                yield f"index/{name}.loose", []
        for key, blob in beside:
            yield key, [blob]

    backend.put_all(blobs())
    return packs


def _new_packs(
    backend: Backend,
    payloads: Iterator[Packed],
    *,
    names: Iterable[str] = (),
    note: Callable[[str, Packed], None] | None = None,
) -> Iterator[tuple[str, PackWriter, Iterator[Buffer]]]:
    """Lay out chunks in packs: yield name, table and bytes of each; draw the bytes before the next pack."""
    drawn = iter(names)
    for first in payloads:
        writer = PackWriter()
        name = next(drawn, None) or new_pack_name(backend)
        some = _of_one_pack(chain([first], payloads))
        yield name, writer, writer.pieces(some if note is None else _noted(some, partial(note, name)))


def _of_one_pack(payloads: Iterator[Packed]) -> Iterator[Packed]:
    n_bytes = 0
    for payload in payloads:
        yield payload
        n_bytes += payload.n_bytes if isinstance(payload, PayloadGroup) else memoryview(payload.data).nbytes
        if n_bytes >= TARGET_BYTES:
            return


def _noted(payloads: Iterator[Packed], note: Callable[[Packed], None]) -> Iterator[Packed]:
    for payload in payloads:
        note(payload)
        yield payload


def publish(
    catalog: Catalog, packs: Mapping[str, PackWriter], condemned: Condemnation, *, is_marked: bool = False
) -> int:
    """Add written packs to the index, and return their size; see `Catalog.publish`."""
    seen = catalog.seen(condemned.generation)
    for name, writer in packs.items():
        seen.add(pack_key(name))
        catalog.publish(name, writer.entries(), is_marked=is_marked)
    return sum(writer.n_bytes for writer in packs.values())


def manifest_blob(backend: Backend, catalog: Catalog, manifest: Manifest) -> bytes:
    """Return the blob of a manifest with stored chunks: in a remote store with hints, for readers without an index."""
    blob = manifest.to_blob(is_packed=not backend.has_database)
    if backend.is_remote:
        different, first, _ = unique_rows(manifest.stored_digests)
        places = catalog.find(different)
        if is_delta(places.entries).any():
            own = {places.packs[number] for number in distinct(places.pack[places.found]).tolist()}
            blob += pack_hint_bytes(own | catalog.find_chains(places)[1])
        else:
            blob += hint_bytes(places.packs, places.pack, places.entries, np.argsort(first))
    return blob


_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4
_MOST_AT_ONCE_BYTES = 8 << 20
"""So many new bytes are encoded before the backend writes any. Payloads of a larger save are encoded while the backend
draws them, so memory stays bounded."""
_ENTRY_BYTES = 256
"""More than a chunk takes in a pack besides its payload."""
_NOTHING = NoSource((), 1)
_LEAST_SAMPLED_BYTES = 512 << 10
"""In a training all chunks are new in each step. So a smaller table of the shape that it had is not searched for moved
rows there."""


class PendingSave:
    """A checkpoint or file under way, stored and not yet committed: its intent protects it from collections.

    `write` may be called before `commit`, which calls it otherwise. A context manager: an uncommitted save is abandoned
    at its end, and the next collection removes its blobs.
    """

    def __init__(
        self,
        backend: Backend,
        catalog: Catalog,
        manifest: Manifest,
        source: Source,
        *,
        policy: Policy = Policy.BALANCED,
        parents: Parents | None = None,
        is_fresh: bool = False,
    ) -> None:
        """Find the new chunks; see `Store.begin_checkpoint`.

        Args:
            backend: The store's.
            catalog: The store's.
            manifest: Manifest of the saved data.
            source: Its bytes; those of its stored rows, if the manifest has derived rows already.
            policy: Encoding effort.
            parents: Search for its earlier states; None stores everything in full.
            is_fresh: See `probe`.
        """
        self.manifest = manifest
        self.n_stored_bytes = 0
        """Bytes added to the store by this save."""
        self.recut_rows: Sequence[int] = ()
        """Numbers of the rows that this save cut at other places than its source."""
        self._backend = backend
        self._catalog = catalog
        self._source = source
        self._policy = policy
        self._is_fresh = is_fresh
        self._parents = parents if policy is not Policy.FAST else None
        self._choices: SeriesChoices | None = None
        """The choices for the last steps of the series, if it is one."""
        if self._parents is not None and self._parents.series is not None:
            self._choices = self._parents.store.choices.of((self._parents.series, policy))
        self._plan: BasePlan | None = None
        """Possible bases of new chunks; the intent names them."""
        self._moved: MovedParts | None = None
        """New chunks that may be parts of longer ones; the intent names these."""
        self._chooser: Chooser | None = None
        """The choices of a small save."""
        self._in_full = manifest
        """The manifest without the derived rows that this save finds."""
        self._may_derive = self._parents is not None
        """Whether to look for derived rows: once, since a save that begins again stores them in full."""
        self._take(with_derived(manifest, source.derived) if source.derived else manifest)
        self._manifest_name = ""
        self._intent: WrittenIntent | None = None
        self._condemned = Condemnation(lists=(), generation=None)
        self._lock = threading.Lock()
        self._new: Any | None = None
        """Chunks to write: for each its first place, over all rows; ascending. None once all are in the store."""
        self._has_manifest = False
        self._put_keys: list[str] = []
        """Blobs of this save."""
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise
        self.n_new_bytes = int(self._source.sizes[self._new].sum())
        """Size of the chunks missing from the store."""

    def __enter__(self) -> PendingSave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def write(self, *, watch: CountBytes | None = None) -> None:
        """Write the new chunks, and the manifest.

        Args:
            watch: Called with the number of bytes encoded, `n_new_bytes` in all.

        Raises:
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
            ConflictError: An array was changed after it was hashed.
        """
        with self._lock:
            self._check_open()
            self._write(watch)

    def commit(self, target: RefTarget, *, replace: bool = True) -> Ref:
        """Make the save visible and permanent, in one step.

        Args:
            target: Key and facts of the ref.
            replace: Whether the ref may replace an earlier one.

        Raises:
            CheckpointExistsError: There is one and ``replace`` is False; it is untouched.
            FencedError: Collectors gave this save up again and again; nothing is committed.
            StoreNotFoundError: Somebody deleted the store meanwhile; nothing is committed.
            ConflictError: Somebody created another store in its place; nothing is committed.
            BackendError: The storage failed; if it failed at the very end the commit may have happened.
        """
        key = target.key
        with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                intent = self._check_open()
                self._write()
                ref = new_ref(
                    target,
                    key=key,
                    kind=self.manifest.kind,
                    manifest=self._manifest_name,
                    n_bytes=self._shown_bytes(),
                    flavor=self.manifest.flavor,
                )
                data = ref_bytes(ref)
                source, token = intent
                try:
                    self._backend.promote(source, key, data, token=token, replace=replace)
                except BlobNotFoundError:
                    self._begin()
                except BlobExistsError:
                    raise CheckpointExistsError(ref.label) from None
                else:
                    self._intent = None
                    if self._parents is not None:
                        self._parents.note(self.manifest)
                        if self.manifest.sketches:
                            note_saved(self._parents.store.id, self._parents.series, self._manifest_name, self.manifest)
                    self.n_stored_bytes += len(data)
                    self._catalog.fold()
                    return ref
            raise FencedError(_MAX_ATTEMPTS)

    def abandon(self) -> None:
        """Give the save up. Does nothing after a commit or an abandon."""
        intent, self._intent = self._intent, None
        self._source = _NOTHING  # a stored error would keep the bytes alive too
        if intent is not None:
            try:
                self._backend.withdraw(*intent, own=self._put_keys)
            except BackendError as error:
                # The caller wants the reason for giving up, not this error. A leftover intent costs little.
                _log.warning("a save was given up, and %s", error)

    def _check_open(self) -> WrittenIntent:
        if self._intent is None:
            raise ValueError("this save is committed or abandoned already")
        return self._intent

    def _shown_bytes(self) -> int:
        return self.manifest.n_bytes if self.manifest.kind == "file" else len(self.manifest.stream)

    def _take(self, manifest: Manifest) -> None:
        """Take a manifest of the saved data, and find the distinct chunks that it keeps."""
        self.manifest = manifest
        self._unique, self._first, _ = unique_rows(manifest.stored_digests)
        if manifest is not self._in_full:
            # The source counts the chunks of all rows of the content, then those of the inputs that the save stores.
            rows = manifest.stored_rows
            content = manifest.columns.chunks_of(rows[rows < len(manifest.columns)])
            self._first = np.append(content, places_of_inputs(manifest, self._source))[self._first]

    def _begin(self) -> None:
        """Take steps 1 to 3 of the protocol: create the intent, read the condemned lists, probe the index."""
        # The intent must name possible bases before the save knows the missing chunks: the index gives an estimate.
        before = self._catalog.find_sound(self._unique, ())
        missing = ~before.found
        self._plan = self._moved = None
        if self._parents is not None and missing.any():
            new = self._first[missing & (self._first >= 0)]
            new.sort()
            self._plan = self._parents.plan(self._source, new)
            if self._may_derive:
                self._may_derive = False
                if self._parents.seen and self._recut(new, self._parents):
                    before = self._catalog.find_sound(self._unique, ())
                    missing = ~before.found
                    new = self._first[missing & (self._first >= 0)]
                    new.sort()
                    self._plan = self._parents.plan(self._source, new)
                found = self._parents.derive(self._source, new, self._plan)
                if found:
                    self._take(with_derived(self._in_full, {**self._source.derived, **found}))
                    before = self._catalog.find_sound(self._unique, ())
                    missing = ~before.found
            if self._source.moves:
                new = np.sort(self._first[missing & (self._first >= 0)])
                self._moved = MovedParts.of(self._catalog, self._parents.store.chunks, self._source, new)
        self._declare(self._catalog.known_manifest(self.manifest.digest))
        missing = probe(
            self._backend,
            self._catalog,
            self._unique,
            self._condemned,
            check_bases=self._check_bases,
            n_bytes=self._most_bytes(missing),
            before=before,
            look_again=self._look_again,
            is_fresh=self._is_fresh,
        )
        self._new = np.sort(self._first[missing])
        if self.manifest.derived and (self._new < 0).any():
            self._begin_in_full()

    def _recut(self, new: Any, parents: Parents) -> bool:
        """Cut tables like an earlier checkpoint that has their rows at other places; tell whether there are any."""
        least_bytes = _LEAST_SAMPLED_BYTES
        if self._choices is not None and not self._choices.has_gained:
            least_bytes = 0  # nothing looks like a training
        if parents.is_on_the_same_rows and np.maximum.reduce(self._source.columns.n_bytes) < least_bytes:
            return False
        from tensorcas_mlflow.store._recut import recut  # few saves need it

        store = parents.store
        found = recut(self._source, new, store.chunks, store.chunk_bytes, parents.seen, self._plan, least_bytes)
        if found is None:
            return False
        if parents.nearest is None:
            parents.nearest = parents.seen[0]
        self.recut_rows = sorted(found.moves)
        self._source, self._in_full = found, replace(self._in_full, rows=found.content)
        self._take(with_derived(self._in_full, found.derived))
        return True

    def _begin_in_full(self) -> None:
        """Begin again without derived rows: a collector has deleted inputs."""
        assert self._intent is not None
        self._backend.withdraw(*self._intent, own=())
        self._take(self._in_full)
        self._begin()

    def _most_bytes(self, missing: Mask) -> int | None:
        """Return the size of some chunks; None if the save cannot write them all, and so has to find them."""
        chunks = self._first[missing]
        if (chunks < 0).any() or not self._source.holds(chunks).all():
            return None
        return int(self._source.sizes[chunks].sum())

    def _check_bases(self) -> Collection[str]:
        """Leave out the possible bases in condemned or deleted packs; return the packs of the others."""
        plans = [] if self._plan is None else [self._plan]
        if self._moved is not None:
            plans.append(self._moved.plan)
        return {pack for plan in plans for pack in plan.leave_out(self._backend, self._condemned)}

    def _write(self, watch: CountBytes | None = None) -> None:
        """Take steps 4 and 5: afterwards everything the save relies on exists, and stays as long as the intent does."""
        if self._new is None and self._has_manifest:
            return
        # In a remote store a manifest's blob has hints of its chunks' places, known only after the packs are written.
        is_together = not self._backend.is_remote
        if self._new is not None:
            sizes = self._source.sizes[self._new]
            payloads = self._payloads(self._new)
            if watch is not None:
                payloads = _watched(payloads, sizes, watch)
            n_bytes = int(sizes.sum())
            if n_bytes <= _MOST_AT_ONCE_BYTES:
                payloads = iter(list(payloads))
            n_stored_bytes = self._put(payloads, with_manifest=is_together and not self._has_manifest)
            if n_stored_bytes and self._chooser is not None:
                self._chooser.note_share(n_stored_bytes / n_bytes)
            self._new = None
        if not self._has_manifest:
            self._put(iter(()), with_manifest=True)

    def _payloads(self, new: Any) -> Iterator[PayloadGroup]:
        if self._moved is None:
            return self._encoded(new)
        is_moved = np.isin(new, self._moved.chunks)
        moved = encode_moved(self._source, new[is_moved], self._moved.plan, self._moved.offset_of)
        return chain(self._encoded(new[~is_moved]), moved)

    def _encoded(self, new: Any) -> Iterator[PayloadGroup]:
        n_bytes = int(self._source.sizes[new].sum())
        leaves_text = self._backend.has_database and n_bytes + _ENTRY_BYTES * len(new) <= MOST_SHARED_BYTES
        if self._parents is None or n_bytes > MOST_SAVED_BYTES:
            return encode_chunks(self._source, new, self._policy, self._plan, leaves_text=leaves_text)
        # For a small state, choosing and decoding would take most of the time. The next step finds both done.
        self._chooser, keep = new_chooser(self._policy, self._choices), self._catalog.recent.note
        return encode_chunks(
            self._source, new, self._policy, self._plan, self._chooser, keep=keep, leaves_text=leaves_text
        )

    def _put(self, payloads: Iterator[PayloadGroup], *, with_manifest: bool) -> int:
        """Write packs, and the manifest; return the size of the packs."""
        key = f"manifests/{self._manifest_name}"
        if with_manifest and self._parents is not None:
            n_bytes = self.n_new_bytes
            if self.manifest.derived:
                n_bytes += int(self.manifest.columns.n_bytes[[each.row for each in self.manifest.derived]].sum())
            a_row = STEP_BYTES if self._parents.is_step else FIRST_BYTES
            if n_bytes >= a_row or self._source.known_words:
                known = self._parents.words
                self.manifest = sketched(self.manifest, self._source, n_bytes // a_row, known=known)
        beside = {key: manifest_blob(self._backend, self._catalog, self.manifest)} if with_manifest else {}
        # Imported only for a remote store: other saves need no reader.
        keep = self._parents.store.chunks.kept if self._parents is not None and self._backend.is_remote else None
        packs = put_packs(self._backend, payloads, beside.items(), keep)
        self._put_keys += [*map(pack_key, packs), *(f"index/{name}.loose" for name in packs), *beside]
        if with_manifest:
            self._catalog.seen(self._condemned.generation).add(key)
            self._catalog.know_manifest(self.manifest.digest, self._manifest_name)
            self._has_manifest = True
            self.n_stored_bytes += len(beside[key])
        n_bytes = publish(self._catalog, packs, self._condemned, is_marked=self._backend.has_database)
        self.n_stored_bytes += n_bytes
        return n_bytes

    def _declare(self, known: str | None) -> None:
        """Create the intent, and only then read the condemned lists.

        Args:
            known: Name of a manifest with the same content, to rely on like on a pack, if it still exists.
        """
        # A collector treated as dead may still be about to delete its condemned blobs. So a newly written manifest gets
        # a name never used before.
        self._manifest_name = known or f"{self.manifest.digest}.{new_name()[:8]}"
        bases = self._plan.packs if self._plan is not None else frozenset()
        if self._moved is not None:
            bases |= self._moved.plan.packs
        self._intent = declare(self._backend, self._manifest_name, self._unique, bases)
        self._condemned = look(self._backend, self._catalog)
        self._has_manifest = known is not None
        is_doomed = self._condemned.is_unknown or known in self._condemned.manifests
        if known is not None and (is_doomed or not self._is_there(f"manifests/{known}")):
            self._backend.withdraw(*self._intent, own=())
            self._declare(None)

    def _look_again(self) -> Condemnation:
        self._condemned = look(self._backend, self._catalog)
        return self._condemned

    def _is_there(self, key: str) -> bool:
        seen = self._catalog.seen(self._condemned.generation)
        if key not in seen and self._backend.stat(key) is not None:
            seen.add(key)
        return key in seen


def _watched(payloads: Iterator[PayloadGroup], sizes: Any, watch: CountBytes) -> Iterator[PayloadGroup]:
    begin = 0
    for group in payloads:
        yield group
        watch(int(sizes[begin : begin + len(group.entries)].sum()))
        begin += len(group.entries)

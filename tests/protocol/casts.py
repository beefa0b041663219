"""The actors, what they are given at the start, and what must be true in the end."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import bases_of, is_delta, read_segment
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, plan_repair, read_source
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import FORMAT, list_packs, new_format, read_condemned, read_pack_table, read_refs
from tests.faulty import FaultyBackend
from tests.forms.forming import SIDE, transposed
from tests.protocol.interleave import Blobs, Program, Run, blobs_of, memory_of

CHUNK_BYTES = 4096
RUN_ID = "run"
STORE_ID = "5" * 32
LETTERS = "abcdefg"
WITNESS = "witness"
"""Prefix of a repairer's notes; no store uses it."""


def chunk(letter: str) -> Array:
    """The bytes of one incompressible chunk, the same for the same letter; a capital is the other one, transposed."""
    if letter.isupper():
        return transposed(chunk(letter.lower())).reshape(-1)
    return np.random.default_rng(ord(letter)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def tensors_of(letters: str) -> dict[str, Array]:
    """A checkpoint of one chunk a letter."""
    return {letter: chunk(letter).reshape(SIDE, SIDE) for letter in letters}


def key_of(step: int) -> str:
    return RefTarget(run_id=RUN_ID, step=step).key


class _Witness(FaultyBackend):
    """Backend of a repairer: it notes the existing refs before each deletion of a pack."""

    def delete(self, *keys: str) -> None:
        for key in keys:
            if key.startswith("packs/"):
                there = sorted(info.key for info in self.inner.list("refs"))
                self.inner.put_new(f"{WITNESS}/{uuid.uuid4().hex}", ["\n".join(there).encode()])
            super().delete(key)


def open_store(backend: Backend) -> Store:
    """A store with a catalog of its own, without asking the backend anything."""
    return Store(backend, store_id=STORE_ID, chunk_bytes=CHUNK_BYTES)


def save(store: Store, letters: str, step: int) -> None:
    with store.write_checkpoint(tensors_of(letters)) as pending:
        pending.commit(RefTarget(run_id=RUN_ID, step=step))


def save_stream(store: Store, letters: str, step: int) -> None:
    """Save a file of one chunk a letter, each of them a batch of its own."""
    data = b"".join(chunk(letter).tobytes() for letter in letters)
    with store.write_stream(io.BytesIO(data)) as pending:
        pending.commit(RefTarget(run_id=RUN_ID, step=step))


def copy_to(destination: Store, source: Store) -> None:
    """Copy everything; what comes of it is in the destination."""
    refs, _ = read_source(source)
    copy_refs(source, destination, refs)


def load(store: Store, ref: Ref) -> Mapping[str, Array]:
    """Read what was saved, of either kind."""
    if ref.kind == "checkpoint":
        return store.read_tensors(store.manifest(ref), verify=True)
    data = b"".join(store.iter_file(ref))
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return {next(letter for letter in LETTERS if chunk(letter).tobytes() == part): chunk_of(part) for part in chunks}


def chunk_of(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def collect(store: Store, *, grace_s: float = 0, max_waste: float = 0.3) -> None:
    plan_gc(store, grace_s=grace_s, max_waste=max_waste).execute()


@dataclass
class Cast:
    """A play: what there is at the start, and who acts."""

    before: Mapping[int, str] = field(default_factory=dict)
    """Steps saved at the start, each in a pack of its own, and their chunks."""
    actors: dict[str, Program] = field(default_factory=dict)
    may_hold: dict[int, set[str]] = field(default_factory=dict)
    """Letters that a step may hold in the end."""
    dropped: set[int] = field(default_factory=set)
    saved_by: dict[str, int] = field(default_factory=dict)
    """The step of each writer: it must be there once the writer is done."""
    prepare: Callable[[Store], None] | None = None
    """Further preparation before the start."""
    start: Blobs | None = None
    """Blobs at the start, if they are known already."""
    abandons_in_the_end: bool = False
    """True if the last collections give up saves through a carrier; no other collection does."""

    def blobs(self) -> Blobs:
        """Return the blobs of the backend at the start; every call returns the same."""
        if self.start is not None:
            return self.start
        memory = MemoryBackend()
        memory.put_new(FORMAT, [new_format(CHUNK_BYTES, STORE_ID)])
        for step, letters in self.before.items():
            apart = memory_of({FORMAT: memory.get(FORMAT)})
            save(open_store(apart), letters, step)
            for key, data in blobs_of(apart).items():
                if memory.stat(key) is None:
                    memory.put_new(key, [data])
            self.may_hold.setdefault(step, set()).add(letters)
        if self.prepare is not None:
            self.prepare(open_store(memory))
        self.start = blobs_of(memory)
        return self.start

    def drop(self, *steps: int) -> Cast:
        """Drop the refs of some steps before the start."""
        gone = {key_of(step) for step in steps}
        self.start = {key: data for key, data in self.blobs().items() if key not in gone}
        self.dropped.update(steps)
        return self

    def writer(self, name: str, letters: str, step: int, *, warm_from: Blobs | None = None) -> Cast:
        """Add a writer; with ``warm_from`` it has read the index of an earlier time."""

        def program(backend: Backend) -> None:
            store = open_store(backend)
            if warm_from is not None:
                early = open_store(memory_of(warm_from))
                early.catalog.refresh()
                early.catalog._backend = backend
                store.catalog = early.catalog
            save(store, letters, step)

        self.actors[name] = program
        self.may_hold.setdefault(step, set()).add(letters)
        self.saved_by[name] = step
        return self

    def trainer(self, name: str, letters: str, *steps: int) -> Cast:
        """Add a writer that saves the same again and again, with one store object."""

        def program(backend: Backend) -> None:
            store = open_store(backend)
            for step in steps:
                save(store, letters, step)

        self.actors[name] = program
        for step in steps:
            self.may_hold.setdefault(step, set()).add(letters)
        self.saved_by[name] = steps[-1]
        return self

    def stream(self, name: str, letters: str, step: int) -> Cast:
        """Add a writer of a file that streams in."""

        def program(backend: Backend) -> None:
            save_stream(open_store(backend), letters, step)

        self.actors[name] = program
        self.may_hold.setdefault(step, set()).add(letters)
        self.saved_by[name] = step
        return self

    def copier(self, name: str, letters_by_step: Mapping[int, str], *, blobs: Blobs | None = None) -> Cast:
        """Add somebody who copies steps from another store of the same id.

        Args:
            name: Of the actor.
            letters_by_step: What the source has.
            blobs: The source's, if not each step is to have a pack of its own there.
        """
        source = memory_of(Cast(before=letters_by_step).blobs() if blobs is None else blobs)

        def program(backend: Backend) -> None:
            copy_to(open_store(backend), open_store(source))

        self.actors[name] = program
        for step, letters in letters_by_step.items():
            self.may_hold.setdefault(step, set()).add(letters)
        return self

    def collector(self, name: str, *, grace_s: float = 0, max_waste: float = 0.3, rounds: int = 1) -> Cast:
        def program(backend: Backend) -> None:
            store = open_store(backend)
            for _ in range(rounds):
                collect(store, grace_s=grace_s, max_waste=max_waste)

        self.actors[name] = program
        return self

    def repairer(self, name: str) -> Cast:
        """Add somebody who repairs what is damaged, without another store, and notes what was committed before."""

        def program(backend: Backend) -> None:
            plan_repair(open_store(_Witness(backend))).execute()

        self.actors[name] = program
        return self

    def executor(self, name: str, planned_on: Blobs, *, grace_s: float = 0, max_waste: float = 0.3) -> Cast:
        """Add a collector that made its plan at an earlier time."""
        plan = plan_gc(open_store(memory_of(planned_on)), grace_s=grace_s, max_waste=max_waste)

        def program(backend: Backend) -> None:
            replace(plan, store=open_store(backend)).execute()

        self.actors[name] = program
        return self

    def deletion(self, name: str, *steps: int) -> Cast:
        def program(backend: Backend) -> None:
            for step in steps:
                backend.delete(key_of(step))

        self.actors[name] = program
        self.dropped.update(steps)
        return self

    def saver_again(self, name: str, letters: str, step: int) -> Cast:
        """Add somebody who deletes a step and then saves it anew."""

        def program(backend: Backend) -> None:
            backend.delete(key_of(step))
            save(open_store(backend), letters, step)

        self.actors[name] = program
        self.may_hold.setdefault(step, set()).add(letters)
        self.saved_by[name] = step
        return self

    def reader(self, name: str, step: int) -> Cast:
        """Add a reader of a step, which must find it whole unless it is dropped or replaced meanwhile."""

        def program(backend: Backend) -> None:
            store = open_store(backend)
            ref = store.ref(key_of(step))
            if ref is None:
                return
            try:
                found = load(store, ref)
            except Exception:
                if store.ref(key_of(step)) == ref:
                    raise
                return
            self.check_tensors(step, found)

        self.actors[name] = program
        return self

    def lister(self, name: str) -> Cast:
        """Add somebody who lists the store, and must find each checkpoint as it was at some time of the listing."""

        def program(backend: Backend) -> None:
            store = open_store(backend)
            before = {info.key: store.ref(info.key) for info in backend.list("refs")}
            listed = {ref.key: ref for ref in store.checkpoints()}
            after = {key: store.ref(key) for key in {*before, *listed}}
            for key, ref in before.items():
                if ref is not None and after[key] == ref:
                    assert listed.get(key) == ref, f"the listing has {listed.get(key)} at {key}, and not {ref}"
            for key, ref in listed.items():
                assert ref.step is not None
                try:
                    found = load(store, ref)
                except Exception:
                    if store.ref(key) == ref:
                        raise
                    continue
                self.check_tensors(ref.step, found)

        self.actors[name] = program
        return self

    def check_tensors(self, step: int, found: Mapping[str, Array]) -> None:
        letters = "".join(sorted(found))
        assert letters in {"".join(sorted(each)) for each in self.may_hold[step]}, f"step {step} holds {letters}"
        for letter, array in found.items():
            assert np.array_equal(array.reshape(-1), chunk(letter)), f"step {step} is not what was saved"

    def seen(self, memory: MemoryBackend) -> Backend:
        """Give the backend through which it is looked what a run has left."""
        return memory

    def check(self, run: Run) -> str | None:
        """Say what is wrong after a run."""
        try:
            for name, error in run.errors().items():
                if not isinstance(error, ConflictError):
                    raise AssertionError(f"{name} raised {error!r}") from error
            self._check_loads(run, "after the run")
            _check_cleans_up(self.seen(run.memory), abandon=self.abandons_in_the_end)
            self._check_loads(run, "after the last collection")
        except AssertionError as error:
            return str(error)
        return None

    def _check_loads(self, run: Run, when: str) -> None:
        store = open_store(self.seen(memory_of(blobs_of(run.memory), is_remote=run.memory.is_remote)))
        steps = set()
        for ref in store.checkpoints():
            assert ref.step is not None
            steps.add(ref.step)
            try:
                found = load(store, ref)
            except Exception as error:
                raise AssertionError(f"LOSS {when}: step {ref.step} does not load: {error}") from error
            self.check_tensors(ref.step, found)
        for actor in run.actors:
            step = self.saved_by.get(actor.name)
            if step is not None and actor.done and not actor.killed and actor.error is None:
                assert step in steps or step in self.dropped, f"LOSS {when}: step {step} was committed and is gone"
        for step in self.before:
            assert step in steps or step in self.dropped, f"LOSS {when}: step {step} is gone"


def _check_cleans_up(backend: Backend, *, abandon: bool) -> None:
    """Collect twice, after which nothing may be left that no ref needs."""
    store = open_store(backend)
    try:
        for _ in range(2):
            ids = [info.key.rpartition("/")[2] for info in backend.list("intents")] if abandon else []
            plan_gc(store, grace_s=0, max_waste=0, abandon=ids).execute()
    except Exception as error:
        raise AssertionError(f"the last collection raised {error!r}") from error
    refs = read_refs(backend)
    names = {ref.manifest for ref in refs if ref.of is None}
    forms = {ref.of: ref for ref in refs if ref.of is not None}
    assert forms.keys() <= names, "LEAK: a form of a manifest that no ref names"
    stored = [forms.get(ref.manifest, ref) for ref in refs if ref.of is None]
    live = {row.tobytes() for ref in stored for row in store.manifest(ref).stored_digests}
    packs = {name for name, _ in list_packs(backend)}
    tables = {name: read_pack_table(backend, name) for name in packs}
    bases = _needed_bases(tables, live)
    for name, table in tables.items():
        held = {entry["digest"].tobytes() for entry in table}
        # A pack with a base that is needed is not rewritten.
        assert held <= live or name in {pack for pack, _ in bases}, f"LEAK: pack {name} holds chunks nobody needs"
    held_manifests = {info.key for info in backend.list("manifests")}
    leaks = [info.key for info in backend.list("intents")]
    # The list of a dead collector stays as long as a manifest on it is needed; see `Survey.dead_lists`.
    needed = {ref.manifest for ref in refs}
    leaks += [each.key for each in read_condemned(backend).lists if each.packs & packs or not each.manifests & needed]
    leaks += sorted(held_manifests - {f"manifests/{ref.manifest}" for ref in refs})
    for info in backend.list("index"):
        if info.key.endswith(".loose"):
            named = {info.key.removeprefix("index/").removesuffix(".loose")}
        else:
            named = set(read_segment(info.key, backend.get(info.key)).packs)
        leaks += [f"{info.key} (names {name})" for name in named - packs]
    assert not leaks, f"LEAK: {leaks}"


def _needed_bases(tables: Mapping[str, Any], live: set[bytes]) -> set[tuple[str, bytes]]:
    """The copies, by pack and digest, that deltas of needed chunks take to be decoded."""
    found: set[tuple[str, bytes]] = set()
    while True:
        deltas = [
            base
            for name, table in tables.items()
            for entry in table[is_delta(table)]
            if entry["digest"].tobytes() in live or (name, entry["digest"].tobytes()) in found
            for base in bases_of(entry.reshape(1))
        ]
        more = {(base.pack, base.digest) for base in deltas} - found
        if not more:
            return found
        found |= more

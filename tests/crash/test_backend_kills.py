"""A process may die at any call of its backend, whatever it does and wherever the store is."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, verify
from tensorcas_mlflow.store import Store, _ingest, protocol
from tests.crash.scenarios import source
from tests.crash.world import CHUNK_BYTES, chunk, long_file
from tests.faulty import FaultyBackend, SimulatedCrash

Holds = dict[str, bytes]
"""Contents of a store by the key of the ref: the letters of a checkpoint's tensors, or a file's bytes."""


def save(store: Store, step: int, letters: str) -> Ref:
    with store.write_checkpoint({letter: chunk(letter) for letter in letters}) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


def drop(store: Store, step: int) -> None:
    ref = store.ref(RefTarget(run_id="run", step=step).key)
    assert ref is not None
    store.drop(ref)


def upload(store: Store) -> None:
    with store.write_stream(io.BytesIO(long_file("abklmnop"))) as pending:
        pending.commit(RefTarget(path="file"))


def prepare(backend: Backend) -> Store:
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    for step, letters in ((1, "abcd"), (2, "cdef"), (3, "gh")):
        save(store, step, letters)
    return store


def died_over_a_list(store: Store) -> None:
    packs = frozenset(name for name, _ in protocol.list_packs(store.backend))
    manifests = frozenset(info.key.removeprefix("manifests/") for info in store.backend.list("manifests"))
    store.backend.put_new("condemned/" + "a" * 32, [protocol.condemned_bytes(packs, manifests)])
    drop(store, 2)


def nothing(store: Store) -> None:
    """Leave it as it is."""


@dataclass(frozen=True, slots=True)
class Act:
    before: Callable[[Store], None]
    act: Callable[[Store], object]
    least_calls: int = 4


ACTS = {
    "save": Act(nothing, lambda store: save(store, 4, "abx"), 8),
    "replace": Act(nothing, lambda store: save(store, 1, "xy"), 8),
    "stream": Act(nothing, upload, 15),
    "drop": Act(nothing, lambda store: drop(store, 1), 2),
    "collect": Act(lambda store: drop(store, 3), lambda store: plan_gc(store, grace_s=0).execute(), 20),
    "compact": Act(lambda store: drop(store, 1), lambda store: plan_gc(store, grace_s=0, max_waste=0).execute(), 20),
    "finish": Act(died_over_a_list, lambda store: plan_gc(store, grace_s=0).execute(), 20),
    "copy": Act(nothing, lambda store: copy_refs(source(), store, source().checkpoints()), 15),
}


def held(backend: Backend) -> Holds:
    """Load everything."""
    store = Store.open_backend(backend)
    found: Holds = {}
    for ref in store.checkpoints():
        if ref.kind == "file":
            found[ref.key] = b"".join(bytes(piece) for piece in store.iter_file(ref))
            continue
        loaded = store.read_tensors(store.manifest(ref))
        for letter, array in loaded.items():
            assert array.tobytes() == chunk(letter).tobytes()
        found[ref.key] = "".join(sorted(loaded)).encode()
    return found


def check_after(inner: Backend, before: Holds, after: Holds) -> None:
    """See that each thing is as it was before or as it was to be, and that the store serves."""
    now = held(inner)
    for key in before.keys() | after.keys() | now.keys():
        assert now.get(key) in (before.get(key), after.get(key)), key
    store = Store.open_backend(inner)
    save(store, 999, "azY")
    for _ in range(2):
        plan_gc(Store.open_backend(inner), grace_s=0, max_waste=0).execute()
    live = {row.tobytes() for ref in store.checkpoints() for row in store.manifest(ref).digests}
    packs = [name for name, _ in protocol.list_packs(inner)]
    chunks = [entry["digest"].tobytes() for name in packs for entry in protocol.read_pack_table(inner, name)]

    assert held(inner) == {**now, RefTarget(run_id="run", step=999).key: b"Yaz"}
    assert sorted(chunks) == sorted(live)
    assert list(inner.list("intents")) == []
    assert verify(Store.open_backend(inner), full=True).problems == ()


def check_all_calls(name: str, make: Callable[[int], Backend], *, when: str, crash: bool, every: int = 1) -> int:
    """Let an act die, or fail, at each of its backend's calls; returns at how many."""
    act = ACTS[name]
    inner = make(-1)
    act.before(prepare(inner))
    before = held(inner)
    act.act(Store.open_backend(inner))
    after = held(inner)
    n_met = 0
    for nth in range(0, 10_000, every):
        inner = make(nth)
        act.before(prepare(inner))
        faulty = FaultyBackend(inner)
        dying = Store.open_backend(faulty)
        (faulty.crash if crash else faulty.fail)(nth, when=when)  # type: ignore[arg-type]
        with suppress(SimulatedCrash, BackendError):
            act.act(dying)
        if not faulty.has_met():
            break
        n_met += 1
        check_after(inner, before, after)
    return n_met


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(_ingest, "_LOOK_BYTES", 4096)


@pytest.mark.parametrize("name", ACTS)
def test_a_death_at_some_call_leaves_only_garbage(name: str) -> None:
    assert check_all_calls(name, lambda _: MemoryBackend(), when="after", crash=True, every=11) > 0


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "remote", "local"])
@pytest.mark.parametrize("name", ACTS)
def test_a_death_at_any_call_leaves_only_garbage(tmp_path: Path, name: str, kind: str, when: str) -> None:
    n_met = check_all_calls(name, maker(kind, tmp_path), when=when, crash=True)

    assert n_met >= ACTS[name].least_calls


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "remote", "local"])
@pytest.mark.parametrize("name", ACTS)
def test_a_failure_at_any_call_leaves_only_garbage(tmp_path: Path, name: str, kind: str, when: str) -> None:
    n_met = check_all_calls(name, maker(kind, tmp_path), when=when, crash=False)

    assert n_met >= ACTS[name].least_calls


def test_a_stream_is_stored_though_the_intent_of_a_batch_cannot_be_removed() -> None:
    inner = MemoryBackend()
    prepare(inner)
    faulty = FaultyBackend(inner)
    faulty.fail(0, operations={"delete"})
    upload(Store.open_backend(faulty))

    assert faulty.has_met()
    check_after(inner, held(inner), held(inner))


def maker(kind: str, folder: Path) -> Callable[[int], Backend]:
    if kind == "local":
        return lambda nth: LocalBackend(folder / str(nth))
    return lambda _: MemoryBackend(is_remote=kind == "remote")

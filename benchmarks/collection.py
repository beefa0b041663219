"""Cost of a collection after one new and one deleted step, in a store of many steps.

With a census, a collection reads only newer content; the first one, or one after the census was removed, reads
everything. Both are shown, for a folder and for a store in memory used as if it were remote: calls of the backend,
bytes read, and seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from benchmarks.harness import Options, Section, Table, show_bytes
from tensorcas_mlflow.backends import Backend, BlobInfo, LocalBackend, MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store

TITLE = "a collection after one new step and one that was dropped"
CHUNK_BYTES = 4096
N_STEPS = 5000
N_CHUNKS = 260
"""Chunks of a step; one in fifty is new."""


class _Counted(Backend):
    """Counts calls, and bytes read."""

    def reset(self) -> None:
        """Begin to count."""
        self.calls: Counter[str] = Counter()
        self.read_bytes = 0

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = super().get(key, max_bytes=max_bytes)  # type: ignore[safe-super]
        self.calls["get " + key.partition("/")[0]] += 1
        self.read_bytes += len(data)
        return data

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.calls["read " + key.partition("/")[0]] += 1
        self.read_bytes += len(out)
        super().read_into(key, start, out)  # type: ignore[safe-super]

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        self.calls["list"] += 1
        return super().list(prefix, after=after)  # type: ignore[safe-super]


class _Local(_Counted, LocalBackend):
    pass


class _Memory(_Counted, MemoryBackend):
    pass


def _save(store: Store, state: np.ndarray, step: int) -> Ref:
    rng = np.random.default_rng(step)
    for at in rng.integers(0, len(state), max(1, len(state) // 50)):
        state[at] = rng.integers(0, 1 << 62, CHUNK_BYTES // 8)
    with store.write_checkpoint({"state": state}) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


def _measure(store: Store, what: str, table: Table) -> None:
    backend = store.backend
    assert isinstance(backend, _Counted)
    backend.reset()
    begin = time.perf_counter()
    report = plan_gc(store, grace_s=0).execute()
    seconds = time.perf_counter() - begin
    calls = ", ".join(f"{n} {name}" for name, n in sorted(backend.calls.items()))
    n_calls, deleted = str(sum(backend.calls.values())), str(report.n_manifests)
    table.add(what, n_calls, show_bytes(backend.read_bytes), f"{seconds:.2f}", deleted, calls)


def run(options: Options) -> Section:
    """Collect for the first time, three times after one more step, and without the census."""
    section = Section("collection", TITLE)
    n_steps, n_chunks = (20, 52) if options.is_smoke else (N_STEPS, N_CHUNKS)
    columns = ("store, collection", "calls", "read", "s", "manifests deleted", "which calls")
    table = Table(f"{n_steps} steps of {n_chunks} chunks, one in fifty of them new", columns)
    with options.folder() as folder:
        for name, backend in (("folder", _Local(folder)), ("remote", _Memory(is_remote=True))):
            backend.reset()
            store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
            state = np.zeros((n_chunks, CHUNK_BYTES // 8), np.int64)
            refs = [_save(store, state, step) for step in range(n_steps)]
            _measure(store, f"{name}, the first", table)
            for again in range(3):
                store.drop(refs.pop(again * n_steps // 50))
                refs.append(_save(store, state, n_steps + again))
                _measure(store, f"{name}, one step later", table)
            for info in list(backend.list("census")):
                backend.delete(info.key)
            store.drop(refs.pop(0))
            _measure(store, f"{name}, without the census", table)
    section.tables.append(table)
    return section

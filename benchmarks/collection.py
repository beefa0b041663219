"""What a collection costs after one new step and one that was dropped, in a store of many.

A collection that finds a census reads what has come since; the first one, or one after the census was removed, reads
all. Both are shown, for a folder and for a store in memory that is used as if it were far away: calls of the backend,
bytes read, and seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo, LocalBackend, MemoryBackend
from tensorcas_mlflow.gc import plan_gc
from tensorcas_mlflow.store import Ref, RefTarget, Store

CHUNK_BYTES = 4096


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


def _measure(store: Store, what: str) -> None:
    backend = store.backend
    assert isinstance(backend, _Counted)
    backend.reset()
    begin = time.perf_counter()
    report = plan_gc(store, grace_s=0).execute()
    seconds = time.perf_counter() - begin
    calls = ", ".join(f"{n} {name}" for name, n in sorted(backend.calls.items()))
    print(f"  {what}: {sum(backend.calls.values())} calls, {backend.read_bytes / 1e6:.1f} MB read, {seconds:.2f} s")
    print(f"    {calls}; {report.n_manifests} manifests deleted")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--chunks", type=int, default=260, help="of a step; one in fifty is new")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, backend in (("local", _Local(Path(folder))), ("remote", _Memory(is_remote=True))):
            backend.reset()
            store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
            state = np.zeros((options.chunks, CHUNK_BYTES // 8), np.int64)
            refs = [_save(store, state, step) for step in range(options.steps)]
            print(f"{name}: {options.steps} steps of {options.chunks} chunks")
            _measure(store, "first collection")
            for again in range(3):
                store.drop(refs.pop(again * 100))
                refs.append(_save(store, state, options.steps + again))
                _measure(store, "one step later")
            for info in list(backend.list("census")):
                backend.delete(info.key)
            store.drop(refs.pop(0))
            _measure(store, "without the census")


if __name__ == "__main__":
    main()

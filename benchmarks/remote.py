"""Cost of saving to and loading from an object store, against one upload or download of the same bytes.

The store is a real S3 server on loopback (LocalStack's, see ``make object-servers``) behind a proxy with a delay for
every request and a bound on the bandwidth. Saves, loads and the peer take turns. The peer is one multipart upload or
download of a file with the same bytes as the store's. The medians are shown, with the numbers of requests.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import S3Store

from benchmarks.data import transformer
from benchmarks.harness import Options, Section, Table
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import Store
from tests.backends.objects.proxy import Proxy, proxy
from tests.backends.objects.relay import Link
from tests.backends.objects.servers import S3Server, localstack
from tests.backends.objects.stores import backend_of

TITLE = "a store far away, against plain uploads and downloads"
N_BYTES = 650_000_000
N_ROUNDS = 3
PEERS = {"first save": "upload of", "load, no cache": "download of"}
LATENCY_S = 0.03
BYTES_PER_S = 1e9
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 16


def timed(act: Callable[[], Any], way: Proxy) -> tuple[float, int, int, Any]:
    """Run an action; return seconds, billed requests, bytes both ways, and its result."""
    way.forget()
    begin = time.perf_counter()
    result = act()
    taken = time.perf_counter() - begin
    traffic = way.traffic()
    return taken, traffic.n_billed, traffic.up_bytes + traffic.down_bytes, result


class Bench:
    """One server behind one slow way."""

    def __init__(self, server: S3Server, way: Proxy, bucket: str, data: Path) -> None:
        self._data = data
        self._at = server.at(way.endpoint)
        self._way = way
        self._bucket = bucket
        self._plain = S3Store(**{**self._at.config, "bucket": bucket})
        self.rows: dict[str, list[tuple[float, int, int]]] = {}

    def note(self, what: str, act: Callable[[], Any]) -> Any:
        """Time one thing."""
        taken, n_requests, n_bytes, result = timed(act, self._way)
        self.rows.setdefault(what, []).append((taken, n_requests, n_bytes))
        return result

    def round(self, number: int, n_bytes: int) -> None:
        """Save, load, and upload and download the same number of bytes."""
        model: dict[str, Array] = transformer(n_bytes, self._data, seed=number).arrays
        changed = {**model, next(iter(model)): next(iter(model.values()))[::-1].copy()}
        backend = backend_of(self._at, self._bucket, f"{number}/.tensorcas")
        store = Store.init_backend(backend)

        def save(state: dict[str, Array], step: int) -> Ref:
            with store.write_checkpoint(state) as pending:
                return pending.commit(RefTarget(run_id="run", step=step))

        ref = self.note("first save", lambda: save(model, 0))
        stored = sum(info.size for info in backend.list("packs"))
        whole = np.concatenate([array.ravel().view(np.uint8) for array in model.values()])
        file = whole[:stored].tobytes()
        self.note("upload of the model's bytes", lambda: self._upload(whole.data, f"{number}/whole"))
        self.note("upload of the bytes stored", lambda: self._upload(file, f"{number}/plain"))
        self.note("save of what is unchanged", lambda: save(model, 1))
        next_ref = self.note("save, one tensor changed", lambda: save(changed, 2))

        def load(what: Ref) -> dict[str, Array]:
            other = Store.open_backend(backend_of(self._at, self._bucket, f"{number}/.tensorcas"))
            return other.read_tensors(other.manifest(what))

        os.environ["TENSORCAS_CACHE"] = "off"
        found = self.note("load, no cache", lambda: load(ref))
        assert all(np.array_equal(found[name], model[name]) for name in model)
        self.note("download of the model's bytes", lambda: self._download(f"{number}/whole", len(whole)))
        self.note("download of the bytes stored", lambda: self._download(f"{number}/plain", len(file)))
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TENSORCAS_CACHE"] = cache
            self.note("load, filling the cache", lambda: load(ref))
            found = self.note("load of the next step, cached", lambda: load(next_ref))
            assert all(np.array_equal(found[name], changed[name]) for name in changed)

    def _upload(self, data: Any, path: str) -> None:
        obstore.put(self._plain, path, data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def _download(self, path: str, n_bytes: int) -> None:
        starts = list(range(0, n_bytes, PART_BYTES))
        out = bytearray(n_bytes)
        view = memoryview(out)

        def fetch(start: int) -> None:
            stop = min(start + PART_BYTES, n_bytes)
            view[start:stop] = memoryview(obstore.get_range(self._plain, path, start=start, end=stop))

        threads.run_all(fetch, starts, waits=True)


def run(options: Options) -> Section:
    """Let them take turns against one server."""
    section = Section("remote", TITLE)
    n_bytes, n_rounds = options.sizes_or((N_BYTES,))[0], options.n_rounds or N_ROUNDS
    link = Link(latency_s=LATENCY_S, up_bytes_per_s=BYTES_PER_S, down_bytes_per_s=BYTES_PER_S)
    try:
        with localstack() as server, proxy(server.endpoint, link=link) as way:
            bench = Bench(server, way, server.make_bucket("bench"), options.data)
            for number in range(n_rounds):
                bench.round(number, n_bytes)
    except FileNotFoundError as error:
        section.note(f"left out: {error}")
        return section
    way_said = f"{LATENCY_S * 1000:.0f} ms a request, {BYTES_PER_S / 1e9:.0f} GB/s"
    columns = ("what", "s", "requests", "MB moved", "to the model's bytes", "to the bytes stored")
    table = Table(f"{n_bytes / 1e6:.0f} MB, {way_said}; medians of {n_rounds}", columns)
    medians = {
        what: [statistics.median(column) for column in zip(*rows, strict=True)] for what, rows in bench.rows.items()
    }
    for what, (taken, n_requests, n_moved) in medians.items():
        ratios = ("", "")
        if what in PEERS:
            whole, stored = (medians[f"{PEERS[what]} the {bytes_}"][0] for bytes_ in ("model's bytes", "bytes stored"))
            ratios = (f"{taken / whole:.2f}", f"{taken / stored:.2f}")
        table.add(what, f"{taken:.3f}", f"{n_requests:.0f}", f"{n_moved / 1e6:.1f}", *ratios)
    section.tables.append(table)
    return section

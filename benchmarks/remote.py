"""What saving to and loading from an object store costs, against one upload or download of the same bytes.

Run it with ``make bench-remote``, or ``python -m benchmarks.remote``, on a machine that does nothing else. The store
is a real S3 server on loopback (LocalStack's, see ``make object-servers``) behind a proxy that lets every request wait
and bounds what passes. Saves, loads and the peer, one multipart upload or download of a file of the very bytes
that the store sends, take turns; the medians are printed, with the requests each has made.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore
from obstore.store import S3Store

from tensorcas_mlflow import threads
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.store import Ref, RefTarget, Store
from tests.objects.proxy import Proxy, proxy
from tests.objects.relay import Link
from tests.objects.servers import S3Server, localstack
from tests.objects.stores import backend_of

LATENCY_S = 0.03
BYTES_PER_S = 1e9
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 16


def make_model(n_bytes: int, seed: int) -> dict[str, Array]:
    """Make the weights of a transformer in bfloat16: drawn as they are initialised, which is as hard to compress."""
    draw = np.random.default_rng(seed)
    shapes = itertools.cycle([("attention", (1024, 3072)), ("out", (1024, 1024)), ("mlp", (1024, 4096))])
    model: dict[str, Array] = {}
    size = 0
    for number, (name, shape) in enumerate(shapes):
        if size >= n_bytes:
            return model
        weights = (draw.standard_normal(shape, dtype=np.float32) * 0.02).view(np.uint32) >> 16
        model[f"layers.{number // 3}.{name}"] = weights.astype(np.uint16)
        size += model[f"layers.{number // 3}.{name}"].nbytes
    raise AssertionError("unreachable")


def timed(act: Callable[[], Any], way: Proxy) -> tuple[float, int, int, Any]:
    """Do something; seconds, billed requests, bytes both ways, and what it returned."""
    way.forget()
    begin = time.perf_counter()
    result = act()
    taken = time.perf_counter() - begin
    traffic = way.traffic()
    return taken, traffic.n_billed, traffic.up_bytes + traffic.down_bytes, result


class Bench:
    """One server behind one slow way."""

    def __init__(self, server: S3Server, way: Proxy, bucket: str) -> None:
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
        model = make_model(n_bytes, number)
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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=650)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    link = Link(latency_s=LATENCY_S, up_bytes_per_s=BYTES_PER_S, down_bytes_per_s=BYTES_PER_S)
    with localstack() as server, proxy(server.endpoint, link=link) as way:
        bench = Bench(server, way, server.make_bucket("bench"))
        for number in range(options.rounds):
            bench.round(number, options.mb * 10**6)
    peers = {"first save": "upload of", "load, no cache": "download of"}
    way_said = f"{LATENCY_S * 1000:.0f} ms a request, {BYTES_PER_S / 1e9:.0f} GB/s"
    print(f"{options.mb} MB, {way_said}; medians of {options.rounds}")
    print(f"{'':32}{'s':>8}{'requests':>10}{'MB moved':>10}{'to the bytes of the model':>28}{'stored':>8}")
    medians = {
        what: [statistics.median(column) for column in zip(*rows, strict=True)] for what, rows in bench.rows.items()
    }
    for what, (taken, n_requests, n_bytes) in medians.items():
        ratios = ""
        if what in peers:
            whole, stored = (medians[f"{peers[what]} the {bytes_}"][0] for bytes_ in ("model's bytes", "bytes stored"))
            ratios = f"{taken / whole:>28.2f}{taken / stored:>8.2f}"
        print(f"{what:32}{taken:>8.3f}{n_requests:>10.0f}{n_bytes / 1e6:>10.1f}{ratios}")


if __name__ == "__main__":
    main()

"""A process whose main thread is in one long call of the core when a real SIGINT comes.

python -m tests.native.interrupted WAY N_THREADS
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

from tensorcas_mlflow import native
from tensorcas_mlflow.chunk_io._decode import CHUNK, LINK, MEMORY, NOWHERE, PART, READ
from tensorcas_mlflow.codecs import DELTA, ZSTD
from tensorcas_mlflow.layout.packs import ENTRY, MAX_DEPTH
from tensorcas_mlflow.store._encode import _ENCODING
from tests.native.chains import floats

MIB = 1 << 20
DELAY_S = 0.3
core = native.core


def decoding(n_threads: int) -> Callable[[], object]:
    """Chunks with the longest chains; no two neighbours share theirs."""
    n_bytes, n_chunks, n_links = 4 * MIB, 200, MAX_DEPTH + 1
    base = floats(n_bytes, 2)
    payloads = [bytes(DELTA.encode(base, 4, base)), bytes(ZSTD.encode(base, 4))]
    data = b"".join(payloads) * 2
    reads = np.array([(0, len(data), 0, MEMORY)] * n_chunks, READ)
    links, chunks, parts = np.zeros(n_chunks * n_links, LINK), np.zeros(n_chunks, CHUNK), np.zeros(n_chunks, PART)
    links["read"], links["codec"] = np.arange(len(links)) // n_links, DELTA.number
    links["begin"] = links["read"] % 2 * (len(data) // 2)
    links["n_stored"] = len(payloads[0])
    ends = links[n_links - 1 :: n_links]
    ends["codec"], ends["n_stored"], ends["begin"] = ZSTD.number, len(payloads[1]), ends["begin"] + len(payloads[0])
    links["n_bytes"] = n_bytes
    chunks["block"], chunks["n_bytes"], chunks["n_links"] = NOWHERE, n_bytes, n_links
    chunks["first_link"] = np.arange(n_chunks) * n_links
    parts["first_read"] = parts["first_chunk"] = np.arange(n_chunks)
    parts["last_read"] = parts["last_chunk"] = np.arange(n_chunks) + 1
    return lambda: core.decode(reads, links, chunks, parts, [data], [], False, n_threads)


def hashing(n_threads: int) -> Callable[[], object]:
    pieces, out = [bytes(16 * MIB)] * 4000, bytearray(4000 * 32)
    return lambda: core.hash_each(pieces, out, n_threads)


def digesting(n_threads: int) -> Callable[[], object]:
    data = np.zeros(6 << 30, np.uint8)  # pages without memory
    return lambda: core.digest(data)


def checking(n_threads: int) -> Callable[[], object]:
    number, name = tempfile.mkstemp()
    os.unlink(name)
    os.write(number, bytes(MIB))
    n = 60_000
    source, start, size = np.full(n, number, "<i4"), np.zeros(n, "<u8"), np.full(n, MIB, "<u8")
    expected, is_good = np.zeros((n, 16), "u1"), np.zeros(n, "u1")
    return lambda: core.check_stored(source, start, size, expected, is_good, n_threads)


def deflating(n_threads: int) -> Callable[[], object]:
    """Bytes of two values: each place has thousands of matches to look at."""
    data = np.random.default_rng(0).integers(0, 2, 400 * MIB, np.uint8)
    return lambda: core.deflate(data, 9, bytearray(len(data)))


def encoding(n_threads: int) -> Callable[[], object]:
    n, n_bytes = 60, 8 * MIB
    chunk = floats(n_bytes, 2)
    encodings = np.zeros(1, _ENCODING)
    encodings["itemsize"], encodings["effort"] = 4, 2
    entries, flags = np.zeros(n, ENTRY), np.zeros(n, bool)
    digests = np.frombuffer(core.digest(chunk) * n, np.uint8)
    itemsizes, how = np.full(n, 4, "<u4"), np.zeros(n, "<i4")
    return lambda: core.encode_group(
        [chunk] * n, None, itemsizes, how, flags, flags, digests, encodings, True, entries, None, None
    )


WAYS = {
    "decode": decoding,
    "hash_each": hashing,
    "digest": digesting,
    "check_stored": checking,
    "deflate": deflating,
    "encode_group": encoding,
}


def main(way: str, n_threads: int) -> None:
    call = WAYS[way](n_threads)
    sent: list[float] = []

    def send() -> None:
        time.sleep(DELAY_S)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    try:
        call()
    except KeyboardInterrupt:
        print(time.monotonic() - sent[0])
        return
    raise SystemExit("the call was over before the signal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Hostile payloads and tables for the batch decode (``decode.c``)."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from tensorcas_mlflow.chunk_io._decode import NOWHERE
from tests.native.chains import Chain, chains, tables
from tests.native.fuzz import number

SIZES = (1, 7, 64, 257, 4_099)


@cache
def samples() -> list[tuple[bytes, Chain]]:
    return [sample for n_bytes in SIZES for sample in chains(n_bytes)]


def fuzz_payloads(core: ModuleType, rng: np.random.Generator) -> None:
    chunk, chain = samples()[rng.integers(0, len(samples()))]
    payloads = [bytearray(payload) for _, payload in chain]
    for _ in range(int(rng.integers(0, 4))):
        payload = payloads[rng.integers(0, len(payloads))]
        if len(payload):
            # Headers come first, and are what a decoder believes.
            most = len(payload) if rng.integers(0, 2) else min(len(payload), 32)
            payload[rng.integers(0, most)] = rng.integers(0, 256)
    if rng.integers(0, 4) == 0:
        payload = payloads[rng.integers(0, len(payloads))]
        del payload[int(rng.integers(0, len(payload) + 1)) :]
    (reads, links, chunks, parts), _, _ = tables()
    sizes = [len(payload) for payload in payloads]
    reads = np.resize(reads, len(chain))
    reads["start"], reads["n_bytes"], reads["source"] = 0, sizes, range(len(chain))
    links = np.resize(links, len(chain))
    links["n_stored"], links["read"], links["codec"] = sizes, range(len(chain)), [codec.number for codec, _ in chain]
    links["n_bytes"] = len(chunk)
    # The second chunk shares its chain with the first.
    chunks = np.resize(chunks[:1], int(rng.integers(1, 3)))
    chunks["start"] = np.arange(len(chunks)) * len(chunk)
    chunks["n_bytes"], chunks["n_links"] = len(chunk), len(chain)
    parts = parts[:1].copy()
    parts["last_read"], parts["last_chunk"] = len(chain), len(chunks)
    out = bytearray(len(chunk) * len(chunks))
    links["checks"], links["stored_digest"] = rng.integers(0, 2), np.frombuffer(core.digest(payloads[0])[:16], np.uint8)
    links["checks"][1:] = 0
    keeps = bool(rng.integers(0, 4))
    chunks["block"] = 0 if keeps else NOWHERE
    verifies = bool(rng.integers(0, 2))
    chunks["digest"] = np.frombuffer(core.digest(chunk), np.uint8)
    statuses = core.decode(reads, links, chunks, parts, payloads, [out], verifies, 1)
    made = [chunk if keeps and not status else bytes(len(chunk)) for status in statuses]
    assert not verifies or bytes(out) == b"".join(made)


def fuzz_decode_payload(core: ModuleType, rng: np.random.Generator) -> None:
    chunk, chain = samples()[rng.integers(0, len(samples()))]
    codec, payload = chain[0]
    stored = bytearray(payload)
    for _ in range(int(rng.integers(0, 4))):
        if stored:
            stored[rng.integers(0, min(len(stored), 40))] = rng.integers(0, 256)
    base = [None, b"", chunk, rng.bytes(len(chunk) + 9)][rng.integers(0, 4)]
    out = bytearray(min(max(0, len(chunk) + number(rng, (0, 0, -1, 1))), 1 << 20))

    core.decode_payload(number(rng, (codec.number,)), stored[: number(rng, (len(stored),))], out, base)


def fuzz_tables(core: ModuleType, rng: np.random.Generator) -> None:
    made, sources, blocks = tables()
    for _ in range(int(rng.integers(0, 3))):
        table = made[rng.integers(0, len(made))]
        field = table[rng.choice([name for name in table.dtype.names if "digest" not in name])]
        value = number(rng, (0, 1, 2, 3, 64, 255, 256, 257, NOWHERE))
        field[rng.integers(0, len(field))] = value & int(np.iinfo(field.dtype).max)
    made = [table[: len(table) - int(rng.integers(0, 20) == 0)].copy() for table in made]
    # Reads of files are of a descriptor that nobody has.
    made[0]["source"][made[0]["kind"] > 0] = -1
    core.decode(*made, sources, blocks, bool(rng.integers(0, 2)), number(rng, (1, 2, 3)))

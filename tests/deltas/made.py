"""Stores in which chunks are deltas, made chunk by chunk, so that a test says what lies where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import DELTA, RAW
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import Base, Payload, bases_of, is_delta
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table, write_packs
from tests.faulty import FaultyBackend

CHUNK_BYTES = 4096


def weights(seed: int, n: int = 3_000) -> Any:
    """Chunks that are like those of the next seed, as those of the next step are."""
    start = np.random.default_rng(7).normal(0, 0.02, n).astype(np.float32)
    moved = np.random.default_rng(seed).normal(0, 1e-6, n).astype(np.float32)
    return start + moved


def a_chunk(seed: int) -> bytes:
    """One chunk of a tensor, like that of the next seed."""
    data: bytes = weights(seed, CHUNK_BYTES // 4).tobytes()
    return data


def save(store: Store, tensors: Mapping[str, Any], step: int, run_id: str = "run") -> Ref:
    with store.write_checkpoint(tensors) as pending:
        return pending.commit(RefTarget(run_id=run_id, step=step))


def save_chunks(store: Store, step: int, *chunks: bytes) -> Ref:
    """A checkpoint of tensors of one chunk each, named by number."""
    return save(store, {str(at): np.frombuffer(chunk, np.float32) for at, chunk in enumerate(chunks)}, step)


def chunks_of(array: Any) -> list[bytes]:
    data = array.tobytes()
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def write_deltas(store: Store, *pairs: tuple[Any, Any]) -> str:
    """Put the chunks of arrays into a pack of their own, each as a delta against that of another array; its name."""
    store.catalog.refresh()
    made = []
    chunks = [zip(chunks_of(array), chunks_of(base), strict=True) for array, base in pairs]
    for raw, base_raw in (both for each in chunks for both in each):
        wanted = np.frombuffer(digest(base_raw), np.uint8).reshape(1, -1)
        places = store.catalog.find(wanted)
        assert places.found.all()
        made.append(payload(store, raw, base_raw, places.packs[int(places.pack[0])]))
    return put_payloads(store, made)


def put_pack(store: Store, *chunks: bytes | tuple[bytes, bytes, str]) -> str:
    """Write a pack; its name.

    Args:
        chunks: Each stored in full; or, with its base and the pack in which that lies, as a delta.
    """
    return put_payloads(store, [payload(store, *((each,) if isinstance(each, bytes) else each)) for each in chunks])


def payload(store: Store, raw: bytes, base: bytes | None = None, base_pack: str = "") -> Payload:
    """A chunk in full, or as a delta against its base in a pack."""
    if base is None:
        return Payload(digest=digest(raw), raw_bytes=len(raw), codec=RAW, typesize=1, data=raw, begins_row=False)
    table = read_pack_table(store.backend, base_pack)
    [entry] = table[(table["digest"] == np.frombuffer(digest(base), np.uint8)).all(axis=1)]
    return Payload(
        digest=digest(raw),
        raw_bytes=len(raw),
        codec=DELTA,
        typesize=4,
        data=DELTA.encode(raw, 4, base),
        begins_row=False,
        base=Base(pack=base_pack, digest=digest(base), depth=int(entry["depth"])),
    )


def put_payloads(store: Store, payloads: Iterable[Payload]) -> str:
    """Write payloads into a pack of their own; its name."""
    before = packs_of(store.backend)
    write_packs(store.backend, store.catalog, iter(payloads))
    [name] = packs_of(store.backend) - before
    return name


def lose(store: Store, pack: str) -> None:
    """Take a pack away, as if a disk had lost it."""
    store.backend.delete(f"packs/{pack}.pack")


def flip(store: Store, pack: str, chunk: bytes) -> None:
    """Change a bit of a chunk as it lies in a pack: of one in full a last digit, so that deltas still decode.

    In an encoded one it is a bit in the middle: decoders leave some bits at the end of a frame unread.
    """
    key = f"packs/{pack}.pack"
    table = read_pack_table(store.backend, pack)
    [entry] = table[(table["digest"] == np.frombuffer(digest(chunk), np.uint8)).all(axis=1)]
    data = bytearray(store.backend.get(key))
    n_bytes = int(entry["stored_bytes"])
    data[int(entry["offset"]) + (n_bytes - 4 if entry["codec"] == RAW.number else n_bytes // 2)] ^= 1
    store.backend.delete(key)
    store.backend.put_new(key, [bytes(data)])


class BadSectors(FaultyBackend):
    """A disk that does not give what lies in one pack, or in some of it, while ``is_bad``."""

    def __init__(self, inner: Backend, pack: str, *, chunk: bytes | None = None, all_of_it: bool = False) -> None:
        super().__init__(inner)
        self.is_bad = False
        self._key = f"packs/{pack}.pack"
        self._span = (0, 1 << 40) if all_of_it else (8, 8 + 1)
        if chunk is not None:
            table = read_pack_table(inner, pack)
            [entry] = table[(table["digest"] == np.frombuffer(digest(chunk), np.uint8)).all(axis=1)]
            self._span = (int(entry["offset"]), int(entry["offset"]) + int(entry["stored_bytes"]))

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if self.is_bad and key == self._key and start < self._span[1] and start + len(out) > self._span[0]:
            raise BackendError("read", key, "Input/output error")
        super().read_into(key, start, out)


def packs_of(backend: Backend) -> set[str]:
    return {name for name, _ in list_packs(backend)}


def base_packs(backend: Backend) -> dict[str, set[str]]:
    """For each pack with deltas the packs of their bases."""
    tables = {name: read_pack_table(backend, name) for name in packs_of(backend)}
    found = {name: {base.pack for base in bases_of(table[is_delta(table)])} for name, table in tables.items()}
    return {name: packs for name, packs in found.items() if packs}

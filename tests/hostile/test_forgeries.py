"""Blobs that are whole in themselves, made by somebody who means harm: never wrong data, and little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.codecs import PLANES, RAW, SHUFFLE_ZSTD, ZSTD, Codec
from tensorcas_mlflow.errors import CorruptChunkError, CorruptError, FormatError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest, Row
from tensorcas_mlflow.layout.packs import PackWriter, Payload
from tensorcas_mlflow.store import Store

WEIGHTS = np.linspace(0, 1, 2000, dtype=np.float32)
MIB = 1 << 20
POOLS: list[pa.MemoryPool] = []
"""None may go while something is left that was taken from it."""


@contextmanager
def at_most(n_bytes: int) -> Iterator[None]:
    """See that what is done takes no more memory."""
    pool = pa.proxy_memory_pool(pa.system_memory_pool())
    POOLS.append(pool)
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak + (pool.max_memory() or 0) <= n_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = Store.init(tmp_path, database=False)
    with store.write_checkpoint({"w": WEIGHTS}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    return tmp_path


def load(root: Path) -> Any:
    store = Store.open(root)
    [ref] = store.checkpoints()
    return store.read_tensors(store.manifest(ref))["w"]


def forge_pack(root: Path, codec: Codec, raw: bytes, *, claims: int) -> None:
    """Put a pack in the place of the only one that has other bytes for the same chunk, and digests that fit these."""
    [pack] = root.glob(".tensorcas/packs/*.pack")
    payload = Payload(
        digest=digest(WEIGHTS.tobytes()),
        raw_bytes=claims,
        codec=codec,
        typesize=4,
        data=codec.encode(raw, 4),
        begins_row=True,
    )
    pack.unlink()
    pack.write_bytes(b"".join(bytes(piece) for piece in PackWriter().pieces([payload])))


@pytest.mark.parametrize("codec", [RAW, ZSTD, SHUFFLE_ZSTD, PLANES], ids=lambda codec: codec.name)
def test_other_bytes_under_a_chunks_name_are_never_given_out(root: Path, codec: Codec) -> None:
    forge_pack(root, codec, (WEIGHTS + 1).tobytes(), claims=WEIGHTS.nbytes)

    with pytest.raises(CorruptChunkError, match="hash to"):
        load(root)


@pytest.mark.parametrize("codec", [ZSTD, SHUFFLE_ZSTD, PLANES], ids=lambda codec: codec.name)
@pytest.mark.parametrize("claims", [WEIGHTS.nbytes, 64 * MIB])
def test_a_chunk_that_would_unpack_to_more_is_not_unpacked(root: Path, codec: Codec, claims: int) -> None:
    forge_pack(root, codec, bytes(64 * MIB), claims=claims)

    with pytest.raises(CorruptChunkError), at_most(4 * MIB):
        load(root)


def test_a_manifest_under_anothers_name_is_damage(root: Path) -> None:
    [file] = root.glob(".tensorcas/manifests/*")
    honest = Manifest.from_blob(file.read_bytes())
    forged = Manifest(
        kind="checkpoint",
        chunk_bytes=honest.chunk_bytes,
        store_id=honest.store_id,
        flavor=None,
        rows=[Row(spec=Spec(name="w", dtype="float32", shape=(1000, 2)), cuts=None, digests=honest.rows[0].digests)],
    )
    file.unlink()
    file.write_bytes(forged.to_blob())

    with pytest.raises(CorruptError, match="hashes to"):
        load(root)


# --- Arrow


INTS, NAMES = pa.list_(pa.int64()), pa.utf8()


def stream(*, compression: Literal["zstd"] | None = None, **columns: Any) -> bytes:
    """A manifest of one row of 4 bytes, some columns of which are others."""
    given = {
        "name": pa.array(["w"], NAMES),
        "dtype": pa.array(["uint8"], NAMES),
        "shape": pa.array([[4]], INTS),
        "chunks": pa.array([[bytes(32)]], pa.list_(pa.binary(32))),
        "cuts": pa.array([None], INTS),
        **columns,
    }
    head = {"format": 1, "kind": "checkpoint", "chunk_bytes": 4096, "store": None, "flavor": None, "metadata": {}}
    batch = pa.record_batch(given).replace_schema_metadata({b"tensorcas": json.dumps(head).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.long
def test_a_manifest_is_not_unpacked() -> None:
    name = pa.array(["w" * 64 * MIB], NAMES)
    bomb = stream(compression="zstd", name=name)

    assert len(bomb) < MIB
    with pytest.raises(FormatError, match="plain record batch"), at_most(4 * MIB):
        Manifest.from_bytes(bomb)


# The product of the last one is 4 in 64 bits, which is the size that the row has.
SHAPES = [[1 << 62, 1 << 62], [-1], [-1, -4], [1 << 57], [1 << 40] * 3, [1] * 65, [1 << 63 - 1], [4, (1 << 62) + 1]]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_shape_that_cannot_be_costs_nothing(shape: list[int]) -> None:
    with pytest.raises(FormatError), at_most(4 * MIB):
        Manifest.from_bytes(stream(shape=pa.array([shape], INTS)))


def test_unforged_sample_of_the_manifests_is_sound() -> None:
    assert len(Manifest.from_bytes(stream()).rows) == 1


@pytest.mark.parametrize(
    ("shape", "cuts", "n_chunks"),
    [
        ([4], [4, 2], 2),
        ([4], [2, 2, 4], 3),
        ([4], [0, 4], 2),
        ([4], [2, 5], 2),
        ([4], [2, 4], 1),
        ([4], [4], 2),
        ([4], None, 2),
        ([4], None, 0),
        ([0], None, 1),
        ([0], [0], 1),
        ([1 << 40], [1 << 40], 2),
        ([4], [-4, 4], 2),
        ([4], [1 << 62, 4], 2),
    ],
)
def test_cuts_and_chunks_that_do_not_make_the_tensor_are_refused(
    shape: list[int], cuts: list[int] | None, n_chunks: int
) -> None:
    columns = {"shape": pa.array([shape], INTS), "cuts": pa.array([cuts], INTS)}
    with pytest.raises(FormatError), at_most(4 * MIB):
        Manifest.from_bytes(stream(**columns, chunks=pa.array([[bytes(32)] * n_chunks], pa.list_(pa.binary(32)))))


def test_many_thin_rows_take_a_bounded_multiple_of_their_size() -> None:
    n = 5_000
    rows = [Row(spec=Spec(name="", dtype=None, shape=(1,)), cuts=None, digests=np.zeros((1, 32), np.uint8))] * n
    thin = Manifest(kind="file", chunk_bytes=4096, store_id=None, flavor=None, rows=rows).to_bytes()

    with at_most(32 * len(thin) + MIB):
        Manifest.from_bytes(thin)

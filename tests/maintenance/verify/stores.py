"""A small store with a blob of every kind, and ways to damage one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes

CHUNK_BYTES = 4096
SWAPPED = "another blob of its kind"

Blobs = Mapping[str, bytes]
Tensors = Mapping[str, Any]


def noise(seed: int, n_bytes: int = CHUNK_BYTES) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def tensors(step: int) -> dict[str, Any]:
    """Every codec, several chunks, and chunks that steps share."""
    return {
        "raw": noise(step, 9_000),
        "frozen": noise(0, 5_000),
        "shuffled": np.arange(2_000, dtype=np.float32) + step,
        "text": np.frombuffer(f"step {step} ".encode() * 90, np.uint8),
        "scalar": np.float64(step),
        "empty": np.empty((0, 3)),
    }


def save(store: Store, wanted: Tensors, **target: Any) -> Ref:
    with store.write_checkpoint(wanted, metadata={"classes": [1, None]}) as pending:
        return pending.commit(RefTarget(**target))


def put(backend: MemoryBackend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.put_new(key, [data])


def backend_of(blobs: Blobs, *, is_remote: bool) -> MemoryBackend:
    backend = MemoryBackend(is_remote=is_remote)
    for key, data in blobs.items():
        backend.put_new(key, [data])
    return backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A sound store, blob by blob, and what it keeps by the keys of the refs."""

    is_remote: bool
    blobs: dict[str, bytes]
    kept: dict[str, dict[str, Any]]
    labels: dict[str, str] = field(default_factory=dict)


def make(*, is_remote: bool) -> Made:
    """Make a store: packs in a segment and packs that are not, refs of each kind, a save and a collection under way."""
    backend = MemoryBackend(is_remote=is_remote)
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    kept: dict[str, dict[str, Any]] = {}
    labels: dict[str, str] = {}

    def keep(wanted: dict[str, Any], **target: Any) -> None:
        ref = save(store, wanted, **target)
        kept[ref.key], labels[ref.key] = wanted, ref.label

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_catalog, "_FOLD_AT", 2)
        keep(tensors(1), run_id="run", step=1, metrics={"loss": 0.5, "acc": 0.25})
        keep(tensors(2), run_id="run", step=2, name="ema")
        store.catalog.refresh()
        store.catalog.fold()
    keep(tensors(3), path="models/m/checkpoint.arrow", model_id="m")
    keep(tensors(4), uri="s3://elsewhere/checkpoint.arrow")
    # Too long to be compressed.
    keep({f"layer{n}": noise(n % 7, 64) for n in range(600)}, run_id="wide", step=1)
    (pending,) = [store.write_checkpoint(tensors(5))]
    backend.put_new("condemned/" + "c" * 32, [condemned_bytes(frozenset(["0" * 32]), frozenset())])
    blobs = {info.key: backend.get(info.key) for prefix in PREFIXES for info in backend.list(prefix)}
    pending.abandon()
    return Made(is_remote=is_remote, blobs={"format": backend.get("format"), **blobs}, kept=kept, labels=labels)


PREFIXES = ("packs", "index", "manifests", "refs", "intents", "condemned")


def damages(blobs: Blobs, key: str, n_flips: int, chance: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Damage one blob in many ways; None is no blob.

    Args:
        blobs: All of them.
        key: Which is damaged.
        n_flips: In how many bytes a bit is flipped, and at how many lengths the blob is cut off.
        chance: Draws them.
    """
    data = blobs[key]
    for at in sorted(chance.sample(range(len(data)), min(n_flips, len(data)))):
        flipped = bytearray(data)
        flipped[at] ^= 1 << chance.randrange(8)
        yield f"a flipped bit in byte {at}", bytes(flipped)
    for length in sorted(chance.sample(range(len(data)), min(n_flips, len(data)))):
        yield f"cut off at {length}", data[:length]
    yield "longer", data + b"\0"
    if len(data) > 1:
        begin = chance.randrange(len(data))
        yield f"zeros from {begin}", data[:begin] + bytes(len(data[begin : begin + 64])) + data[begin + 64 :]
    if data:
        yield "empty", b""
    yield "gone", None
    folder = key.partition("/")[0]
    others = [other for other in blobs if other.startswith(f"{folder}/") and blobs[other] != data]
    if others:
        yield SWAPPED, blobs[chance.choice(others)]


def failures(made: Made, backend: MemoryBackend) -> dict[str, TensorCasError]:
    """Load everything that is kept; what loads is bit for bit what was saved.

    Returns:
        For each ref that does not load the error.
    """
    store = Store.open_backend(backend)
    failed: dict[str, TensorCasError] = {}
    for key, wanted in made.kept.items():
        try:
            ref = store.ref(key)
            assert ref is None or ref.label == made.labels[key]
            if ref is None:
                continue
            if ref.metrics is not None:
                assert ref.metrics == {"loss": 0.5, "acc": 0.25}
            manifest = store.manifest(ref)
            loaded = store.read_tensors(manifest)
        except TensorCasError as error:
            failed[key] = error
            continue
        assert manifest.metadata == {"classes": [1, None]}
        assert list(loaded) == list(wanted)
        for name, array in wanted.items():
            assert loaded[name].dtype == np.asarray(array).dtype
            assert loaded[name].shape == np.asarray(array).shape
            assert loaded[name].tobytes() == np.asarray(array).tobytes(), name
    return failed


def told(backend: MemoryBackend, *, full: bool = True) -> tuple[Any, ...]:
    return verify(Store.open_backend(backend), full=full).problems

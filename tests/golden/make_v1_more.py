"""Write what the first golden store of format 1 lacks. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_more

Three stores: one of files, one that clients carried through an MLflow server, and the objects of one in a bucket.
``expected.json`` says what they must hold, by SHA-256 of the bytes before they came near a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import obstore
from obstore.store import MemoryStore

from tensorcas_mlflow.backends import ObjectBackend
from tensorcas_mlflow.base.digest import unique_rows
from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.layout import RefTarget, _records, new_ref, record_bytes, ref_bytes
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import PendingSave, Store, _ingest, _save
from tensorcas_mlflow.store.protocol import condemned_bytes, intent_bytes, list_packs
from tests.file_formats.split_samples import samples
from tests.golden.bucket import opened
from tests.golden.golden_v1 import CUTS, METADATA, noise, tensors

HERE = Path(__file__).parent / "v1_more"
Expected = dict[str, Any]


def sha_of(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {
        name: hashlib.sha256(f"{a.dtype.str}{a.shape}".encode() + np.ascontiguousarray(a).tobytes()).hexdigest()
        for name, a in tensors.items()
    }


def save(store: Store, expected: Expected, arrays: Mapping[str, Any], target: RefTarget, **options: Any) -> None:
    with store.write_checkpoint(arrays, **options) as pending:
        expected[pending.commit(target).key] = sha_of(arrays)


def save_files(store: Store, expected: Expected) -> None:
    """Every container, in streams of several batches."""
    for name, data in samples().items():
        with store.write_stream(io.BytesIO(data)) as pending:  # type: ignore[arg-type]
            expected[pending.commit(RefTarget(path=f"files/{name}")).key] = hashlib.sha256(data).hexdigest()


def save_steps(store: Store, expected: Expected) -> None:
    for step in (1, 2, 3, 4, 5):
        metrics = {"loss": 1 / step, "none": float("nan"), "most": float("inf"), "least": float("-inf")}
        target = RefTarget(
            run_id="run", name="ema", step=step, parent_step=step - 1, metrics=metrics, model_id="m-2", uri="x:/y"
        )
        save(store, expected, tensors(step), target, flavor="pytorch", cuts=CUTS, metadata=METADATA)
    save(store, expected, tensors(1), RefTarget(run_id="long " * 60, step=-7))
    save(store, expected, tensors(2), RefTarget(copy_path="1/models/m-3/artifacts/data/checkpoint.arrow", uri="x:/z"))
    many = {f"layer.{n}.a rather long name of a tensor: {'long ' * 20}": noise(3, n) for n in range(500)}
    save(store, expected, many, RefTarget(run_id="many", step=0))


def drop_and_rewrite(store: Store) -> None:
    """Leave packs that a collection has rewritten, and garbage for the next."""
    extra: Expected = {}
    save(store, extra, {"garbage": noise(4_000, 77), "noise": noise(700, 7)}, RefTarget(run_id="gone", step=0))
    store.backend.delete(next(iter(extra)))
    plan_gc(store, grace_s=0, max_waste=0).execute()
    save(store, extra, {"garbage": noise(4_000, 78)}, RefTarget(run_id="gone", step=1))
    store.backend.delete(next(reversed(extra)))


def leave_open(store: Store, expected: Expected) -> None:
    """A save that is pending, one that died in its commit, a batch of a stream, a stand-in, a condemned list."""
    backend = store.backend
    pending = {"pending": noise(1_500, 11), "n": np.array(1)}
    store.write_checkpoint(pending)
    expected["pending"] = sha_of(pending)
    half = {"half": noise(1_500, 12)}
    dying: PendingSave = store.write_checkpoint(half)
    assert dying._intent is not None
    about: dict[str, Any] = {"kind": "checkpoint", "manifest": dying._manifest_name, "n_bytes": 1, "flavor": None}
    ref = new_ref(RefTarget(run_id="half", step=0), key="refs/runs/half/@0", **about)
    path = HERE / "root" / ".tensorcas" / dying._intent[0]
    intent = path.read_bytes()
    path.write_bytes(ref_bytes(ref) + intent[len(ref_bytes(ref)) :])
    batch = store.write_checkpoint({"batch": noise(1_500, 13)})
    _save.declare(backend, "ab" * 32, unique_rows(batch.manifest.digests)[0])
    batch.abandon()
    stand_in = {"stand-in": noise(1_500, 14)}
    save(store, expected, stand_in, RefTarget(run_id="stand-in", step=0))
    of_it = store.ref("refs/runs/stand-in/@0")
    assert of_it is not None
    backend.put_new(f"refs/replacing/@{'5a' * 16}", [ref_bytes(of_it)])
    store.drop(of_it)
    expected[f"refs/replacing/@{'5a' * 16}"] = expected.pop(of_it.key)
    save(store, expected, {"loose": noise(1_500, 17)}, RefTarget(run_id="loose", step=0))
    packs = frozenset(name for name, _ in list_packs(backend))
    backend.put_new(f"condemned/{'c0' * 16}", [condemned_bytes(packs, frozenset({of_it.manifest, "0" * 64}))])


def make_carried(expected: Expected) -> None:
    """As if clients had put it there through a server; one of them is in the middle of a save."""
    store = Store.init(HERE / "carried", chunk_bytes=4096, database=False)
    path = HERE / "carried" / ".tensorcas" / "format"
    said = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "check"}
    path.write_bytes(record_bytes(said | {"carried": True}))
    save(store, expected, tensors(1), RefTarget(run_id="run", name="checkpoint", step=1), flavor="pytorch", cuts=CUTS)
    under_way = {"under way": noise(1_500, 15)}
    pending = store.write_checkpoint(under_way)
    digests = unique_rows(pending.manifest.digests)[0]
    blob = intent_bytes(pending._manifest_name, digests, through_carrier=True)
    store.backend.put_new("intents/" + "ca" * 16, [blob])
    pending.abandon()


def die_in_a_commit(store: Store, arrays: Mapping[str, Any]) -> None:
    """Leave an intent that has become a move to a key with no blob."""
    pending = store.write_checkpoint(arrays)
    assert pending._intent is not None
    assert isinstance(store.backend, ObjectBackend)
    about: dict[str, Any] = {"kind": "checkpoint", "manifest": pending._manifest_name, "n_bytes": 1, "flavor": None}
    ref = new_ref(RefTarget(run_id="moving", step=0), key="refs/runs/moving/@0", **about)
    key, token = pending._intent
    died = mock.patch.object(store.backend._bucket, "create", side_effect=KeyboardInterrupt)
    with died, contextlib.suppress(KeyboardInterrupt):
        store.backend.promote(key, ref.key, ref_bytes(ref), token=token, replace=True)


def make_objects(expected: Expected) -> None:
    """A store in a bucket: packs by time, hints, voids, a generation, and a move of a save that died in its commit."""
    memory = MemoryStore()
    store = Store.init_backend(opened(memory), chunk_bytes=4096)
    for step in (1, 2, 3):
        save(store, expected, tensors(step), RefTarget(run_id="run", step=step), flavor="pytorch", cuts=CUTS)
    save(store, expected, tensors(4), RefTarget(run_id="run", step=3))
    dropped: Expected = {}
    save(store, dropped, {"garbage": noise(4_000, 79)}, RefTarget(path="gone/file"))
    store.drop_artifacts("gone")
    plan_gc(store, grace_s=0, max_waste=0).execute()
    die_in_a_commit(store, {"moving": noise(1_500, 16)})
    for batch in obstore.list(memory):
        for found in batch:
            to = HERE / "objects" / found["path"]
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(bytes(obstore.get(memory, found["path"]).bytes()))


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    _catalog._FOLD_AT = 3  # a segment of few packs keeps the store small
    _ingest.BATCH_BYTES = 8192
    expected: dict[str, Expected] = {"root": {}, "carried": {}, "objects": {}}
    with (
        mock.patch.object(_records, "_this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch.object(_records.os, "getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=4096, database=False)
        save_files(store, expected["root"])
        save_steps(store, expected["root"])
        drop_and_rewrite(store)
        leave_open(store, expected["root"])
        make_carried(expected["carried"])
        make_objects(expected["objects"])
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

"""Write the golden store of shards: ``python -m tests.golden.make_v1_shards``, once for this version of the format."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Box, Policy, Store, join_shards, store_shards, withdraw_shards

HERE = Path(__file__).parent / "v1_shards"


def main() -> None:
    """Write the store and the digests of its tensors."""
    shutil.rmtree(HERE, ignore_errors=True)
    store = Store.init(HERE / "root", chunk_bytes=4096, database=False)
    rng = np.random.default_rng(22)
    whole = {
        "rows": rng.normal(0, 1, (30, 101)).astype(np.float32),
        "columns": rng.normal(0, 1, (16, 60)).astype(np.float16),
        "boxes": rng.integers(0, 99, (11, 13, 3)).astype(np.int16),
    }
    parts = {
        "rows": [(slice(0, 17),), (slice(17, 30),)],
        "columns": [(slice(0, 16), slice(0, 25)), (slice(0, 16), slice(25, 60))],
        "boxes": [(slice(a, b), slice(c, d)) for a, b in ((0, 6), (6, 11)) for c, d in ((0, 7), (7, 13))],
    }
    stored = []
    for rank in range(2):
        boxes = [
            Box(
                name=name,
                data=np.ascontiguousarray(whole[name][part]),
                offsets=tuple(side.start for side in part) + (0,) * (whole[name].ndim - len(part)),
                shape=whole[name].shape,
            )
            for name, some in parts.items()
            for part in some[rank::2]
        ]
        shards = store_shards(store, boxes, series=f"golden#{rank}", policy=Policy.BALANCED)
        stored.append((boxes, shards))
    tensors = [
        (
            Spec.of(name, array),
            [
                shard
                for boxes, each in stored
                for box, shard in zip(boxes, each.shards, strict=True)
                if box.name == name
            ],
        )
        for name, array in whole.items()
    ]
    joined = join_shards(store, tensors)
    with store.begin_checkpoint(joined, series="golden") as save:
        ref = save.commit(RefTarget(run_id="golden", step=1))
    withdraw_shards(store, [each.intent for _, each in stored])
    expected = {name: sha256(array.tobytes()).hexdigest() for name, array in whole.items()}
    (HERE / "expected.json").write_text(json.dumps({"key": ref.key, **expected}, indent=1) + "\n")


if __name__ == "__main__":
    main()

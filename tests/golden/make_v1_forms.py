"""Write the golden store with forms. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_forms

Checkpoints were saved without a search for functions. An optimization found that the tensors of two of them are those
of a third one, cast or transposed, and wrote forms. The third one is deleted and collected. ``expected.json`` has the
SHA-256 of the bytes of each tensor.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize
from tensorcas_mlflow.store import Store
from tests.forms.made import no_search
from tests.golden.make_v1_derived import floats

HERE = Path(__file__).parent / "v1_forms"
CHUNK_BYTES = 16 << 10
SHAPES = {"w": (192, 256), "v": (160, 256)}


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    model = {name: floats(seed, *shape) for seed, (name, shape) in enumerate(SHAPES.items(), 1)}
    checkpoints = {
        "model": model,
        "half": {name: array.astype(ml_dtypes.bfloat16) for name, array in model.items()},
        "transposed": {name: np.ascontiguousarray(array.T) for name, array in model.items()},
    }
    expected: dict[str, dict[str, str]] = {}
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=CHUNK_BYTES, database=False)
        refs = {}
        with no_search():
            for run_id, arrays in checkpoints.items():
                with store.write_checkpoint(arrays) as pending:
                    refs[run_id] = pending.commit(RefTarget(run_id=run_id, step=1))
                expected[refs[run_id].key] = {
                    name: sha256(array.tobytes()).hexdigest() for name, array in arrays.items()
                }
        report = plan_optimize(Store.open(HERE / "root")).execute()
        assert report.n_forms == 2
        store = Store.open(HERE / "root")
        store.drop(refs["model"])
        del expected[refs["model"].key]
        plan_gc(store, grace_s=0, max_waste=0).execute()
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

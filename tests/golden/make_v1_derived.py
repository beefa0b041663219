"""Write the golden store with derived rows. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_derived

A checkpoint has one row of each function, and a file has a derived row. The checkpoint that
the inputs were saved with is deleted and collected. ``expected.json`` has the SHA-256 of the bytes of each tensor.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from tensorcas_mlflow.codecs import Kind, evaluate
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tests.derived.checkpoints import Made, save_derived

HERE = Path(__file__).parent / "v1_derived"
CHUNK_BYTES = 4096


def floats(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """Return floats with many digits, by arithmetic that every release of numpy repeats."""
    n = int(np.prod(shape))
    words = ((np.arange(n, dtype=np.int64) + seed) * 2654435761 >> 5) % 16777213 - 8388607
    return (words.astype(np.float32) / np.float32(1 << 26)).reshape(shape)


def tensors() -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Made]]:
    """Return the tensors of the checkpoint, and the functions of the derived ones."""
    one, two = floats(1, 48, 64), floats(2, 48, 64)
    conv = floats(3, 8, 4, 3, 3).astype(np.float16)
    rounded = one.astype(ml_dtypes.bfloat16)
    near = rounded.copy()
    near.view(np.uint16)[::7] += 1
    q8 = evaluate("q8_0", {}, [two], Kind(None, (48 * 64 // 32 * 34,)))
    arrays = {
        "one": one,
        "cast": rounded,
        "float8": two.astype(ml_dtypes.float8_e4m3fn),
        "permute": np.ascontiguousarray(one.T),
        "permute.conv": np.ascontiguousarray(conv.transpose(2, 3, 1, 0)),
        "slice": np.ascontiguousarray(two[:, 16:48]),
        "slice.cast": one[5:30].astype(np.float16),
        "mean": evaluate("mean", {}, [one, two], Kind("float32", one.shape)),
        "mean.three": evaluate("mean", {}, [one, two, near], Kind("bfloat16", one.shape)),
        "q8_0": q8,
    }
    made = {
        "cast": Made("cast", ["one"]),
        "float8": Made("cast", [two]),
        "permute": Made("permute", ["one"], {"axes": [1, 0]}),
        "permute.conv": Made("permute", [conv], {"axes": [2, 3, 1, 0]}),
        "slice": Made("slice", [two], {"axis": 1, "start": 16}),
        "slice.cast": Made("slice", ["one"], {"axis": 0, "start": 5}),
        "mean": Made("mean", ["one", two]),
        "mean.three": Made("mean", ["one", two, near]),
        "q8_0": Made("q8_0", [two]),
    }
    return arrays, made


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    arrays, made = tensors()
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=CHUNK_BYTES, database=False)
        with store.write_checkpoint({"a": floats(1, 48, 64), "b": floats(2, 48, 64)}) as pending:
            first = pending.commit(RefTarget(run_id="run", step=1))
        checkpoint = save_derived(store, RefTarget(run_id="run", step=2), arrays, made, is_bytes=["q8_0"])
        head = np.frombuffer(b"a head of some bytes\n" * 3, np.uint8)
        parts = {"head": head, "w": arrays["cast"], "tail": head[::-1].copy()}
        file = save_derived(
            store,
            RefTarget(path="model.bin"),
            parts,
            {"w": Made("cast", [arrays["one"]])},
            is_bytes=["head", "tail"],
            nameless=["head", "tail"],
            kind="file",
        )
        store.drop(first)
        plan_gc(store, grace_s=0, max_waste=0).execute()
    expected = {
        "checkpoint": {"key": checkpoint.key}
        | {name: sha256(array.tobytes()).hexdigest() for name, array in arrays.items()},
        "file": {
            "key": file.key,
            "": sha256(b"".join(array.tobytes() for array in parts.values())).hexdigest(),
        },
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

"""Write the golden store with sparse deltas. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_sparse

Each step changes few words, so chains are as deep as a save makes them. ``expected.json`` has the SHA-256 of the bytes
of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

HERE = Path(__file__).parent
CHUNK_BYTES = 32 << 10
N_STEPS = 10


def tensors(step: int) -> dict[str, np.ndarray]:
    """Return whole numbers as floats, by arithmetic that every release of numpy repeats."""
    n = 8 << 10
    words = (np.arange(2 * n, dtype=np.int64) * 2654435761 >> 7) % 65536
    for earlier in range(step):
        changed = (np.arange(2 * n) * 40503 + 977 * earlier) % 251 == 0
        words[changed] = (words[changed] * 40503 + 977 * earlier) % 65536
    return {
        "single": words.astype(np.float32),
        "half": words.astype("<u2").view(ml_dtypes.bfloat16),
        "double": words[:n].astype(np.float64),
    }


def write(folder: Path, tensors: Callable[[int], dict[str, np.ndarray]]) -> None:
    """Write a golden store of one run.

    Args:
        folder: Folder of the store and of what is expected of it; it must not exist.
        tensors: Returns the tensors of a step.
    """
    if folder.exists():
        raise SystemExit(f"{folder} is there, and stays as it is")
    expected: dict[str, dict[str, str]] = {}
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(folder / "root", chunk_bytes=CHUNK_BYTES, database=False)
        for step in range(N_STEPS):
            arrays = tensors(step)
            with store.write_checkpoint(arrays) as pending:
                key = pending.commit(RefTarget(run_id="run", step=step)).key
            expected[key] = {name: sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write(HERE / "v1_sparse", tensors)

"""Write the golden store of quantized blocks of GGUF. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_blocks

A checkpoint has one row of each format, all derived from one tensor of float32 that the store keeps beside it.
``expected.json`` has the SHA-256 of the bytes of each tensor as ``gguf.quantize`` makes them.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from unittest import mock

import gguf
import numpy as np

from tensorcas_mlflow.codecs import BLOCK_FORMATS
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.derived.checkpoints import Made, save_derived
from tests.golden.make_v1_derived import CHUNK_BYTES, floats

HERE = Path(__file__).parent / "v1_blocks"


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    weights = floats(7, 64, 256)
    weights[3], weights[4, :32], weights[5] = 0, np.arange(32) * 0.5, weights[5] * np.float32(2**-130)
    with np.errstate(all="ignore"):
        blocks = {
            name: gguf.quantize(weights, gguf.GGMLQuantizationType[name.upper()]).reshape(-1) for name in BLOCK_FORMATS
        }
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=CHUNK_BYTES, database=False)
        arrays = {"w": weights, **blocks}
        made = {name: Made(name, ["w"]) for name in blocks}
        ref = save_derived(store, RefTarget(run_id="run", step=1), arrays, made, is_bytes=list(blocks))
    expected = {"key": ref.key} | {name: sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

"""Contents of the golden store of format 1, by arithmetic that no release of numpy changes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

METADATA = {"classes": [1, 2.5, None, "drei"], "nested": {"ok": True}}
CUTS = {"trees": [100, 350, 1000]}


def noise(n: int, seed: int) -> np.ndarray:
    """Words without a pattern."""
    words = np.arange(n, dtype=np.uint64) + np.uint64(seed) * np.uint64(1_000_003)
    for shift in (33, 29, 32):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(0xFF51AFD7ED558CCD)
    return words


def tensors(step: int) -> dict[str, np.ndarray]:
    changing = (noise(3_000, step) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    record = np.zeros(50, [("left", "<i4"), ("gain", ">f8", (2,)), ("name", "S5")])
    record["left"] = np.arange(50)
    record["gain"] = np.arange(100).reshape(50, 2) / 4
    record["name"] = b"leaf"
    return {
        "__skeleton__": np.frombuffer(b'{"kind": "golden"}' * 20, np.uint8),
        "layer.weight": changing.reshape(30, 100),
        "layer.bias": np.arange(100, dtype=np.float16),
        "frozen": np.arange(4_096, dtype=np.int64),
        "bf16": changing[:500].astype(ml_dtypes.bfloat16),
        "fp8": changing[:70].astype(ml_dtypes.float8_e4m3fn),
        "big": np.arange(20, dtype=">f8"),
        "noise": noise(700, 7),
        "trees": np.arange(3_000, dtype=np.int32).reshape(1_000, 3),
        "record": record,
        "text": np.array(["eins", "zwei", "模型"]),
        "bytes": np.array([b"a", b"bcd"]),
        "when": np.array(["2020-01-01T00:00:00", "NaT"], "datetime64[ns]"),
        "flags": np.arange(9) % 2 == 0,
        "scalar": np.array(step),
        "empty": np.zeros((0, 4)),
        "zeros": np.zeros(20_000, np.float32),
    }


def payload_tensors() -> dict[str, np.ndarray]:
    return {name: tensors(9)[name] for name in ("layer.weight", "noise", "empty", "scalar", "__skeleton__")}


FILE = b"a file\n" * 1_000 + noise(2_000, 3).tobytes()

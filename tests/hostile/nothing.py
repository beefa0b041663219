"""A process that gives chunks and payloads of 0 bytes to every reader; it ends, or hangs.

python -m tests.hostile.nothing
"""

from __future__ import annotations

from itertools import product

from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, SHUFFLE_ZSTD, ZSTD
from tensorcas_mlflow.errors import TensorCasError
from tests.hostile.test_forged_deltas import FORGED, OPERATIONS, forged, load


def read_stores() -> int:
    names = [name for name in FORGED if " 0 bytes" in name or " no " in name]
    for name, folded in product(names, (False, True)):
        for operate in OPERATIONS.values():
            operate(forged(name, folded=folded))
        try:
            load(forged(name, folded=folded))
        except TensorCasError:
            continue
        raise AssertionError(f"{name} was loaded")
    return len(names)


def decode() -> None:
    """Call the core itself, which gets no such chunk from the readers."""
    from tests.native.test_decode import run_core, run_python

    for codec in (RAW, ZSTD, SHUFFLE_ZSTD, PLANES):
        for n_deltas in range(12):
            delta = bytes(DELTA.encode(b"", 4, b""))
            chain = [*[(DELTA, delta)] * n_deltas, (codec, bytes(codec.encode(b"", 4)))]
            for verify in (False, True):
                assert run_core(b"", chain, verify=verify) is None
                assert run_python(b"", chain, verify=verify) is None


if __name__ == "__main__":
    decode()
    print(read_stores())

"""Write the golden self-contained file of version 1. It was run once; a file that was written is never changed.

    python -m tests.golden.make_tensors_v1

What it must hold is said in `golden_v1.py`, which the test reads too.
"""

from __future__ import annotations

from pathlib import Path

from tensorcas_mlflow.store import write_payload
from tests.golden.golden_v1 import METADATA, payload_tensors

HERE = Path(__file__).parent / "tensors_v1"


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    cuts = {"layer.weight": [10, 30]}
    write_payload(HERE, payload_tensors(), flavor="sklearn", cuts=cuts, metadata=METADATA)


if __name__ == "__main__":
    main()

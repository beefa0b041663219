"""Write the golden store of format 1, without a database. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1

What it must hold is said in `golden_v1.py`, which the test reads too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.golden.golden_v1 import CUTS, FILE, METADATA, tensors

HERE = Path(__file__).parent / "v1"


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    _catalog._FOLD_AT = 3  # a segment of few packs keeps the store small
    store = Store.init(HERE / "root", chunk_bytes=4096, database=False)
    for step in (1, 2, 3, 4):
        target = RefTarget(run_id="run one", step=step, model_id="m-1")
        with store.write_checkpoint(tensors(step), flavor="pytorch", cuts=CUTS, metadata=METADATA) as save:
            save.commit(target)
    with store.write_checkpoint(tensors(2), flavor="pytorch", cuts=CUTS, metadata=METADATA) as save:
        save.commit(RefTarget(path="models/m-1/artifacts/data/checkpoint.arrow", run_id="run one", step=2))
    with store.write_checkpoint(tensors(5)) as save:
        save.commit(RefTarget(uri="s3://bucket/elsewhere/checkpoint.arrow"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").write_bytes(FILE)
        with store.write_file(Path(folder) / "file") as save:
            save.commit(RefTarget(path="plots/ä b%.bin"))


if __name__ == "__main__":
    main()

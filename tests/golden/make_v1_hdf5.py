"""Write the golden store of HDF5 files whose data sets have chunks and filters. It was run once.

A store that was written is never changed.

    python -m tests.golden.make_v1_hdf5

The file has one array in chunks of each kind. ``expected.json`` has the SHA-256 of the file, by the key of its ref.
"""

from __future__ import annotations

import io
import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import h5py

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.hdf5_samples import hdf5_file
from tests.golden.make_v1_derived import floats

HERE = Path(__file__).parent / "v1_hdf5"
CHUNK_BYTES = 1 << 14
GZIP = {"compression": "gzip", "compression_opts": 4}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": GZIP,
    "shuffle": {**GZIP, "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "all": {"compression": "gzip", "compression_opts": 9, "shuffle": True, "fletcher32": True},
}


def write(file: h5py.File) -> None:
    """Write one array of 404 x 103 floats in each kind of chunks, which are wider and longer than it at its ends."""
    array = floats(11, 404, 103)
    array[100:150] = 0.5
    for name, settings in KINDS.items():
        file.create_dataset(f"layers/{name}/w", data=array, chunks=(50, 40), maxshape=(None, 103), **settings)


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    expected: dict[str, str] = {}
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=CHUNK_BYTES, database=False)
        for libver in ("earliest", "latest"):
            data = hdf5_file(write, libver=libver)
            with store.write_stream(io.BytesIO(data)) as pending:
                ref = pending.commit(RefTarget(path=f"{libver}.h5"))
            expected[ref.key] = sha256(data).hexdigest()
            print(libver, len(data), [each.params for each in store.manifest(ref).derived])
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

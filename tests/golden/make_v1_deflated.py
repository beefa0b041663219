"""Write the golden store of files with compressed streams. It was run once; a store that was written is never changed.

    python -m tests.golden.make_v1_deflated

A zip archive has one array nine times, compressed with the levels 1 to 9, and a gzip file has it once.
``expected.json`` has the SHA-256 of each file, by the key of its ref.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from hashlib import sha256, shake_256
from pathlib import Path
from unittest import mock

import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

HERE = Path(__file__).parent / "v1_deflated"
CHUNK_BYTES = 1 << 16


def array() -> bytes:
    """Return an ``.npy`` file that each level compresses in another way, to more than 64 KiB."""
    noise = shake_256(b"tensorcas golden").digest(70_000)
    words = [noise[40 * at : 40 * at + 3 + noise[at] % 37] for at in range(250)]
    picks = [one * other // 261 for one, other in zip(noise[10_000:38_000], noise[38_000:66_000], strict=True)]
    data = b"".join(word[:cut] for at, pick in enumerate(picks) for word, cut in [(words[pick], 3 + noise[at] % 20)])
    out = io.BytesIO()
    np.save(out, np.frombuffer(data[: len(data) // 4 * 4], "<f4"))
    return out.getvalue()


def main() -> None:
    if HERE.exists():
        raise SystemExit(f"{HERE} is there, and stays as it is")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for level in range(1, 10):
            info = zipfile.ZipInfo(f"level-{level}.npy")
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, array(), compresslevel=level)
    expected: dict[str, str] = {}
    files = {"model.npz": archive.getvalue(), "array.npy.gz": gzip.compress(array(), 9, mtime=0)}
    with (
        mock.patch("tensorcas_mlflow.layout._records._this_process", return_value=("golden", 1)),
        mock.patch("platform.node", return_value="golden"),
        mock.patch("os.getpid", return_value=1),
    ):
        store = Store.init(HERE / "root", chunk_bytes=CHUNK_BYTES, database=False)
        for path, data in files.items():
            with store.write_stream(io.BytesIO(data)) as pending:
                ref = pending.commit(RefTarget(path=path))
            expected[ref.key] = sha256(data).hexdigest()
            print(path, len(data), [each.params["level"] for each in store.manifest(ref).derived])
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

"""Compressed members, and arrays in another order than C's, are imported, converted and exported in bounded memory."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

N_BYTES = 256 << 20
ALLOWED_BYTES = 128 << 20
"""Beyond what the process has once it has done the same with a small file."""

LIMITED = """
import resource, sys
from pathlib import Path
from tensorcas_mlflow.reader import import_checkpoint, plan_export
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.reader import open_ref
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

def imported(path, folder):
    import_checkpoint(Store.init(folder / "store"), open_listing(path), RefTarget(run_id="r", step=1))

def converted(path, folder):
    plan_export(open_listing(path), folder / "out.npz").execute()

def exported(path, folder):
    store = Store.init(folder / "store")
    with store.write_file(path) as pending:
        ref = pending.commit(RefTarget(path=path.name))
    with open_ref(store, ref) as reader:
        plan_export(reader, folder / "out.npz").execute()

def data_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) << 10

door, small, large, folder = globals()[sys.argv[1]], *map(Path, sys.argv[2:5])
(folder / "small").mkdir()
door(small, folder / "small")
limit = data_bytes() + int(sys.argv[5])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
door(large, folder)
"""


def npz(n_bytes: int, out: Path, *, dtype: str = "<f4", order: str = "C") -> None:
    array = np.zeros((n_bytes // 8192, 2048), dtype, order=order)
    array[:, 7] = 1
    np.savez_compressed(out, w=array)


def archive(n_bytes: int, out: Path) -> None:
    """Write a file of `torch.save` that somebody has compressed since."""
    plain = io.BytesIO()
    torch.save({"w": torch.zeros(n_bytes // 4).reshape(-1, 1024).t()}, plain)
    with zipfile.ZipFile(plain) as stored, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as deflated:
        for info in stored.infolist():
            deflated.writestr(info.filename, stored.read(info))


def legacy(n_bytes: int, out: Path) -> None:
    torch.save({"w": torch.zeros(n_bytes // 4).reshape(-1, 1024).t()}, out, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[int, Path], None]] = {
    "deflated": npz,
    "deflated, Fortran order": lambda n_bytes, out: npz(n_bytes, out, order="F"),
    "deflated, big-endian": lambda n_bytes, out: npz(n_bytes, out, dtype=">f4"),
    "deflated torch, transposed": archive,
    "legacy torch, transposed": legacy,
}
SLOW = pytest.mark.long
CASES = [
    pytest.param(door, kind, marks=[] if (door, kind) == ("imported", "deflated") else [SLOW])
    for door in ("imported", "converted", "exported")
    for kind in WRITERS
]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is told by Linux only")
@pytest.mark.parametrize(("door", "kind"), CASES)
def test_member_larger_than_memory_is_converted(door: str, kind: str, tmp_path: Path) -> None:
    suffix = ".pt" if "torch" in kind else ".npz"
    small, large = tmp_path / f"small{suffix}", tmp_path / f"large{suffix}"
    WRITERS[kind](1 << 20, small)
    WRITERS[kind](N_BYTES, large)
    # A file that is mapped so that it may be written to counts as data, though none of it is in memory.
    allowed = ALLOWED_BYTES + large.stat().st_size

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, door, small, large, tmp_path, str(allowed)],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-2000:]

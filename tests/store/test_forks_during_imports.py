"""A child forked while another thread imports for its first save, load or read can save, load and read.

This file is the program, too: the first use of the package is in a thread, and beside it the process forks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

N_CHILDREN = 6
PAUSES_S = (0.0, 0.003, 0.03, 0.1, 0.2, 0.4)
LIMIT_S = 90


def save(root: Path) -> None:
    import numpy as np

    from tensorcas_mlflow import TensorCasStore

    TensorCasStore(root, f"process {os.getpid()}").save({"w": np.arange(9.0)}, step=1)


def load(root: Path) -> None:
    from tensorcas_mlflow import TensorCasStore

    assert TensorCasStore(root, "there").load()["w"].sum() == 36


def read(root: Path) -> None:
    import tensorcas_mlflow

    with tensorcas_mlflow.open_checkpoint(root / "file.npz") as reader:
        assert reader["w"].sum() == 36


ACTS: dict[str, Callable[[Path], None]] = {"save": save, "load": load, "read": read}


def run(act: Callable[[Path], None], root: Path) -> None:
    """Act in a thread, fork beside it, and act in each child. Print the number of children that hang or fail."""
    import numpy as np  # noqa: F401 -- as a user has it

    import tensorcas_mlflow  # noqa: F401

    begun = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        begun.set()
        try:
            act(root)
        except BaseException as error:  # noqa: BLE001 -- shown below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    children = []
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                act(root)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    thread.join()
    end_s = time.monotonic() + LIMIT_S
    bad = dict.fromkeys(children, "hangs")
    while bad and time.monotonic() < end_s:
        for child in list(bad):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                del bad[child]
                if status:
                    failures.append(ChildProcessError(f"a child ends with {status}"))
        time.sleep(0.01)
    for child in bad:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print(f"{len(bad)} hang, {failures}")


@pytest.mark.parametrize("act", ACTS)
def test_child_forked_during_the_first_use_does_not_hang(act: str, tmp_path: Path) -> None:
    import numpy as np

    from tensorcas_mlflow import TensorCasStore

    TensorCasStore(tmp_path, "there").save({"w": np.arange(9.0)}, step=1)
    np.savez(tmp_path / "file.npz", w=np.arange(9.0))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
    command = [sys.executable, __file__, act, str(tmp_path)]
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=3 * LIMIT_S)

    assert done.stdout == "0 hang, []\n", done.stderr
    assert "Exception ignored" not in done.stderr


if __name__ == "__main__":
    run(ACTS[sys.argv[1]], Path(sys.argv[2]))

"""Run a function in the ranks of a gloo group: processes forked from one that has imported everything."""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any


def run_ranks(n_ranks: int, function: str, *given: Any) -> list[int]:
    """Run a function of this package's modules in ranks, each with its rank first, and return their exit statuses.

    Args:
        n_ranks: Number of ranks.
        function: ``module:name``.
        given: Plain JSON values.
    """
    import subprocess

    words = [sys.executable, "-m", "tests.distributed.ranks", str(n_ranks), function, json.dumps(given)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise AssertionError(done.stdout[-6000:] + done.stderr[-6000:])
    print(done.stderr[-6000:])  # pytest shows it if the test fails
    return list(json.loads(done.stdout.splitlines()[-1]))


def _rank(rank: int, n_ranks: int, meeting: str, function: Any, given: list[Any]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=n_ranks, init_method=f"file://{meeting}", timeout=patience)
    function(rank, *given)
    dist.barrier()
    dist.destroy_process_group()


def _main() -> None:
    n_ranks, name, given = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(n_ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _rank(rank, n_ranks, str(Path(folder, "meeting")), function, given)
                    status = 0
                except BaseException:  # noqa: BLE001 - the status tells the parent
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print()
    print(json.dumps(statuses))


if __name__ == "__main__":
    _main()

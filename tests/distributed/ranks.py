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

from tests.zygote import run_program

LATE = "tensorcas_flavors.pytorch"
"""A module that each rank would import when it saves or loads: one process imports it before it forks."""


def run_ranks(n_ranks: int, function: str, *given: Any) -> list[int]:
    """Run a function of this package's modules in ranks, each with its rank first, and return their exit statuses.

    Args:
        n_ranks: Number of ranks.
        function: ``module:name``.
        given: Plain JSON values.
    """
    return run_groups((n_ranks, function, *given))[0]


def run_groups(*groups: tuple[Any, ...]) -> list[list[int]]:
    """Run functions in groups of ranks, one group after the other; return the exit statuses of each group's ranks.

    Args:
        groups: The arguments of `run_ranks` for each.
    """
    program = "import sys; from tests.distributed.ranks import main; main(sys.argv[1])"
    done = run_program(program, json.dumps(groups), timeout=300, check=True)
    print(done.stderr[-12000:])  # pytest shows it if the test fails
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def _rank(rank: int, n_ranks: int, meeting: str, function: Any, given: list[Any]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=n_ranks, init_method=f"file://{meeting}", timeout=patience)
    function(rank, *given)
    dist.barrier()
    dist.destroy_process_group()


def _run(n_ranks: int, name: str, *given: Any) -> list[int]:
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(n_ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _rank(rank, n_ranks, str(Path(folder, "meeting")), function, list(given))
                    status = 0
                except BaseException:  # noqa: BLE001 - the status tells the parent
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(groups: str) -> None:
    """Run groups, given as JSON, and print the statuses of each."""
    importlib.import_module(LATE)
    for group in json.loads(groups):
        statuses = _run(*group)
        print()
        print(json.dumps(statuses), flush=True)

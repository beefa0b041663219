"""Listing a long series of checkpoints, and loading its latest step, in a new process."""

from __future__ import annotations

import mlflow
import numpy as np
from mlflow.tracking import MlflowClient

from benchmarks.harness import WHOLE, Options, Program, Section, Table, at_most, interleave_fresh, show_ms

TITLE = "a long series in a new process"
N_STEPS = 2000
N_ROUNDS = 7
LISTED = at_most(0.1, "s", "list_checkpoints of 2,000 steps, the first call of a process")

_BEGIN = """
import sys
import mlflow, mlflow.tensorcas
mlflow.set_tracking_uri(sys.argv[1])
client = mlflow.MlflowClient()
client.get_run(sys.argv[2])  # opens the database, which is none of the figures
begin = time.perf_counter()
"""
_FIGURES = "\nfigures = {'call': time.perf_counter() - begin}\n"
_CALLS = {
    "list_checkpoints": "assert len(mlflow.tensorcas.list_checkpoints(sys.argv[2])) == int(sys.argv[3])",
    "load_checkpoint, the latest": "mlflow.tensorcas.load_checkpoint(sys.argv[2])",
    "os.scandir, the refs": "import os; assert sum(1 for _ in os.scandir(sys.argv[4])) >= int(sys.argv[3])",
}


def run(options: Options) -> Section:
    """Log a series of small states; list it and load the latest, each in an interpreter of its own."""
    section = Section("listing", TITLE)
    section.note("the call alone, with MLflow imported and its database open")
    n_steps = 20 if options.is_smoke else N_STEPS
    table = Table(f"{TITLE}: {n_steps:,} steps", ("call", "ms", "middle half", "whole process, ms"))
    before = mlflow.get_tracking_uri()
    with options.folder() as scratch:
        tracking_uri = f"sqlite:///{scratch}/mlflow.db"
        mlflow.set_tracking_uri(tracking_uri)
        try:
            location = scratch / "artifacts"
            experiment = MlflowClient().create_experiment("listing", artifact_location=str(location))
            with mlflow.start_run(experiment_id=experiment) as run:
                for step in range(n_steps):
                    state = {"weights": np.full(64, step, dtype=np.float32)}
                    mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)  # type: ignore[attr-defined]
        finally:
            mlflow.set_tracking_uri(before)
        shown = location / run.info.run_id / "artifacts" / "checkpoints" / "checkpoint"
        args = (tracking_uri, run.info.run_id, str(n_steps), str(shown))
        programs = {name: Program(text=f"{_BEGIN}{call}{_FIGURES}", args=args) for name, call in _CALLS.items()}
        n_rounds, n_warm = (1, 0) if options.is_smoke else (options.n_rounds or N_ROUNDS, 1)
        found = interleave_fresh(programs, n_rounds, n_warm=n_warm)
    for name, figures in found.items():
        section.keep(f"{n_steps:,} steps", {name: figures["call"]})
        table.add(name, *show_ms(figures["call"]), show_ms(figures[WHOLE])[0])
    section.verdicts.append(LISTED.judge("warm", found["list_checkpoints"]["call"].median))
    section.tables.append(table)
    return section

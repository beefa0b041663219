"""End-to-end time of `mlflow.tensorcas.log_checkpoint`, called as in a training loop, against its unavoidable work."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlflow
import torch
from mlflow.tracking import MlflowClient

from benchmarks.data import Case, bytes_of, mlp, transformer
from benchmarks.harness import (
    Hashing,
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_most,
    interleave,
    show_ms,
    sync,
    write_durably,
)
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES

TITLE = "log_checkpoint, run resolved, metrics off; and the last step into a module that is there"
CHANGED = at_most(4, "ms", "log_checkpoint of a changed 330 KB MLP, less two fsyncs")
N_ROUNDS = 100
_LOADS = ("load_checkpoint, into a module", "open_checkpoint, load_into")
"""Turns without a save, so no floor of a save applies to them."""


def run(options: Options) -> Section:
    """Log modules and state dicts, changed and unchanged, to MLflow's own artifact root and to a store's."""
    section = Section("checkpoint", TITLE)
    section.note("two fsyncs: 400 bytes in a new file, which is synced, renamed, and its folder synced")
    columns = ("place, model, state", "ms", "middle half", "hashing", "two fsyncs", "less both")
    table = Table(TITLE, columns)
    cases = [mlp(options.data, is_smoke=options.is_smoke)]
    if not options.is_smoke:
        cases.append(transformer(13_000_000, options.data, dtype="fp32"))
    before = mlflow.get_tracking_uri()
    with options.folder() as scratch:
        mlflow.set_tracking_uri(f"sqlite:///{scratch}/mlflow.db")
        try:
            places = {"plain": str(scratch / "plain"), "tensorcas:": f"tensorcas://{scratch}/ours"}
            for (place, location), case in itertools.product(places.items(), cases):
                _measure(place, location, case, scratch, options, section, table)
        finally:
            mlflow.set_tracking_uri(before)
    section.tables.append(table)
    return section


def _measure(
    place: str, location: str, case: Case, scratch: Path, options: Options, section: Section, table: Table
) -> None:
    experiment = f"{place} {case.name}"
    experiment_id = MlflowClient().create_experiment(experiment, artifact_location=f"{location}/{len(table.rows)}")
    module, live = as_module(case), as_module(case.like())
    steps = itertools.count()
    work = scratch / f"{len(table.rows)}"
    work.mkdir()
    with mlflow.start_run(experiment_id=experiment_id) as active:
        turns = {
            "hashing": Turn(Hashing(map(bytes_of, case.arrays.values()), DEFAULT_CHUNK_BYTES)),
            "two fsyncs": Turn(lambda: write_durably(work / str(next(steps)), [b"x" * 400])),
            "torch.save + fsync": Turn(lambda: _save_durably(module, work / f"{next(steps)}.pt")),
            "unchanged module": Turn(lambda: _log(module, next(steps))),
            "unchanged state dict": Turn(lambda: _log(module.state_dict(), next(steps))),
            "changed module": Turn(lambda: _log(module, next(steps)), before=lambda: _train(module)),
            "load_checkpoint, into a module": Turn(lambda: _load_into(active.info.run_id, live)),
            "open_checkpoint, load_into": Turn(lambda: _fill(active.info.run_id, live)),
        }
        taken = interleave(turns, options.n_rounds or (1 if options.is_smoke else N_ROUNDS), n_warm=2)
        _check(module, active.info.run_id)
    section.keep(experiment, taken)
    for name in list(turns)[2:]:
        rest = taken[name].minus(taken["two fsyncs"]).minus(taken["hashing"])
        floors = [show_ms(taken[floor])[0] for floor in ("hashing", "two fsyncs")]
        compared = ("", "", "") if name in _LOADS else (*floors, _signed_ms(rest))
        table.add(f"{place}, {case.name}, {name}", *show_ms(taken[name]), *compared)
    if case.name == "330 KB MLP":
        left = taken["changed module"].minus(taken["two fsyncs"])
        section.verdicts.append(CHANGED.judge(place, left.median * 1000))


def as_module(case: Case) -> torch.nn.Module:
    """A module with the tensors of a model: one parameter each."""
    module = torch.nn.Module()
    for name, tensor in case.tensors.items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
    return module


def _log(state: Any, step: int) -> None:
    mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)  # type: ignore[attr-defined]


def _load_into(run_id: str, module: torch.nn.Module) -> None:
    mlflow.tensorcas.load_checkpoint(run_id, into=module)  # type: ignore[attr-defined]


def _fill(run_id: str, module: torch.nn.Module) -> None:
    mlflow.tensorcas.open_checkpoint(run_id).load_into(module)  # type: ignore[attr-defined]


def _train(module: torch.nn.Module) -> None:
    """Move every weight a little."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.001 * torch.randn(parameter.shape))


def _save_durably(module: torch.nn.Module, path: Path) -> None:
    torch.save(module.state_dict(), path)
    sync(path)
    sync(path.parent)


def _check(module: torch.nn.Module, run_id: str) -> None:
    """Check that the last checkpoint equals the module's present state."""
    mlflow.tensorcas.log_checkpoint(module, step=1 << 30, log_metrics=False)  # type: ignore[attr-defined]
    loaded = mlflow.tensorcas.load_checkpoint(run_id, weights_only=True)  # type: ignore[attr-defined]
    wanted = module.state_dict()
    if not all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items()):
        raise AssertionError("other weights came back than were logged")


def _signed_ms(series: Series) -> str:
    return f"{series.median * 1000:.2f}"

"""Size of histories of trainings, every byte of the store counted, and the speed of restoring any of their steps."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.contenders import Ours, Write, chosen, policies_of_ours
from benchmarks.data import Case, History, boosters, gradient_boosting, histories, same_bytes
from benchmarks.harness import (
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_least,
    disk_bytes,
    interleave,
    show_bytes,
    show_ratio,
)
from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.base import config
from tensorcas_mlflow.maintenance import plan_optimize
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore

TITLE = "histories of trainings: bytes kept, and steps restored"
SAVED = {
    "Adam states": at_least(25, "%", "16 checkpoints with Adam state, saved by default"),
    "bf16 fine-tune": at_least(64, "%", "bf16 weights of a fine-tune, base + 5, saved by default"),
    "bf16 pretraining": at_least(45, "%", "bf16 weights of a pretraining, 8 epochs, saved by default"),
    "fp32 CNN": at_least(39, "%", "fp32 weights of a CNN, 10 epochs, saved by default"),
    "fp32 encoder": at_least(57, "%", "fp32 fine-tune of an encoder at 2e-5, base + 5, saved by default"),
    "bf16 encoder": at_least(78, "%", "bf16 fine-tune of an encoder at 2e-5, base + 5, saved by default"),
}
OPTIMIZED = {
    "Adam states": at_least(26.5, "%", "16 checkpoints with Adam state, saved after optimize"),
    "bf16 fine-tune": at_least(67, "%", "bf16 weights of a fine-tune, base + 5, saved after optimize"),
    "bf16 pretraining": at_least(48, "%", "bf16 weights of a pretraining, 8 epochs, saved after optimize"),
    "fp32 CNN": at_least(44, "%", "fp32 weights of a CNN, 10 epochs, saved after optimize"),
}
N_RESTORES = 5
"""Of each step."""

DELTAS = at_least(700, "MB/s", "save of a step after the first of its run, as deltas")
RESTORED = at_least(500, "MB/s", "restore of any step of a history, verified")
RESTORED_OPTIMIZED = at_least(500, "MB/s", "restore of any step of a history after optimize, verified")
_COLUMNS = (
    "history, saved by",
    "steps",
    "plain",
    "stored",
    "saved",
    "save MB/s",
    "as deltas MB/s",
    "slowest restore MB/s",
    "median",
    "to safetensors",
    "saved after optimize",
    "optimize MB/s",
    "slowest restore then",
    "median then",
    "to safetensors then",
)


def run(options: Options) -> Section:
    """Save each history into a store of its own by each policy, load every step back, and compare.

    The store of the default policy is optimized then, and all of it loaded and compared again.
    """
    section = Section("histories", TITLE)
    section.note(f"restored warm, verified, on {config.n_threads()} threads; the slowest step is what counts")
    table = Table(TITLE, _COLUMNS)
    policies = chosen(policies_of_ours(), options, section)
    for history in histories(options.data, is_smoke=options.is_smoke):
        for ours in policies:
            with options.folder() as scratch:
                table.add(f"{history.name}, {ours.name}", *_measure(history, ours, scratch, options, section))
    section.tables.append(table)
    section.tables.append(_trees(options))
    return section


def _measure(history: History, ours: Ours, scratch: Path, options: Options, section: Section) -> list[str]:
    """Give the cells of a history and a policy."""
    is_default = ours.name == "tensorcas"
    is_judged = is_default and not options.is_smoke
    plain, saving, deltas = _save(history, ours, scratch)
    stored = disk_bytes(scratch)
    saved = 100 * (1 - stored / plain)
    restored, ratio = _restored(history, scratch, options)
    section.samples[f"{history.name}/{ours.name}/restore MB/s"] = restored.values
    cells = [str(len(history.steps)), show_bytes(plain), show_bytes(stored), f"{saved:.1f} %"]
    cells += [f"{saving:,.0f}", "" if deltas is None else f"{deltas.median:,.0f}"]
    cells += [f"{restored.least:,.0f}", f"{restored.median:,.0f}", show_ratio(ratio)]
    if is_judged:
        if history.name in SAVED:
            section.verdicts.append(SAVED[history.name].judge("default policy", saved))
        section.verdicts.append(RESTORED.judge(history.name, restored.least))
        if deltas is not None:
            section.verdicts.append(DELTAS.judge(history.name, deltas.median))
    if deltas is not None:
        section.samples[f"{history.name}/{ours.name}/save as deltas MB/s"] = deltas.values
    if not is_default:
        return [*cells, "", "", "", "", ""]
    begin = time.perf_counter()
    plan_optimize(Store.open(scratch)).execute()
    optimizing_s = time.perf_counter() - begin
    saved = 100 * (1 - disk_bytes(scratch) / plain)
    restored, ratio = _restored(history, scratch, options)
    section.samples[f"{history.name}/{ours.name}/restore after optimize MB/s"] = restored.values
    if is_judged:
        if history.name in OPTIMIZED:
            section.verdicts.append(OPTIMIZED[history.name].judge("small", saved))
        section.verdicts.append(RESTORED_OPTIMIZED.judge(history.name, restored.least))
    speeds = (plain / 1e6 / optimizing_s, restored.least, restored.median)
    return [*cells, f"{saved:.1f} %", *(f"{speed:,.0f}" for speed in speeds), show_ratio(ratio)]


def _save(history: History, ours: Ours, root: Path) -> tuple[int, float, Series | None]:
    """Save all steps.

    Returns:
        Bytes of all steps, megabytes a second over all of them, and those of each step after the first one of its run,
        most of which is stored as deltas; None if every run has one step.
    """
    plain = 0
    saving_s = 0.0
    later: list[float] = []
    ours.prepare(root)
    writers: dict[str, Write] = {}
    for run, step, case in history.cases():
        is_later = run in writers
        if not is_later:
            writers[run] = ours.writer(root, run)
        case.ready()
        begin = time.perf_counter()
        writers[run](case, step)
        seconds = time.perf_counter() - begin
        saving_s += seconds
        plain += case.n_bytes
        if is_later:
            later.append(case.n_bytes / 1e6 / seconds)
    return plain, plain / 1e6 / saving_s, Series(tuple(later)) if later else None


def _restored(history: History, root: Path, options: Options) -> tuple[Series, Series]:
    """Load each step as a process with a newly opened store does, and compare every byte.

    Returns:
        Megabytes a second of each step, and its time to that of a safetensors file with the same tensors.
    """
    found = [_restored_step(root, *each, options) for each in history.cases()]
    speeds, ratios = zip(*found, strict=True)
    return Series(speeds), Series(ratios)


def _restored_step(root: Path, run: str, step: int, case: Case, options: Options) -> tuple[float, float]:
    store = TensorCasStore(root, run)
    with options.folder() as beside:
        file = beside / "step.safetensors"
        save_file(case.tensors, file)
        turns = {
            "ours": Turn(lambda: store.load_tensors(step)),
            # Into memory of their own, as ours are: the tensors of a mapped file are read at their first use.
            "theirs": Turn(lambda: [tensor.clone() for tensor in load_file(file).values()]),
        }
        taken = interleave(turns, 1 if options.is_smoke else N_RESTORES, n_warm=0)
    loaded = store.load_tensors(step)
    loaded.pop(SKELETON, None)
    if not same_bytes(loaded, case.arrays):
        raise AssertionError(f"step {step} of {run} came back otherwise")
    return case.n_bytes / 1e6 / taken["ours"].median, taken["ours"].over(taken["theirs"]).median


def _trees(options: Options) -> Table:
    """Models of trees, five trees more each step, as `TensorCasStore` saves them."""
    table = Table("Models that grow by five trees a step", ("model", "steps", "as files", "stored", "stored / files"))
    n_steps = 3 if options.is_smoke else 20
    models: dict[str, tuple[Iterator[Any], Callable[[Any], bytes]]] = {
        "GradientBoostingRegressor, pickled": (gradient_boosting(n_steps), pickle.dumps),
        "XGBoost, as UBJSON": (boosters(n_steps), lambda booster: bytes(booster.save_raw("ubj"))),
    }
    for name, (history, as_file) in models.items():
        files: list[bytes] = []
        with options.folder() as scratch:
            store = TensorCasStore(scratch, "run")
            for step, model in enumerate(history):
                store.save(model, step)
                files.append(as_file(model))
            for step, file in enumerate(files):
                if as_file(store.load(step)) != file:
                    raise AssertionError(f"step {step} of {name} came back otherwise")
            stored = disk_bytes(scratch)
        plain = sum(map(len, files))
        table.add(name, str(len(files)), show_bytes(plain), show_bytes(stored), f"{100 * stored / plain:.2f} %")
    return table

"""What histories of trainings take, every byte of the store counted, and how fast any step of them comes back."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.contenders import Ours, chosen, policies_of_ours
from benchmarks.data import Case, History, boosters, gradient_boosting, histories, same_bytes
from benchmarks.harness import (
    Options,
    Section,
    Series,
    Table,
    at_least,
    disk_bytes,
    show_bytes,
)
from tensorcas_mlflow import TensorCasStore, config
from tensorcas_mlflow.store import RefTarget, Store

TITLE = "histories of trainings: bytes kept, and steps restored"
SAVED = {
    "Adam states": at_least(25, "%", "16 checkpoints with Adam state, saved by default"),
    "bf16 fine-tune": at_least(64, "%", "bf16 weights of a fine-tune, base + 5, saved by default"),
    "bf16 pretraining": at_least(45, "%", "bf16 weights of a pretraining, 8 epochs, saved by default"),
    "fp32 CNN": at_least(41, "%", "fp32 weights of a CNN, 10 epochs, saved by default"),
    "fp32 encoder": at_least(57, "%", "fp32 fine-tune of an encoder at 2e-5, base + 5, saved by default"),
    "bf16 encoder": at_least(78, "%", "bf16 fine-tune of an encoder at 2e-5, base + 5, saved by default"),
}
N_RESTORES = 5
"""Of each step."""

RESTORED = at_least(500, "MB/s", "restore of any step of a history, verified")


def run(options: Options) -> Section:
    """Save each history into a store of its own by each policy, load every step back, and compare."""
    section = Section("histories", TITLE)
    section.note(f"restored warm, verified, on {config.n_threads()} threads; the slowest step is what counts")
    columns = ("history, saved by", "steps", "plain", "stored", "saved", "save MB/s", "slowest restore MB/s", "median")
    table = Table(TITLE, columns)
    policies = chosen(policies_of_ours(), options, section)
    for history in histories(options.data, is_smoke=options.is_smoke):
        for ours in policies:
            _measure(history, ours, options, section, table)
    section.tables.append(table)
    section.tables.append(_trees(options))
    return section


def _measure(history: History, ours: Ours, options: Options, section: Section, table: Table) -> None:
    plain = 0
    saving_s = 0.0
    with options.folder() as scratch:
        store = Store.init(scratch)
        for run, step, case in history.cases():
            begin = time.perf_counter()
            ours.write(store, case, step, run=run)
            saving_s += time.perf_counter() - begin
            plain += case.n_bytes
        stored = disk_bytes(scratch)
        speeds = [_restored(store, run, step, case, options) for run, step, case in history.cases()]
    saved = 100 * (1 - stored / plain)
    restored = Series(tuple(speeds))
    section.samples[f"{history.name}/{ours.name}/restore MB/s"] = restored.values
    sizes = (show_bytes(plain), show_bytes(stored), f"{saved:.1f} %")
    speed = (f"{plain / 1e6 / saving_s:,.0f}", f"{restored.least:,.0f}", f"{restored.median:,.0f}")
    table.add(f"{history.name}, {ours.name}", str(len(history.steps)), *sizes, *speed)
    if ours.name == "tensorcas" and not options.is_smoke:
        if history.name in SAVED:
            section.verdicts.append(SAVED[history.name].judge("default policy", saved))
        section.verdicts.append(RESTORED.judge(history.name, restored.least))


def _restored(store: Store, run: str, step: int, case: Case, options: Options) -> float:
    """Load one step and compare it; megabytes a second, the median of some times."""
    ref = store.ref(RefTarget(run_id=run, step=step).key)
    assert ref is not None
    taken = []
    for _ in range(1 if options.is_smoke else N_RESTORES):
        begin = time.perf_counter()
        loaded = store.read_tensors(store.manifest(ref))
        taken.append(time.perf_counter() - begin)
    if not same_bytes(loaded, case.arrays):
        raise AssertionError(f"step {step} of {run} came back otherwise")
    return case.n_bytes / 1e6 / statistics.median(taken)


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

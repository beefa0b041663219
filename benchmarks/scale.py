"""Costs of a process in stores of up to ten million chunks and 20,000 checkpoints.

The stores are made by ordinary saves of small states without anything in common, so that only the numbers of chunks,
packs and checkpoints are large. Every figure is that of a new process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.harness import Options, Program, Section, Series, Table, at_most, interleave_fresh, show_bytes
from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

TITLE = "one process in a large store"
SIZES = ((1_000, 526), (2_510, 526), (20_000, 500))
"""Checkpoints of each store, and chunks of each checkpoint."""
SMOKE_SIZES = ((70, 20),)
STEPS_OF_A_RUN = 50

FIRST_SAVE = at_most(0.1, "s", "the first save of a process")
FIRST_LOAD = at_most(0.1, "s", "the first load of a process")
FIRST_MEMORY = at_most(50e6, "bytes", "memory that the first save of a process adds")
PLAN = at_most(300, "s", "the plan of the first collection")
PLAN_MEMORY = at_most(4e9, "bytes", "memory of the plan of the first collection")
NEXT_PLAN = at_most(10, "s", "the plan of the next collection")

_BEGIN = """
import resource, sys, tempfile
import numpy as np
import tensorcas_mlflow.tensorcas_store
from tensorcas_mlflow.base.engines import LocalProcesses
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store

def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024

def save(store):
    # Another state in each process, so that all of its chunks are new.
    random = np.random.default_rng()
    state = {f"layers.{number}.weight": random.integers(0, 1 << 62, 8) for number in range(500)}
    with store.write_checkpoint(state, series="new") as pending:
        return pending.commit(RefTarget(run_id="new", step=int(random.integers(1 << 60))))

with tempfile.TemporaryDirectory() as small:
    store = Store.open(small, create=True)  # imports what a save and a load need
    store.read_tensors(store.manifest(save(store)))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = held()
begin = time.perf_counter()
store = Store.open(sys.argv[1])
"""
_END = "\nfigures = {'s': time.perf_counter() - begin, 'bytes': max(0, %s - before)}\n"
_CALLS = {
    "first save": ("save(store)", "held()"),
    "first load": ("store.read_tensors(store.manifest(store.ref(sys.argv[2])))", "held()"),
    "list all checkpoints": ("assert len(store.checkpoints()) >= int(sys.argv[3])", "held()"),
    "quick verification": ("assert not verify(store).problems", "peak()"),
    "full verification": ("assert not verify(store, full=True).problems", "peak()"),
    "full verification, 2 processes": (
        "assert not verify(store, full=True, engine=LocalProcesses(2)).problems",
        "peak()",
    ),
    "repair, plan": ("assert plan_repair(store).is_empty", "peak()"),
    "first collection, plan": ("plan_gc(store)", "peak()"),
    "first collection, all of it": ("plan_gc(store).execute()", "peak()"),
    "next collection, plan": ("plan_gc(store)", "peak()"),
}


def run(options: Options) -> Section:
    """Make each store, and measure it call by call."""
    section = Section("scale", TITLE)
    for n_steps, n_chunks in SMOKE_SIZES if options.is_smoke else SIZES:
        title = f"{n_steps * n_chunks:,} chunks, {n_steps:,} checkpoints"
        table = Table(f"{TITLE}: {title}", ("call", "s", "memory"))
        with options.folder() as folder:
            key = _make(folder, n_steps, n_chunks)
            args = (str(folder), key, str(n_steps))
            # One after the other: a collection changes what the next calls find.
            for name, (call, memory) in _CALLS.items():
                is_quick = name.startswith("first") and "collection" not in name
                n_rounds = (options.n_rounds or 5) if is_quick and not options.is_smoke else 1
                program = Program(text=f"{_BEGIN}{call}{_END % memory}", args=args)
                figures = interleave_fresh({name: program}, n_rounds, n_warm=int(is_quick))[name]
                section.keep(title, {name: figures["s"]})
                table.add(name, f"{figures['s'].median:.3f}", show_bytes(figures["bytes"].median))
                _judge(section, title, name, figures)
        section.tables.append(table)
    return section


def _make(folder: Path, n_steps: int, n_chunks: int) -> str:
    """Make a store, and return the key of one of its refs."""
    store = Store.init_backend(LocalBackend(folder / ".tensorcas"))
    random = np.random.default_rng(0)
    names = [f"layers.{number}.weight" for number in range(n_chunks)]
    key = ""
    for step in range(n_steps):
        values = random.integers(0, 1 << 62, (n_chunks, 8))
        run = f"run-{step // STEPS_OF_A_RUN}"
        with store.write_checkpoint(dict(zip(names, values, strict=True)), series=run) as pending:
            ref = pending.commit(RefTarget(run_id=run, step=step))
        if step == n_steps // 2:
            key = ref.key
    return key


def _judge(section: Section, case: str, name: str, figures: dict[str, Series]) -> None:
    seconds, n_bytes = figures["s"].median, figures["bytes"].median
    if name == "first save":
        section.verdicts += [FIRST_SAVE.judge(case, seconds), FIRST_MEMORY.judge(case, n_bytes)]
    elif name == "first load":
        section.verdicts.append(FIRST_LOAD.judge(case, seconds))
    elif name == "first collection, plan":
        section.verdicts += [PLAN.judge(case, seconds), PLAN_MEMORY.judge(case, n_bytes)]
    elif name == "next collection, plan":
        section.verdicts.append(NEXT_PLAN.judge(case, seconds))

"""Training loops that save every step: the stall of each save, the time of the loop, and what a step leaves on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import torch
from mlflow.tracking import MlflowClient

from benchmarks.harness import (
    Counts,
    Options,
    Section,
    Series,
    Table,
    at_most,
    counts_of,
    disk_bytes,
    n_files,
    show_bytes,
    show_ms,
    show_ratio,
    sync,
)

TITLE = "loops that save every step"
PEER = "torch.save + fsync"
NONE = "no saves"
STALL = at_most(1.5, "x", "a save of a small net every step: stall, to torch.save + fsync")
BACKGROUND = at_most(1, "ms", "a save of a small net in the background: stall")
LOOP = at_most(1.05, "x", "a save of a small net every step: loop in the background, to the foreground")
N_FILES = at_most(0.5, "files", "a save of a small net every step: files, each step")
N_CALLS = at_most(1000, "calls", "a save of a small net: Python calls")
N_ROUNDS = 5

Save = Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A net, and the length of its loop."""

    name: str
    sizes: tuple[int, ...]
    n_steps: int
    has_optimizer: bool
    """True if the optimizer's moments are saved with the weights."""


SMALL = Net(name="160 KB net", sizes=(64, 256, 96, 10), n_steps=200, has_optimizer=False)
NETS = (SMALL, Net(name="4 MB net and Adam", sizes=(256, 512, 256, 256), n_steps=60, has_optimizer=True))


class Training:
    """A net in training, with real gradients, so every step changes every weight."""

    def __init__(self, net: Net) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for n_in, n_out in zip(net.sizes, net.sizes[1:], strict=False):
            layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
        self.module = torch.nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-4)
        self.state: Any = {"model": self.module, "optimizer": self.optimizer} if net.has_optimizer else self.module
        self._data = torch.randn(32, net.sizes[0])
        self.step()

    def step(self) -> None:
        """Take one step of the optimizer."""
        self.optimizer.zero_grad()
        self.module(self._data).square().mean().backward()
        self.optimizer.step()

    def plain(self) -> Any:
        """Return the state in the form for `torch.save`."""
        if isinstance(self.state, dict):
            return {name: part.state_dict() for name, part in self.state.items()}
        return self.module.state_dict()


@dataclass(slots=True)
class _Found:
    """Findings of one way to save."""

    stalls: list[float]
    loops: list[float]
    n_files: float = 0
    n_bytes: float = 0
    counts: Counts | None = None


def run(options: Options) -> Section:
    """Train each net with each way to save, in turns."""
    section = Section("loops", TITLE)
    section.note(
        "stall: the time of the call that saves; loop: until the last step is durable, to the loop without saves"
    )
    section.note("files and bytes: those of MLflow's artifacts with the store in them, and of the files of torch.save")
    columns = ("net, saved by", "stall ms", "p95", "p99", "to torch.save", "loop", "files a step", "bytes a step")
    table = Table(TITLE, columns)
    calls = Table("Work of one save", ("net, saved by", "Python calls", "modules", "fsyncs"))
    before = mlflow.get_tracking_uri()
    with options.folder() as scratch:
        mlflow.set_tracking_uri(f"sqlite:///{scratch}/mlflow.db")
        try:
            for net in (SMALL,) if options.is_smoke else NETS:
                _measure(net, scratch, options, section, table, calls)
        finally:
            mlflow.set_tracking_uri(before)
    section.tables += [table, calls]
    return section


def _measure(net: Net, scratch: Path, options: Options, section: Section, table: Table, calls: Table) -> None:
    n_steps = 5 if options.is_smoke else net.n_steps
    found = {name: _Found([], []) for name in (NONE, PEER, *_OURS)}
    for number in range(options.n_rounds or (1 if options.is_smoke else N_ROUNDS)):
        names = list(found)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            place = scratch / f"{len(table.rows)}-{number}-{list(found).index(name)}"
            _loop(net, name, place, n_steps, found[name])
    peer = Series(tuple(found[PEER].stalls))
    alone = Series(tuple(found[NONE].loops))
    for name, of_name in found.items():
        loops = Series(tuple(of_name.loops)).over(alone)
        if name == NONE:
            table.add(f"{net.name}, {name}", "", "", "", "", show_ratio(loops), "", "")
            continue
        stalls = Series(tuple(of_name.stalls))
        section.keep(f"{net.name}, stalls", {name: stalls})
        tails = (f"{stalls.percentile(percent) * 1000:.2f}" for percent in (95, 99))
        ratio = stalls.median / peer.median
        left = f"{of_name.n_files:.2f}", show_bytes(of_name.n_bytes)
        table.add(f"{net.name}, {name}", show_ms(stalls)[0], *tails, f"{ratio:.2f} x", show_ratio(loops), *left)
        counts = of_name.counts
        if counts is not None:
            calls.add(f"{net.name}, {name}", f"{counts.n_calls:,}", str(counts.n_modules), str(counts.n_fsyncs))
        if net is SMALL and name == "log_checkpoint":
            section.verdicts.append(STALL.judge(net.name, ratio))
            section.verdicts.append(N_FILES.judge(net.name, of_name.n_files))
            if counts is not None:
                section.verdicts.append(N_CALLS.judge(net.name, counts.n_calls))
        if net is SMALL and name == "log_checkpoint, in the background":
            section.verdicts.append(BACKGROUND.judge(net.name, stalls.median * 1000))
            in_foreground = Series(tuple(found["log_checkpoint"].loops))
            section.verdicts.append(LOOP.judge(net.name, Series(tuple(of_name.loops)).over(in_foreground).median))


def _loop(net: Net, name: str, place: Path, n_steps: int, found: _Found) -> None:
    training = Training(net)
    with _saver(name, training, place) as (save, wait):
        if save is not None:
            for step in range(2):  # the first save creates the store
                save(step)
                training.step()
            wait()
        n_before, bytes_before = (n_files(place), disk_bytes(place)) if place.exists() else (0, 0)
        begin = time.perf_counter()
        for step in range(2, 2 + n_steps):
            training.step()
            if save is not None:
                at = time.perf_counter()
                save(step)
                found.stalls.append(time.perf_counter() - at)
        wait()
        found.loops.append(time.perf_counter() - begin)
        if save is not None:
            found.n_files = (n_files(place) - n_before) / n_steps
            found.n_bytes = (disk_bytes(place) - bytes_before) / n_steps
            training.step()
            found.counts = counts_of(lambda: (save(2 + n_steps), wait()))


def _nothing() -> None:
    pass


@contextmanager
def _saver(name: str, training: Training, place: Path) -> Iterator[tuple[Save | None, Callable[[], object]]]:
    """Open a way to save: a function that saves a step, or None, and one that waits until all steps are durable."""
    if name == NONE:
        yield None, _nothing
        return
    if name == PEER:
        place.mkdir()
        yield lambda step: _save_durably(training, place / f"{step}.pt"), _nothing
        return
    options = _OURS[name]
    tensorcas: Any = mlflow.tensorcas  # type: ignore[attr-defined]
    experiment = MlflowClient().create_experiment(place.name, artifact_location=str(place))
    with mlflow.start_run(experiment_id=experiment) as run:
        steps: list[int] = []

        def save(step: int) -> None:
            steps.append(step)
            tensorcas.log_checkpoint(training.state, step=step, **options)

        yield save, tensorcas.wait
        loaded = tensorcas.load_checkpoint(run.info.run_id, step=steps[-1], weights_only=True)
        weights = training.module.state_dict()
        prefix = "model." if isinstance(training.state, dict) else ""
        if not all(torch.equal(loaded[f"{prefix}{name}"], tensor) for name, tensor in weights.items()):
            raise AssertionError(f"{name}: other weights came back than were saved")


_OURS: dict[str, dict[str, Any]] = {
    "log_checkpoint": {"log_metrics": False},
    "log_checkpoint, in the background": {"log_metrics": False, "blocking": False},
    "log_checkpoint, in the background, with metrics": {"log_metrics": True, "blocking": False},
}


def _save_durably(training: Training, path: Path) -> None:
    torch.save(training.plain(), path)
    sync(path)
    sync(path.parent)

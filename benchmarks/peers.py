"""The same histories as other tools keep them: files of safetensors, one a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
from safetensors.torch import load, save_file

from benchmarks.contenders import OURS, TOOLS, Ours, Tool
from benchmarks.data import History, histories, same_bytes
from benchmarks.harness import Chart, Options, Section, Series, Table, disk_bytes, n_files, show_bytes
from tensorcas_mlflow.tensorcas_store import TensorCasStore

TITLE = "histories as other tools keep them, every byte counted"
HISTORIES = ("Adam states", "bf16 fine-tune", "fp32 CNN", "frozen backbone", "adapters")


def run(options: Options) -> Section:
    """Keep each history by each tool, give the last step back, and compare."""
    section = Section("peers", TITLE)
    section.note("seconds: a whole history, step by step, and the last step back; measured once, not in turns")
    tools = [tool for tool in TOOLS if tool.missing is None]
    for tool in TOOLS:
        if tool.missing is not None:
            section.note(f"left out: {tool.name}, {tool.missing}")
    table = Table(TITLE, ("history, kept by", "bytes", "of plain", "files", "keeping s", "last step back s"))
    named = {history.name: history for history in histories(options.data, is_smoke=options.is_smoke)}
    for name in HISTORIES[-1:] if options.is_smoke else HISTORIES:
        _measure(named[name], tools, options, section, table)
    section.tables.append(table)
    return section


def _measure(history: History, tools: list[Tool], options: Options, section: Section, table: Table) -> None:
    shares: dict[str, Series] = {}
    with options.folder() as scratch, _tracking_kept():
        plain = 0
        files = []
        for number, (_, _, case) in enumerate(history.cases()):
            files.append(scratch / f"{number}.safetensors")
            save_file(case.tensors, files[-1])
            plain += case.n_bytes

        def note(name: str, kept: Path, keeping_s: float, back_s: float) -> None:
            n_bytes = disk_bytes(kept)
            shares[name] = Series((100 * n_bytes / plain,))
            row = (show_bytes(n_bytes), f"{100 * n_bytes / plain:.1f} %", str(n_files(kept)))
            table.add(f"{history.name}, {name}", *row, f"{keeping_s:.2f}", f"{back_s:.2f}")

        note("safetensors files", _moved(files, scratch), 0.0, 0.0)
        files = sorted((scratch / "files").iterdir(), key=lambda path: int(path.stem))
        for tool in tools:
            note(tool.name, *_kept_by(tool, files, scratch / tool.name))
        note(OURS[0].name, *_kept_by_us(OURS[0], history, scratch / "ours"))
    section.charts.append(Chart(f"{history.name}: bytes kept, of plain", "%", shares))


def _moved(files: list[Path], scratch: Path) -> Path:
    """Put the files into a folder of their own, to be counted."""
    folder = scratch / "files"
    folder.mkdir()
    for file in files:
        file.rename(folder / file.name)
    return folder


def _kept_by(tool: Tool, files: list[Path], place: Path) -> tuple[Path, float, float]:
    """Keep all files; return their place, the seconds for that, and the seconds to restore the last one."""
    tool.prepare(place)
    begin = time.perf_counter()
    for step, file in enumerate(files):
        tool.keep(place, file, step)
    kept = time.perf_counter()
    last = tool.give_back(place, len(files) - 1)
    back = time.perf_counter()
    if not same_bytes(load(last), load(files[-1].read_bytes())):
        raise AssertionError(f"{tool.name} gave other bytes back than it was given")
    return tool.kept(place), kept - begin, back - kept


def _kept_by_us(ours: Ours, history: History, place: Path) -> tuple[Path, float, float]:
    """Do the same for a history in memory, as in a training."""
    ours.prepare(place)
    keeping_s = 0.0
    for run, step, case in history.cases():
        case.ready()
        begin = time.perf_counter()
        ours.writer(place, run)(case, step)
        keeping_s += time.perf_counter() - begin
    begin = time.perf_counter()
    back = TensorCasStore(place, run).load(step)
    back_s = time.perf_counter() - begin
    if not same_bytes(back, case.arrays):
        raise AssertionError("other bytes came back than were saved")
    return place, keeping_s, back_s


@contextmanager
def _tracking_kept() -> Iterator[None]:
    """Give MLflow's tracking store back as it was."""
    before = mlflow.get_tracking_uri()
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)

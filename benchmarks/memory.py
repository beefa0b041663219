"""Memory of a save or a load, besides the model itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.contenders import OURS, SAFETENSORS, Contender, SafetensorsFile, TorchFile, chosen, save_all
from benchmarks.data import Case, Specs, transformer
from benchmarks.harness import Job, Options, Section, Table, at_most, clear, interleave_apart, series_of, show_bytes

TITLE = "peak memory above the model"
SIZES = (47_000_000, 650_000_000, 2_000_000_000)
N_ROUNDS = 3
SAVING = at_most(64, "MB", "peak memory above the model, saving")
LOADING = at_most(32, "MB", "peak memory above the model, loading into its own memory")
LOADS_IN_PLACE = ("load_into", "tensorcas Store")
"""Contenders of ours with one of these names read into the model's own memory; the others check everything first."""


def run(options: Options) -> Section:
    """Save, and load into an existing model, each in a process of its own."""
    section = Section("memory", TITLE)
    section.note("the peak is that of the resident set during the call, of which mapped files are a part")
    contenders: list[Contender] = chosen(
        [*OURS, SAFETENSORS, SafetensorsFile(kind="numpy"), TorchFile()], options, section
    )
    table = Table(TITLE, ("model, contender", "saving", "loading into it"))
    for size in options.sizes_or(SIZES):
        _measure(size, contenders, options, section, table)
    section.tables.append(table)
    return section


def _measure(size: int, contenders: list[Contender], options: Options, section: Section, table: Table) -> None:
    case = transformer(size, options.data, is_smoke=options.is_smoke)
    n_rounds = options.n_rounds or (1 if options.is_smoke else N_ROUNDS)
    with options.folder() as scratch:
        plain = scratch / "model.safetensors"
        save_file(case.tensors, plain)
        saving = {one.name: Job(prepare=_saving, args=(one, plain, scratch)) for one in contenders}
        saved = interleave_apart(saving, n_rounds, section)
        places = save_all(case, contenders, scratch)
        loading = {one.name: Job(prepare=_loading, args=(one, places[one.name], case.specs)) for one in contenders}
        loaded = interleave_apart(loading, n_rounds, section)
    ours = {one.name for one in OURS}
    for name in saving:
        save, load = (series_of(usages[name], "peak_bytes") for usages in (saved, loaded))
        table.add(f"{case.name}, {name}", show_bytes(save.median), show_bytes(load.median))
        section.keep(case.name, {name: save}, "bytes saving")
        section.keep(case.name, {name: load}, "bytes loading")
        if name in ours:
            section.verdicts.append(SAVING.judge(f"{case.name}, {name}", save.median / 1e6))
        if name in ours and any(text in name for text in LOADS_IN_PLACE):
            section.verdicts.append(LOADING.judge(f"{case.name}, {name}", load.median / 1e6))


def _saving(contender: Contender, plain: Path, scratch: Path) -> Callable[[], None]:
    """Have the model in memory, and save it; called in a process of its own."""
    case = Case.of_tensors("", load_file(plain)).ready()
    place = scratch / "saving"
    if place.exists():
        clear(place)
    place.mkdir()
    contender.prepare(place)
    return partial(contender.save, case, place)


def _loading(contender: Contender, folder: Path, specs: Specs) -> Callable[[], None]:
    """Have memory for the model, and load into it; called in a process of its own."""
    return partial(contender.load_into, folder, Case.of_specs("", specs).ready())

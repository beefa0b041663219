"""What loads cost: warm as they come and into a live model, and cold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import FILES, OURS, SAFETENSORS, Contender, ZipnnFile, ZstdTorchFile, installed
from benchmarks.data import Case, Specs, same_bytes, transformer
from benchmarks.harness import (
    Job,
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_least,
    at_most,
    interleave,
    interleave_apart,
    series_of,
    show_bytes,
    show_ms,
    show_ratio,
)

TITLE = "loads, from the page cache and without it"
SIZES = (300_000, 13_000_000, 47_000_000, 650_000_000)
COLD_SIZES = (47_000_000, 650_000_000)
LARGE_BYTES = 600_000_000
"""From here on a model counts as the large one that some targets are about."""

MAPPED = at_most(1.1, "x", "warm load of what is stored raw, mapped, verify off, to safetensors mapped")
COPIED = at_most(1.8, "x", "warm load into a model, verified, to safetensors' load + copy")
DECODED = at_least(1.5, "GB/s", "warm load of what the default codec stored, verified")
COLD = at_most(0.95, "x", "cold load into a model, to safetensors' load + copy")


def run(options: Options) -> Section:
    """Measure all three."""
    section = Section("load", TITLE)
    contenders = installed([*FILES, *OURS, ZstdTorchFile(), ZipnnFile()], section)
    sizes = options.sizes_or(SIZES)
    for size in sizes:
        case = transformer(size, options.data, is_smoke=options.is_smoke)
        with options.folder() as scratch:
            places = saved(case, contenders, scratch)
            warm(case, contenders, places, options, section)
            if size in options.sizes_or(COLD_SIZES):
                _cold(case, contenders, places, options, section)
    return section


def saved(case: Case, contenders: Sequence[Contender], scratch: Path) -> dict[str, Path]:
    """Save a model by each contender into a folder of its own, and give these by the contenders' names."""
    places = {contender.name: scratch / str(number) for number, contender in enumerate(contenders)}
    for contender in contenders:
        places[contender.name].mkdir()
        contender.prepare(places[contender.name])
        contender.save(case, places[contender.name])
    return places


def warm(
    case: Case, contenders: Sequence[Contender], places: dict[str, Path], options: Options, section: Section
) -> None:
    """Load from the page cache: as each does it best, and into memory that is there."""
    out = case.like()

    def check(loaded: Any) -> None:
        if loaded is not None and not same_bytes(loaded, case.tensors):
            raise AssertionError("other bytes came back")

    def check_out(_: Any) -> None:
        if not same_bytes(out.arrays, case.arrays):
            raise AssertionError("other bytes came back")
        for array in out.arrays.values():
            array[...] = 0

    # Comparing is slower than loading: it is done in a round of its own.
    plain = {one.name: Turn(lambda one=one: one.load(places[one.name])) for one in contenders}  # type: ignore[misc]
    into = {one.name: Turn(lambda one=one: one.load_into(places[one.name], out)) for one in contenders}  # type: ignore[misc]
    for name in plain:
        check(plain[name].act())
        into[name].act()
        check_out(None)
    n_rounds = options.rounds(case.n_bytes)
    loads, copies = interleave(plain, n_rounds), interleave(into, n_rounds)
    section.keep(f"warm load, {case.name}", loads)
    section.keep(f"warm load into, {case.name}", copies)
    columns = ("contender", "load ms", "middle half", "to safetensors", "load into ms", "middle half", "to safetensors")
    table = Table(f"Warm loads of a {case.name}, {len(case.arrays)} tensors", columns)
    for name in loads:
        alone, copied = loads[name].over(loads[SAFETENSORS.name]), copies[name].over(copies[SAFETENSORS.name])
        table.add(name, *show_ms(loads[name]), show_ratio(alone), *show_ms(copies[name]), show_ratio(copied))
    section.tables.append(table)
    _judge_warm(case, loads, copies, section)


def _judge_warm(case: Case, loads: dict[str, Series], copies: dict[str, Series], section: Section) -> None:
    mapped, raw, base = "tensorcas fast, mapped, verify off", "tensorcas fast", SAFETENSORS.name
    if mapped in loads:
        section.verdicts.append(MAPPED.judge(case.name, loads[mapped].over(loads[base]).median))
    if raw in copies:
        section.verdicts.append(COPIED.judge(case.name, copies[raw].over(copies[base]).median))
    if case.n_bytes >= 10_000_000:
        fastest = min(loads["tensorcas"].median, copies["tensorcas"].median)
        section.verdicts.append(DECODED.judge(case.name, case.n_bytes / fastest / 1e9))


def _cold(
    case: Case, contenders: Sequence[Contender], places: dict[str, Path], options: Options, section: Section
) -> None:
    """Load into a model in a process of its own, after what is saved was dropped from the page cache."""
    jobs = {
        one.name: Job(prepare=_load_into, args=(one, places[one.name], case.specs), cold=places[one.name])
        for one in contenders
    }
    usages, still_there = interleave_apart(jobs, min(5, options.rounds(case.n_bytes)))
    note_cold(still_there, section)
    taken = {name: series_of(of_name, "seconds") for name, of_name in usages.items()}
    section.keep(f"cold load into, {case.name}", taken)
    table = Table(
        f"Cold loads of a {case.name} into a model, a process a sample",
        ("contender", "ms", "middle half", "to safetensors", "read from disk", "peak above the model"),
    )
    for name, series in taken.items():
        read, peak = (series_of(usages[name], figure).median for figure in ("read_bytes", "peak_bytes"))
        ratio = show_ratio(series.over(taken[SAFETENSORS.name]))
        table.add(name, *show_ms(series), ratio, show_bytes(read), show_bytes(peak))
    section.tables.append(table)
    if case.n_bytes >= LARGE_BYTES:
        fastest = min((name for name in taken if name.startswith("tensorcas")), key=lambda name: taken[name].median)
        ratio = taken[fastest].over(taken[SAFETENSORS.name]).median
        section.verdicts.append(COLD.judge(f"{case.name}, {fastest}", ratio))


def _load_into(contender: Contender, folder: Path, specs: Specs) -> Callable[[], None]:
    """Load into a model that is there; called in a process of its own."""
    out = Case.of_specs("", specs)
    return lambda: contender.load_into(folder, out)


def note_cold(still_there: float, section: Section) -> None:
    """Say whether what was to be cold was."""
    if still_there > 0.02:
        section.note(
            f"the page cache could not be emptied: {still_there:.0%} of a folder stayed; its loads were not cold"
        )
    else:
        section.note("cold: the files are synced and dropped from the page cache (`posix_fadvise`) before each sample")

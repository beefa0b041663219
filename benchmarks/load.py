"""Cost of loads: warm, into new memory and into a live model, and cold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders import (
    FILES,
    OURS,
    SAFETENSORS,
    Contender,
    ZipnnFile,
    ZstdTorchFile,
    chosen,
    fastest_peer,
    save_all,
)
from benchmarks.data import Case, Specs, same_bytes, transformer
from benchmarks.harness import (
    Chart,
    Job,
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_least,
    at_most,
    in_ms,
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
"""Smallest size of a large model; some targets apply to large models only."""

DEFAULT = ("tensorcas", "tensorcas, load_into")
"""Calls for users to load content in the default codec."""

MOST_COLD = 7
"""Rounds of cold loads; each of them starts a process for each contender."""

MAPPED = at_most(1.1, "x", "warm load of what is stored raw, mapped, verify off, to safetensors mapped")
COPIED = at_most(1.8, "x", "warm load into a model of what is stored raw, verified, to safetensors' load + copy")
DECODED = at_least(1.5, "GB/s", "warm load of what the default codec stored, verified")
COLD = at_most(0.95, "x", "cold load into a model, to safetensors' load + copy")


def run(options: Options) -> Section:
    """Measure all three."""
    section = Section("load", TITLE)
    contenders = chosen([*FILES, *OURS, ZstdTorchFile(), ZipnnFile()], options, section)
    sizes = options.sizes_or(SIZES)
    for size in sizes:
        case = transformer(size, options.data, is_smoke=options.is_smoke)
        with options.folder() as scratch:
            places = save_all(case, contenders, scratch)
            _judge_warm(case, warm(case, contenders, places, options, section), section)
            if size in options.sizes_or(COLD_SIZES):
                _cold(case, contenders, places, options, section)
    return section


@dataclass(frozen=True, slots=True)
class Loads:
    """Seconds of warm loads of one model, by contender."""

    alone: dict[str, Series]
    into: dict[str, Series]
    """Loads into the memory of an existing model."""


def warm(
    case: Case, contenders: Sequence[Contender], places: Mapping[str, Path], options: Options, section: Section
) -> Loads:
    """Load from the page cache, in each contender's best way and into existing memory; add a table."""
    out = case.like()
    for one in contenders:
        loaded = one.load(places[one.name])
        one.load_into(places[one.name], out)
        if not same_bytes(loaded, case.tensors) or not same_bytes(out.arrays, case.arrays):
            raise AssertionError(f"{one.name} gave other bytes back than it was given")
        for array in out.arrays.values():
            array[...] = 0
    del loaded
    n_rounds = options.rounds(case.n_bytes)
    alone = interleave({one.name: Turn(partial(one.load, places[one.name])) for one in contenders}, n_rounds)
    into = interleave({one.name: Turn(partial(one.load_into, places[one.name], out)) for one in contenders}, n_rounds)
    section.keep(f"warm load, {case.name}", alone)
    section.keep(f"warm load into, {case.name}", into)
    base = SAFETENSORS.name
    title, fastest = f"Warm loads of {case.name}", "to the fastest peer"
    table = Table(title, ("contender", "load ms", "middle half", f"to {base}", fastest))
    copied = Table(f"{title} into a model", ("contender", "ms", "middle half", f"to {base}", fastest))
    for rows, taken in ((table, alone), (copied, into)):
        best = taken[fastest_peer(taken)]
        for name, series in taken.items():
            rows.add(name, *show_ms(series), show_ratio(series.over(taken[base])), show_ratio(series.over(best)))
    section.tables += [table, copied]
    section.charts.append(Chart(f"Warm load of {case.name} into a model", "ms", in_ms(into)))
    return Loads(alone, into)


def _judge_warm(case: Case, loads: Loads, section: Section) -> None:
    mapped, raw, base = "tensorcas Store fast, mapped, verify off", "tensorcas fast, load_into", SAFETENSORS.name
    if mapped in loads.alone:
        section.verdicts.append(MAPPED.judge(case.name, loads.alone[mapped].over(loads.alone[base]).median))
    if raw in loads.into:
        section.verdicts.append(COPIED.judge(case.name, loads.into[raw].over(loads.into[base]).median))
    if case.n_bytes >= 10_000_000:
        fastest = min(each[name].median for each in (loads.alone, loads.into) for name in DEFAULT if name in each)
        section.verdicts.append(DECODED.judge(case.name, case.n_bytes / fastest / 1e9))


def _cold(
    case: Case, contenders: Sequence[Contender], places: dict[str, Path], options: Options, section: Section
) -> None:
    """Load into a model in a process of its own, with the saved files dropped from the page cache."""
    jobs = {
        one.name: Job(prepare=_load_into, args=(one, places[one.name], case.specs), cold=places[one.name])
        for one in contenders
    }
    usages = interleave_apart(jobs, min(MOST_COLD, options.rounds(case.n_bytes)), section)
    taken = {name: series_of(of_name, "seconds") for name, of_name in usages.items()}
    section.keep(f"cold load into, {case.name}", taken)
    table = Table(
        f"Cold loads of {case.name} into a model, a process a sample",
        (
            "contender",
            "ms",
            "middle half",
            "to safetensors",
            "to the fastest peer",
            "read from disk",
            "peak above model",
        ),
    )
    best = taken[fastest_peer(taken)]
    for name, series in taken.items():
        read, peak = (series_of(usages[name], figure).median for figure in ("read_bytes", "peak_bytes"))
        ratios = (show_ratio(series.over(other)) for other in (taken[SAFETENSORS.name], best))
        table.add(name, *show_ms(series), *ratios, show_bytes(read), show_bytes(peak))
    section.tables.append(table)
    section.charts.append(Chart(f"Cold load of {case.name} into a model", "ms", in_ms(taken)))
    if case.n_bytes >= LARGE_BYTES:
        fastest = min((name for name in taken if name.startswith("tensorcas")), key=lambda name: taken[name].median)
        ratio = taken[fastest].over(taken[SAFETENSORS.name]).median
        section.verdicts.append(COLD.judge(f"{case.name}, {fastest}", ratio))


def _load_into(contender: Contender, folder: Path, specs: Specs) -> Callable[[], None]:
    """Load into an existing model; called in a process of its own."""
    out = Case.of_specs("", specs).ready()
    return lambda: contender.load_into(folder, out)

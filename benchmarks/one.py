"""One tensor of a large checkpoint, from an empty page cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.contenders import FILES, OURS, SAFETENSORS, Contender, chosen, fastest_peer, save_all
from benchmarks.data import bytes_of, transformer
from benchmarks.harness import (
    Chart,
    Job,
    Options,
    Section,
    Table,
    at_most,
    in_ms,
    interleave_apart,
    series_of,
    show_bytes,
    show_ms,
    show_ratio,
)

TITLE = "one tensor of a large checkpoint, cold"
SIZES = (650_000_000,)
N_ROUNDS = 9
TIME = at_most(0.5, "x", "one tensor, cold, to safetensors")
READ = at_most(1.1, "x", "one tensor, cold: bytes read from the disk, to the tensor's")


def run(options: Options) -> Section:
    """Read a tensor from the middle of a model, by each contender, in a process a sample."""
    section = Section("one", TITLE)
    contenders = chosen([*FILES, *OURS], options, section)
    for size in options.sizes_or(SIZES):
        _measure(size, contenders, options, section)
    return section


def _measure(size: int, contenders: list[Contender], options: Options, section: Section) -> None:
    case = transformer(size, options.data, is_smoke=options.is_smoke)
    layers = sorted({int(name.split(".")[1]) for name in case.arrays if name.startswith("blocks.")})
    name = f"blocks.{layers[len(layers) // 2]}.up.weight"
    n_bytes = case.arrays[name].nbytes
    with options.folder() as scratch:
        places = save_all(case, contenders, scratch)
        for one in contenders:
            if bytes_of(one.read_one(places[one.name], name)).tobytes() != case.arrays[name].tobytes():
                raise AssertionError(f"{one.name} gave other bytes back than it was given")
        jobs = {
            one.name: Job(prepare=_reading, args=(one, places[one.name], name), cold=places[one.name])
            for one in contenders
        }
        usages = interleave_apart(jobs, options.n_rounds or (1 if options.is_smoke else N_ROUNDS), section)
    taken = {who: series_of(of_one, "seconds") for who, of_one in usages.items()}
    section.keep(case.name, taken)
    title = f"One tensor of {show_bytes(n_bytes)} of {case.name}, cold"
    columns = (
        "contender",
        "ms",
        "middle half",
        "to safetensors",
        "to the fastest peer",
        "read from disk",
        "to the tensor",
    )
    table = Table(title, columns)
    best = taken[fastest_peer(taken)]
    for who, series in taken.items():
        read = series_of(usages[who], "read_bytes")
        ratio = series.over(taken[SAFETENSORS.name])
        share = read.times(1 / n_bytes)
        ratios = show_ratio(ratio), show_ratio(series.over(best))
        table.add(who, *show_ms(series), *ratios, show_bytes(read.median), show_ratio(share))
        if who in ("tensorcas", "tensorcas fast"):
            section.verdicts.append(TIME.judge(who, ratio.median))
            section.verdicts.append(READ.judge(who, share.median))
    section.tables.append(table)
    section.charts.append(Chart(title, "ms", in_ms(taken)))


def _reading(contender: Contender, folder: Path, name: str) -> Callable[[], object]:
    """Read one tensor; called in a process of its own."""
    return partial(contender.read_one, folder, name)

"""Cost of saves: a first one, an unchanged one, a partly changed one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import (
    FILES,
    OURS,
    SAFETENSORS,
    Contender,
    Durable,
    Ours,
    ZipnnFile,
    ZstdTorchFile,
    chosen,
    fastest_peer,
    policies_of_ours,
)
from benchmarks.data import Case, bytes_of, same_bytes, transformer
from benchmarks.harness import (
    Chart,
    Hashing,
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_least,
    at_most,
    clear,
    disk_bytes,
    in_ms,
    interleave,
    n_files,
    show_bytes,
    show_ms,
    show_ratio,
    write_durably,
)
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES

TITLE = "saves, each durable when it returns but where it is said"
SIZES = (300_000, 13_000_000, 47_000_000, 650_000_000)
UNCHANGED_SIZES = (300_000, 13_000_000, 47_000_000, 650_000_000, 2_000_000_000)
LARGE_BYTES = 600_000_000
"""Smallest size of a large model; some targets apply to large models only."""

PERCENTS = (1, 10, 50)
UNCHANGED = at_most(
    1.25, "x", "save of an unchanged model, to BLAKE3 of its bytes on the same threads + one small durable write"
)
CHANGED = at_most(1.3, "x", "save with some tensors changed, to hashing all + writing the changed bytes durably")
RAW = at_most(1.15, "x", "first save, no codec, to safetensors + fsync")
FASTER = at_least(1.5, "x", "first save, default policy: torch.save + zstd-3 + fsync takes so many times as long")
SMALLER = at_least(10, "%", "first save, default policy: smaller than torch.save + zstd-3")


@dataclass(frozen=True, slots=True)
class FirstSaves:
    """Times of first saves of one model, by contender."""

    seconds: dict[str, Series]
    disk_bytes: dict[str, int]


def run(options: Options) -> Section:
    """Measure all three."""
    section = Section("save", TITLE)
    for size in options.sizes_or(SIZES):
        case = transformer(size, options.data, is_smoke=options.is_smoke)
        policies = chosen(policies_of_ours(), options, section)
        peers = [Durable(file) for file in (*FILES[1:4], *FILES[5:], ZstdTorchFile(), ZipnnFile())]
        saves = first(
            case, [Durable(SAFETENSORS), *policies, SAFETENSORS, *chosen(peers, options, section)], options, section
        )
        if case.n_bytes >= LARGE_BYTES:
            _judge_first(case, saves, section)
        _changed(case, policies, options, section)
    for size in options.sizes_or(UNCHANGED_SIZES):
        _unchanged(transformer(size, options.data, is_smoke=options.is_smoke), options, section)
    return section


def first(case: Case, contenders: Sequence[Contender], options: Options, section: Section) -> FirstSaves:
    """Save a model by each contender into an empty place, check the result, and add a table.

    Args:
        contenders: The first one is the baseline for the others, besides the fastest that is not ours.
    """
    stored: dict[str, tuple[int, int]] = {}
    with options.folder() as scratch:

        def turn(contender: Contender) -> Turn:
            folder = scratch / contender.name.replace("/", " ")
            places = (folder / str(number) for number in itertools.count())
            # A store is known by its path for the life of the process, so no path is used again.
            place = [folder]

            def before() -> None:
                place[0] = next(places)
                place[0].mkdir(parents=True)
                contender.prepare(place[0])

            def after(_: Any) -> None:
                if contender.name not in stored:
                    stored[contender.name] = disk_bytes(place[0]), n_files(place[0])
                    if not same_bytes(contender.load(place[0]), case.tensors):
                        raise AssertionError(f"{contender.name} gave other bytes back than it was given")
                clear(place[0])

            return Turn(lambda: contender.save(case, place[0]), before, after)

        taken = interleave({one.name: turn(one) for one in contenders}, options.rounds(case.n_bytes))
    section.keep(f"first save, {case.name}", taken)
    base = contenders[0].name
    best = taken[fastest_peer(taken)]
    columns = ("contender", "ms", "middle half", f"to {base}", "to the fastest peer", "on disk", "files")
    table = Table(f"First save of {case.name}", columns)
    for name, series in taken.items():
        n_bytes, files = stored[name]
        ratios = (show_ratio(series.over(other)) for other in (taken[base], best))
        table.add(name, *show_ms(series), *ratios, show_bytes(n_bytes), str(files))
    section.tables.append(table)
    section.charts.append(Chart(f"First save of {case.name}", "ms", in_ms(taken)))
    return FirstSaves(taken, {name: n_bytes for name, (n_bytes, _) in stored.items()})


def _judge_first(case: Case, saves: FirstSaves, section: Section) -> None:
    taken, packed = saves.seconds, f"{ZstdTorchFile.name} + fsync"
    if "tensorcas fast" in taken:
        ratio = taken["tensorcas fast"].over(taken[f"{SAFETENSORS.name} + fsync"]).median
        section.verdicts.append(RAW.judge(case.name, ratio))
    if packed not in taken:
        return
    section.verdicts.append(FASTER.judge(case.name, taken[packed].over(taken["tensorcas"]).median))
    less = 100 * (1 - saves.disk_bytes["tensorcas"] / saves.disk_bytes[packed])
    section.verdicts.append(SMALLER.judge(case.name, less))


def _unchanged(case: Case, options: Options, section: Section) -> None:
    """Save content already in the store, as the next step."""
    ours, steps = OURS[0], itertools.count(1)
    with options.folder() as scratch:
        ours.prepare(scratch / "store")
        write = ours.writer(scratch / "store")
        write(case, 0)
        hashing = Hashing(map(bytes_of, case.arrays.values()), DEFAULT_CHUNK_BYTES)
        taken = interleave(
            {
                "BLAKE3 of all bytes": Turn(hashing),
                "one small durable write": Turn(lambda: write_durably(scratch / str(next(steps)), [b"x" * 400])),
                "tensorcas": Turn(lambda: write(case, next(steps))),
            },
            options.rounds(case.n_bytes),
        )
    section.keep(f"unchanged, {case.name}", taken)
    floor = taken["BLAKE3 of all bytes"].plus(taken["one small durable write"])
    ratio = taken["tensorcas"].over(floor)
    table = Table(f"Save of {case.name}, unchanged", ("what", "ms", "middle half", "to both floors"))
    for name, series in taken.items():
        table.add(name, *show_ms(series), show_ratio(series.over(floor)))
    section.tables.append(table)
    if case.n_bytes >= 10_000_000:
        section.verdicts.append(UNCHANGED.judge(case.name, ratio.median))


def _changed(case: Case, ours: Sequence[Ours], options: Options, section: Section) -> None:
    """Save the next step, with some tensors trained further."""
    columns = ("changed, saved by", "ms", "middle half", "hashing all", "writing what changed", "to both")
    table = Table(f"Save of {case.name} with some tensors changed", columns)
    for percent, saver in itertools.product(PERCENTS[:1] if options.is_smoke else PERCENTS, ours):
        with options.folder() as scratch:
            taken = interleave(_changing(case, percent, saver, scratch), options.rounds(case.n_bytes))
        what = f"{percent} %, {saver.name}"
        section.keep(f"changed {what}, {case.name}", taken)
        ratio = taken["saving"].over(taken["hashing"].plus(taken["writing"]))
        floors = (show_ms(taken[floor])[0] for floor in ("hashing", "writing"))
        table.add(what, *show_ms(taken["saving"]), *floors, show_ratio(ratio))
        section.verdicts.append(CHANGED.judge(f"{case.name}, {what}", ratio.median))
    section.tables.append(table)


def _changing(case: Case, percent: float, saver: Ours, scratch: Path) -> dict[str, Turn]:
    """Save a newly trained state, and measure its floors."""
    saver.prepare(scratch / "store")
    write = saver.writer(scratch / "store")
    write(case, 0)
    steps = itertools.count(1)
    trained = [case.changed(percent, 0)]
    new = [bytes_of(array) for name, array in trained[0].arrays.items() if array is not case.arrays[name]]

    def train() -> None:
        trained[0] = case.changed(percent, next(steps)).ready()

    return {
        "hashing": Turn(Hashing(map(bytes_of, case.arrays.values()), DEFAULT_CHUNK_BYTES)),
        "writing": Turn(lambda: write_durably(scratch / "new", new), after=lambda _: clear(scratch / "new")),
        "saving": Turn(lambda: write(trained[0], next(steps)), before=train),
    }

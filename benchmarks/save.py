"""What saves cost: a first one, one of what has not changed, one of what has changed in part."""

from __future__ import annotations

import itertools
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
    installed,
)
from benchmarks.data import Case, bytes_of, same_bytes, transformer
from benchmarks.harness import (
    Hashing,
    Options,
    Section,
    Table,
    Turn,
    at_least,
    at_most,
    clear,
    disk_bytes,
    interleave,
    n_files,
    show_bytes,
    show_ms,
    show_ratio,
    write_durably,
)
from tensorcas_mlflow.store import Store

TITLE = "saves, each durable when it returns but where it is said"
SIZES = (300_000, 13_000_000, 47_000_000, 650_000_000)
UNCHANGED_SIZES = (300_000, 13_000_000, 47_000_000, 650_000_000, 2_000_000_000)
LARGE_BYTES = 600_000_000
"""From here on a model counts as the large one that some targets are about."""

PERCENTS = (1, 10, 50)
UNCHANGED = at_most(
    1.25, "x", "save of an unchanged model, to BLAKE3 of its bytes on the same threads + one small durable write"
)
CHANGED = at_most(1.3, "x", "save with some tensors changed, to hashing all + writing the changed bytes durably")
RAW = at_most(1.15, "x", "first save, no codec, to safetensors + fsync")
FASTER = at_least(1.5, "x", "first save, default policy: torch.save + zstd-3 + fsync takes so many times as long")
SMALLER = at_least(10, "%", "first save, default policy: smaller than torch.save + zstd-3")


def run(options: Options) -> Section:
    """Measure all three."""
    section = Section("save", TITLE)
    for size in options.sizes_or(SIZES):
        case = transformer(size, options.data, is_smoke=options.is_smoke)
        _first(case, options, section)
        for ours in installed(_policies(), section):
            _changed(case, ours, options, section)
        del case
    for size in options.sizes_or(UNCHANGED_SIZES):
        _unchanged(transformer(size, options.data, is_smoke=options.is_smoke), options, section)
    return section


def _policies() -> list[Ours]:
    """Our contenders that save differently."""
    return [ours for ours in OURS if not ours.loads_specially]


def _first(case: Case, options: Options, section: Section) -> None:
    """Save into an empty place, by everybody, and look that it comes back."""
    peers: list[Contender] = [Durable(SAFETENSORS), *_policies(), SAFETENSORS]
    peers += [Durable(file) for file in (*FILES[1:4], *FILES[5:], ZstdTorchFile(), ZipnnFile())]
    present = installed(peers, section)
    stored: dict[str, tuple[int, int]] = {}
    with options.folder() as scratch:

        def turn(contender: Contender) -> Turn:
            folders = (scratch / f"{contender.name} {number}".replace("/", " ") for number in itertools.count())
            place: list[Path] = []

            def before() -> None:
                place[:] = [next(folders)]
                place[0].mkdir()
                contender.prepare(place[0])

            def after(_: Any) -> None:
                if contender.name not in stored:
                    stored[contender.name] = disk_bytes(place[0]), n_files(place[0])
                    if not same_bytes(contender.load(place[0]), case.tensors):
                        raise AssertionError(f"{contender.name} gave other bytes back than it was given")
                clear(place[0])

            return Turn(lambda: contender.save(case, place[0]), before, after)

        turns = {contender.name: turn(contender) for contender in present}
        taken = interleave(turns, options.rounds(case.n_bytes))
    section.keep(f"first save, {case.name}", taken)
    base = taken[present[0].name]
    table = Table(
        f"First save of a {case.name}, {len(case.arrays)} tensors",
        ("contender", "ms", "middle half", "to safetensors + fsync", "on disk", "files"),
    )
    for name, series in taken.items():
        n_bytes, files = stored[name]
        table.add(name, *show_ms(series), show_ratio(series.over(base)), show_bytes(n_bytes), str(files))
    section.tables.append(table)
    if case.n_bytes >= LARGE_BYTES:
        packed = f"{ZstdTorchFile.name} + fsync"
        if "tensorcas fast" in taken:
            section.verdicts.append(RAW.judge(case.name, taken["tensorcas fast"].over(base).median))
        section.verdicts.append(FASTER.judge(case.name, taken[packed].over(taken["tensorcas"]).median))
        less = 100 * (1 - stored["tensorcas"][0] / stored[packed][0])
        section.verdicts.append(SMALLER.judge(case.name, less))


def _unchanged(case: Case, options: Options, section: Section) -> None:
    """Save what the store holds already, as the next step."""
    ours, steps = OURS[0], itertools.count(1)
    with options.folder() as scratch:
        store = Store.init(scratch / "store")
        ours.write(store, case, 0)
        hashing = Hashing(map(bytes_of, case.arrays.values()), store.chunk_bytes)
        taken = interleave(
            {
                "BLAKE3 of all bytes": Turn(hashing),
                "one small durable write": Turn(lambda: write_durably(scratch / str(next(steps)), [b"x" * 400])),
                "tensorcas": Turn(lambda: ours.write(store, case, next(steps))),
            },
            options.rounds(case.n_bytes),
        )
    section.keep(f"unchanged, {case.name}", taken)
    floor = taken["BLAKE3 of all bytes"].plus(taken["one small durable write"])
    ratio = taken["tensorcas"].over(floor)
    table = Table(f"Save of an unchanged {case.name}", ("what", "ms", "middle half", "to both floors"))
    for name, series in taken.items():
        table.add(name, *show_ms(series), show_ratio(series.over(floor)))
    section.tables.append(table)
    if case.n_bytes >= 10_000_000:
        section.verdicts.append(UNCHANGED.judge(case.name, ratio.median))


def _changed(case: Case, ours: Ours, options: Options, section: Section) -> None:
    """Save the next step, of which some tensors are trained further."""
    if not any(table.title.startswith(f"Save of a {case.name} with") for table in section.tables):
        columns = ("changed, saved by", "ms", "middle half", "hashing all", "writing what changed", "to both")
        section.tables.append(Table(f"Save of a {case.name} with some tensors changed", columns))
    table = section.tables[-1]
    steps = itertools.count(1)
    for percent in PERCENTS[:1] if options.is_smoke else PERCENTS:
        with options.folder() as scratch:
            store = Store.init(scratch / "store")
            ours.write(store, case, 0)
            hashing = Hashing(map(bytes_of, case.arrays.values()), store.chunk_bytes)
            current = [case]
            new: list[Any] = []

            def train() -> None:
                seed = next(steps)
                current[0] = case.changed(percent, seed)  # noqa: B023  # called before the next one
                new[:] = [
                    bytes_of(array) for name, array in current[0].arrays.items() if array is not case.arrays[name]
                ]

            train()
            taken = interleave(
                {
                    "hashing": Turn(hashing),
                    "writing": Turn(
                        lambda: write_durably(scratch / "new", new), after=lambda _: clear(scratch / "new")
                    ),
                    "saving": Turn(lambda: ours.write(store, current[0], next(steps)), before=train),  # noqa: B023
                },
                options.rounds(case.n_bytes),
            )
        what = f"{percent} %, {ours.name}"
        section.keep(f"changed {what}, {case.name}", taken)
        ratio = taken["saving"].over(taken["hashing"].plus(taken["writing"]))
        floors = (f"{taken[floor].median * 1000:.2f}" for floor in ("hashing", "writing"))
        table.add(what, *show_ms(taken["saving"]), *floors, show_ratio(ratio))
        section.verdicts.append(CHANGED.judge(f"{case.name}, {what}", ratio.median))

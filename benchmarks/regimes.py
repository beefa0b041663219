"""Each way of reading, forced, against the way that the store chooses by itself, in every situation it tells apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders import Ours
from benchmarks.data import Case, Specs, same_bytes, tiny_tensors, transformer
from benchmarks.harness import (
    Job,
    Options,
    Section,
    Series,
    Table,
    Turn,
    at_most,
    interleave,
    interleave_apart,
    series_of,
    show_bytes,
    show_ms,
    show_ratio,
)
from tensorcas_mlflow.readplan import WAYS, Way

TITLE = "ways of reading, forced one by one, against the store's own choice"
SIZES = (13_000_000, 650_000_000)
N_COLD = 5
CHOICE = at_most(1.1, "x", "the way that the store chooses, to the best of all")
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Regime:
    """What is read of what."""

    name: str
    case: Case
    policy: str
    names: tuple[str, ...]


def run(options: Options) -> Section:
    """Read in every situation in every way that can be had here, warm and cold, into memory that is there."""
    section = Section("regimes", TITLE)
    table = Table(TITLE, ("what is read, way", "ms", "middle half", "to the best way", "read from disk"))
    for regime in _regimes(options):
        with options.folder() as scratch:
            ours = Ours(CHOSEN, save={"policy": regime.policy})
            ours.prepare(scratch)
            ours.save(regime.case, scratch)
            ways = _ways_to_be_had(scratch, ours, regime)
            _warm(regime, ways, scratch, options, section, table)
            _cold(regime, ways, scratch, options, section, table)
    section.tables.append(table)
    return section


def _regimes(options: Options) -> Iterator[Regime]:
    for size in options.sizes_or(SIZES):
        case = transformer(size, options.data, is_smoke=options.is_smoke)
        names = tuple(case.arrays)
        large = max(names, key=lambda name: (case.arrays[name].nbytes, name))
        yield Regime(f"all of {show_bytes(case.n_bytes)}, raw", case, "fast", names)
        yield Regime(f"all of {show_bytes(case.n_bytes)}, default", case, "balanced", names)
        if options.is_smoke:
            return
        yield Regime(f"every 10th tensor of {show_bytes(case.n_bytes)}, raw", case, "fast", names[::10])
        yield Regime(f"one tensor of {show_bytes(case.n_bytes)}, raw", case, "fast", (large,))
    tiny = tiny_tensors(1000, 4096, options.data)
    yield Regime(tiny.name, tiny, "fast", tuple(tiny.arrays))


def _ways_to_be_had(place: Path, ours: Ours, regime: Regime) -> dict[str, Way | None]:
    """The ways that are gone when they are forced, by name, and no force at all."""
    store, manifest = ours.opened(place)
    forced = {way: store.explain(manifest, regime.names, way=way).ways for way in WAYS}
    return {CHOSEN: None, **{way: way for way, gone in forced.items() if set(gone) == {way}}}


def _warm(
    regime: Regime, ways: dict[str, Way | None], place: Path, options: Options, section: Section, table: Table
) -> None:
    out = regime.case.only(regime.names).like()
    read = {name: _reading(place, regime.names, way, out) for name, way in ways.items()}
    for name, act in read.items():
        act()
        if not same_bytes(out.arrays, regime.case.only(regime.names).arrays):
            raise AssertionError(f"other bytes were read by {name}")
        for array in out.arrays.values():
            array[...] = 0
    taken = interleave({name: Turn(act) for name, act in read.items()}, options.rounds(regime.case.n_bytes))
    _report(f"{regime.name}, warm", taken, {}, section, table)


def _cold(
    regime: Regime, ways: dict[str, Way | None], place: Path, options: Options, section: Section, table: Table
) -> None:
    specs = regime.case.only(regime.names).specs
    jobs = {
        name: Job(prepare=_reading_apart, args=(place, regime.names, way, specs), cold=place)
        for name, way in ways.items()
    }
    usages = interleave_apart(jobs, options.n_rounds or (1 if options.is_smoke else N_COLD), section)
    taken = {name: series_of(of_name, "seconds") for name, of_name in usages.items()}
    read = {name: series_of(of_name, "read_bytes") for name, of_name in usages.items()}
    _report(f"{regime.name}, cold", taken, read, section, table)


def _report(name: str, taken: dict[str, Series], read: dict[str, Series], section: Section, table: Table) -> None:
    """Add a row a way; the best way is the one whose median is least."""
    section.keep(name, taken)
    best = min(taken, key=lambda way: taken[way].median)
    for way, series in taken.items():
        disk = show_bytes(read[way].median) if way in read else ""
        table.add(f"{name}, {way}", *show_ms(series), show_ratio(series.over(taken[best])), disk)
    section.verdicts.append(CHOICE.judge(f"{name}; best: {best}", taken[CHOSEN].over(taken[best]).median))


def _reading(place: Path, names: tuple[str, ...], way: Way | None, out: Case) -> Callable[[], object]:
    """Read into place by a way, as one that has found the store does."""
    store, manifest = Ours(CHOSEN).opened(place)
    return partial(store.read_tensors, manifest, names, out=out.arrays, way=way)


def _reading_apart(place: Path, names: tuple[str, ...], way: Way | None, specs: Specs) -> Callable[[], object]:
    """The same in a process of its own, the store not yet opened."""
    out = Case.of_specs("", specs)

    def act() -> None:
        _reading(place, names, way, out)()

    return act

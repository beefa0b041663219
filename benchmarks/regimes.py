"""Each way of reading, forced, against the store's own choice, in every situation the store distinguishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders import StoreCalls
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
from tensorcas_mlflow.chunk_io import WAYS, Way

TITLE = "ways of reading, forced one by one, against the store's own choice"
SIZES = (13_000_000, 650_000_000)
N_COLD = 5
N_AGAIN = 3
"""Factor for the rounds of the last comparison, between two ways alone."""
CHOICE = at_most(1.1, "x", "the way that the store chooses, to the best that can be forced")
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Regime:
    """A situation: the content and the manner of a read."""

    name: str
    case: Case
    policy: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Results of some rounds of one way."""

    seconds: Series
    read_bytes: Series | None = None
    """Bytes from the disk; None without disk reads."""


Measure = Callable[[Sequence[str], int], dict[str, Sample]]
"""Lets some ways take turns, so many times the usual number of rounds."""


def run(options: Options) -> Section:
    """Read in every situation and every way available here, warm and cold, into existing memory."""
    section = Section("regimes", TITLE)
    table = Table(TITLE, ("what is read, way", "ms", "middle half", "to the best way", "read from disk"))
    for regime in _regimes(options):
        with options.folder() as scratch:
            ours = StoreCalls(CHOSEN, save={"policy": regime.policy})
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


def _ways_to_be_had(place: Path, ours: StoreCalls, regime: Regime) -> dict[str, Way | None]:
    """Return the ways in use when forced, by name, and no force at all."""
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

    def measure(ways: Sequence[str], times: int) -> dict[str, Sample]:
        turns = {name: Turn(read[name]) for name in ways}
        taken = interleave(turns, times * options.rounds(regime.case.n_bytes))
        return {name: Sample(series) for name, series in taken.items()}

    _report(f"{regime.name}, warm", list(ways), measure, section, table)


def _cold(
    regime: Regime, ways: dict[str, Way | None], place: Path, options: Options, section: Section, table: Table
) -> None:
    specs = regime.case.only(regime.names).specs
    jobs = {
        name: Job(prepare=_reading_apart, args=(place, regime.names, way, specs), cold=place)
        for name, way in ways.items()
    }
    n_rounds = options.n_rounds or (1 if options.is_smoke else N_COLD)

    def measure(ways: Sequence[str], times: int) -> dict[str, Sample]:
        usages = interleave_apart({name: jobs[name] for name in ways}, times * n_rounds, section)
        return {name: Sample(series_of(of, "seconds"), series_of(of, "read_bytes")) for name, of in usages.items()}

    _report(f"{regime.name}, cold", list(ways), measure, section, table)


def _report(name: str, ways: list[str], measure: Measure, section: Section, table: Table) -> None:
    """Find the best of the forceable ways, by their medians, and compare the store's own choice with it.

    They are compared in new rounds: of several ways with similar speeds, the best one in some rounds is partly the
    luckiest, and the store's choice had no such luck.
    """
    samples = measure(ways, 1)
    found = {way: each.seconds for way, each in samples.items()}
    section.keep(name, found)
    best = min((way for way in ways if way != CHOSEN), key=lambda way: found[way].median)
    for way, each in samples.items():
        disk = "" if each.read_bytes is None else show_bytes(each.read_bytes.median)
        table.add(f"{name}, {way}", *show_ms(each.seconds), show_ratio(each.seconds.over(found[best])), disk)
    again = {way: each.seconds for way, each in measure([CHOSEN, best], N_AGAIN).items()}
    section.keep(f"{name}, again", again)
    ratio = again[CHOSEN].over(again[best])
    table.add(f"{name}, chosen and {best} again", *show_ms(again[CHOSEN]), show_ratio(ratio), "")
    section.verdicts.append(CHOICE.judge(f"{name}; best: {best}", ratio.median))


def _reading(place: Path, names: tuple[str, ...], way: Way | None, out: Case) -> Callable[[], object]:
    """Read in place by a way, with the store already open."""
    store, manifest = StoreCalls(CHOSEN).opened(place)
    return partial(store.read_tensors, manifest, names, out=out.arrays, way=way)


def _reading_apart(place: Path, names: tuple[str, ...], way: Way | None, specs: Specs) -> Callable[[], object]:
    """The same in a process of its own, the store not yet opened."""
    out = Case.of_specs("", specs)

    def act() -> None:
        _reading(place, names, way, out)()

    return act

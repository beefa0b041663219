"""Many tensors of almost no bytes: the cost per tensor."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders import (
    FILES,
    OURS,
    SAFETENSORS,
    Contender,
    Durable,
    chosen,
    fastest_peer,
    policies_of_ours,
    save_all,
)
from benchmarks.data import tiny_tensors
from benchmarks.harness import Options, Section, at_most
from benchmarks.load import warm
from benchmarks.save import first

TITLE = "1,000 tensors of 4 KB, and 100,000 of 64 B"
LOADED = at_most(0.4, "x", "1,000 tensors of 4 KB, warm load, to safetensors")
SAVED = at_most(0.6, "x", "1,000 tensors of 4 KB, first save, to safetensors + fsync")
MANY_SAVED = at_most(
    0.5, "x", "100,000 tiny tensors, durable first save, to the fastest file that is saved, synced or not"
)


def run(options: Options) -> Section:
    """Measure both."""
    section = Section("tiny", TITLE)
    _thousand(options, section)
    _hundred_thousand(options, section)
    return section


def _thousand(options: Options, section: Section) -> None:
    case = tiny_tensors(100 if options.is_smoke else 1000, 4096, options.data, is_smoke=options.is_smoke)
    peers: list[Contender] = [Durable(SAFETENSORS), *policies_of_ours(), *(Durable(file) for file in FILES[1:])]
    saves = first(case, chosen(peers, options, section), options, section).seconds
    contenders = chosen([*FILES, *OURS], options, section)
    with options.folder() as scratch:
        loads = warm(case, contenders, save_all(case, contenders, scratch), options, section).alone
    for ours in chosen(policies_of_ours(), options, section):
        saved, loaded = saves[ours.name], loads[ours.name]
        section.verdicts.append(SAVED.judge(ours.name, saved.over(saves[f"{SAFETENSORS.name} + fsync"]).median))
        section.verdicts.append(LOADED.judge(ours.name, loaded.over(loads[SAFETENSORS.name]).median))


def _hundred_thousand(options: Options, section: Section) -> None:
    case = tiny_tensors(1000 if options.is_smoke else 100_000, 64, options.data, is_smoke=options.is_smoke)
    few = replace(options, n_rounds=options.n_rounds or (1 if options.is_smoke else 5))
    ours = chosen(policies_of_ours(), options, section)
    files = chosen(FILES[:4], options, section)
    contenders = [*files, *ours, *(Durable(file) for file in files)]
    saves = first(case, contenders, few, section).seconds
    best = saves[fastest_peer(saves)]
    for one in ours:
        ratio = saves[one.name].over(best).median
        section.verdicts.append(MANY_SAVED.judge(f"{len(case.arrays):,}, {one.name}", ratio))

"""Opening a checkpoint of very many tensors, finding one by name, and listing its structure."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.contenders import OURS, SAFETENSORS, ArrowFile, BintensorsFile, Contender, RunStore, chosen, save_all
from benchmarks.data import tiny_tensors
from benchmarks.harness import Options, Section, Table, Turn, at_most, interleave, show_ms, show_ratio
from tensorcas_mlflow.reader import CheckpointReader

TITLE = "open a checkpoint and find one tensor by name"
COUNTS = (1_000, 10_000, 100_000)
N_ROUNDS = 15
SUMMARY = at_most(0.15, "s", "the summary of 100,000 tensors, the checkpoint being open")
LAYER = at_most(0.005, "s", "a layer of 100,000 tensors, read after a summary")
FOUND = at_most(0.02, "x", "open a checkpoint of 100,000 tensors and find one, to safetensors' safe_open")


def run(options: Options) -> Section:
    """Say the shape of a tensor in the middle, warm; nothing of it is read."""
    section = Section("opening", TITLE)
    contenders: list[Contender] = chosen([SAFETENSORS, BintensorsFile(), ArrowFile(), OURS[0]], options, section)
    table = Table(TITLE, ("tensors, contender", "ms", "middle half", "to safetensors"))
    for count in COUNTS[:1] if options.is_smoke else COUNTS:
        case = tiny_tensors(count, 64, options.data, is_smoke=options.is_smoke)
        name = list(case.arrays)[count // 2]
        with options.folder() as scratch:
            places = save_all(case, contenders, scratch)
            for one in contenders:
                if one.find(places[one.name], name) != case.arrays[name].shape:
                    raise AssertionError(f"{one.name} found another shape")
            turns = {one.name: Turn(partial(one.find, places[one.name], name)) for one in contenders}
            turns |= _hierarchy(places["tensorcas"], int(name.split(".")[1]))
            taken = interleave(turns, options.n_rounds or (1 if options.is_smoke else N_ROUNDS))
        section.keep(f"{count:,} tensors", taken)
        for who, series in taken.items():
            ratio = series.over(taken[SAFETENSORS.name])
            table.add(f"{count:,}, {who}", *show_ms(series), show_ratio(ratio))
        if count == max(COUNTS):
            section.verdicts.append(FOUND.judge("warm", taken["tensorcas"].over(taken[SAFETENSORS.name]).median))
            section.verdicts.append(SUMMARY.judge("warm", taken["tensorcas, summary"].median))
            section.verdicts.append(LAYER.judge("warm", taken["tensorcas, a layer"].median))
    section.tables.append(table)
    return section


def _hierarchy(folder: Path, layer: int) -> dict[str, Turn]:
    """List a checkpoint's structure with a newly opened reader; and read a layer of eight tensors."""
    ours = RunStore("tensorcas")
    opened: list[CheckpointReader] = []

    def open_it() -> None:
        opened[:] = [ours.opened(folder)]

    def open_and_look() -> None:
        open_it()
        opened[0].summary()
        opened[0].layer(0)

    return {
        "tensorcas, summary": Turn(lambda: opened[0].summary(), before=open_it),
        "tensorcas, a layer": Turn(lambda: opened[0].layer(layer), before=open_and_look),
    }

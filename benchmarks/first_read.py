"""The first read of a new process: imports, opening and reading, from an empty page cache of the checkpoint."""

from __future__ import annotations

from benchmarks.contenders import OURS, SAFETENSORS, save_all
from benchmarks.data import mixture
from benchmarks.harness import (
    WHOLE,
    Options,
    Program,
    Section,
    Table,
    at_most,
    interleave_fresh,
    show_ms,
    show_ratio,
)

TITLE = "first read of a new process, imports included, cold"
SIZES = (650_000_000,)
N_ROUNDS = 11
FIRST = at_most(1, "x", "first read of a new process, to safetensors")

_OPEN_OURS = """
import sys
from tensorcas_mlflow.tensorcas_store import TensorCasStore
reader = TensorCasStore(sys.argv[1], "benchmark").open()
"""
_OPEN_THEIRS = """
import sys
from pathlib import Path
from safetensors import safe_open
file = safe_open(Path(sys.argv[1], "model.safetensors"), "np")
"""
_READS = {
    "one tensor": ("reader.tensor(sys.argv[2], copy=True)", "file.get_tensor(sys.argv[2])"),
    "summary": (
        "str(reader.summary())",
        "str({name: file.get_slice(name).get_shape() for name in file.keys()})",
    ),
}
"""Programs for ours and for safetensors, by what they read."""


def run(options: Options) -> Section:
    """Read one tensor, and the list of all, in an interpreter of its own per sample."""
    section = Section("first_read", TITLE)
    section.note(
        "the time begins before the first import, and the start of the interpreter is in the whole process alone"
    )
    table = Table(TITLE, ("what is read, by", "ms", "middle half", "to safetensors", "modules", "whole process, ms"))
    ours = [one for one in OURS if one.name in ("tensorcas", "tensorcas fast")]
    for size in options.sizes_or(SIZES):
        # In fp16: numpy lacks bf16, and torch's import would hide everything else.
        case = mixture(size, options.data, is_fused=False, is_smoke=options.is_smoke)
        name = sorted(name for name in case.arrays if "experts" in name or "qkv" in name)[0]
        case = type(case)(case.name, {key: array.astype("float16") for key, array in case.arrays.items()})
        with options.folder() as scratch:
            places = save_all(case, [SAFETENSORS, *ours], scratch)
            programs = {}
            for what, (read_ours, read_theirs) in _READS.items():
                texts = {one.name: _OPEN_OURS + read_ours for one in ours}
                texts[SAFETENSORS.name] = _OPEN_THEIRS + read_theirs
                for who, text in texts.items():
                    place = places[who]
                    programs[f"{what}, {who}"] = Program(text=text, args=(str(place), name), cold=place)
            n_rounds, n_warm = (1, 0) if options.is_smoke else (options.n_rounds or N_ROUNDS, 1)
            found = interleave_fresh(programs, n_rounds, n_warm=n_warm)
        for who, figures in found.items():
            seconds = figures["seconds"]
            ratio = seconds.over(found[f"{who.partition(', ')[0]}, {SAFETENSORS.name}"]["seconds"])
            section.keep(case.name, {who: seconds})
            modules = f"{figures['modules'].median:,.0f}"
            table.add(who, *show_ms(seconds), show_ratio(ratio), modules, show_ms(figures[WHOLE])[0])
            if not who.endswith(SAFETENSORS.name):
                section.verdicts.append(FIRST.judge(who, ratio.median))
    section.tables.append(table)
    return section

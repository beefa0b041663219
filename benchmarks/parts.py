"""A summary, an expert and a layer of a mixture of experts, read with an empty page cache; the kernel counts reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import OURS, SAFETENSORS, Contender, RunStore, save_all
from benchmarks.data import Case, bytes_of, mixture
from benchmarks.harness import (
    Job,
    Options,
    Section,
    Table,
    Usage,
    at_most,
    interleave_apart,
    series_of,
    show_bytes,
    show_ms,
)

TITLE = "parts of a mixture of experts, cold"
SIZES = (650_000_000,)
N_ROUNDS = 7
LAYER, EXPERT = 2, 5
SUMMARY = at_most(0.001, "x", "a summary: bytes read, to those of reading all from safetensors")
ONE_EXPERT = at_most(1.05, "x", "one expert: bytes read, to its own")


def run(options: Options) -> Section:
    """Read parts with ours, and nameable ones with safetensors, in one process per sample."""
    section = Section("parts", TITLE)
    for size in options.sizes_or(SIZES):
        for is_fused in (False, True):
            case = mixture(size, options.data, is_fused=is_fused, is_smoke=options.is_smoke)
            _measure(case, options, section)
    section.note(
        "read: what `read` calls brought or what came from the disk, whichever is more; what is mapped is in the second"
    )
    return section


def _measure(case: Case, options: Options, section: Section) -> None:
    ours = [one for one in OURS if one.name in ("tensorcas", "tensorcas fast")]
    with options.folder() as scratch:
        places = save_all(case, [SAFETENSORS, *ours], scratch)
        jobs: dict[str, Job] = {}
        for what in _OURS:
            for one in ours:
                _check(case, places[one.name], what)
                folder = places[one.name]
                jobs[f"{what}, {one.name}"] = Job(prepare=_reading, args=(folder, what), cold=folder)
        for what in _THEIRS:
            folder = places[SAFETENSORS.name]
            jobs[f"{what}, safetensors"] = Job(prepare=_reading_theirs, args=(SAFETENSORS, folder, what), cold=folder)
        usages = interleave_apart(jobs, options.n_rounds or (1 if options.is_smoke else N_ROUNDS), section)
    own = {"all": case.n_bytes, "summary": case.n_bytes, **{what: _n_bytes(case, what) for what in ("expert", "layer")}}
    table = Table(f"Parts of a {case.name}, cold", ("part, contender", "ms", "middle half", "read", "to its own bytes"))
    section.keep(case.name, {who: series_of(of_one, "seconds") for who, of_one in usages.items()})
    flat = _read(usages["all, safetensors"])
    for who, of_one in usages.items():
        what, _, contender = who.partition(", ")
        read = _read(of_one)
        share = read / own[what]
        table.add(who, *show_ms(series_of(of_one, "seconds")), show_bytes(read), f"{share:.4f} x")
        if what == "summary":
            section.verdicts.append(SUMMARY.judge(f"{contender}, {case.name}", read / flat))
        if what == "expert" and contender != "safetensors":
            section.verdicts.append(ONE_EXPERT.judge(f"{contender}, {case.name}", share))
    section.tables.append(table)


def _read(usages: tuple[Usage, ...]) -> float:
    """Return the median of the bytes read by a sample."""
    return max(series_of(usages, "read_bytes").median, series_of(usages, "called_read_bytes").median)


def _n_bytes(case: Case, what: str) -> int:
    return sum(array.nbytes for array in _part_of(case, what).values())


def _part_of(case: Case, what: str) -> dict[str, Any]:
    """Return the description of a part."""
    layer = {name: array for name, array in case.arrays.items() if f".layers.{LAYER}." in name}
    if what == "layer":
        return layer
    single = {name: array for name, array in layer.items() if f".experts.{EXPERT}." in name}
    return single or {name: array[EXPERT] for name, array in layer.items() if ".experts." in name}


def _check(case: Case, folder: Path, what: str) -> None:
    found = _OURS[what](folder)
    if what in ("expert", "layer"):
        expected = _part_of(case, what)
        if {name: bytes_of(array).tobytes() for name, array in found.items()} != {
            name: array.tobytes() for name, array in expected.items()
        }:
            raise AssertionError(f"another {what} came back than was saved")


def _opened(folder: Path) -> Any:
    return RunStore("tensorcas").opened(folder)


def _summary(folder: Path) -> str:
    return str(_opened(folder).summary())


def _expert(folder: Path) -> Any:
    return _opened(folder).expert(LAYER, EXPERT)


def _layer(folder: Path) -> Any:
    return _opened(folder).layer(LAYER)


_OURS: dict[str, Callable[[Path], Any]] = {"summary": _summary, "expert": _expert, "layer": _layer}
_THEIRS = ("all", "expert", "layer")


def _reading(folder: Path, what: str) -> Callable[[], object]:
    """Read a part; called in a process of its own, after its imports."""
    from tensorcas_mlflow.reader import Summary, open_ref  # noqa: F401  # the package imports a name on first use

    return partial(_OURS[what], folder)


def _reading_theirs(contender: Contender, folder: Path, what: str) -> Callable[[], object]:
    from safetensors import safe_open

    def read() -> list[Any]:
        with safe_open(folder / "model.safetensors", "pt") as file:
            names = [name for name in file.keys() if what == "all" or f".layers.{LAYER}." in name]  # noqa: SIM118
            if what == "expert":
                single = [name for name in names if f".experts.{EXPERT}." in name]
                if not single:
                    return [file.get_slice(name)[EXPERT].clone() for name in names if ".experts." in name]
                names = single
            return [file.get_tensor(name).clone() for name in names]

    return read

"""Checkpoints of several ranks, beside the files of `torch.distributed.checkpoint` (DCP).

``python -m benchmarks.ranks RANK …`` is one of the ranks; the part itself starts them.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mlflow.tracking import MlflowClient
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.harness import Options, Section, Series, Table, at_most, disk_bytes, show_bytes, show_ms

TITLE = "checkpoints of four ranks"
N_RANKS = 4
N_ROUNDS = 5
SIZES = (200_000_000,)
PEER = "FileSystemWriter"
POLICIES = ("fast", "balanced")
FIRST, SAME, LITTLE, MUCH = "first save", "save of the same state", "a tenth changed", "Adam's step"
EQUAL, ROWS, COLUMNS = "load, same shards", "load of columns as rows", "load of rows as columns"
SAVES = (FIRST, SAME, LITTLE, MUCH)
LOADS = (EQUAL, ROWS, COLUMNS)
FIRST_SAVE = at_most(1.3, "x", "four ranks, first save with the policy fast, to FileSystemWriter")
LOADED = at_most(2, "x", "four ranks, load with the same shards, to FileSystemReader")
N_LAYERS = 8


class _Way(NamedTuple):
    """One way to save and load steps."""

    writer: Callable[[int], Any]
    reader: Callable[[int], Any]
    place: Path


def run(options: Options) -> Section:
    """Save and load with each way in turns, in ranks of their own processes."""
    section = Section("ranks", TITLE)
    section.note(
        f"{N_RANKS} ranks of gloo on one machine. The state has rows and columns of float32 and bfloat16 weights, a "
        "frozen third, and Adam's moments; its numbers are random. Times are those of the slowest rank"
    )
    section.note("FileSystemWriter syncs its files, as it does by default")
    for n_bytes in options.sizes_or(SIZES):
        rounds = options.n_rounds or (1 if options.is_smoke else N_ROUNDS)
        with options.folder() as scratch:
            found = _measure(scratch, n_bytes, rounds)
        times = Table(f"{show_bytes(n_bytes)}, {N_RANKS} ranks", ("step", *(f"{way}, ms" for way in found), "ratios"))
        sizes = Table(f"{show_bytes(n_bytes)}, growth on disk", ("step", *found))
        for step in (*SAVES, *LOADS):
            series = {way: Series(tuple(of_way[step]["s"])) for way, of_way in found.items()}
            ratios = {way: each.over(series[PEER]).median for way, each in series.items()}
            shown = ", ".join(f"{ratios[way]:.2f} x" for way in POLICIES)
            times.add(step, *(show_ms(each)[0] for each in series.values()), shown)
            section.keep(f"{n_bytes}, {step}", series)
            if step in SAVES:
                sizes.add(step, *(show_bytes(found[way][step]["bytes"][-1]) for way in found))
            if step == FIRST:
                section.verdicts.append(FIRST_SAVE.judge(show_bytes(n_bytes), ratios["fast"]))
            if step == EQUAL:
                section.verdicts.append(LOADED.judge(show_bytes(n_bytes), ratios["balanced"]))
        section.tables += [times, sizes]
    return section


def _measure(scratch: Path, n_bytes: int, n_rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    given = json.dumps([str(scratch), n_bytes, n_rounds])
    words = [sys.executable, "-m", "benchmarks.ranks"]
    ranks = [subprocess.Popen([*words, str(rank), given], stderr=subprocess.PIPE) for rank in range(N_RANKS)]
    failed = [rank.communicate()[1].decode(errors="replace")[-4000:] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise AssertionError("\n".join(failed))
    found: dict[str, dict[str, dict[str, list[float]]]] = json.loads((scratch / "found.json").read_text())
    return found


def _state(n_bytes: int, *, column_wise: bool) -> dict[str, Any]:
    """Return a state of random weights: a frozen third, and trained ones with Adam's moments."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    side = max(64, int((n_bytes / (N_LAYERS * 18)) ** 0.5) // 8 * 8)
    rows, columns = Shard(1 if column_wise else 0), Shard(0 if column_wise else 1)
    generator = torch.Generator().manual_seed(1)

    def draw(placement: Any, dtype: torch.dtype = torch.float32) -> DTensor:
        whole = torch.randn(side, side, generator=generator).to(dtype)
        return distribute_tensor(whole, mesh, [placement], src_data_rank=None)

    layers = {
        str(layer): {
            "frozen": draw(rows, torch.bfloat16),
            "columns": draw(columns, torch.bfloat16),
            "weight": draw(rows),
            "bias": torch.randn(side, generator=generator),
        }
        for layer in range(N_LAYERS)
    }
    moments = {
        f"{layer}.weight": {"exp_avg": draw(rows), "exp_avg_sq": draw(rows), "step": torch.tensor(1.0)}
        for layer in range(N_LAYERS)
    }
    return {"model": layers, "optimizer": {"state": moments}, "epoch": 1}


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value.to_local() if isinstance(value, DTensor) else value


def _change(state: dict[str, Any], step: str) -> None:
    """Change a state for a step's save."""
    if step == LITTLE:
        layers = [state["model"]["0"]]
    elif step == MUCH:
        layers = [*state["model"].values(), *state["optimizer"]["state"].values()]
    else:
        return
    for layer in layers:
        for name, tensor in layer.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name != "frozen":
                local.mul_(1.0078125)


def _rank(rank: int, scratch: Path, n_bytes: int, n_rounds: int) -> None:
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=N_RANKS,
        init_method=f"file://{scratch}/meeting",
        timeout=datetime.timedelta(minutes=30),
    )
    torch.set_num_threads(1)
    mlflow.set_tracking_uri(f"sqlite:///{scratch}/mlflow.db")
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for number in range(-1, n_rounds):
        ways = [PEER, *POLICIES]
        for way in ways[number % 3 :] + ways[: number % 3]:
            opened = _way(way, scratch / f"{way}-{number + 1}", rank)
            of_way = found.setdefault(way, {step: {"s": [], "bytes": []} for step in (*SAVES, *LOADS)})
            for step, (seconds, grown) in _round(opened, n_bytes).items():
                if number >= 0:  # the first round warms up
                    of_way[step]["s"].append(seconds)
                    of_way[step]["bytes"].append(grown)
    if rank == 0:
        (scratch / "found.json").write_text(json.dumps({way: found[way] for way in (PEER, *POLICIES)}))
    dist.barrier()
    dist.destroy_process_group()


def _way(name: str, place: Path, rank: int) -> _Way:
    if name == PEER:
        return _Way(
            lambda step: dcp.FileSystemWriter(place / str(step)),
            lambda step: dcp.FileSystemReader(place / str(step)),
            place,
        )
    from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter

    known: list[Any] = [None]
    if rank == 0:
        experiment = MlflowClient().create_experiment(place.name, artifact_location=str(place))
        known[0] = MlflowClient().create_run(experiment).info.run_id
    dist.broadcast_object_list(known)
    return _Way(
        lambda step: TensorCasStorageWriter(step=step, run_id=known[0], log_metrics=False, policy=name),
        lambda step: TensorCasStorageReader(step=step, run_id=known[0]),
        place,
    )


def _round(way: _Way, n_bytes: int) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}
    state = _state(n_bytes, column_wise=False)
    grown = 0
    for number, step in enumerate(SAVES):
        _change(state, step)
        seconds = _timed(lambda number=number: dcp.save(state, storage_writer=way.writer(number)))  # type: ignore[misc]
        # Rank 0 writes the page of the steps in the background.
        mlflow.tensorcas.wait()  # type: ignore[attr-defined]
        dist.barrier()
        size = disk_bytes(way.place)
        found[step] = seconds, size - grown
        grown = size
        dist.barrier()
    for step in LOADS:
        target = _state(n_bytes, column_wise=step != EQUAL)
        wanted = state if step == EQUAL else target
        parts = _part_of(target, step)
        if step != EQUAL:
            _change(wanted, LITTLE)
            _change(wanted, MUCH)
        copies = [tensor.clone() for tensor in _tensors(_part_of(wanted, step))]
        for tensor in _tensors(parts):
            tensor.zero_()
        last = len(SAVES) - 1
        found[step] = _timed(lambda: dcp.load(parts, storage_reader=way.reader(last))), 0  # noqa: B023
        for tensor, copy in zip(_tensors(parts), copies, strict=True):
            if not torch.equal(tensor, copy):
                raise AssertionError(f"{step}: other weights came back than were saved")
    return found


def _part_of(state: dict[str, Any], step: str) -> dict[str, Any]:
    """Return the part of a state that a step loads."""
    if step == EQUAL:
        return state
    kinds = ("columns",) if step == ROWS else ("frozen", "weight")
    return {
        "model": {
            layer: {name: tensor for name, tensor in tensors.items() if name in kinds}
            for layer, tensors in state["model"].items()
        }
    }


def _timed(act: Callable[[], object]) -> float:
    """Return the seconds until all ranks have acted."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":
    folder, size, rounds = json.loads(sys.argv[2])
    _rank(int(sys.argv[1]), Path(folder), size, rounds)

"""Bytes that a store adds for weights that it has in another form: moved a little, renamed, cast, quantized, sharded.

Every change is saved into a store in a folder, and into one in a bucket whose requests are counted. All bytes of the
store count. The weights are bfloat16, and a step moves them by 1e-6, unless the name of a change says otherwise. Two
models and several seeds take part. The worst of them is compared with the target. Everything is read back and compared.
"""

from __future__ import annotations

import io
import itertools
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import h5py
import ml_dtypes
import numpy as np
import torch

from benchmarks.data import Array, Case, mixture, transformer
from benchmarks.harness import Options, Section, Series, Table, Turn, at_most, interleave, show_bytes
from benchmarks.places import BESIDE_PACKS, Cost, Folder, Place, Places, places
from tensorcas_mlflow.tensorcas_store import TensorCasStore

TITLE = "what a small change of the weights takes"
N_BYTES = 30_000_000
"""Size of a model in bfloat16; twice as much in single precision."""
N_SEEDS = 2
STEP = 1e-6
TUNING = 1e-3
"""Size of the steps of fine-tunes that are merged."""
N_SMALL_STEPS = 8
SMALL_SHARE = 0.014
"""Share of the words that a step of reinforcement learning changes."""
N_RESTORES = 9

BEYOND_FOLDER = 4.096
"""Kilobytes that a save into a bucket may take beyond one into a folder."""
ALIKE = 0.1
"""Share in percent by which changes that should take the same may differ."""
SMALL = at_most(1.1, "x", "a step of reinforcement learning less 4 KB, to the entropy of its change")
RESTORED = at_most(2, "x", "restore of the slowest of these steps, to that of the first, stored in full")

State = dict[str, Array]


class Model:
    """Weights in single precision, and what a training makes of them."""

    def __init__(self, name: str, masters: State, seed: int) -> None:
        self.name = name
        self.masters = masters
        self._seed = seed

    def moved(self, number: int = 1, size: float = STEP) -> State:
        """Return the weights after a step of their own; another number gives another step."""
        draw = np.random.default_rng((self._seed, number))
        return {
            name: weights + np.float32(size) * draw.standard_normal(weights.shape, np.float32)
            for name, weights in self.masters.items()
        }

    def matrices(self) -> State:
        """Return the tensors of two axes."""
        return {name: weights for name, weights in self.masters.items() if weights.ndim == 2}


Save = Callable[[Place, Model], tuple[Cost, int]]
"""Saves what a change needs, then the change; returns the cost of the change, and the bytes of what was saved."""


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the table."""

    name: str
    save: Save
    most: float | None = None
    """Target: percent of what is saved."""
    like: str | None = None
    """Target: no more than another change."""
    is_variant: bool = False
    """True if a smoke test need not see it."""

    @property
    def target(self) -> str:
        """The target as tables show it."""
        return f"{self.most:g} %" if self.most else f"as {self.like}" if self.like else ""


def run(options: Options) -> Section:
    """Save every change into both kinds of places, for all models."""
    section = Section("deltas", TITLE)
    models = list(_models(options))
    with options.folder() as scratch, places(scratch) as (made, server):
        section.note(f"the server of the buckets is {server}; the worst of {len(models)} models and seeds is judged")
        section.note("folder and bucket: bytes added, as a share of what is saved, from the least to the most")
        section.note(
            f"requests: those of the save into the bucket, in the dearest case; allowed are one for each pack, and "
            f"{BESIDE_PACKS} for each save. Opening the store is not counted"
        )
        section.note(f"models: {', '.join(model.name for model in models)}")
        changes = [change for change in CHANGES if not (options.is_smoke and change.is_variant)]
        _tabulate(_measure(made, changes, models), changes, section)
        _small_steps(made, models, options, section)
    return section


def _models(options: Options) -> Iterator[Model]:
    [size] = options.sizes_or((N_BYTES,))
    for seed in range(options.n_rounds or (1 if options.is_smoke else N_SEEDS)):
        # Differences depend on the magnitude of the weights, which those of a short training have as well.
        yield _model(transformer(2 * size, options.data, dtype="fp32", seed=seed, is_smoke=True), seed)
        if not options.is_smoke:
            yield _model(mixture(2 * size, options.data, is_fused=False, dtype="fp32", seed=seed, is_smoke=True), seed)


def _model(case: Case, seed: int) -> Model:
    return Model(f"{case.name}, seed {seed}", case.arrays, seed)


# --- weights in other forms


def _as_bf16(state: Mapping[str, Array]) -> State:
    return {name: weights.astype(ml_dtypes.bfloat16) for name, weights in state.items()}


def _as_fp32(state: Mapping[str, Array]) -> State:
    return dict(state)


def _of_peft(state: Mapping[str, Array]) -> State:
    return {f"base_model.model.{name}": weights for name, weights in state.items()}


def _n_bytes(state: Mapping[str, Array]) -> int:
    return sum(weights.nbytes for weights in state.values())


Cast = Callable[[Mapping[str, Array]], State]
Write = Callable[[State, Path], object]


def _write_torch(state: State, path: Path) -> None:
    torch.save(Case("", state).tensors, path)


class _Exportable(torch.nn.Module):
    def __init__(self, weights: torch.nn.Module) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use one of the weights."""
        return x + next(self.weights.parameters()).sum()


def _write_pt2(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(_Exportable(Case("", state).module), (torch.ones(2),)), path)


def _write_gguf(kind: gguf.GGMLQuantizationType) -> Write:
    def write(state: State, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        for number, weights in enumerate(state.values()):
            values = weights.astype(np.float32)
            if weights.ndim == 2:
                writer.add_tensor(f"blk.{number}.weight", gguf.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"blk.{number}.weight", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def _write_hdf5(state: State, path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, weights in state.items():
            file.create_dataset(name, data=weights, compression="gzip")


def _write_npz(state: State, path: Path) -> None:
    np.savez_compressed(path, **state)  # type: ignore[arg-type]  # the names are no keywords of it


def _write_keras(state: State, path: Path) -> None:
    """Write the members of Keras 3: two texts, and the weights in HDF5 by layer and number."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        for number, array in enumerate(state.values()):
            file.create_dataset(f"layers/dense_{number}/vars/0", data=array)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "3.11.3"}')
        archive.writestr("config.json", '{"module": "keras", "class_name": "Sequential"}')
        archive.writestr("model.weights.h5", weights.getvalue())


# --- changes


def _next_step(cast: Cast) -> Save:
    def save(place: Place, model: Model) -> tuple[Cost, int]:
        after = cast(model.moved())
        place.save("training", 0, cast(model.masters))
        return place.save("training", 1, after), _n_bytes(after)

    return save


def _next_file(write: Write, suffix: str, cast: Cast) -> Save:
    def save(place: Place, model: Model) -> tuple[Cost, int]:
        place.log("step-0", lambda path: write(cast(model.masters), path), suffix)
        cost = place.log("step-1", lambda path: write(cast(model.moved()), path), suffix)
        return cost, place.size_of("step-1")

    return save


def _copy(before: Cast, after: Callable[[Model], list[State]]) -> Save:
    """Save weights in another process, then copies of them in this one."""

    def save(place: Place, model: Model) -> tuple[Cost, int]:
        place.save_elsewhere("base", before(model.masters))
        copies = after(model)
        costs = [place.save(f"copy-{number}", 0, copy) for number, copy in enumerate(copies)]
        return sum(costs[1:], costs[0]), sum(map(_n_bytes, copies))

    return save


def _file(write: Write, suffix: str, cast: Cast) -> Save:
    """Save weights in another process, then a file of the same weights in this one."""

    def save(place: Place, model: Model) -> tuple[Cost, int]:
        state = cast(model.masters)
        place.save_elsewhere("base", state)
        return place.log("again", lambda path: write(state, path), suffix), place.size_of("again")

    return save


def _merge(cast: Cast) -> Save:
    def save(place: Place, model: Model) -> tuple[Cost, int]:
        tuned = [cast(model.moved(number, TUNING)) for number in range(2)]
        for number, each in enumerate(tuned):
            place.save_elsewhere(f"tuned-{number}", each)
        one, other = tuned
        mean = cast(
            {name: (one[name].astype(np.float32) + other[name].astype(np.float32)) * np.float32(0.5) for name in one}
        )
        return place.save("mean", 0, mean), _n_bytes(mean)

    return save


def _transposed(model: Model) -> list[State]:
    return [{name: np.ascontiguousarray(weights.T) for name, weights in _as_bf16(model.matrices()).items()}]


def _shards(n_ranks: int) -> Callable[[Model], list[State]]:
    def divide(model: Model) -> list[State]:
        state = _as_bf16(model.masters)
        parts = {name: np.split(each, n_ranks, axis=1) for name, each in state.items() if each.ndim == 2}
        return [
            {name: np.ascontiguousarray(parts[name][rank]) if name in parts else each for name, each in state.items()}
            for rank in range(n_ranks)
        ]

    return divide


CHANGES = (
    Change("checkpoint, the next step", _next_step(_as_bf16)),
    Change("torch.save file, the next step", _next_file(_write_torch, ".pt", _as_bf16)),
    Change(
        "torch.export file, the next step",
        _next_file(_write_pt2, ".pt2", _as_bf16),
        like="torch.save file, the next step",
    ),
    Change("fp32 torch.save file, the next step", _next_file(_write_torch, ".pt", _as_fp32), is_variant=True),
    Change(
        "fp32 torch.export file, the next step",
        _next_file(_write_pt2, ".pt2", _as_fp32),
        like="fp32 torch.save file, the next step",
        is_variant=True,
    ),
    Change("fine-tune in another process", _copy(_as_bf16, lambda model: [_as_bf16(model.moved())])),
    Change(
        "the same, names of PEFT",
        _copy(_as_bf16, lambda model: [_of_peft(_as_bf16(model.moved()))]),
        like="fine-tune in another process",
    ),
    Change("bf16 copy of fp32", _copy(_as_fp32, lambda model: [_as_bf16(model.masters)]), 1),
    Change("GGUF Q8_0 of bf16", _file(_write_gguf(gguf.GGMLQuantizationType.Q8_0), ".gguf", _as_bf16), 2),
    Change(
        "GGUF Q8_0 of fp32", _file(_write_gguf(gguf.GGMLQuantizationType.Q8_0), ".gguf", _as_fp32), 2, is_variant=True
    ),
    Change("mean of two fine-tunes", _merge(_as_bf16), 1),
    Change("mean of two fine-tunes, fp32", _merge(_as_fp32), 1, is_variant=True),
    Change("matrices, transposed", _copy(_as_bf16, _transposed), 1),
    Change("column shards of 2 ranks", _copy(_as_bf16, _shards(2)), 1),
    Change("column shards of 4 ranks", _copy(_as_bf16, _shards(4)), 1, is_variant=True),
    Change("fp32 in HDF5 with gzip", _file(_write_hdf5, ".h5", _as_fp32), 0.3),
    Change("fp32 in savez_compressed", _file(_write_npz, ".npz", _as_fp32), 0.3),
    Change("fp32 in .keras", _file(_write_keras, ".keras", _as_fp32), 0.3),
)

Costs = dict[str, dict[str, list[tuple[Cost, int]]]]
"""By change and kind of place: the cost and the bytes saved, for each model."""


def _measure(made: Places, changes: Sequence[Change], models: list[Model]) -> Costs:
    costs: Costs = {}
    for change in changes:
        of_kind = costs.setdefault(change.name, {})
        for model in models:
            for open_place in (made.folder, made.bucket):
                with open_place() as place:
                    of_kind.setdefault(place.kind, []).append(change.save(place, model))
                    place.check()
    return costs


def _tabulate(costs: Costs, changes: Sequence[Change], section: Section) -> None:
    table = Table(TITLE, ("change", "target", "folder", "bucket", "requests", "allowed"))
    for change in changes:
        shares = {kind: _shares(found) for kind, found in costs[change.name].items()}
        for kind, series in shares.items():
            section.samples[f"{change.name}/{kind}/%"] = series.values
            if change.most is not None:
                section.verdicts.append(at_most(change.most, "%", change.name).judge(kind, max(series.values)))
            if change.like is not None:
                beyond = series.minus(_shares(costs[change.like][kind]))
                target = at_most(ALIKE, "% of the model", f"{change.name}: beyond {change.like}")
                section.verdicts.append(target.judge(kind, max(beyond.values)))
        in_folder, in_bucket = ([cost for cost, _ in costs[change.name][kind]] for kind in ("folder", "bucket"))
        beyond_folder = max(
            (there.n_bytes - here.n_bytes) / there.n_saves for here, there in zip(in_folder, in_bucket, strict=True)
        )
        target = at_most(BEYOND_FOLDER, "KB", f"{change.name}: bytes in a bucket beyond those in a folder")
        section.verdicts.append(target.judge("bucket", beyond_folder / 1000))
        dearest = max(in_bucket, key=lambda cost: cost.n_beside_packs)
        target = at_most(BESIDE_PACKS, "requests", f"{change.name}: requests beside those for packs")
        section.verdicts.append(target.judge("bucket", dearest.n_beside_packs))
        allowed = f"{dearest.n_packs + dearest.n_saves * BESIDE_PACKS}"
        cells = (_range(shares["folder"]), _range(shares["bucket"]), f"{dearest.n_requests}", allowed)
        table.add(change.name, change.target, *cells)
    section.tables.append(table)


def _shares(found: list[tuple[Cost, int]]) -> Series:
    return Series(tuple(100 * cost.n_bytes / n_bytes for cost, n_bytes in found))


def _range(series: Series, unit: str = " %") -> str:
    low, high = f"{series.least:.2f}", f"{max(series.values):.2f}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


# --- steps that change few words


def _small_steps(made: Places, models: list[Model], options: Options, section: Section) -> None:
    """Save steps of reinforcement learning into a folder."""
    title = f"{N_SMALL_STEPS} steps that change {SMALL_SHARE:.1%} of the words"
    columns = ("model", "words changed", "stored a step", "entropy of the change", "to the entropy", "slowest restore")
    table = Table(title, columns)
    section.note("slowest restore: to that of the first step, stored in full; the median of rounds in turns")
    section.note("to the entropy: the bytes of a step less 4 KB, to the entropy of its places and differences")
    for model in models:
        with made.folder() as place:
            assert isinstance(place, Folder)
            states = list(_trained_a_little(model))
            costs = [place.save("rl", step, state).n_bytes for step, state in enumerate(states)][1:]
            changes = list(itertools.starmap(_entropy, itertools.pairwise(states)))
            place.check()
            restored = _restored(place, options)
        size = _n_bytes(states[0])
        ratios = Series(tuple((cost - 4096) / n_bytes for cost, (_, n_bytes) in zip(costs, changes, strict=True)))
        stored = Series(tuple(100 * cost / size for cost in costs))
        entropies = Series(tuple(100 * n_bytes / size for _, n_bytes in changes))
        changed = Series(tuple(100 * share for share, _ in changes))
        section.samples[f"small steps, {model.name}/folder/%"] = stored.values
        section.samples[f"small steps, {model.name}/entropy/%"] = entropies.values
        section.samples[f"small steps, {model.name}/restore/x"] = restored.values
        section.verdicts.append(SMALL.judge(model.name, max(ratios.values)))
        section.verdicts.append(RESTORED.judge(model.name, restored.median))
        name = f"{model.name}, {show_bytes(size)} in bf16"
        table.add(name, *map(_range, (changed, stored, entropies)), _range(ratios, " x"), f"{restored.median:.2f} x")
    section.tables.append(table)


def _trained_a_little(model: Model) -> Iterator[State]:
    """Yield the weights, and those after each step; a step has the size that changes the wanted share of words."""
    masters = {name: weights.copy() for name, weights in model.masters.items()}
    state = _as_bf16(masters)
    low, high = 1e-9, 1e-3
    for _ in range(12):
        size = float(np.sqrt(low * high))
        after = _as_bf16(model.moved(0, size))
        low, high = (size, high) if _entropy(state, after)[0] < SMALL_SHARE else (low, size)
    yield state
    draw = np.random.default_rng(len(masters))
    for _ in range(N_SMALL_STEPS):
        for weights in masters.values():
            weights += np.float32(size) * draw.standard_normal(weights.shape, np.float32)
        yield _as_bf16(masters)


def _entropy(before: State, after: State) -> tuple[float, float]:
    """Return the share of changed words, and the bytes of the entropy of which words changed and by how much.

    A word changes independently of the others, and its difference is that of the numbers of both words in the order of
    their values.
    """
    differences = np.concatenate([_numbers(after[name]) - _numbers(before[name]) for name in before])
    _, counts = np.unique(differences[differences != 0], return_counts=True)
    share = counts.sum() / len(differences)
    places = -sum(p * np.log2(p) for p in (share, 1 - share) if p > 0)
    values = -(counts / counts.sum() * np.log2(counts / counts.sum())).sum()
    return float(share), float(len(differences) * (places + share * values) / 8)


def _numbers(weights: Array) -> Any:
    """Number bfloat16 words in the order of their values."""
    words = weights.view(np.uint16).ravel().astype(np.int32)
    magnitudes = words & 0x7FFF
    return np.where(words & 0x8000, -magnitudes, magnitudes)


def _restored(place: Folder, options: Options) -> Series:
    """Return the ratios of the time of the slowest step's restore to that of the first step's."""
    store = TensorCasStore(place.path, "rl")
    turns = {str(step): Turn(partial(store.load_tensors, step)) for step in range(N_SMALL_STEPS + 1)}
    full, *others = interleave(turns, 1 if options.is_smoke else N_RESTORES).values()
    return max((each.over(full) for each in others), key=lambda ratios: ratios.median)

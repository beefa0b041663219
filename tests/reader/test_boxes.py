"""Parts of tensors that are kept as boxes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import CorruptChunkError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, open_ref
from tensorcas_mlflow.store import Box, Policy, Shard, Store, join_shards, store_shards, withdraw_shards
from tests.reader.test_slices import some_index
from tests.stored_bytes import flip_in_packs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path)


def opened(store: Store, tensors: dict[str, Array], cuts: dict[str, Sequence[Sequence[int]]]) -> CheckpointReader:
    """Save tensors as boxes between cuts along each axis, and open the checkpoint."""
    boxes: list[Box] = []
    for name, array in tensors.items():
        borders = [[0, *at, side] for at, side in zip(cuts[name], array.shape, strict=True)]
        for box in product(*(list(pairwise(at)) for at in borders)):
            data = np.ascontiguousarray(array[tuple(slice(*side) for side in box)])
            boxes.append(Box(name=name, data=data, offsets=tuple(low for low, _ in box), shape=array.shape))
    stored = store_shards(store, boxes, series="boxes#0", policy=Policy.FAST)
    shards: dict[str, list[Shard]] = {name: [] for name in tensors}
    for each, shard in zip(boxes, stored.shards, strict=True):
        shards[each.name].append(shard)
    joined = join_shards(store, [(Spec.of(name, array), shards[name]) for name, array in tensors.items()])
    with store.begin_checkpoint(joined, series="boxes") as save:
        ref = save.commit(RefTarget(run_id="run", step=1))
    withdraw_shards(store, [stored.intent])
    return open_ref(store, ref)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_any_index_into_boxes_reads_what_numpy_finds(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 7) for _ in range(rng.randint(2, 4))) for _ in range(4)]
    tensors = {f"t{number}": np.arange(np.prod(shape)).reshape(shape) for number, shape in enumerate(shapes)}
    cuts = {
        name: [sorted(rng.sample(range(1, side), rng.randint(0, min(2, side - 1)))) for side in array.shape]
        for name, array in tensors.items()
    }
    reader = opened(store, tensors, cuts)

    for _ in range(100):
        name = rng.choice(list(tensors))
        index = some_index(rng, tensors[name].shape)
        try:
            wanted = tensors[name][index]
        except IndexError:
            continue
        found = reader.get_slice(name)[index]
        assert found.shape == wanted.shape
        assert found.tolist() == wanted.tolist(), (cuts[name], index)


@pytest.mark.long
def test_slices_of_boxes_and_of_other_tensors_come_together(store: Store) -> None:
    tensors = {name: np.arange(48 * n).reshape(6, 8, n) for n, name in enumerate(("boxes", "others", "whole"), start=1)}
    reader = opened(store, tensors, {"boxes": [[3], [4], []], "others": [[], [2, 4], [1]], "whole": [[], [], []]})
    rng = random.Random(5)
    wanted: list[tuple[str, Any]] = [("boxes", (slice(3), slice(4, 8))), ("boxes", slice(0, 0)), ("whole", ...)]
    for _ in range(200):
        name = rng.choice(list(tensors))
        index = some_index(rng, tensors[name].shape)
        try:
            tensors[name][index]
        except IndexError:
            continue
        wanted.append((name, index))

    found = reader.slices(wanted)

    assert [part.tolist() for part in found] == [tensors[name][index].tolist() for name, index in wanted]


def test_a_part_of_one_box_reads_only_its_chunks(store: Store) -> None:
    rng = np.random.default_rng(3)
    columns = rng.integers(0, 256, (1024, 4096), dtype=np.uint8)
    reader = opened(store, {"columns": columns}, {"columns": [[], [1024, 2048, 3072]]})
    before = reader.stats.read_bytes
    one = reader.get_slice("columns")[:, 1024:2048]
    after = reader.stats.read_bytes
    some = reader.get_slice("columns")[:256]

    assert (one == columns[:, 1024:2048]).all()
    assert (some == columns[:256]).all()
    assert after - before < 1.1 * (1 << 20)
    assert reader.stats.read_bytes - after < 1.1 * (1 << 20)


def test_a_damaged_box_is_reported_by_its_tensor(store: Store) -> None:
    columns = np.random.default_rng(3).integers(0, 256, (1024, 1024), dtype=np.uint8)
    reader = opened(store, {"columns": columns}, {"columns": [[], [512]]})
    flip_in_packs(store.backend)

    with pytest.raises(CorruptChunkError, match="columns, box"):
        [reader.get_slice("columns")[:, part] for part in (slice(512), slice(512, None))]

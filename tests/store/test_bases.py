from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.base.digest import digest_all
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.layout.manifests import Manifest, Row
from tensorcas_mlflow.store import _bases, _recent
from tensorcas_mlflow.store._bases import compared_with, matching_row, nearest
from tensorcas_mlflow.store._recent import RecentManifests
from tensorcas_mlflow.store._sources import TensorSource

CHUNK = 4096


def manifest(**tensors: np.ndarray) -> Manifest:
    source = TensorSource(tensors, {}, CHUNK)
    return Manifest(kind="checkpoint", chunk_bytes=CHUNK, store_id="s", flavor=None, rows=source.rows)


ONE = np.arange(5_000, dtype=np.float32)


def test_the_same_tensor_is_one_of_that_name_dtype_and_shape() -> None:
    row = manifest(a=ONE).row("a")

    assert matching_row(row, CHUNK, manifest(b=ONE, a=ONE + 1)) is not None
    assert matching_row(row, CHUNK, manifest(b=ONE)) is None
    assert matching_row(row, CHUNK, manifest(a=ONE.astype(np.float64))) is None
    assert matching_row(row, CHUNK, manifest(a=ONE.reshape(50, 100))) is None
    assert matching_row(row, 2 * CHUNK, manifest(a=ONE)) is None


def test_a_tensor_that_is_cut_at_other_places_is_not_the_same() -> None:
    rows = TensorSource({"a": ONE}, {"a": [1_000, 5_000]}, CHUNK).rows
    cut = Manifest(kind="checkpoint", chunk_bytes=CHUNK, store_id="s", flavor=None, rows=rows)

    assert matching_row(manifest(a=ONE).row("a"), CHUNK, cut) is None
    assert matching_row(cut.row("a"), CHUNK, cut) is not None


def share(row: Row, other: Row) -> float:
    return 0.9 if (row.digests != other.digests).any() else 0.1


def test_the_nearest_checkpoint_is_that_against_which_large_tensors_take_the_least() -> None:
    new = manifest(small=ONE[:10], large=ONE)
    small_alike, large_alike = manifest(small=ONE[:10], large=ONE + 1), manifest(small=ONE[:10] + 1, large=ONE)

    assert nearest(compared_with(new.rows, CHUNK, [small_alike, large_alike]), share) is large_alike
    assert nearest(compared_with(new.rows, CHUNK, [large_alike, small_alike]), share) is large_alike


def test_first_of_equally_near_checkpoints_is_the_base() -> None:
    candidates = [manifest(a=ONE + 1), manifest(a=ONE + 2)]

    assert nearest(compared_with(manifest(a=ONE).rows, CHUNK, candidates), share) is candidates[0]


def test_a_checkpoint_of_other_tensors_is_not_near() -> None:
    rows = manifest(a=ONE).rows

    assert nearest(compared_with(rows, CHUNK, [manifest(b=ONE)]), share) is None
    assert nearest(compared_with(rows, CHUNK, [manifest(b=ONE), manifest(a=ONE[1:])]), share) is None
    assert nearest(compared_with(rows, CHUNK, []), share) is None


def test_manifests_lately_seen_are_told_of_the_latest_first_and_by_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recent, "_N_RECENT", 4)
    recent = RecentManifests()
    made = [manifest(a=ONE + number) for number in range(6)]
    for number, each in enumerate(made):
        recent.note("s", f"m{number}", each)
    recent.note("s", "m3", made[3])

    assert recent.of("s") == [made[3], made[5], made[4], made[2]]
    assert recent.of("other") == []


def file_of(dtype: str | None, n_bytes: int) -> Manifest:
    shape = (n_bytes,) if dtype is None else (n_bytes // 4,)
    digests = digest_all([memoryview(bytes(1))] * -(-n_bytes // CHUNK))
    row = Row(spec=Spec(name="a", dtype=dtype, shape=shape), cuts=None, digests=digests)
    return Manifest(kind="file", chunk_bytes=CHUNK, store_id="s", flavor=None, rows=[row])


def test_files_without_tensors_do_not_push_out_what_is_remembered() -> None:
    recent = RecentManifests()
    model = file_of("float32", 5 * CHUNK)
    recent.note("s", "model", model)
    for number in range(100):
        recent.note("s", f"bytes {number}", file_of(None, 5 * CHUNK))
        recent.note("s", f"small {number}", file_of("float32", CHUNK))

    assert recent.of("s") == [model]


def test_only_some_of_many_checkpoints_of_the_same_tensors_are_compared() -> None:
    candidates = [manifest(b=ONE), *(manifest(a=ONE + number) for number in range(10))]
    compared: list[Row] = []

    def share_of(row: Row, other: Row) -> float:
        compared.append(other)
        return 0.5

    assert nearest(compared_with(manifest(a=ONE).rows, CHUNK, candidates), share_of) is candidates[1]
    assert len(compared) == _bases._N_COMPARED

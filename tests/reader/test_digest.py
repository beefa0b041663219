"""Digests and comparisons of whole checkpoints: they cover all that a load gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, diff, open_path, open_ref
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.file_formats.samples import safetensors_of
from tests.reader.checkpoints import moe, opened, save

RNG = np.random.default_rng(0)
X, NOISE = RNG.normal(size=(300, 3)), RNG.normal(size=300)


def agree(one: CheckpointReader, other: CheckpointReader) -> bool:
    """Tell whether two checkpoints are equal; fail unless the digest and the comparison say the same."""
    found = diff(one, other)

    assert found.is_equal is (one.digest() == other.digest())
    assert bool(found) is not found.is_equal
    assert (one.tensors_digest() == other.tensors_digest()) is not bool(found.added or found.removed or found.changed)
    return found.is_equal


def skeleton(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def pth(**values: Any) -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.arange(3000.0), **values}, out)
    return out.getvalue()


def a_file(tmp_path: Path, data: bytes) -> CheckpointReader:
    (tmp_path / "local").write_bytes(data)
    return open_path(tmp_path / "local")


def a_stored_file(tmp_path: Path, data: bytes, chunk_bytes: int = 1 << 18) -> CheckpointReader:
    (tmp_path / "a.file").write_bytes(data)
    root = tmp_path / str(chunk_bytes)
    store = Store.open(root, create=True, chunk_bytes=chunk_bytes)
    with store.write_file(tmp_path / "a.file") as pending:
        return open_ref(store, pending.commit(RefTarget(path="a.file"), replace=True))


def test_models_that_differ_in_small_values_only_are_told_apart(tmp_path: Path) -> None:
    with TensorCasStore(tmp_path, run_id="r") as store:
        for step, scale in enumerate((1.0, 1.0, 2.0)):
            store.save(SimpleNamespace(coefficients=[scale, 2.0], table=np.ones((90, 90))), step)
        same, other = (diff(store.open(0), store.open(step)) for step in (1, 2))

        assert agree(store.open(0), store.open(1))
        assert not agree(store.open(0), store.open(2))
    assert (same.changed, same.other) == ((), ())
    assert (other.changed, other.other) == ((), ("skeleton",))


def test_two_models_of_statsmodels_are_told_apart(tmp_path: Path) -> None:
    with TensorCasStore(tmp_path, run_id="r") as store:
        for step, small in enumerate((0.0, 0.25)):
            store.save(sm.OLS(NOISE + small * (NOISE > 2), X).fit(), step)

        assert not agree(store.open(0), store.open(1))


@pytest.mark.parametrize("chunk_bytes", [1 << 18, 4096])
def test_a_skeleton_is_compared_wherever_the_checkpoint_lies(tmp_path: Path, chunk_bytes: int) -> None:
    pickle = RNG.bytes(10_000)
    tensors = {"w": np.ones(3000), SKELETON: skeleton(pickle)}
    other = tensors | {SKELETON: skeleton(pickle[:-1] + b"x")}
    store = Store.init(tmp_path / "store")
    reader = opened(store, tensors)
    write_payload(tmp_path, tensors, flavor=None)
    file = open_path(tmp_path / PAYLOAD_FILE)
    elsewhere = Store.init(tmp_path / "b", chunk_bytes=chunk_bytes)

    assert agree(reader, file)
    assert agree(reader, opened(elsewhere, tensors))
    assert agree(reader, open_ref(elsewhere, save(elsewhere, tensors, 3, cuts={"w": [10, 3000]})))
    assert not agree(reader, opened(elsewhere, other, 2))
    assert not agree(file, opened(elsewhere, other, 4))
    assert diff(file, opened(elsewhere, other, 5)).other == ("skeleton",)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"metadata": {"epoch": 2}}, "metadata"), ({"flavor": "sklearn"}, "adapter")],
    ids=["metadata", "adapter"],
)
def test_metadata_and_adapters_are_compared(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    store = Store.init(tmp_path)
    base = {"flavor": "pytorch", "metadata": {"epoch": 1, "a": [1.5, None]}}
    tensors = {"w": np.ones(3)}
    one = open_ref(store, save(store, tensors, 1, **base))
    equal = open_ref(store, save(store, tensors, 2, flavor="pytorch", metadata={"a": [1.5, None], "epoch": 1}))
    other = open_ref(store, save(store, tensors, 3, **base | options))

    assert agree(one, equal)
    assert not agree(one, other)
    assert diff(one, other).other == (kind,)
    assert one.tensors_digest() == other.tensors_digest()


def test_the_order_of_tensors_is_content_beside_them(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    one = opened(store, {"a": np.ones(3), "b": np.ones(4), "c": np.ones(5)}, 1)
    other = opened(store, {"b": np.ones(4), "a": np.ones(3), "c": np.ones(5)}, 2)
    fewer = opened(store, {"a": np.ones(3), "c": np.ones(5)}, 3)

    assert not agree(one, other)
    assert diff(one, other).other == ("order",)
    assert diff(one, fewer).other == ()
    assert one.tensors_digest() == other.tensors_digest()


@pytest.mark.parametrize(
    "other",
    [np.zeros(1), np.zeros((1, 1)), np.zeros((), "f4"), np.zeros((), ">f8"), np.array(-0.0), np.zeros((), "i8")],
    ids=["one", "two axes", "narrower", "big-endian", "sign", "integer"],
)
def test_tensors_of_equal_numbers_and_other_bits_or_shapes_differ(tmp_path: Path, other: Any) -> None:
    store = Store.init(tmp_path)

    assert not agree(opened(store, {"w": np.zeros(())}, 1), opened(store, {"w": other}, 2))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,)])
def test_empty_tensors_of_other_shapes_differ(tmp_path: Path, shape: tuple[int, ...]) -> None:
    store = Store.init(tmp_path)

    assert not agree(opened(store, {"w": np.zeros((0, 2))}, 1), opened(store, {"w": np.zeros(shape)}, 2))
    assert agree(opened(store, {"w": np.zeros((0, 2))}, 3), opened(store, {"w": np.zeros((0, 2))}, 4))


@pytest.mark.parametrize("chunk_bytes", [1 << 18, 4096])
def test_records_texts_and_nans_are_compared_by_their_bits(tmp_path: Path, chunk_bytes: int) -> None:
    one = {
        "record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", ">f8")]),
        "text": np.array(["a", "bcd"]),
        "nan": np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32),
        "time": np.array(["2026-01-01"], "datetime64[D]"),
    }
    changed = {
        "record": np.array([(1, 2.75)], dtype=[("a", "i4"), ("b", ">f8")]),
        "text": np.array(["a", "bce"]),
        "nan": one["nan"][::-1].copy(),
        "time": one["time"].astype("datetime64[h]"),
    }
    store, elsewhere = Store.init(tmp_path / "a"), Store.init(tmp_path / "b", chunk_bytes=chunk_bytes)

    assert agree(opened(store, one, 1), opened(elsewhere, one, 2))
    for step, name in enumerate(one):
        other = opened(elsewhere, one | {name: changed[name]}, 3 + step)
        assert not agree(opened(store, one, 1 + step), other)
        assert diff(open_ref(store, save(store, one, 20 + step)), other, values=True).changed == (name,)


def test_a_part_has_all_content_beside_the_tensors(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    one, other = (
        opened(store, {"model.w": np.ones(3), "epoch": np.array(step), SKELETON: skeleton(b"pickle %d" % step)}, step)
        for step in (1, 2)
    )

    assert not agree(one.below("model"), other.below("model"))
    assert diff(one.below("model"), other.below("model")).other == ("skeleton",)
    assert one.below("model").tensors_digest() == other.below("model").tensors_digest()
    assert agree(one.below("model"), one.below("model"))


@pytest.mark.parametrize("place", [a_file, a_stored_file])
def test_files_of_equal_tensors_and_another_epoch_differ(
    tmp_path: Path, place: Callable[[Path, bytes], CheckpointReader]
) -> None:
    one = a_stored_file(tmp_path, pth(epoch=1))
    (tmp_path / "other").mkdir()
    same, other = place(tmp_path / "other", pth(epoch=1)), place(tmp_path, pth(epoch=2))

    assert agree(one, same)
    assert not agree(one, other)
    assert (diff(one, other).changed, diff(one, other).other) == ((), ("bytes",))


@pytest.mark.parametrize("chunk_bytes", [1 << 18, 4096])
def test_tensors_that_cannot_be_read_are_compared(tmp_path: Path, chunk_bytes: int) -> None:
    def packed(four: int) -> bytes:
        header = {
            "m.four": {"dtype": "F4", "shape": [2, 40_000], "data_offsets": [0, 40_000]},
            "m.plain": {"dtype": "U8", "shape": [4], "data_offsets": [40_000, 40_004]},
        }
        data = bytearray(safetensors_of(header, 40_004))
        data[-1000] = four
        return bytes(data)

    one = a_file(tmp_path, packed(1))
    other = a_stored_file(tmp_path, packed(2), chunk_bytes)

    assert one.left_out == other.left_out != {}
    assert not agree(one, other)
    assert diff(one, other).other == ("bytes",)
    assert agree(one, a_stored_file(tmp_path, packed(1), chunk_bytes))


def test_bytes_that_strides_leave_out_are_compared(tmp_path: Path) -> None:
    def view(base: torch.Tensor) -> bytes:
        out = io.BytesIO()
        torch.save({"v": base[:, ::2], "t": base.t()[:0]}, out, _use_new_zipfile_serialization=False)
        return out.getvalue()

    # Such a file names a storage by its address, so all three are written of one storage.
    base = torch.arange(80.0).reshape(8, 10)
    files = [view(base), view(base)]
    base[:, 1] += 1
    files.append(view(base))
    for name in "abc":
        (tmp_path / name).mkdir()
    one, same, other = (a_file(tmp_path / name, data) for name, data in zip("abc", files, strict=True))

    assert agree(one, same)
    assert one.tensors_digest() == other.tensors_digest()
    assert not agree(one, other)


def test_a_digest_of_a_stored_file_reads_nothing_that_the_store_has_hashed(tmp_path: Path) -> None:
    reader = a_stored_file(tmp_path, pth(epoch=1))
    before = reader.stats
    reader.digest()

    assert reader.stats.read_bytes - before.read_bytes < 3000 * 4


def test_two_steps_of_any_store_are_compared_without_reading_a_tensor(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=4096)
    one, other = opened(store, moe(0), 1), opened(store, moe(1), 2)
    n_bytes = one.stats.read_bytes + other.stats.read_bytes
    found = diff(one, other)

    assert found.changed == tuple(moe(0))
    assert one.stats.read_bytes + other.stats.read_bytes == n_bytes
    assert one.stats.mapped_bytes + other.stats.mapped_bytes == 0

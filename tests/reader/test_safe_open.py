"""Code that was written for `safetensors.safe_open` reads from a store. After the library's own tests, in our words."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from tensorcas_mlflow.errors import AdapterError, BackendError, TensorNotFoundError
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.reader import SafeOpen, open_path
from tensorcas_mlflow.store import Store
from tests.reader.checkpoints import opened, save

TENSORS = {
    "b": np.arange(60, dtype="f4").reshape(3, 4, 5),
    "a": np.arange(7, dtype="i8"),
    "half": np.ones((2, 2), "f2"),
    "flag": np.array([True, False]),
    "scalar": np.array(2.5),
    "empty": np.empty((0, 3), "u1"),
}


@pytest.fixture
def ours(tmp_path: Path) -> SafeOpen:
    return SafeOpen(opened(Store.init(tmp_path / "store"), TENSORS))


@pytest.fixture
def theirs(tmp_path: Path) -> object:
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    return safetensors.safe_open(tmp_path / "model.safetensors", framework="np")


def test_safe_open_of_ours_lists_the_names_of_safetensors(ours: SafeOpen, theirs: SafeOpen) -> None:
    with ours as one, theirs as other:
        assert one.keys() == other.keys()
        assert sorted(one.offset_keys()) == sorted(other.offset_keys())


def test_safe_open_of_ours_gives_the_tensors_of_safetensors(ours: SafeOpen, theirs: SafeOpen) -> None:
    with ours as one, theirs as other:
        for name in other.keys():  # noqa: SIM118 - it is no mapping
            got, expected = one.get_tensor(name), other.get_tensor(name)
            assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert list(one.get_tensors(["b", "a"])) == ["b", "a"]


@pytest.mark.parametrize(
    "index",
    [
        np.s_[0],
        np.s_[-1],
        np.s_[1:],
        np.s_[:2],
        np.s_[1:2, 2:],
        np.s_[:, 1],
        np.s_[:, :, 3],
        np.s_[..., 0],
        np.s_[0, 1, 2],
        np.s_[:],
        np.s_[...],
    ],
    ids=str,
)
def test_safe_open_of_ours_gives_the_slices_of_safetensors(ours: SafeOpen, theirs: SafeOpen, index: object) -> None:
    with ours as one, theirs as other:
        got, expected = one.get_slice("b")[index], other.get_slice("b")[index]
        assert (got.shape, got.tobytes()) == (expected.shape, expected.tobytes())


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy", "flax", "jax"])
def test_safe_open_gives_the_tensors_of_each_framework_of_safetensors(tmp_path: Path, framework: str) -> None:
    arrays = {name: array for name, array in TENSORS.items() if array.dtype.itemsize < 8}  # JAX cuts these to 32 bits
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    ours = SafeOpen(opened(Store.init(tmp_path / "store"), TENSORS, framework=framework, device="cpu"))
    with ours as one, safetensors.safe_open(tmp_path / "m.safetensors", framework) as other:
        for name in arrays:
            got, expected = one.get_tensor(name), other.get_tensor(name)
            assert (type(got), got.dtype, got.shape) == (type(expected), expected.dtype, expected.shape)
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
            assert type(one.get_slice("b")[1:]) is type(other.get_slice("b")[1:])
        assert np.asarray(one.get_tensor("a")).tobytes() == TENSORS["a"].tobytes()


@pytest.mark.parametrize("framework", ["tf", "tensorflow", "mlx", "paddle"])
def test_framework_without_an_adapter_is_refused_with_the_way_to_its_tensors(tmp_path: Path, framework: str) -> None:
    with pytest.raises(
        ValueError, match=f"framework='{framework}' is not supported: open with framework='np', and pass"
    ):
        opened(Store.init(tmp_path / "store"), TENSORS, framework=framework)


def test_framework_that_is_not_installed_is_refused_by_the_name_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ValueError, match="framework='flax' needs the package jax, which is not installed"):
        opened(Store.init(tmp_path / "store"), TENSORS, framework="flax")


@pytest.mark.parametrize(
    "name", ["absent.safetensors", "no/such/folder.bt", "file/below.npz", "50%25.npz", "a?b#c", "n" * 300]
)
def test_file_that_does_not_exist_is_an_error_of_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    for opens in (open_path, open_listing, mlflow.tensorcas.safe_open):
        with pytest.raises((FileNotFoundError, BackendError)) as caught:
            opens(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError) or len(name) == 300
    with pytest.raises(FileNotFoundError):
        mlflow.tensorcas.safe_open(tmp_path / name)


def test_path_with_characters_that_mlflow_decodes_is_that_path(tmp_path: Path) -> None:
    for nth, name in enumerate(("a%20b.npz", "a b.npz", "q?x.npz", "h#x.npz")):
        np.savez(tmp_path / name, w=np.full(3, nth))
    for nth, name in enumerate(("a%20b.npz", "a b.npz", "q?x.npz", "h#x.npz")):
        assert mlflow.tensorcas.safe_open(str(tmp_path / name)).get_tensor("w")[0] == nth


def test_slice_of_ours_describes_itself_as_one_of_safetensors(ours: SafeOpen, theirs: SafeOpen) -> None:
    with ours as one, theirs as other:
        for name in TENSORS:
            got, expected = one.get_slice(name), other.get_slice(name)
            assert (got.get_shape(), got.get_dtype()) == (expected.get_shape(), expected.get_dtype())


def test_a_tensor_that_is_not_there_is_an_error(ours: SafeOpen) -> None:
    with ours as one, pytest.raises(TensorNotFoundError):
        one.get_tensor("nothing")


def test_metadata_of_a_checkpoint_comes_as_texts(tmp_path: Path) -> None:
    store = Store.init(tmp_path)

    assert SafeOpen(opened(store, TENSORS)).metadata() is None
    save(store, TENSORS, 2, metadata={"format": "pt", "n": 3})
    ref = next(ref for ref in store.checkpoints() if ref.step == 2)
    from tensorcas_mlflow.reader import open_ref

    assert SafeOpen(open_ref(store, ref)).metadata() == {"format": "pt", "n": "3"}


def test_safe_open_gives_all_tensors_at_once(ours: SafeOpen, theirs: SafeOpen) -> None:
    with ours as one, theirs as other:
        got, expected = one.get_tensors(), other.get_tensors()

    assert got.keys() == expected.keys()
    assert all(got[name].tobytes() == expected[name].tobytes() for name in expected)


def test_closed_safe_open_reads_only_slices_taken_before(ours: SafeOpen) -> None:
    with ours:
        tensor, part = ours.get_tensor("b"), ours.get_slice("b")
    for read in (ours.keys, ours.metadata, ours.get_tensors, lambda: ours.get_slice("b")):
        with pytest.raises(ValueError, match="closed"):
            read()
    ours.__exit__(None, None, None)

    assert tensor.tobytes() == part[:].tobytes() == TENSORS["b"].tobytes()


def test_safe_open_refuses_a_name_that_is_no_text(ours: SafeOpen) -> None:
    with ours as one, pytest.raises(TypeError, match="3"):
        one.get_tensor(3)


def test_an_open_checkpoint_is_not_sent_to_another_process(ours: SafeOpen) -> None:
    with ours as one, pytest.raises(TypeError, match="open that there"):
        pickle.dumps(one)


def test_part_can_be_chosen_by_torch_tensors(ours: SafeOpen) -> None:
    with ours as one:
        part = one.get_slice("b")
        assert part[torch.tensor([2, 0])].tobytes() == TENSORS["b"][[2, 0]].tobytes()
        assert part[torch.tensor([True, False, True])].tobytes() == TENSORS["b"][[0, 2]].tobytes()
        assert part[torch.tensor(1)].tobytes() == TENSORS["b"][1].tobytes()


def test_an_index_out_of_bounds_says_of_which_axis(ours: SafeOpen) -> None:
    with ours as one, pytest.raises(IndexError, match="index -5 is out of bounds for axis 1 with size 4"):
        one.get_slice("b")[1:, -5]


def test_a_device_that_is_none_is_refused_when_the_checkpoint_is_opened(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="'nowhere' is no device"):
        opened(Store.init(tmp_path / "store"), TENSORS, framework="pt", device="nowhere")

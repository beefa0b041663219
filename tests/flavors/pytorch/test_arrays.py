"""Arrays of any checkpoint become tensors in their own memory."""

from __future__ import annotations

import gc
import mmap
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensorcas_mlflow.errors import AdapterError
from tests.flavors.pytorch.checkpoints import BOTH, EXTENSIONS, SHAPES, read_only, some_array
from tests.flavors.pytorch.models import ADAPTER, raw


class TestTensors:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [*BOTH, *EXTENSIONS])
    @pytest.mark.parametrize("lend", [np.asarray, read_only])
    def test_an_array_becomes_a_tensor_of_its_own_memory(self, dtype: str, shape: tuple[int, ...], lend: Any) -> None:
        array = lend(some_array(dtype, shape))

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = ADAPTER.weights({"w": array})["w"]

        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == shape
        assert tensor.is_contiguous()
        assert not tensor.is_meta
        assert raw(tensor) == array.tobytes()
        assert not array.size or tensor.data_ptr() == array.ctypes.data

    def test_a_read_only_array_causes_no_warning(self) -> None:
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = ADAPTER.weights({"w": read_only(np.ones(3)), "b": read_only(np.ones(3, ml_dtypes.bfloat16))})
        finally:
            torch.set_warn_always(always)

        assert found["w"].tolist() == found["b"].tolist() == [1, 1, 1]

    def test_a_file_stays_mapped_as_long_as_its_tensors_live(self, tmp_path: Path) -> None:
        (tmp_path / "pack").write_bytes(np.arange(1000, dtype=np.float32).tobytes())
        with (tmp_path / "pack").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tensor = ADAPTER.weights({"w": np.frombuffer(mapped, np.float32)[10:]})["w"]
        del mapped
        gc.collect()

        assert torch.equal(tensor, torch.arange(10, 1000, dtype=torch.float32))

    @pytest.mark.parametrize("dtype", [">i2", ">u8", ">f2", ">f4", ">f8", ">c16"])
    def test_the_other_byte_order_is_converted(self, dtype: str) -> None:
        array = np.arange(6).reshape(2, 3).astype(dtype)

        tensor = ADAPTER.weights({"w": array})["w"]

        assert np.array_equal(tensor.numpy(), array)

    @pytest.mark.parametrize("lend", [np.asarray, read_only])
    def test_strides_are_kept_where_torch_has_them(self, lend: Any) -> None:
        array = lend(np.arange(24, dtype=np.float32).reshape(4, 6))
        found = ADAPTER.weights({"t": array.T, "step": array[::2, 1::2], "back": array[::-1], "all": array})

        assert found["t"].stride() == (1, 6)
        assert found["step"].data_ptr() == array.ctypes.data + 4
        for name, expected in {"t": array.T, "step": array[::2, 1::2], "back": array[::-1]}.items():
            assert np.array_equal(found[name].numpy(), expected)

    def test_an_unaligned_array_is_copied(self) -> None:
        data = np.frombuffer(b"x" + np.arange(4, dtype=np.float32).tobytes(), dtype=np.uint8)

        tensor = ADAPTER.weights({"w": np.frombuffer(data[1:].data, np.float32)})["w"]

        assert tensor.data_ptr() % 4 == 0
        assert tensor.tolist() == [0, 1, 2, 3]

    def test_all_arrays_without_a_tensor_type_are_named(self) -> None:
        arrays = {
            "text": np.array(["a"]),
            "record": np.zeros(2, "i1,f4"),
            "int4": np.zeros(2, ml_dtypes.int4),
            "time": np.zeros(2, "m8[s]"),
            "fine": np.zeros(2),
        }

        with pytest.raises(AdapterError) as caught:
            ADAPTER.weights(arrays)

        assert all(repr(name) in str(caught.value) for name in list(arrays)[:4])
        assert "fine" not in str(caught.value)

    def test_weights_are_moved_and_converted_together(self) -> None:
        arrays = {"w": read_only(np.ones(2, np.float32)), "n": np.ones(2, np.int64)}

        found = ADAPTER.weights(arrays, dtype="bfloat16", device="cpu")

        assert (found["w"].dtype, found["n"].dtype) == (torch.bfloat16, torch.int64)

    def test_a_default_device_changes_nothing(self) -> None:
        with torch.device("meta"):
            found = ADAPTER.weights({"w": np.ones(2), "empty": np.ones(0)})

        assert found["w"].tolist() == [1, 1]
        assert not found["empty"].is_meta

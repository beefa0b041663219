"""ZipNN, a compressor of floats by byte planes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders._contender import Contender, module_missing
from benchmarks.data import Case


class ZipnnFile(Contender):
    """A safetensors file compressed as its own script does it: all bytes as those of one dtype."""

    name = "ZipNN of safetensors"

    @property
    def missing(self) -> str | None:
        return module_missing("zipnn")

    def save(self, case: Case, folder: Path) -> None:
        import safetensors.torch
        import zipnn

        dtype = "bfloat16" if "bfloat16" in {array.dtype.name for array in case.arrays.values()} else "float32"
        coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte")
        (folder / "model.znn").write_bytes(coder.compress(safetensors.torch.save(case.tensors)))

    def load(self, folder: Path) -> Mapping[str, Any]:
        import safetensors.torch
        import zipnn

        plain = zipnn.ZipNN(input_format="byte").decompress((folder / "model.znn").read_bytes())
        return safetensors.torch.load(bytes(plain))

"""Writing safetensors: one file, or a folder of shards with an index, as transformers reads it.

The format: https://github.com/huggingface/safetensors#format. The bytes are those of the library (0.8) for the same
tensors and metadata, but for the order of metadata, which it draws by lot and which is by key here.

Shards are laid out and named as ``PreTrainedModel.save_pretrained`` does: filled in the order of the tensors, a larger
tensor by itself. The library itself is not used: it wants all tensors in memory, and writes no shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.formats._write_layout import FileLayout, FlatLayout, check_dtypes, pad, refuse, starts_of
from tensorcas_mlflow.tensor import Spec

MAX_HEADER_BYTES = 100_000_000
FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
"""Names of the files in a folder of shards."""

_METADATA = "__metadata__"
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""In the library's order, from the last of which on it lays tensors out."""
_RANK = {name: -rank for rank, name in enumerate(_DTYPES)}


def lay_out_file(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay one file out.

    Raises:
        ValueError: A tensor's dtype or name cannot be written, or the header gets too long.
    """
    _check(specs)
    return [_file("", specs, _metadata_of(metadata))]


def lay_out_shards(specs: Sequence[Spec], metadata: Mapping[str, Any], *, shard_bytes: int) -> list[FileLayout]:
    """Lay out a folder of shards, the index last; of a single shard, only that.

    Args:
        specs: The tensors.
        metadata: Written into each shard.
        shard_bytes: How many bytes of tensors a shard holds at most, unless it holds one that is larger.

    Raises:
        ValueError: As `lay_out_file`.
    """
    _check(specs)
    texts = _metadata_of(metadata)
    shards: list[list[Spec]] = [[]]
    n_bytes = 0
    for spec in specs:
        if shards[-1] and n_bytes + spec.n_bytes > shard_bytes:
            shards.append([])
            n_bytes = 0
        shards[-1].append(spec)
        n_bytes += spec.n_bytes
    if len(shards) == 1:
        return [_file("model.safetensors", specs, texts)]
    names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(spec.n_bytes for spec in specs)},
        "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
    }
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files: list[FileLayout] = [_file(name, shard, texts) for name, shard in zip(names, shards, strict=True)]
    return [*files, FlatLayout("model.safetensors.index.json", head=text.encode())]


def _check(specs: Sequence[Spec]) -> None:
    check_dtypes(specs, _DTYPES, "safetensors")
    refuse([(spec, "is where its metadata stand") for spec in specs if spec.name == _METADATA], "safetensors")


def _metadata_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    # transformers reads no file that does not say for whom it was written.
    return texts_of({"format": "pt", **metadata})


def texts_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Write metadata as texts by name: a text as it is, all else as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
        for name, value in sorted(metadata.items())
    }


def _file(name: str, specs: Sequence[Spec], metadata: Mapping[str, str]) -> FlatLayout:
    ordered = sorted(specs, key=lambda spec: (_RANK[spec.dtype or ""], spec.name))
    text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    entries = [f"{text(_METADATA)}:{text(metadata)}"] if metadata else []
    for spec, start in zip(ordered, starts_of(ordered), strict=True):
        sides = ",".join(map(str, spec.shape))
        entries.append(
            f'{text(spec.name)}:{{"dtype":"{_DTYPES[spec.dtype or ""]}","shape":[{sides}],'
            f'"data_offsets":[{start},{start + spec.n_bytes}]}}'
        )
    header = pad(("{" + ",".join(entries) + "}").encode(), 8)
    check_header(header, "safetensors")
    return FlatLayout(name, head=len(header).to_bytes(8, "little") + header, specs=ordered)


def check_header(header: bytes, what: str) -> None:
    """Refuse a header that no reader of the format takes.

    Raises:
        ValueError: It is too long.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a {what} header of {len(header)} bytes is too long, {MAX_HEADER_BYTES} are allowed: write shards, or "
            "fewer or shorter names and metadata"
        )

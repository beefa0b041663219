"""Listings of files that hold arrays in every way a file can."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.file_formats import Listing, LocalFile, TensorLocation


def listing_of(
    path: Path,
    arrays: Mapping[str, Array],
    *,
    format: str = "safetensors",
    metadata: Mapping[str, Any] | None = None,
    left_out: Mapping[str, str] | None = None,
    deflated: tuple[str, ...] = (),
    transposed: tuple[str, ...] = (),
    source: type[LocalFile] = LocalFile,
) -> Listing:
    """Write arrays into a file and list it: some in C order, some deflated, some in columns."""
    data = bytearray(b"head")
    places: dict[str, TensorLocation] = {}
    for name, array in arrays.items():
        raw, strides, before = array.tobytes(), None, None
        if name in transposed:
            raw = array.T.tobytes()
            strides = tuple(stride // array.itemsize for stride in array.T.copy().T.strides)
        if name in deflated:
            squeezer = zlib.compressobj(wbits=-15)
            raw, before = squeezer.compress(b"header" + raw) + squeezer.flush(), len(b"header")
        places[name] = TensorLocation(
            spec=Spec.of(name, array) if name != "__skeleton__" else Spec(name=name, dtype="uint8", shape=array.shape),
            source=0,
            start=len(data),
            n_bytes=len(raw),
            strides=strides,
            deflated=before,
        )
        data += raw
    path.write_bytes(data)
    return Listing(
        format=format, sources=[source(path)], locations=places, metadata=metadata or {}, left_out=left_out or {}
    )

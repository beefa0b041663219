"""Writing npz archives, as `numpy.savez` does, but with the arrays at multiples of 64 bytes, to be mapped.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.lib import format as npy

from tensorcas_mlflow.dtypes import DType
from tensorcas_mlflow.formats._write_layout import FileLayout, refuse
from tensorcas_mlflow.formats._write_zip import Member, ZipLayout
from tensorcas_mlflow.tensor import Spec

_OF_OTHERS = 2
"""What `numpy.dtype.isbuiltin` is for dtypes that other packages have brought."""


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay one archive out; the format has no place for metadata.

    Dtypes that numpy knows only by the package ml_dtypes (bfloat16, the float8 kinds) are refused: `numpy.load` would
    give bytes of no type.

    Raises:
        ValueError: A tensor's dtype or name cannot be written.
    """
    names = {spec.name for spec in specs}
    refuse([(spec, f"has the dtype {spec.dtype}") for spec in specs if not _is_known(spec.numpy_dtype)], "npz")
    # numpy.load gives the member x.npy both for "x" and for "x.npy".
    refuse([(spec, f"is {spec.name + '.npy'!r} too") for spec in specs if spec.name + ".npy" in names], "npz")
    members = [Member(name=f"{spec.name}.npy", head=_header(spec), spec=spec) for spec in specs]
    return [ZipLayout(members)]


def _is_known(dtype: DType) -> bool:
    """Tell whether a dtype is numpy's own, as are its parts."""
    if dtype.fields is not None:
        return all(_is_known(field[0]) for field in dtype.fields.values())
    return dtype.base.isbuiltin != _OF_OTHERS


def _header(spec: Spec) -> bytes:
    facts = {"descr": npy.dtype_to_descr(spec.numpy_dtype), "fortran_order": False, "shape": spec.shape}
    out = io.BytesIO()
    try:
        npy.write_array_header_1_0(out, facts)
    except ValueError:  # a record of very many fields
        npy.write_array_header_2_0(out, facts)
    return out.getvalue()

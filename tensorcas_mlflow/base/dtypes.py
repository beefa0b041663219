"""Names of dtypes in manifests (``docs/format.md``), and their numpy dtypes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from tensorcas_mlflow.errors import FormatError

DType = np.dtype[Any]

_NUMPY_NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ML_DTYPES_NAMES = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int4",
    "uint4",
    "int2",
    "uint2",
]
_ITEMSIZES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Sizes of the dtypes that every release of ml_dtypes has, in bytes."""
_BY_NAME: dict[str, DType] = {name: np.dtype(name) for name in _NUMPY_NAMES}
_NAME_OF: dict[DType, str] = {dtype: name for name, dtype in _BY_NAME.items()}


@cache
def _learn_ml_dtypes() -> None:
    """Add the dtypes of ml_dtypes to the tables. Checkpoints of numpy's own dtypes do not wait for its import."""
    try:
        import ml_dtypes
    except Exception as error:  # numpy raises a ValueError for a build for another numpy
        raise ImportError(f"ml_dtypes cannot be imported here: {error}") from error

    found = {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES_NAMES if hasattr(ml_dtypes, name)}
    _NAME_OF.update({dtype: name for name, dtype in found.items()})
    _BY_NAME.update(found)


_FIXED = re.compile(r"[SU][1-9][0-9]{0,8}")
_TIME = re.compile(r"(?:datetime64|timedelta64)(?:\[(?:[1-9][0-9]{0,9})?[A-Za-z]{1,2}\])?")
_FIELD = re.compile(
    r"([A-Za-z_][A-Za-z0-9_.]{0,99}):([^{},:\[\]]{1,40}(?:\[[A-Za-z0-9]{1,12}\])??)"
    r"(\[[0-9]{1,8}(?:,[0-9]{1,8}){0,30}\])?(?=[,}])"
)

MAX_RECORD_BYTES = 1 << 20
"""Longer records are refused: no model has them, and a hostile name must not cost memory."""
MAX_FIELDS = 1000


def dtype_name(dtype: DType) -> str:
    """Return a dtype's name for manifests.

    Raises:
        ValueError: The dtype has no name: objects, padded or nested records, and long doubles, whose bytes differ
            from machine to machine.
    """
    if dtype.fields is not None:
        return _record_name(dtype)
    if dtype not in _NAME_OF:
        _learn_ml_dtypes()
    name = _NAME_OF.get(dtype)
    if name is not None:
        return name
    if dtype.byteorder == ">" and dtype.kind in "iufc" and dtype.newbyteorder("=") in _NAME_OF:
        return ">" + _NAME_OF[dtype.newbyteorder("=")]
    if dtype.kind in "SU" and 0 < dtype.itemsize <= MAX_RECORD_BYTES:
        order = ">" if dtype.byteorder == ">" else ""
        return f"{order}{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}"
    if dtype.kind in "Mm" and dtype.byteorder != ">":
        return dtype.name
    raise ValueError(f"arrays of dtype {dtype} cannot be stored")


def _record_name(dtype: DType) -> str:
    parts: list[str] = []
    end = 0
    assert dtype.names is not None
    assert dtype.fields is not None
    for field in dtype.names:
        base, offset = dtype.fields[field][:2]
        if offset != end or base.fields is not None:
            raise ValueError(f"records with padding or records inside cannot be stored: {dtype}")
        end = offset + base.itemsize
        inner, shape = base.subdtype or (base, ())
        sides = f"[{','.join(map(str, shape))}]" if shape else ""
        parts.append(f"{field}:{dtype_name(inner)}{sides}")
    if end != dtype.itemsize:
        raise ValueError(f"records with padding cannot be stored: {dtype}")
    name = "{" + ",".join(parts) + "}"
    try:
        parsed = parse_dtype(name)
    except FormatError:
        parsed = None
    if parsed != dtype:
        raise ValueError(f"records that are empty, too long or have such names cannot be stored: {dtype}")
    return name


def parse_dtype(name: str) -> DType:
    """Return the dtype of a name in a manifest.

    Raises:
        FormatError: There is no such dtype.
    """
    if name.startswith("{"):
        return _parse_record(name)
    big = name.startswith(">")
    bare = name[1:] if big else name
    if bare in _ML_DTYPES_NAMES:
        _learn_ml_dtypes()
    dtype = _BY_NAME.get(bare)
    if big and dtype is not None and (dtype.itemsize == 1 or bare in _ML_DTYPES_NAMES):
        dtype = None  # one byte has no order, and ml_dtypes knows only this machine's
    elif dtype is None and (_FIXED.fullmatch(bare) or (not big and _TIME.fullmatch(bare))):
        try:
            dtype = np.dtype(bare)
        except (TypeError, ValueError, OverflowError):
            dtype = None
    if dtype is None or dtype.itemsize > MAX_RECORD_BYTES:
        raise FormatError(f"no dtype is called {name[:80]!r}")
    return dtype.newbyteorder(">") if big else dtype


def itemsize_of(name: str) -> int:
    """Return the size of an element in bytes, without the import of ml_dtypes for the common dtypes of it.

    Raises:
        FormatError: There is no such dtype.
    """
    return _ITEMSIZES.get(name) or parse_dtype(name).itemsize


def _parse_record(name: str) -> DType:
    fields: list[tuple[str, DType, tuple[int, ...]]] = []
    at = 1
    n_bytes = 0
    while at < len(name) and name.endswith("}") and len(fields) < MAX_FIELDS:
        match = _FIELD.match(name, at)
        if match is None:
            break
        inner = parse_dtype(match[2])
        shape = tuple(map(int, match[3][1:-1].split(","))) if match[3] else ()
        size = inner.itemsize
        for side in shape:
            size *= side
        n_bytes += size
        if n_bytes > MAX_RECORD_BYTES:
            break
        fields.append((match[1], inner, shape))
        at = match.end() + 1
        if at == len(name) and n_bytes:
            try:
                return np.dtype([field if field[2] else field[:2] for field in fields])
            except ValueError as error:
                raise FormatError(f"not a record type: {name[:80]!r} ({error})") from error
    raise FormatError(f"not a record type: {name[:80]!r}")

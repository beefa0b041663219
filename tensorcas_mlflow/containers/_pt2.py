"""Weight tables of `torch.export` archives (``.pt2``).

The sources are ``torch/export/pt2_archive/_package.py``, ``torch/csrc/export/pt2_archive_constants.h`` and
``torch/_export/serde/schema.py`` (``PayloadConfig``, ``TensorMeta``). Since torch 2.9 each storage of a model is a
member ``<root>/data/weights/weight_<n>`` or ``<root>/data/constants/tensor_<n>``, and a table in JSON that follows them
says which tensors view it. A tensor of a subclass is a file of `torch.save` instead, and so was a whole state dict
before torch 2.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorcas_mlflow.containers._json import SPACE, TEXT, entries, strict_json, whole
from tensorcas_mlflow.containers._torch_views import TensorView
from tensorcas_mlflow.errors import FormatError

PT2_TABLE = re.compile(r"data/(?:weights/(?P<weights>.+)_weights|constants/(?P<constants>.+)_constants)_config\.json")
"""Name of a table, below the archive's root, with the model's name in it."""
PT2_DEFAULT_MODEL = "model"
"""Name of a model that its writer has not named."""
PT2_PICKLED_TENSOR = "pickled tensor"
"""What the type of a tensor of a subclass is called, which lies in a file of its own."""

_STRIDED = 7
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
"""By its number in ``ScalarType`` of torch's schema what a dtype is called here."""

_ENVELOPE = re.compile(
    SPACE + rb"\{" + SPACE + rb'"config"' + SPACE + rb":" + SPACE + rb"(\{.*\})" + SPACE + rb"\}" + SPACE, re.DOTALL
)
_MAX_NESTING = 6


def _object_pattern() -> bytes:
    """Return a pattern for an object, which `strict_json` checks, of which one holds another so many times at most."""
    inside = rb"(?:[^{}\"]++|" + TEXT + rb")"
    pattern = rb"\{" + inside + rb"*+\}"
    for _ in range(_MAX_NESTING):
        pattern = rb"\{(?:[^{}\"]++|" + TEXT + rb"|" + pattern + rb")*+\}"
    return pattern


_ENTRY = re.compile(SPACE + rb"(" + TEXT + rb")" + SPACE + rb":" + SPACE + rb"(" + _object_pattern() + rb")")


class Pt2Payload(NamedTuple):
    """One entry of a table."""

    view: TensorView
    """The tensor. Its ``key`` is the name of the member that it views, in the table's folder."""
    is_pickled: bool
    """Whether the member is a file of its own that holds the tensor, or a pickled object, and no storage."""


def pt2_payloads(table: bytes) -> Iterator[Pt2Payload]:
    """Read a table, one entry after the other.

    Raises:
        FormatError: It is not sound.
    """
    envelope = _ENVELOPE.fullmatch(table)
    if not envelope:
        raise FormatError('a weight table that is no object with "config" alone')
    for match in entries(memoryview(table)[slice(*envelope.span(1))], _ENTRY, b"{}"):
        yield _payload(strict_json(match[1]), strict_json(match[2]))


def _payload(name: str, fields: dict[str, Any]) -> Pt2Payload:
    path, is_pickled, meta = fields.get("path_name"), fields.get("use_pickle"), fields.get("tensor_meta")
    if type(path) is not str or not path or "/" in path or type(is_pickled) is not bool or not name:
        raise FormatError(f"a weight table that does not say where {name[:80]!r} lies")
    if is_pickled:
        return Pt2Payload(TensorView(name, "pickled object" if meta is None else PT2_PICKLED_TENSOR, None, path), True)
    if type(meta) is not dict or type(meta.get("sizes")) is not list or type(meta.get("strides")) is not list:
        raise FormatError(f"a weight table that does not say what {name[:80]!r} is")
    size, stride = tuple(map(_number, meta["sizes"])), tuple(map(_number, meta["strides"]))
    offset, scalar_type, layout = _number(meta.get("storage_offset")), whole(meta.get("dtype")), meta.get("layout")
    if len(size) != len(stride):
        raise FormatError(f"a weight table in which {name[:80]!r} has an impossible shape")
    if layout != _STRIDED:
        return Pt2Payload(TensorView(name, f"layout {whole(layout)}", None, path), False)
    dtype = _DTYPES.get(scalar_type)
    return Pt2Payload(TensorView(name, dtype or f"dtype {scalar_type}", dtype, path, 0, offset, size, stride), False)


def _number(value: Any) -> int:
    """Read a ``SymInt`` that is a number; weights have no other."""
    if type(value) is not dict or value.keys() != {"as_int"}:
        raise FormatError("a weight table with a size that is no number")
    return whole(value["as_int"])

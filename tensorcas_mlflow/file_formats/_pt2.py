"""Archives of `torch.export` (``.pt2``), read without torch; nothing in them is run.

The sources are ``torch/export/pt2_archive/_package.py``, ``torch/csrc/export/pt2_archive_constants.h`` and
``torch/_export/serde/schema.py`` (``PayloadConfig``, ``TensorMeta``). There are three layouts:

- Since torch 2.9, each storage of a model is a member ``<root>/data/weights/weight_<n>`` or
  ``<root>/data/constants/tensor_<n>``, and a JSON table behind them describes the tensors that view it. A tensor of a
  subclass is a file of `torch.save` instead.
- In torch 2.8, all weights of a model are one file of `torch.save`, and its constants another one.
- Until torch 2.7, the same files have other names, in an archive that `zipfile` writes (``torch/export/__init__.py``).

AOTInductor puts compiled code beside them, and weights as files of `torch.save` with one tensor each.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import JSON_SPACE, JSON_TEXT, json_entries, strict_json, whole_number
from tensorcas_mlflow.file_formats._listing import EXAMPLE_INPUT, Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, SliceSource
from tensorcas_mlflow.file_formats._tape import UNREADABLE
from tensorcas_mlflow.file_formats._torch import (
    MAX_PICKLE_BYTES,
    UNNAMED_TENSOR,
    below_name,
    is_torch_archive,
    list_torch,
)
from tensorcas_mlflow.file_formats._torch_pickle import TensorView
from tensorcas_mlflow.file_formats._torchscript import paths_in
from tensorcas_mlflow.file_formats._zip import list_members, read_member

PT2_TABLE = re.compile(r"data/(?:weights/(?P<weights>.+)_weights|constants/(?P<constants>.+)_constants)_config\.json")
"""Path of a table below the archive's root, with the model's name in it."""
PT2_DEFAULT_MODEL = "model"
"""Name of a model without a name of its own."""
_PICKLED_TENSOR = "pickled tensor"
"""Type of a tensor of a subclass, which lies in a file of its own."""

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
"""Dtypes by their number in ``ScalarType`` of torch's schema."""

_ENVELOPE = re.compile(
    JSON_SPACE
    + rb"\{"
    + JSON_SPACE
    + rb'"config"'
    + JSON_SPACE
    + rb":"
    + JSON_SPACE
    + rb"(\{.*\})"
    + JSON_SPACE
    + rb"\}"
    + JSON_SPACE,
    re.DOTALL,
)
_MAX_NESTING = 6


def _object_pattern() -> bytes:
    """Return a pattern for an object with bounded nesting; `strict_json` checks its matches."""
    inside = rb"(?:[^{}\"]++|" + JSON_TEXT + rb")"
    pattern = rb"\{" + inside + rb"*+\}"
    for _ in range(_MAX_NESTING):
        pattern = rb"\{(?:[^{}\"]++|" + JSON_TEXT + rb"|" + pattern + rb")*+\}"
    return pattern


_ENTRY = re.compile(
    JSON_SPACE + rb"(" + JSON_TEXT + rb")" + JSON_SPACE + rb":" + JSON_SPACE + rb"(" + _object_pattern() + rb")"
)


class Pt2Payload(NamedTuple):
    """One entry of a table."""

    view: TensorView
    """The tensor. Its ``key`` is the name of the member that it views, in the table's folder."""
    is_pickled: bool
    """True if the member is a file with the tensor, or a pickled object; otherwise it is a storage."""


def pt2_payloads(table: bytes) -> Iterator[Pt2Payload]:
    """Read a table, one entry after the other.

    Raises:
        FormatError: The table is malformed.
    """
    envelope = _ENVELOPE.fullmatch(table)
    if not envelope:
        raise FormatError('a weight table that is not an object with "config" alone')
    for match in json_entries(memoryview(table)[slice(*envelope.span(1))], _ENTRY, b"{}"):
        yield _payload(strict_json(match[1]), strict_json(match[2]))


def _payload(name: str, fields: dict[str, Any]) -> Pt2Payload:
    path, is_pickled, meta = fields.get("path_name"), fields.get("use_pickle"), fields.get("tensor_meta")
    if type(path) is not str or not path or "/" in path or type(is_pickled) is not bool or not name:
        raise FormatError(f"a weight table without the position of {name[:80]!r}")
    if is_pickled:
        return Pt2Payload(TensorView(name, "pickled object" if meta is None else _PICKLED_TENSOR, None, path), True)
    if type(meta) is not dict or type(meta.get("sizes")) is not list or type(meta.get("strides")) is not list:
        raise FormatError(f"a weight table without the shape of {name[:80]!r}")
    size, stride = tuple(map(_number, meta["sizes"])), tuple(map(_number, meta["strides"]))
    offset, scalar_type, layout = (
        _number(meta.get("storage_offset")),
        whole_number(meta.get("dtype")),
        meta.get("layout"),
    )
    if len(size) != len(stride):
        raise FormatError(f"a weight table in which {name[:80]!r} has an impossible shape")
    if layout != _STRIDED:
        return Pt2Payload(TensorView(name, f"layout {whole_number(layout)}", None, path), False)
    dtype = _DTYPES.get(scalar_type)
    return Pt2Payload(TensorView(name, dtype or f"dtype {scalar_type}", dtype, path, 0, offset, size, stride), False)


def _number(value: Any) -> int:
    """Read a ``SymInt`` that is a number; weights have no symbolic sizes."""
    if type(value) is not dict or value.keys() != {"as_int"}:
        raise FormatError("a weight table with a size that is not a number")
    return whole_number(value["as_int"])


_MARK = "archive_format"
_MARK_VALUE = b"pt2"
_OLD_MARK = "serialized_exported_program.json"
_MAX_TABLE_BYTES = 64 << 20
_MAX_WORD_BYTES = 16

_WEIGHTS = re.compile(r"data/(?:weights|constants)/(.+)\.pt|serialized_(?:state_dict|constants)\.(?:pt|json)")
"""Files of `torch.save`, in the layouts before torch 2.9."""
_EXAMPLES = re.compile(r"data/sample_inputs/.+\.pt|serialized_example_inputs\.pt")
_CODE_TABLE = re.compile(r"data/aotinductor/([^/]+)/weights_config\.json")
_WITHOUT_TENSORS = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/.*|\.format_version|\.storage_alignment"
    r"|models/.*\.json|serialized_exported_program\.json|extra/.*|extra_files/.*",
    re.DOTALL,
)
"""Members that hold graphs and texts."""


def is_pt2(members: Sequence[FileRange]) -> bool:
    """Recognise an archive of `torch.export` by its members."""
    return any(
        member.name == _OLD_MARK or (member.name.endswith(f"/{_MARK}") and member.name.count("/") == 1)
        for member in members
    )


def list_pt2(source: ByteSource, members: Sequence[FileRange]) -> Listing:
    """List the weights, buffers and constants of an archive of `torch.export`.

    Names are those of the tables; a model that is not called ``model`` adds its name and a slash before them. Left out
    are example inputs (see `EXAMPLE_INPUT`), compiled code, pickled objects, and unknown members, which may hold
    tensors.

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` and `zlib.error` say the same.
    """
    return _Archive(source, members).listing()


class _Archive:
    """Reader of one archive."""

    def __init__(self, source: ByteSource, members: Sequence[FileRange]) -> None:
        self._source = source
        self._table = LocationTable(source)
        marks = [member.name for member in members if member.name.endswith(f"/{_MARK}") and member.name.count("/") == 1]
        root = marks[0].removesuffix(_MARK) if marks else ""
        if len(marks) > 1 or not all(member.name.startswith(root) for member in members):
            raise FormatError("it holds two archives")
        self._members = {member.name[len(root) :]: member for member in members}
        if marks and read_member(source, self._members[_MARK], _MAX_WORD_BYTES) != _MARK_VALUE:
            raise FormatError(f"{marks[0][:80]!r} does not contain 'pt2'")
        if is_torch_archive(members):
            raise FormatError("it is a file of torch.save, too")
        self._left = dict.fromkeys(path for path, member in self._members.items() if member.raw_bytes)
        """Members that nothing has accounted for; an ordered set."""

    def listing(self) -> Listing:
        for path in self._members:
            table, weights, code = PT2_TABLE.fullmatch(path), _WEIGHTS.fullmatch(path), _CODE_TABLE.fullmatch(path)
            if table is not None:
                self._add_table(path, _prefix(table["weights"] or table["constants"]))
            elif code is not None:
                self._add_code_table(path, _prefix(code[1]))
            elif weights is not None:
                self._add_file(path, _prefix(weights[1] or PT2_DEFAULT_MODEL))
            elif _EXAMPLES.fullmatch(path):
                self._leave_out_examples(path)
            elif _WITHOUT_TENSORS.fullmatch(path):
                self._left.pop(path, None)
        for path in self._left:
            is_code = path.startswith("data/aotinductor/")
            self._leave_out(path, "compiled code" if is_code else "a file that no table names")
        return self._table.listing("pt2")

    def _leave_out(self, name: str, kind: str) -> None:
        self._table.leave_out(self._table.unused(name), kind)

    # --- since torch 2.9

    def _add_table(self, path: str, prefix: str) -> None:
        """Add the tensors that a table names."""
        self._check_byte_order()
        folder = path[: path.rfind("/") + 1]
        names: set[str] = set()
        for view, is_pickled in pt2_payloads(self._read(path)):
            member = self._member(folder + view.key, view.name)
            if view.name in names:
                raise FormatError(f"a weight table names {view.name[:80]!r} twice")
            names.add(view.name)
            if is_pickled:
                self._add_pickled(member, view, prefix + view.name)
            elif view.dtype is not None and not member.raw_bytes and 0 not in view.size:
                # torch fills it with zeros on loading.
                self._leave_out(prefix + view.name, "fake tensor")
            else:
                self._add_view(member, view, prefix + view.name)

    def _add_pickled(self, member: FileRange, view: TensorView, name: str) -> None:
        """Add the tensors that a tensor of a subclass consists of; leave out any other object."""
        if view.kind == _PICKLED_TENSOR:
            with contextlib.suppress(*UNREADABLE, zlib.error):
                nested = list_torch(self._source, self._nested(member))
                if nested.locations or nested.left_out:
                    self._table.join(nested, partial(below_name, name), numbered=True)
                    return
        self._leave_out(name, view.kind)

    def _add_view(self, storage: FileRange, view: TensorView, name: str) -> None:
        """Add a tensor that views a storage."""
        if view.dtype is None:
            self._leave_out(name, view.kind)
            return
        if storage.is_deflated:
            raise FormatError(f"{storage.name[:80]!r} is compressed")
        name = self._table.unused(name)
        self._table.add_view(name, view.dtype, view.size, view.stride, offset=view.offset, storage=storage)

    # --- before torch 2.9

    def _add_file(self, path: str, prefix: str) -> None:
        """Add all tensors of a file of `torch.save`; the file is empty if there are none."""
        member = self._member(path, path)
        if member.raw_bytes:
            self._table.join(list_torch(self._source, self._nested(member)), prefix.__add__, numbered=True)

    def _leave_out_examples(self, path: str) -> None:
        """Name the example inputs of a model, as far as they can be read."""
        member = self._member(path, path)
        names = [path] if member.raw_bytes else []
        with contextlib.suppress(*UNREADABLE, zlib.error):
            for each in self._nested(member) if names else ():
                if is_torch_archive([each]):
                    names = [f"{path}/{name}" for name in paths_in(read_member(self._source, each, MAX_PICKLE_BYTES))]
        for name in names:
            self._leave_out(name, EXAMPLE_INPUT)

    # --- of AOTInductor

    def _add_code_table(self, path: str, prefix: str) -> None:
        """Add the weights of compiled code: the table has the file, shape, stride and offset of each."""
        table = strict_json(self._read(path))
        if type(table) is not dict:
            raise FormatError(f"{path[:80]!r} is no table of weights")
        for name, entry in table.items():
            file, size, stride, offset = _code_entry(name, entry)
            members = self._nested(self._member(f"data/weights/{file}", name))
            nested = list_torch(self._source, members)
            location = nested.locations.get(UNNAMED_TENSOR)
            if (
                location is None
                or len(nested.locations) + len(nested.left_out) != 1
                or location.swapped
                or location.source
            ):
                self._leave_out(prefix + name, "a file that holds no plain tensor")
                continue
            storage = next(each for each in members if each.start <= location.start <= each.start + each.n_bytes)
            dtype = location.spec.dtype
            self._add_view(storage, TensorView(name, "", dtype, "", 0, offset, size, stride), prefix + name)

    # --- members

    def _member(self, path: str, name: str) -> FileRange:
        """Return a member, and account for it."""
        member = self._members.get(path)
        if member is None:
            raise FormatError(f"{path[:80]!r}, of {name[:80]!r}, is missing")
        self._left.pop(path, None)
        return member

    def _read(self, path: str) -> bytes:
        return read_member(self._source, self._member(path, path), _MAX_TABLE_BYTES)

    def _nested(self, member: FileRange) -> list[FileRange]:
        """List the members of an archive that is a member."""
        if member.is_deflated:
            raise FormatError(f"{member.name[:80]!r} is compressed")
        inner = list_members(SliceSource(self._source, member.start, member.n_bytes, self._source.name))
        return [each._replace(start=each.start + member.start) for each in inner]

    def _check_byte_order(self) -> None:
        """Refuse storages in big-endian order: torch itself reads them as if they were little-endian."""
        member = self._members.get("byteorder")
        if member is not None and read_member(self._source, member, _MAX_WORD_BYTES) != b"little":
            raise FormatError("its storages are not in little-endian order")


def _prefix(model: str) -> str:
    return "" if model == PT2_DEFAULT_MODEL else f"{model}/"


def _code_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    is_entry = type(entry) is list and len(entry) == 4 and type(entry[0]) is str
    if not name or not is_entry or type(entry[1]) is not list or type(entry[2]) is not list:
        raise FormatError(f"a table of weights without the position of {name[:80]!r}")
    size, stride = tuple(map(whole_number, entry[1])), tuple(map(whole_number, entry[2]))
    if len(size) != len(stride):
        raise FormatError(f"a table of weights in which {name[:80]!r} has an impossible shape")
    return entry[0], size, stride, whole_number(entry[3])

"""Archives of `torch.export` (``.pt2``), read without torch; nothing in them is run.

There are three layouts:

- since torch 2.9 storages and tables of what views them (`tensorcas_mlflow.containers`, ``_pt2.py``);
- in torch 2.8 a file of `torch.save` for all weights of a model, and one for its constants;
- until torch 2.7 the same, with other names, in an archive that `zipfile` writes (``torch/export/__init__.py``).

AOTInductor puts compiled code beside them, and weights as files of `torch.save` with one tensor each.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from tensorcas_mlflow.containers import (
    PT2_DEFAULT_MODEL,
    PT2_PICKLED_TENSOR,
    PT2_TABLE,
    UNREADABLE,
    TensorView,
    pt2_payloads,
    strict_json,
    whole,
)
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import EXAMPLE_INPUT, Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._read_torch import TorchArchive, add_view, read_whole, unused_name
from tensorcas_mlflow.formats._source import ByteSource, Stretch
from tensorcas_mlflow.formats._zip_directory import Member, list_members

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
"""Graphs and texts."""


def is_pt2(members: Sequence[Member]) -> bool:
    """Tell the members of such an archive from those of others."""
    return any(
        member.name == _OLD_MARK or (member.name.endswith(f"/{_MARK}") and member.name.count("/") == 1)
        for member in members
    )


def list_pt2(source: ByteSource, members: Sequence[Member]) -> Listing:
    """List the weights, buffers and constants of such an archive.

    Their names are those of the tables. Before those of a model that is not called ``model`` comes its name and a
    slash. Left out are example inputs (see `EXAMPLE_INPUT`), compiled code, pickled objects, and whatever else is not
    known to hold no tensors.

    Raises:
        FormatError: It is not sound. So do the others of `tensorcas_mlflow.containers.UNREADABLE` and `zlib.error` say.
    """
    return _Archive(source, members).listing()


class _Archive:
    """One archive under way."""

    def __init__(self, source: ByteSource, members: Sequence[Member]) -> None:
        self._source = source
        self._places = Places()
        marks = [member.name for member in members if member.name.endswith(f"/{_MARK}") and member.name.count("/") == 1]
        root = marks[0].removesuffix(_MARK) if marks else ""
        if len(marks) > 1 or not all(member.name.startswith(root) for member in members):
            raise FormatError("there are two archives in it")
        self._members = {member.name[len(root) :]: member for member in members}
        if marks and read_whole(source, self._members[_MARK], _MAX_WORD_BYTES) != _MARK_VALUE:
            raise FormatError(f"what {marks[0][:80]!r} says is not 'pt2'")
        if f"{root}data.pkl" in self._members or "data.pkl" in self._members:
            raise FormatError("it is a file of torch.save, too")
        self._left = dict.fromkeys(path for path, member in self._members.items() if member.raw_bytes)
        """What nothing has accounted for; a set in order."""

    def listing(self) -> Listing:
        for path in list(self._members):
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
            self._places.leave_out(
                unused_name(path, self._places), "compiled code" if is_code else "a file that no table names"
            )
        return Listing(format="pt2", sources=[self._source], places=self._places, left_out=self._places.left_out)

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
            name = unused_name(prefix + view.name, self._places)
            if is_pickled:
                self._add_pickled(member, view, name)
            elif view.dtype is not None and not member.raw_bytes and 0 not in view.size:
                # torch fills it with zeros when it is loaded.
                self._places.leave_out(name, "fake tensor")
            else:
                add_view(self._places, self._source, member, view, name)

    def _add_pickled(self, member: Member, view: TensorView, name: str) -> None:
        """Add the tensors that one of a subclass is made of; leave out what is none, or cannot be read as such."""
        found = Places()
        if view.kind == PT2_PICKLED_TENSOR:
            with contextlib.suppress(*UNREADABLE):
                self._nested(member).add(found, prefix=f"{name}.", only=name)
        if found or found.left_out:
            self._places.join(found, 0)
        else:
            self._places.leave_out(name, view.kind)

    # --- before torch 2.9

    def _add_file(self, path: str, prefix: str) -> None:
        """Add all tensors of a file of `torch.save`, which has no bytes where there are none."""
        member = self._member(path, path)
        if member.raw_bytes:
            self._nested(member).add(self._places, prefix=prefix)

    def _leave_out_examples(self, path: str) -> None:
        """Name the example inputs of a model."""
        member = self._member(path, path)
        if not member.raw_bytes:
            return
        try:
            names = [f"{path}/{name}" for name in self._nested(member).names()]
        except UNREADABLE:
            names = [path]
        for name in names:
            self._places.leave_out(unused_name(name, self._places), EXAMPLE_INPUT)

    # --- of AOTInductor

    def _add_code_table(self, path: str, prefix: str) -> None:
        """Add the tensors that compiled code takes its weights from: of each its file, shape, stride and offset."""
        table = strict_json(self._read(path))
        if type(table) is not dict:
            raise FormatError(f"{path[:80]!r} is no table of weights")
        for name, entry in table.items():
            file, size, stride, offset = _code_entry(name, entry)
            member = self._member(f"data/weights/{file}", name)
            storage, dtype = self._nested(member).only_storage()
            view = TensorView(name, dtype or "", dtype, "", storage.raw_bytes, offset, size, stride)
            add_view(self._places, self._source, storage, view, unused_name(prefix + name, self._places))

    # --- members

    def _member(self, path: str, name: str) -> Member:
        """Find a member, and account for it."""
        member = self._members.get(path)
        if member is None:
            raise FormatError(f"{path[:80]!r}, of {name[:80]!r}, is not there")
        self._left.pop(path, None)
        return member

    def _read(self, path: str) -> bytes:
        return read_whole(self._source, self._member(path, path), _MAX_TABLE_BYTES)

    def _nested(self, member: Member) -> TorchArchive:
        if member.is_deflated:
            raise FormatError(f"{member.name[:80]!r} is compressed")
        inner = list_members(Stretch(self._source, member.start, member.n_bytes))
        return TorchArchive(self._source, [each._replace(start=each.start + member.start) for each in inner])

    def _check_byte_order(self) -> None:
        """Refuse storages of the other byte order: torch itself reads them as if they were of this one."""
        member = self._members.get("byteorder")
        if member is not None and read_whole(self._source, member, _MAX_WORD_BYTES) != b"little":
            raise FormatError("its storages are not in little-endian order")


def _prefix(model: str) -> str:
    return "" if model == PT2_DEFAULT_MODEL else f"{model}/"


def _code_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    is_entry = type(entry) is list and len(entry) == 4 and type(entry[0]) is str
    if not name or not is_entry or type(entry[1]) is not list or type(entry[2]) is not list:
        raise FormatError(f"a table of weights that does not say where {name[:80]!r} lies")
    size, stride = tuple(map(whole, entry[1])), tuple(map(whole, entry[2]))
    if len(size) != len(stride):
        raise FormatError(f"a table of weights in which {name[:80]!r} has an impossible shape")
    return entry[0], size, stride, whole(entry[3])

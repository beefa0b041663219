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
import zlib
from collections.abc import Sequence
from typing import Any

from tensorcas_mlflow.containers import (
    PT2_DEFAULT_MODEL,
    PT2_PICKLED_TENSOR,
    PT2_TABLE,
    UNREADABLE,
    TensorView,
    item_bytes,
    pt2_payloads,
    strict_json,
    whole,
)
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import is_c_order, span_of
from tensorcas_mlflow.formats._gathering import Gathering
from tensorcas_mlflow.formats._listing import EXAMPLE_INPUT, Listing
from tensorcas_mlflow.formats._read_torch import MAX_PICKLE_BYTES, ONLY, is_torch_archive, list_torch
from tensorcas_mlflow.formats._read_torchscript import paths_in
from tensorcas_mlflow.formats._source import ByteSource, PartSource
from tensorcas_mlflow.formats._zip_directory import Member, list_members, read_member

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
        self._found = Gathering(source)
        marks = [member.name for member in members if member.name.endswith(f"/{_MARK}") and member.name.count("/") == 1]
        root = marks[0].removesuffix(_MARK) if marks else ""
        if len(marks) > 1 or not all(member.name.startswith(root) for member in members):
            raise FormatError("there are two archives in it")
        self._members = {member.name[len(root) :]: member for member in members}
        if marks and read_member(source, self._members[_MARK], _MAX_WORD_BYTES) != _MARK_VALUE:
            raise FormatError(f"what {marks[0][:80]!r} says is not 'pt2'")
        if is_torch_archive(members):
            raise FormatError("it is a file of torch.save, too")
        self._left = dict.fromkeys(path for path, member in self._members.items() if member.raw_bytes)
        """What nothing has accounted for; a set in order."""

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
            self._found.leave_out(path, "compiled code" if is_code else "a file that no table names")
        return self._found.listing("pt2")

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
                # torch fills it with zeros when it is loaded.
                self._found.leave_out(prefix + view.name, "fake tensor")
            else:
                self._add_view(member, view, prefix + view.name)

    def _add_pickled(self, member: Member, view: TensorView, name: str) -> None:
        """Add the tensors that one of a subclass is made of; leave out what is none, or cannot be read as such."""
        if view.kind == PT2_PICKLED_TENSOR:
            with contextlib.suppress(*UNREADABLE, zlib.error):
                nested = list_torch(self._source, self._nested(member))
                if nested.places or nested.left_out:
                    self._found.add(nested, lambda inner: name if inner == ONLY else f"{name}.{inner}")
                    return
        self._found.leave_out(name, view.kind)

    def _add_view(self, storage: Member, view: TensorView, name: str) -> None:
        """Add a tensor that views a storage."""
        places = self._found.places
        if view.dtype is None:
            self._found.leave_out(name, view.kind)
            return
        n_item_bytes = item_bytes(view.dtype)
        begin, n_bytes = view.offset * n_item_bytes, span_of(view.size, view.stride) * n_item_bytes
        if n_bytes and begin + n_bytes > storage.raw_bytes:
            raise FormatError(f"tensor {name[:80]!r} reaches beyond its storage")
        if storage.is_deflated:
            raise FormatError(f"{storage.name[:80]!r} is compressed")
        places.add(
            places.unused(name),
            view.dtype,
            view.size,
            start=storage.start + (begin if n_bytes else 0),
            n_bytes=n_bytes,
            file_bytes=self._source.size,
            strides=None if is_c_order(view.size, view.stride) else view.stride,
        )

    # --- before torch 2.9

    def _add_file(self, path: str, prefix: str) -> None:
        """Add all tensors of a file of `torch.save`, which has no bytes where there are none."""
        member = self._member(path, path)
        if member.raw_bytes:
            self._found.add(list_torch(self._source, self._nested(member)), lambda name: prefix + name)

    def _leave_out_examples(self, path: str) -> None:
        """Name the example inputs of a model, as far as they can be told."""
        member = self._member(path, path)
        names = [path] if member.raw_bytes else []
        with contextlib.suppress(*UNREADABLE, zlib.error):
            for each in self._nested(member) if names else ():
                if is_torch_archive([each]):
                    names = [f"{path}/{name}" for name in paths_in(read_member(self._source, each, MAX_PICKLE_BYTES))]
        for name in names:
            self._found.leave_out(name, EXAMPLE_INPUT)

    # --- of AOTInductor

    def _add_code_table(self, path: str, prefix: str) -> None:
        """Add the tensors that compiled code takes its weights from: of each its file, shape, stride and offset."""
        table = strict_json(self._read(path))
        if type(table) is not dict:
            raise FormatError(f"{path[:80]!r} is no table of weights")
        for name, entry in table.items():
            file, size, stride, offset = _code_entry(name, entry)
            members = self._nested(self._member(f"data/weights/{file}", name))
            nested = list_torch(self._source, members)
            place = nested.places.get(ONLY)
            if place is None or len(nested.places) + len(nested.left_out) != 1 or place.swapped or place.source:
                self._found.leave_out(prefix + name, "a file that holds no plain tensor")
                continue
            storage = next(each for each in members if each.start <= place.start <= each.start + each.n_bytes)
            dtype = place.spec.dtype
            self._add_view(storage, TensorView(name, "", dtype, "", 0, offset, size, stride), prefix + name)

    # --- members

    def _member(self, path: str, name: str) -> Member:
        """Find a member, and account for it."""
        member = self._members.get(path)
        if member is None:
            raise FormatError(f"{path[:80]!r}, of {name[:80]!r}, is not there")
        self._left.pop(path, None)
        return member

    def _read(self, path: str) -> bytes:
        return read_member(self._source, self._member(path, path), _MAX_TABLE_BYTES)

    def _nested(self, member: Member) -> list[Member]:
        """List the members of an archive that is a member."""
        if member.is_deflated:
            raise FormatError(f"{member.name[:80]!r} is compressed")
        inner = list_members(PartSource(self._source, member.start, member.n_bytes, self._source.name))
        return [each._replace(start=each.start + member.start) for each in inner]

    def _check_byte_order(self) -> None:
        """Refuse storages of the other byte order: torch itself reads them as if they were of this one."""
        member = self._members.get("byteorder")
        if member is not None and read_member(self._source, member, _MAX_WORD_BYTES) != b"little":
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

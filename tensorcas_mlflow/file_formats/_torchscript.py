"""Archives of `torch.jit.save`, read without torch; nothing in them is run.

Such an archive is one of `torch.save` with more in it (``torch/csrc/jit/serialization/export_module.cpp``): code, the
constants of that code as a second pickle with storages of its own, and example inputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorcas_mlflow.file_formats._listing import EXAMPLE_INPUT, Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange
from tensorcas_mlflow.file_formats._torch import MAX_PICKLE_BYTES, UNNAMED_TENSOR, is_torch_archive, list_torch
from tensorcas_mlflow.file_formats._torch_pickle import views_of, walk_torch_pickle
from tensorcas_mlflow.file_formats._zip import read_member

_CONSTANTS = "constants"
_TRACED_INPUTS = "traced_inputs.pkl"
_READ = re.compile(
    r"(?:data|constants|traced_inputs)(?:\.pkl|/[^/]*)|code/.*|extra/.*|version|byteorder|\.data/.*"
    r"|\.format_version|\.storage_alignment",
    re.DOTALL,
)
"""Members that are read or hold text."""


def is_torchscript(members: Sequence[FileRange]) -> bool:
    """Recognise an archive of `torch.jit.save` by its members."""
    return is_torch_archive(members) and any(
        member.name.endswith(f"/{_CONSTANTS}.pkl") and member.name.count("/") == 1 for member in members
    )


def list_torchscript(source: ByteSource, members: Sequence[FileRange]) -> Listing:
    """List the tensors of a module, as `list_torch` does, and its constants as ``constants.<n>``.

    Left out are example inputs (see `EXAMPLE_INPUT`), and unknown members, which may hold tensors.

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` and `zlib.error` say the same.
    """
    table = LocationTable(source)
    table.join(list_torch(source, members), numbered=True)
    marks = [member.name for member in members if member.name.endswith(f"/{_CONSTANTS}.pkl")]
    folder = marks[0].removesuffix(f"{_CONSTANTS}.pkl")
    table.join(list_torch(source, _constants(members, folder)), f"{_CONSTANTS}.{{}}".format, numbered=True)
    for member in members:
        path = member.name.removeprefix(folder)
        if path == _TRACED_INPUTS:
            for name in paths_in(read_member(source, member, MAX_PICKLE_BYTES)):
                table.leave_out(table.unused(f"{path.removesuffix('.pkl')}/{name}"), EXAMPLE_INPUT)
        if member.raw_bytes and not (member.name.startswith(folder) and _READ.fullmatch(path)):
            table.leave_out(table.unused(path), "a file that is not known")
    return table.listing("torch")


def paths_in(pickled: bytes) -> list[str]:
    """Return the path to each tensor of a pickle, with slashes between: its numbers are not layers."""
    return [(view.name or UNNAMED_TENSOR).replace(".", "/") for view in views_of(walk_torch_pickle(pickled))]


def _constants(members: Sequence[FileRange], folder: str) -> list[FileRange]:
    """Return the members of the archive of `torch.save` that the constants alone would be."""
    inside = f"{folder}{_CONSTANTS}"
    own = [
        member._replace(name=f"{folder}data{member.name[len(inside) :]}")
        for member in members
        if member.name == f"{inside}.pkl" or member.name.startswith(f"{inside}/")
    ]
    return own + [member for member in members if member.name == f"{folder}byteorder"]

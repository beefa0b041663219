"""Archives of `torch.jit.save`, read without torch; nothing in them is run.

Such an archive is one of `torch.save` with more in it (``torch/csrc/jit/serialization/export_module.cpp``): code, the
constants of that code as a second pickle with storages of its own, and the inputs that it was traced with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tensorcas_mlflow.containers import views_of, walk_torch_pickle
from tensorcas_mlflow.formats._gathering import Gathering
from tensorcas_mlflow.formats._listing import EXAMPLE_INPUT, Listing
from tensorcas_mlflow.formats._read_torch import MAX_PICKLE_BYTES, ONLY, is_torch_archive, list_torch
from tensorcas_mlflow.formats._source import ByteSource
from tensorcas_mlflow.formats._zip_directory import Member, read_member

_CONSTANTS = "constants"
_TRACED_INPUTS = "traced_inputs.pkl"
_READ = re.compile(
    r"(?:data|constants|traced_inputs)(?:\.pkl|/[^/]*)|code/.*|extra/.*|version|byteorder|\.data/.*"
    r"|\.format_version|\.storage_alignment",
    re.DOTALL,
)
"""Members that are read, and texts."""


def is_torchscript(members: Sequence[Member]) -> bool:
    """Tell the members of such an archive from those of others."""
    return is_torch_archive(members) and any(
        member.name.endswith(f"/{_CONSTANTS}.pkl") and member.name.count("/") == 1 for member in members
    )


def list_torchscript(source: ByteSource, members: Sequence[Member]) -> Listing:
    """List what a module holds, as `list_torch` does, and its constants as ``constants.<n>``.

    Left out are the inputs that it was traced with (see `EXAMPLE_INPUT`), and members that are not known to hold no
    tensors.

    Raises:
        FormatError: It is not sound. So do the others of `tensorcas_mlflow.containers.UNREADABLE` and `zlib.error` say.
    """
    found = Gathering(source)
    found.add(list_torch(source, members))
    marks = [member.name for member in members if member.name.endswith(f"/{_CONSTANTS}.pkl")]
    folder = marks[0].removesuffix(f"{_CONSTANTS}.pkl")
    found.add(list_torch(source, _constants(members, folder)), f"{_CONSTANTS}.{{}}".format)
    for member in members:
        path = member.name.removeprefix(folder)
        if path == _TRACED_INPUTS:
            for name in paths_in(read_member(source, member, MAX_PICKLE_BYTES)):
                found.leave_out(f"{path.removesuffix('.pkl')}/{name}", EXAMPLE_INPUT)
        if member.raw_bytes and not (member.name.startswith(folder) and _READ.fullmatch(path)):
            found.leave_out(path, "a file that is not known")
    return found.listing("torch")


def paths_in(pickled: bytes) -> list[str]:
    """Return what leads to each tensor that a pickle of torch makes, with slashes between: no number is a layer's."""
    return [(view.name or ONLY).replace(".", "/") for view in views_of(walk_torch_pickle(pickled))]


def _constants(members: Sequence[Member], folder: str) -> list[Member]:
    """Give the members of the archive of `torch.save` that the constants would be by themselves."""
    inside = f"{folder}{_CONSTANTS}"
    own = [
        member._replace(name=f"{folder}data{member.name[len(inside) :]}")
        for member in members
        if member.name == f"{inside}.pkl" or member.name.startswith(f"{inside}/")
    ]
    return own + [member for member in members if member.name == f"{folder}byteorder"]

"""Zip archives of stored members at multiples of 64 bytes, whose sizes are known beforehand.

`zipfile` writes them; what is counted here is what it is going to write (APPNOTE.TXT 6.3.10, 4.3).
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tensorcas_mlflow.formats._write_layout import Feed, FileLayout
from tensorcas_mlflow.tensor import ALIGNMENT, Spec

_LOCAL_BYTES = 30
_CENTRAL_BYTES = 46
_END_BYTES = 22
_END_64_BYTES = 56 + 20
_LOCAL_64_BYTES = 20
_FILLER_BYTES = 4
_FILLER = b"FB"
"""The extra field by which torch moves a member to its place; nobody reads it."""
_LARGE_BYTES = 1 << 30
"""From this size on members have sizes of 8 bytes. `zipfile` would do so somewhat below 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of an archive."""

    name: str
    head: bytes
    """What it begins with; all of it, if it holds no tensor."""
    spec: Spec | None = None
    """The tensor that follows."""

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return len(self.head) + (0 if self.spec is None else self.spec.n_bytes)


class ZipLayout(FileLayout):
    """An archive."""

    def __init__(self, members: Sequence[Member]) -> None:
        """Lay an archive out, its members in this order."""
        self.name = ""
        self.specs = [member.spec for member in members if member.spec is not None]
        self._members = members
        self._fillers: list[bytes] = []
        end = directory_bytes = 0
        for member in members:
            name_bytes = len(member.name.encode())
            is_large = member.n_bytes >= _LARGE_BYTES
            begin = end + _LOCAL_BYTES + name_bytes + (_LOCAL_64_BYTES if is_large else 0) + _FILLER_BYTES
            filler = bytes(-begin % ALIGNMENT)
            self._fillers.append(_FILLER + len(filler).to_bytes(2, "little") + filler)
            n_64 = (16 if member.n_bytes > zipfile.ZIP64_LIMIT else 0) + (8 if end > zipfile.ZIP64_LIMIT else 0)
            directory_bytes += _CENTRAL_BYTES + name_bytes + (4 + n_64 if n_64 else 0)
            end = begin + len(filler) + member.n_bytes
        needs_64 = max(end, directory_bytes) > zipfile.ZIP64_LIMIT or len(members) > zipfile.ZIP_FILECOUNT_LIMIT
        self.n_bytes = end + directory_bytes + _END_BYTES + (_END_64_BYTES if needs_64 else 0)

    def write(self, out: BinaryIO, feed: Feed) -> None:
        with zipfile.ZipFile(out, "w") as archive:
            for member, filler in zip(self._members, self._fillers, strict=True):
                info = zipfile.ZipInfo(member.name)  # of a fixed time, so that equal tensors make equal files
                info.extra = filler
                with archive.open(info, "w", force_zip64=member.n_bytes >= _LARGE_BYTES) as file:
                    file.write(member.head)
                    if member.spec is not None:
                        for piece in feed.pieces(member.spec):
                            file.write(piece)
                info.extra = b""  # it is of the member alone, and not for the directory

"""The plain files of one artifact folder: those an adoption takes, and reasons to leave the folder alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tensorcas_mlflow.backends import UPLOADING, is_store, is_visible
from tensorcas_mlflow.integration.artifacts import PLAIN_BYTES, is_small_text
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """A file, or a whole folder, that an adoption or its reversal did not touch."""

    path: str
    """Its path below the root."""
    reason: str


class Stamp(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, place: Path | int) -> Stamp | None:
        """Look at a path or a descriptor; None if there is no regular file with one name."""
        try:
            found = os.fstat(place) if isinstance(place, int) else os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return None
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def has_bytes_of(self, other: Stamp | None) -> bool:
        """Tell whether both are one file with the same bytes, perhaps under another name."""
        return other is not None and self[:4] == other[:4]


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in one artifact folder."""

    files: dict[str, int]
    """Sizes of the files for the store, by path below the root."""
    reason: str | None
    """Why the folder must stay as it is, if it must."""


def look(root: Path, unit: str) -> Found:
    """Find the files of an artifact folder that belong into a store; small text does not."""
    files: dict[str, int] = {}
    folders = [unit]
    try:
        while folders:
            folder = folders.pop()
            with os.scandir(root / folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{folder}/{entry.name}"
                    if is_store(entry.name):
                        return Found({}, f"{folder!r} is the root of another store")
                    if entry.name.startswith(UPLOADING):  # a partial file
                        continue
                    if not is_visible(entry.name):
                        return Found({}, f"the name of {path!r} cannot be an artifact's below a tensorcas: location")
                    if entry.is_symlink():
                        return Found({}, f"{path!r} is a link")
                    if entry.is_dir():
                        folders.append(path)
                    elif not entry.is_file():
                        return Found({}, f"{path!r} is neither a file nor a folder")
                    elif _is_for_store(root / path):
                        files[path] = entry.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return Found({}, None)
    except OSError as error:
        return Found({}, f"it cannot be read: {error}")
    return Found(files, None)


def _is_for_store(file: Path) -> bool:
    stamp = Stamp.of(file)
    if stamp is None:  # its bytes have another name too, so taking it would free nothing
        return False
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as opened:
        head = opened.read(PLAIN_BYTES + 1 if stamp.size <= PLAIN_BYTES else 4096)
    # A manifest pins chunks of the store it came with, and is small.
    return not Manifest.looks_like(head) and not (stamp.size <= PLAIN_BYTES and is_small_text(head))


def link_targets(root: Path) -> Iterator[Path]:
    """Find where the links below a root lead; stores are not entered."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not is_store(name)]
        for name in (*folders, *files):
            place = os.path.join(folder, name)
            if os.path.islink(place):
                yield Path(os.path.realpath(place))


def is_same(store: Store, ref: Ref, file: BinaryIO) -> bool:
    """Compare what the store gives for a ref with the bytes of a file."""
    for piece in store.iter_file(ref):
        view = memoryview(piece).cast("B")
        while view:
            read = file.read(len(view))
            if not read or view[: len(read)] != read:
                return False
            view = view[len(read) :]
    return file.read(1) == b""


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of the files below a folder."""
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(folder) for name in names)

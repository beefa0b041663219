"""Carried stores from the time before this server kept a store of its own; the server serves them as plain files.

A server may be started with a store in a folder of plain files. Experiments' folders may then hold stores carried there
by clients. These clients continue as before: the server serves the files of such a store like any plain file, and does
not announce its own store there. Other uploads to such an experiment go into the carried store too, because it is the
nearest. The protocol allows both ways of writing in one store (``docs/design/protocol.md``, Carriers).
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from mlflow.entities import FileInfo

from tensorcas_mlflow.backends import STORE_FOLDER, Root, check_key, is_visible, write_whole
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.files import Settled
from tensorcas_mlflow.file_formats import Readable
from tensorcas_mlflow.integration._artifact_uri import root_of
from tensorcas_mlflow.layout import is_carried

_BLOCK_BYTES = 1 << 20

_settled = Settled()


class CarriedStores:
    """Files of carried stores below a repository's root, by artifact path. Only a server of local files has them."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def find(self, path: str) -> Path | None:
        """Return the file or folder of a carried store for an artifact path, existing or not; None for another path."""
        folders, key = _parted(path)
        if folders is None or not self._root.is_local or not config.in_mlflow_server():
            return None
        place = self._root.folder.joinpath(*folders)
        real = Path(os.path.realpath(self._root.folder), *folders)
        is_own = any(_is_folder_of(root, real) for root in config.server_roots())
        if is_own or Path(os.path.realpath(place)) != real or not is_carried(real):
            return None
        return real / STORE_FOLDER / key

    def children(self, path: str, folder: Path) -> list[FileInfo]:
        """List a folder; nothing if it is none."""
        infos = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if not is_visible(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    is_dir = entry.is_dir(follow_symlinks=False)
                    infos.append(FileInfo(f"{path}/{entry.name}", is_dir, None if is_dir else found.st_size))
        return sorted(infos, key=lambda info: str(info.path))

    def fetch(self, file: Path, out: Path) -> bool:
        """Copy a file; False if there is none."""
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            shutil.copyfile(file, out)
            return True
        return False

    def write(self, stream: Readable, file: Path) -> None:
        """Write a complete, durable file, replacing an existing one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        block = memoryview(bytearray(_BLOCK_BYTES))
        write_whole(file, (block[:n_read] for n_read in iter(lambda: stream.readinto(block), 0)))
        _settled.settle(os.path.abspath(file.parent))

    def remove(self, file: Path) -> None:
        """Remove a file; a missing file or a folder is no error."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM, errno.ENOTDIR):
                raise


def _parted(path: str) -> tuple[list[str] | None, str]:
    """Split a path into the folders above a store and the key inside it; None if it leads to no place of a store."""
    segments = path.split("/")
    if segments.count(STORE_FOLDER) != 1:
        return None, ""
    at = segments.index(STORE_FOLDER)
    folders, key = segments[:at], "/".join(segments[at + 1 :])
    if not all(map(is_visible, segments[:at] + segments[at + 1 :])):
        return None, ""
    if key:
        try:
            check_key(key)
        except ValueError:
            return None, ""
    return folders, key


def _is_folder_of(root: str, folder: Path) -> bool:
    with suppress(ValueError):
        return Path(os.path.realpath(root_of(root).folder)) == folder
    return False

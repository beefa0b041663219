"""The plain files that lie in the artifact roots below a store's root: found, measured and removed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.backends import STORE_FOLDER, Bucket, ObjectInfo, Root, is_void_object, open_bucket
from tensorcas_mlflow.store import Store

# The first match from the left counts, as everywhere: what lies below an artifact root belongs to it.
LAYOUT = re.compile(
    r"(?P<root>(?:(?P<experiment>.*?)/)?"
    r"(?:(?P<run>[0-9a-f]{32})|models/(?P<model>m-[0-9a-f]{32})|traces/(?P<trace>(?:tr-)?[0-9a-f]{32}))"
    r"/artifacts)(?:/.*)?",
    re.DOTALL,
)
"""How MLflow lays out artifact roots below an experiment's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How much there is."""

    n_files: int = 0
    n_bytes: int = 0
    newest_s: float = 0.0
    """When any of it was written last, in seconds of Unix time."""


def plain_below(store: Store) -> PlainFiles | PlainObjects:
    """Give the plain files below a store's root."""
    root = Root.parse(store.uri)
    return PlainFiles(root.folder) if root.is_local else PlainObjects(open_bucket(root, ""))


class PlainObjects:
    """Objects in a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def roots(self) -> Iterator[str]:
        """Find the artifact roots in which something lies, relative to the store's root."""
        found = (LAYOUT.fullmatch(info.path) for info in self._bucket.walk("") if _is_plain(info))
        yield from dict.fromkeys(match["root"] for match in found if match)

    def measure(self, root: str) -> Measure:
        """Measure what lies in an artifact root."""
        infos = [info for info in self._bucket.walk(root) if _is_plain(info) and not is_void_object(self._bucket, info)]
        return Measure(
            n_files=len(infos),
            n_bytes=sum(info.size for info in infos),
            newest_s=max((info.modified_s for info in infos), default=0.0),
        )

    def remove(self, root: str, newest_s: float) -> None:
        """Remove what lies in an artifact root and was not written after a time."""
        for info in self._bucket.walk(root):
            if _is_plain(info) and info.modified_s <= newest_s:
                self._bucket.delete(info.path)


class PlainFiles:
    """Files in a folder. Nothing behind a symbolic link is looked at."""

    def __init__(self, top: Path) -> None:
        self._top = Path(os.path.realpath(top))

    def roots(self) -> Iterator[str]:
        """Find the folders that are artifact roots by their names, relative to the store's root."""
        folders = [""]
        while folders:
            folder = folders.pop()
            if LAYOUT.fullmatch(folder):
                yield folder
                continue
            with suppress(FileNotFoundError), os.scandir(self._top / folder) as entries:
                folders.extend(
                    f"{folder}/{entry.name}" if folder else entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and entry.name.casefold() != STORE_FOLDER
                )

    def measure(self, root: str) -> Measure:
        """Measure what lies in an artifact root."""
        n_files = n_bytes = 0
        newest_s = 0.0
        for folder, _, names in os.walk(top) if (top := self._unlinked(root)) is not None else ():
            # A copied file has the times of its source, but its inode was changed when it was copied.
            for place in [folder, *(os.path.join(folder, name) for name in names)]:
                with suppress(FileNotFoundError):
                    found = os.lstat(place)
                    newest_s = max(newest_s, found.st_ctime)
                    if place != folder:
                        n_files += 1
                        n_bytes += found.st_size
        return Measure(n_files=n_files, n_bytes=n_bytes, newest_s=newest_s)

    def remove(self, root: str, newest_s: float) -> None:
        """Remove what lies in an artifact root and was not written after a time."""
        top = self._unlinked(root)
        if top is None:
            return
        for folder, folders, names in os.walk(top, topdown=False):
            for place in (Path(folder, name) for name in [*names, *folders]):
                with suppress(FileNotFoundError):
                    if place.is_dir() and not place.is_symlink():
                        continue
                    if place.lstat().st_ctime <= newest_s:
                        place.unlink()
            # It stays if it holds something new.
            with suppress(OSError):
                os.rmdir(folder)
        # The folder of the run or model itself; those above it are shared, and somebody may be writing there.
        with suppress(OSError):
            top.parent.rmdir()

    def _unlinked(self, root: str) -> Path | None:
        """Give the folder of an artifact root, unless a symbolic link lies on the way to it from the store's root."""
        place = self._top / root
        return place if os.path.realpath(place) == os.fspath(place) else None


def _is_plain(info: ObjectInfo) -> bool:
    return STORE_FOLDER not in info.path.split("/")

"""Symbolic links in an artifact tree: those that stay below its root are followed for reading, all others are not."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.artifact_repo._names import is_visible, is_visible_path

NOT_FOLLOWED = "leads out of the artifact root, to the folder of a store, or back to a folder that it lies in"
"""The reason why a link is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The place to which links lead from an artifact path."""

    path: str
    """The artifact path of that place, on which no link lies; the path itself where a link is not followed."""
    crossed: tuple[str, ...] = ()
    """The links on the way, each by its own path on which no link lies."""
    refused: str | None = None
    """The link that is not followed, if one is not; see `NOT_FOLLOWED`."""


class Links:
    """The links below one local root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def follow(self, path: str) -> Followed:
        """Follow all links on the way to an artifact path and at its end. Nothing need be there."""
        if not path or not is_visible_path(path) or not self._has_any(path):
            return Followed(path=path)
        place = ""
        crossed: tuple[str, ...] = ()
        for name in path.split("/"):
            step = posixpath.join(place, name)
            if not os.path.islink(self._root / step):
                place = step
                continue
            target = self._target(step, crossed)
            if target is None:
                return Followed(path=path, refused=step)
            place, crossed = target, (*crossed, step)
        return Followed(path=place, crossed=crossed)

    def in_folder(self, folder: Followed) -> Iterator[tuple[str, Followed]]:
        """List the links right in a folder that are followed, by their own paths, and where they lead."""
        try:
            with os.scandir(self._root / folder.path) as entries:
                names = [entry.name for entry in entries if entry.is_symlink() and is_visible(entry.name)]
        except OSError:  # no folder, or deleted since
            return
        for name in names:
            link = posixpath.join(folder.path, name)
            target = self._target(link, folder.crossed)
            if target is not None:
                yield link, Followed(path=target, crossed=(*folder.crossed, link))

    def _has_any(self, path: str) -> bool:
        return os.path.realpath(self._root / path) != os.path.join(os.path.realpath(self._root), path)

    def _target(self, link: str, crossed: tuple[str, ...]) -> str | None:
        try:
            target = Path(os.path.realpath(self._root / link)).relative_to(os.path.realpath(self._root)).as_posix()
        except ValueError:
            return None
        target = "" if target == "." else target
        # A folder that holds a link that was crossed would be listed within itself, for ever.
        is_round = any(each == target or not target or each.startswith(f"{target}/") for each in (*crossed, link))
        return None if is_round or not is_visible_path(target) else target


def moved(path: str, old: str, new: str) -> str:
    """Give the path of something at or below one folder as it is at or below another."""
    return posixpath.join(new, path.removeprefix(old).removeprefix("/")) if path != old else new

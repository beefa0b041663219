"""The journal of adoptions: what each artifact folder was before, on disk before anything changes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorcas_mlflow.backends import is_visible_path
from tensorcas_mlflow.base.files import sync_folder
from tensorcas_mlflow.errors import ConflictError, CorruptError
from tensorcas_mlflow.integration.adoption._database import Place, local_folder
from tensorcas_mlflow.layout import load_record, record_bytes

JOURNAL = ".tensorcas-adopted"
"""Name of the journal in the artifact root."""
EXPERIMENTS = ""
"""The journal's unit with the locations of experiments."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """State of one artifact folder."""

    state: str = "begun"
    """``begun``, ``stored``, ``done`` or ``reverted``."""
    old: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The locations before, by `Place.id`."""
    times: dict[str, int] = field(default_factory=dict)
    """Time of the last write of each stored file, by its path below the root."""


_STATES = ("begun", "stored", "done", "reverted")


class Journal:
    """The journal of one root, locked against other adoptions and synced with each line.

    Args:
        root: The real artifact root.

    Raises:
        ConflictError: Another adoption has it.
        CorruptError: Its bytes are not what an adoption wrote.
        ValueError: Its name is taken by something else.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        place = root / JOURNAL
        try:
            self._file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise ValueError(f"{str(place)!r} is not a file: remove it, it is the place of the journal") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{str(place)!r} is not a file: remove it, it is the place of the journal")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConflictError(f"another `tensorcas adopt` works on {str(root)!r}: wait until it ends") from error
            sync_folder(root)
            self.entries: dict[str, Entry] = {}
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def begin(self, unit: str, places: Iterable[Place]) -> None:
        """Note the locations of a folder before they change."""
        old = [{"id": list(place.id), "old": place.location} for place in places if not place.is_switched]
        self._write({"unit": unit, "state": "begun", "old": old})

    def stored(self, unit: str, times: Mapping[str, int]) -> None:
        """Note the files of a folder that the store holds, before the plain ones go."""
        self._write({"unit": unit, "state": "stored", "times": dict(times)})

    def end(self, unit: str, *, reverted: bool = False) -> None:
        """Note that a folder is done."""
        self._write({"unit": unit, "state": "reverted" if reverted else "done"})

    def _write(self, said: Mapping[str, Any]) -> None:
        line = record_bytes({"format": 1, **said}) + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)
        self._take(dict(said))

    def _read(self) -> None:
        data = bytearray()
        while piece := os.pread(self._file, 1 << 20, len(data)):
            data += piece
        whole = data.rfind(b"\n") + 1
        for line in bytes(data[:whole]).splitlines():
            record = load_record(JOURNAL, line)
            try:
                self._take(self._checked(record))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptError(JOURNAL, f"a line is no line of an adoption: {error}") from error
        # A process that died while it wrote a line has changed nothing yet.
        os.ftruncate(self._file, whole)

    def _take(self, said: dict[str, Any]) -> None:
        entry = self.entries.setdefault(said["unit"], Entry())
        if entry.state == "reverted":
            entry = self.entries[said["unit"]] = Entry()
        entry.state = said["state"]
        for each in said.get("old", ()):
            entry.old[tuple(each["id"])] = each["old"]
        entry.times.update(said.get("times", {}))

    def _checked(self, said: dict[str, Any]) -> dict[str, Any]:
        """Refuse a line that would lead an adoption out of its root."""
        unit = said["unit"]
        if said["state"] not in _STATES or "check" not in said or not self._is_below(unit):
            raise ValueError("its unit or its state")
        for each in said.get("old", ()):
            # An old location may only be another name of the folder, so no journal can send a run elsewhere.
            folder = local_folder(each["old"])
            if folder is None or not folder.is_relative_to(self._root / unit) or not all(map(_is_text, each["id"])):
                raise ValueError("a location out of its folder")
        for path, modified_ns in said.get("times", {}).items():
            if not path.startswith(f"{unit}/") or not self._is_below(path) or type(modified_ns) is not int:
                raise ValueError("a file out of its folder")
        return said

    def _is_below(self, path: str) -> bool:
        parts = path.split("/")
        is_plain = path == EXPERIMENTS or not any(part in ("", ".", "..") or "\0" in part for part in parts)
        return is_plain and is_visible_path(path)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def old_location(entry: Entry, place: Place) -> str:
    """Return the plain location of a field that names a folder at or below an adopted one.

    A field written since the adoption gets a location of the same form as the others.
    """
    known = entry.old.get(place.id)
    if known is not None and local_folder(known) == place.folder:
        return known
    form = next(iter(entry.old.values()), "")
    return place.folder.as_uri() if form.startswith("file:") else str(place.folder)

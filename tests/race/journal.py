"""Journal of the results of a process's calls, kept outside of the store so that it survives a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Key = tuple[Any, ...]
Value = Any
"""Value at a key, as JSON; None for nothing."""


class Journal:
    """Of one process, which alone writes to its keys."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    @contextmanager
    def says(self, key: Key, value: Value) -> Iterator[None]:
        """Note that a key is to have a value, and, if the block ends well, that it has."""
        self._note({"begin": list(key), "value": value})
        try:
            yield
        except BaseException:
            self._note({"failed": True})
            raise
        self._note({"done": True})

    def _note(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def allowed(path: Path) -> dict[Key, list[Value]]:
    """Give, for each key of a journal, the values that may be found there: one, or two where the process was killed.

    A call that failed has changed nothing.
    """
    found: dict[Key, list[Value]] = {}
    open_: tuple[Key, Value] | None = None
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # the process was killed here
        if "begin" in entry:
            open_ = tuple(entry["begin"]), entry["value"]
            continue
        assert open_ is not None
        if "done" in entry:
            found[open_[0]] = [open_[1]]
        open_ = None
    if open_ is not None:
        key, value = open_
        found[key] = [*found.get(key, [None]), value]
    return found

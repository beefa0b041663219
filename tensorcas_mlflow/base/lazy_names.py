"""Names of a room, each imported from its module on first use.

Opening a checkpoint needs a few modules of each room. A room that imported all of its modules would make every reader
wait for the savers, collectors and file formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(room: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a room.

    Args:
        room: The name of its package.
        names: The names that it exports, separated by spaces, by the module that defines them: one of the room, or a
            full name.
    """
    modules = {name: module for module, exported in names.items() for name in exported.split()}

    def look_up(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        # Not `import_module`: ``python -X importtime`` does not see its imports.
        value = getattr(__import__(module if "." in module else f"{room}.{module}", fromlist=[name]), name)
        setattr(sys.modules[room], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[room]), *modules})

    return look_up, list_names

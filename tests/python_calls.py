"""Counts of Python calls, which no load of the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType


@contextmanager
def calls_of(*functions: str) -> Iterator[list[CodeType]]:
    """Note the Python calls of this thread.

    Args:
        functions: Names of functions, such as ``refresh`` or ``Database.read``; none notes all calls, those
            that end the block among them.
    """
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and (not functions or code.co_name in functions or code.co_qualname in functions):
            calls.append(code)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)

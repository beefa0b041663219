"""Counts of Python calls, modules and frames, which no load of the machine changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import tensorcas_flavors
import tensorcas_mlflow


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


@contextmanager
def depths_of_ours() -> Iterator[dict[str, int]]:
    """Note the files of our packages that this thread calls, and the most frames of ours that are open in a call."""
    depths: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and _is_ours(file):
            n_frames, below = 0, frame
            while below is not None:
                n_frames += _is_ours(below.f_code.co_filename)
                below = below.f_back  # type: ignore[assignment]  # None ends the loop
            depths[file] = max(depths.get(file, 0), n_frames)

    sys.setprofile(note)
    try:
        yield depths
    finally:
        sys.setprofile(None)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)


_OURS = tuple(folder + os.sep for package in (tensorcas_flavors, tensorcas_mlflow) for folder in package.__path__)

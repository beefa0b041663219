"""Counts of one call, which no load of the machine changes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Work of one call."""

    n_calls: int
    """Calls of Python functions, in the calling thread and in threads started meanwhile."""
    n_modules: int
    """Modules with at least one of these functions."""
    n_fsyncs: int
    """Calls of `os.fsync`, in all threads."""


def counts_of(act: Callable[[], Any]) -> Counts:
    """Count the Python calls and the fsyncs of one call."""
    files: list[str] = []
    synced: list[int] = []
    fsync = os.fsync

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    def counted(descriptor: int) -> None:
        synced.append(descriptor)
        fsync(descriptor)

    with mock.patch.object(os, "fsync", counted):
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            act()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # the same as for sys
    own = [file for file in files if file != __file__]
    return Counts(n_calls=len(own), n_modules=len(set(own)), n_fsyncs=len(synced))

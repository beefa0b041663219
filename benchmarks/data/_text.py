"""Training text, available on every machine with the benchmark."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

MAX_BYTES = 4_000_000


@cache
def documentation() -> torch.Tensor:
    """Return the documentation of the packages beside torch: some megabytes of introductions and lists of changes."""
    # An environment may take its packages from another one, so its own site-packages may be empty.
    return _read(sorted(Path(torch.__file__).parents[1].glob("*.dist-info/METADATA")))


@cache
def sources() -> torch.Tensor:
    """Return the standard library's own code, a different text than the documentation."""
    return _read(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def _read(paths: Iterable[Path]) -> torch.Tensor:
    """Return the first bytes of some files, concatenated, each byte as a number from 0 to 255."""
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8).long()

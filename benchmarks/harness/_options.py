"""Options of the command line."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tensorcas_mlflow

SMOKE_BYTES = 500_000

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Thoroughness and place of the measurements."""

    is_smoke: bool
    """True to check only that everything runs and comes back bit for bit."""
    sizes: tuple[int, ...] | None
    """Sizes of models in bytes; by default each part has its own."""
    only: tuple[str, ...]
    """Parts of the names of contenders; all take part if there are none."""
    n_rounds: int | None
    """Counted rounds; by default fewer for slow cases."""
    data: Path
    """Folder of trained histories, kept between runs."""
    scratch: Path
    """Folder of saved models; emptied after each use."""

    def wants(self, name: str) -> bool:
        """Tell whether a contender is to take part."""
        return not self.only or any(part in name for part in self.only)

    def rounds(self, n_bytes: int) -> int:
        """Return the number of rounds for a case of a size."""
        if self.n_rounds is not None:
            return self.n_rounds
        if self.is_smoke:
            return 1
        return 40 if n_bytes < 1e6 else 20 if n_bytes < 3e7 else 12 if n_bytes < 1e8 else 5

    def sizes_or(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes given, else a part's own, or a small one in a smoke test."""
        if self.sizes is not None:
            return self.sizes
        return (SMOKE_BYTES,) if self.is_smoke else tuple(sizes)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Create a temporary folder for the duration of a block."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder)
            # Figures and pages of checkpoints in it may still be under way.
            tensorcas_mlflow.wait()


def parse_bytes(text: str) -> int:
    """Read a size like ``300KB``, ``47MB`` or ``2GB``, by powers of ten.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"not a size like 300KB, 47MB or 2GB: {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])

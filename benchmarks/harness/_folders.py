"""Contents of a contender's folder."""

from __future__ import annotations

import shutil
from pathlib import Path


def disk_bytes(folder: Path) -> int:
    """Add up the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in _files(folder))


def n_files(folder: Path) -> int:
    """Count the files below a folder."""
    return len(_files(folder))


def clear(path: Path) -> None:
    """Remove a file, or a folder with its content."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]

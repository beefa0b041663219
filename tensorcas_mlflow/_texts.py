"""Figures in words."""

from __future__ import annotations


def size_text(n_bytes: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"

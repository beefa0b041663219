"""A bucket's descriptions of its objects, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """A store's description of one object."""

    path: str
    """Relative to the bucket's prefix."""
    size: int
    modified_s: float
    token: str
    """Its ETag, without quotes."""


class TakenError(Exception):
    """A new object whose path is taken."""


class TooLongError(Exception):
    """An object longer than allowed."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class PartlySentError(Exception):
    """A failed upload, partly drawn; its cause has the reason."""

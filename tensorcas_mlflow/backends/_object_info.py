"""What a bucket says of its objects, and what it does not do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a store says of one object."""

    path: str
    """Relative to the bucket's prefix."""
    size: int
    modified_s: float
    token: str
    """Its ETag, without quotes."""


class TakenError(Exception):
    """There is an object at a path that was to be created."""


class TooLongError(Exception):
    """An object is longer than it may be."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class PartlySentError(Exception):
    """An upload failed after some of it was drawn; the cause says why."""

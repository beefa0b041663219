"""What a carrier is built on: whole files by path, as every artifact repository of MLflow keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tensorcas_mlflow.errors import BackendError


class NoAnswerError(BackendError):
    """A server did not say whether it has done what it was asked; it may do it yet."""

    def __str__(self) -> str:
        return f"{super().__str__()}; nothing that was saved before is lost, and it is safe to try again"


class BrokenOffError(NoAnswerError):
    """A server's answer has broken off; that of one which is there."""


class UnreachableError(NoAnswerError):
    """A server did not answer at all, after all the attempts that MLflow makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder in a listing."""

    name: str
    size: int | None
    """Bytes of a file; None for a folder."""


class Shelf(ABC):
    """Files by path below one root: put whole, fetched whole, listed and deleted.

    A file that `put` has returned for is whole, and once a call has returned, every later call of anybody sees its
    effect. But if the process ends or the line breaks *within* a put, the beginning of the file may stay, perhaps
    nothing of it: not every server compares what has come with the length that was announced. So whoever reads a file
    has to see for himself that it is whole.

    All methods raise `RefusedError` if the server refuses, `NoAnswerError` if it may have done what it was asked, and
    another `BackendError` if this machine failed.
    """

    @abstractmethod
    def put(self, path: str, file: Path) -> None:
        """Put a copy of a local file, of the same name, at a path; what is there is replaced in one step."""

    @abstractmethod
    def fetch(self, path: str, out: Path) -> None:
        """Write a copy of a file to a local path.

        Raises:
            BlobNotFoundError: There is no such file.
        """

    @abstractmethod
    def head(self, path: str, n_bytes: int) -> bytes:
        """Read how a file begins: so many bytes, or all of a shorter one; not much more of it is fetched.

        Raises:
            BlobNotFoundError: There is no such file.
        """

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """List what lies directly in a folder, in no order; nothing for an absent one."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; none there is no error."""

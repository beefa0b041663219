"""The contract of a backend, written for object stores as much as for files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tensorcas_mlflow.backends._file import BlobFile
from tensorcas_mlflow.backends._tally import Tally

Buffer = Any
"""Anything with contiguous bytes: bytes, memoryview, a 1-d uint8 array."""

Token = str
"""Tells the blob at a key from others with other bytes, as an ETag does. Opaque; compared only by the backend that gave
it. Where a key is removed and taken again the token may come again too, unless the backend is remote; so keys that
tokens are used with, or their blobs, are random."""

_SEGMENT = re.compile(r"[A-Za-z0-9._=@%~-]{1,200}")


def check_key(key: str) -> str:
    """Refuse what is not a key: ``/``-separated segments as ``docs/format.md`` gives them.

    Raises:
        ValueError: It is not a key.
    """
    if not all(map(is_segment, key.split("/"))):
        raise ValueError(f"not a key: {key[:200]!r}")
    return key


def is_segment(name: str) -> bool:
    """Tell whether a name may stand between the slashes of a key."""
    return name not in (".", "..") and _SEGMENT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """What a listing says of one blob."""

    key: str
    size: int
    """Bytes."""
    modified_s: float
    """When it was written, in seconds of Unix time by the storage's own clock. Good for liveness, never for safety."""
    token: Token
    is_link: bool = False
    """Whether a symbolic link stands there, which is no blob and is not followed."""


Children = tuple[list[BlobInfo], list[str]]
"""The blobs directly below a prefix, and the names of the next segments; both sorted."""


class Backend(ABC):
    """Blobs by key under one root.

    A blob appears whole or not at all, and is never seen half written. Once a call has returned, every later call of
    any process sees its effect (read-after-write, list-after-write). Any number of processes and threads may use one
    root at once. Keys are as `check_key` has them; every method raises ValueError for anything else, and
    `BackendError` if the storage fails. A caller never makes a blob below the key of another one: a place is a blob or
    holds blobs. No two callers write equal blobs at one key, and a blob of more than 8 MiB goes to a key that nobody
    else writes.
    """

    uri: str
    """The root, in the form `open_backend` reads."""
    is_carrier: bool = False
    """Whether it keeps less than is promised here: no `promote` that `withdraw` excludes, and no part of a blob without
    the whole. Only the carrier says so (`tensorcas_mlflow.carrier`); whoever relies on one of the two asks."""
    is_remote: bool = False
    """Whether each call is a request to another machine, so that a caller saves requests and makes many at once. A
    remote backend lists keys in their order, and tokens of blobs that are random never come again."""
    tally: Tally | None = None
    """What counts its reads, if somebody wants to know; see `MeteredBackend`."""

    @abstractmethod
    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        """Create a blob from pieces, drawn one by one, unless the key is taken.

        Args:
            key: Where.
            pieces: The content, drawn in the calling thread. A few of them are held at a time, and none may change
                before the call has ended.
            durable: Whether the blob must survive a crash of the machine once this has returned. Without it a
                crash may lose the blob, or what it holds.

        Raises:
            BlobExistsError: The key is taken; the blob there is untouched.
            Exception: Whatever ``pieces`` raises; nothing is created then.
        """

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        """Create several blobs, on which only a later `promote` relies: all but that may be waited for together.

        They are durable before a `promote` that is called later, on this object, makes its blob, and once `missing`
        has told of them. When this has returned all of them are there; before, any may be.

        Args:
            blobs: Keys that nobody else writes, and pieces as for `put_new`. Drawn one after the other, each only when
                all pieces of the one before are drawn.

        Raises:
            BlobExistsError: A key is taken; the blob there is untouched.
            Exception: Whatever ``blobs`` or pieces raise. Some of those before may be there then.
        """
        for key, pieces in blobs:
            self.put_new(key, pieces)

    @abstractmethod
    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        """Turn the blob at ``source``, if it is still there unchanged, into a durable blob ``dest`` holding ``data``.

        This is the compare-and-swap of the protocol. After a `withdraw` of ``source`` has returned True no `promote` of
        it makes ``dest``, and none had made a blob that still is there: one that returns all the same had made it
        before, and somebody has removed or replaced it since. When this has returned, ``dest`` is durable, and
        ``source`` is gone or, if the storage failed at the very end, garbage that a `withdraw` clears away. If the
        process dies inside, either ``dest`` was made with ``data``, or ``source`` is there: unchanged, or holding a
        beginning of ``data``, or ``data`` and a line of the backend's own.

        Args:
            source: An existing blob, at a key that never comes again.
            dest: Another key. Nothing is put there by `put_new` while promotes to it are under way.
            data: What ``dest`` is to hold, at most a few KiB, different each time. White space at its end says nothing:
                a backend may change it later, and with it the token.
            token: The state of ``source`` this call relies on.
            replace: Whether a blob at ``dest`` may be replaced, in one step.

        Raises:
            BlobNotFoundError: ``source`` is gone or is no longer what ``token`` names. Nothing is changed.
            BlobExistsError: ``dest`` is taken and ``replace`` is False. ``source`` is still there.
        """

    @abstractmethod
    def withdraw(self, key: str, token: Token) -> bool:
        """Remove a blob in a way that excludes a later `promote` of it.

        Returns:
            Whether this call removed it; False if it was gone or changed before. One that was removed does not come
            back in a crash of the machine.
        """

    @abstractmethod
    def stat(self, key: str) -> BlobInfo | None:
        """Describe one blob, or return None if there is none."""

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Tell which of some blobs are not there. Each is looked at after the call has begun.

        Those that are there are durable when this has returned, whoever made them, unless they were put otherwise.
        """
        return {key for key in keys if self.stat(key) is None}

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole blob.

        Args:
            key: Which.
            max_bytes: What it may have at most; a longer one is an error before it is read.

        Raises:
            BlobNotFoundError: There is none.
            CorruptError: It is longer than ``max_bytes``.
        """

    @abstractmethod
    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill a buffer with a blob's bytes from ``start`` on.

        Raises:
            BlobNotFoundError: There is none.
            CorruptError: It ends before the buffer is full.
        """

    def open_file(self, key: str) -> BlobFile | None:
        """Open a blob for the ways of reading that only files of this machine have; the caller closes it.

        Returns:
            None where blobs are no such files: then there is `read_into` alone.

        Raises:
            BlobNotFoundError: There is none.
            CorruptError: It is something else than a file.
        """
        return None

    @abstractmethod
    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        """List the blobs below a key prefix of whole segments, in no order; an absent prefix is empty.

        A blob there when the listing begins and not removed meanwhile is listed, exactly once. A blob created or
        removed meanwhile may or may not be.

        Args:
            prefix: Where.
            after: Only keys that come after this text, in the order of their bytes.
        """

    @abstractmethod
    def list_dir(self, prefix: str) -> Children:
        """List the direct children of a prefix.

        Returns:
            The blobs, and the names of the next segments that hold blobs (or held blobs), both sorted.
        """

    def paths(self) -> Iterator[str]:
        """Yield the path of every file or object below the root, in no order, also where it is no key.

        Others may put files with any names there. A folder that cannot hold keys is yielded with a slash at its end,
        and not entered. What the backend itself keeps there for a while, such as files under way, is left out.
        """
        return iter(())

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a blob; none at the key is no error. A crash of the machine may bring it back, whole; see `settle`."""

    def settle(self, prefix: str) -> None:
        """Make durable all that has been made, replaced and removed below a prefix, by whatever process.

        Where each call does so before it returns there is nothing left to do.
        """
        return

    def check_conditions(self) -> None:
        """See that the storage keeps what is promised here, where some storages of a kind do not.

        Raises:
            RefusedError: It does not; no store may be kept there.
        """
        return

    def sweep(self, older_than_s: float) -> int:
        """Remove what crashed calls left behind outside of any key, such as temporary files.

        Args:
            older_than_s: Only what has not been written for so long.

        Returns:
            Bytes freed.
        """
        return 0

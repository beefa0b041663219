"""The contract of a backend, written for object stores as much as for files."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple, TypeVar

from tensorcas_mlflow.backends._file import BlobFile
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import RefusedError

T = TypeVar("T")
R = TypeVar("R")

Token = str
"""Identifies the bytes at a key, like an ETag. Opaque; only the backend that returned it compares it. After a key is
removed and created again, the token may come back, unless the backend is remote; so keys used with tokens, or their
blobs, are random."""

MOST_SHARED_BYTES = 32 << 10
"""Bound of a pack that shares bytes with earlier ones; see `Backend.has_database`."""

_SEGMENT = r"[A-Za-z0-9._=@%~-]{1,200}"
is_listed_segment = re.compile(_SEGMENT).fullmatch
"""Matches a name in a listing if it is a segment of a key; no listing has the names `.` and `..`."""
_NAMED = rf"(?!\.{{1,2}}(?:/|\Z)){_SEGMENT}"
_is_key = re.compile(rf"{_NAMED}(?:/{_NAMED})*").fullmatch


# A save checks each of its keys several times.
@lru_cache(maxsize=1024)
def check_key(key: str) -> str:
    """Refuse an invalid key; ``docs/format.md`` defines keys as ``/``-separated segments.

    Raises:
        ValueError: It is not a key.
    """
    if _is_key(key) is None:
        raise ValueError(f"not a key: {key[:200]!r}")
    return key


class BlobInfo(NamedTuple):
    """A listing's description of one blob."""

    key: str
    size: int
    """Bytes."""
    modified_s: float
    """Time of writing, in seconds of Unix time by the storage's own clock. Good for liveness, never for safety."""
    token: Token
    is_link: bool = False
    """True if it is a symbolic link; a link is no blob and is not followed."""


class Children(NamedTuple):
    """Direct children of a prefix."""

    blobs: Mapping[str, bool | None]
    """Last segments of the keys that may have blobs: True for one that has, None if only a look at it would show."""
    segments: Set[str]
    """Next segments with keys below them that may have blobs (or held blobs)."""
    facts: Callable[[], list[BlobInfo]]
    """Describes the blobs, sorted by key, without those that a look shows to be none."""
    is_whole: bool = True
    """False if the listing ended at its bound: then there may be more."""


class FoundFile(NamedTuple):
    """File or object below the root of a backend."""

    path: str
    """Relative to the root, with ``/`` between the parts; it need not be a key."""
    size: int
    """Bytes."""
    is_own: bool = False
    """True for a file of the backend itself that is no blob: a temporary one, or one of its database."""


class Backend(ABC):
    """Blobs by key under one root.

    A blob appears whole or not at all; nobody sees it half written. After a call has returned, every later call of
    any process sees its effect (read-after-write, list-after-write). Any number of processes and threads may use one
    root at once. `check_key` defines keys; every method raises ValueError for any other, and `BackendError` if the
    storage fails. A caller never creates a blob below the key of another one: a place is a blob or holds blobs. No two
    callers write equal blobs at one key, and a blob of more than 8 MiB goes to a key nobody else writes.
    """

    uri: str
    """The root, in a form `open_backend` accepts."""
    is_carrier: bool = False
    """True if the backend keeps less than the contract: no exclusion between `promote` and `withdraw`, and no ranged
    reads.

    Only the backend on a shelf says so (`tensorcas_mlflow.integration.server_store`).
    """
    is_remote: bool = False
    """True if each call is a request to another machine, so callers save requests and send many at once. A
    remote backend lists keys in order, and tokens of random blobs never come back."""
    has_database: bool = False
    """True if it keeps small blobs in a database. Of the blobs that one commit creates, packs up to
    `MOST_SHARED_BYTES` and other small ones are stored as differences from earlier ones, so callers leave text in them
    uncompressed."""

    @abstractmethod
    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        """Create a blob from pieces, drawn one by one, unless the key is taken.

        Args:
            key: Its key.
            pieces: The content, drawn in the calling thread. The call holds a few of them at a time, and none may
                change before the call has ended.
            durable: Whether the blob must survive a crash of the machine after this has returned. Otherwise a
                crash may lose the blob, or its content.

        Raises:
            BlobExistsError: The key is taken; the blob there is untouched.
            Exception: ``pieces`` raised it; nothing is created then.
        """

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        """Create several blobs needed only by a later `promote`, which waits for their durability all at once.

        They are durable before a later `promote`, on this object, creates its blob, and after `missing` has reported on
        them. After this has returned all of them exist for this object. Other objects see each of them from then on, or
        together with the blob of that `promote`. Before this has returned, any may exist.

        Args:
            blobs: Keys nobody else writes, and pieces as for `put_new`. Drawn one after the other, each only after
                all pieces of the previous one.

        Raises:
            BlobExistsError: A key is taken; the blob there is untouched.
            Exception: ``blobs`` or pieces raised it. Some of the earlier blobs may exist then.
        """
        for key, pieces in blobs:
            self.put_new(key, pieces)

    @abstractmethod
    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        """Turn the blob at ``source``, if it is still there unchanged, into a durable blob ``dest`` holding ``data``.

        This is the compare-and-swap of the protocol. After a `withdraw` of ``source`` has returned True, no `promote`
        of it creates ``dest``. After this has returned, ``dest`` is durable, and ``source`` is gone or, if the storage
        failed at the very end, garbage. If the process dies inside, ``source`` or ``dest`` is left, or both: ``dest``
        with ``data``, and ``source`` unchanged, or holding a beginning of ``data``, or ``data`` and a line of the
        backend's own. So who withdraws the intent of a dead process looks for the ref afterwards.

        Args:
            source: An existing blob below ``intents/``, at a key that never comes back.
            dest: Another key. Nobody uses `put_new` on it while promotes to it are under way.
            data: Content of ``dest``, at most a few KiB, different each time. White space at its end means nothing:
                a backend may change it later, and with it the token.
            token: The state of ``source`` this call relies on.
            replace: Whether to replace a blob at ``dest``, in one step.

        Raises:
            BlobNotFoundError: ``source`` is gone or no longer has ``token``. Nothing is changed.
            BlobExistsError: ``dest`` is taken and ``replace`` is False. ``source`` still exists.
        """

    @abstractmethod
    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        """Remove a blob and exclude a later `promote` of it.

        Args:
            key: Its key.
            token: The state of it that this call relies on.
            own: Given by the creator of the blob, who will not promote it any more: the keys of its blobs of `put_all`.
                Those that nobody else has seen yet are forgotten, and the others stay. Nothing is left in the place of
                the withdrawn blob, which may come back in a crash of the machine.

        Returns:
            Whether this call removed it; False if it was gone or changed before. Without ``own``, a removed blob does
            not come back in a crash of the machine.
        """

    @abstractmethod
    def stat(self, key: str) -> BlobInfo | None:
        """Describe one blob, or return None if there is none."""

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Return those keys without a blob, or with one that damage hides. Each is checked after the call has begun.

        The existing blobs are durable after this has returned, whoever created them, unless they were put without it.
        """
        return {key for key in keys if self.stat(key) is None}

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole blob.

        Args:
            key: Its key.
            max_bytes: Maximum size; a longer blob is an error before it is read.

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
        """Open a blob for the ways of reading available for local files only; the caller closes it.

        Returns:
            None if blobs are no such files: then `read_into` is the only way.

        Raises:
            BlobNotFoundError: There is none.
            CorruptError: It is no regular file.
        """
        return None

    def alone(self) -> AbstractContextManager[bool]:
        """Let one process do work that several would repeat. Nothing may depend on being alone.

        Returns:
            Context with False if another process, or thread, is in this context now. A backend without locks gives
            True.
        """
        return nullcontext(True)

    @abstractmethod
    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        """List the blobs below a key prefix of whole segments, in no order; an absent prefix is empty.

        A blob present throughout the listing is listed, exactly once. A blob created or
        removed meanwhile may or may not be. If damage hides some, the others come before the error.

        Args:
            prefix: The prefix.
            after: Only keys after this text, in the order of their bytes.
        """

    @abstractmethod
    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        """List the direct children of a prefix; an absent prefix has none.

        The names alone cost less than the facts. A remote backend does not look which of the objects count as no blob,
        and a folder does not look at its files, until the facts are wanted.

        Args:
            prefix: The prefix.
            most: Bound of the keys below the prefix, however deep, beyond which a remote backend lists no further.
        """

    @abstractmethod
    def files(self) -> Iterator[FoundFile]:
        """Yield every file or object below the root, in no order.

        All of them count: the backend's own and temporary ones, and those of other programs, whatever their names. So
        the sizes add up to the disk space of the store, once nobody writes: the write-ahead log of a database counts as
        pages of that. A file that comes or goes meanwhile may or may not be there.
        """

    @abstractmethod
    def delete(self, *keys: str) -> None:
        """Remove blobs; a missing one is no error. A crash of the machine may bring one back, whole; see `settle`.

        A database removes its own in one transaction. If the call fails, any of the others may be gone.
        """

    def settle(self, prefix: str) -> None:
        """Make durable everything created, replaced and removed below a prefix, by any process.

        If each call does so before it returns, there is nothing left to do.
        """
        return

    def prepare(self, *, database: bool | None = None) -> None:
        """Prepare a new store: check that the storage keeps these promises, since some storages of a kind do not.

        Args:
            database: Whether small blobs go to a database; None for yes where there can be one.

        Raises:
            RefusedError: The storage does not keep them, or can have no database; no store may be kept there.
        """
        if database:
            raise RefusedError("create", "blobs.db", f"{self.uri!r} cannot have a database: only a folder can")

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> int:
        """Estimate the bytes of files that a deletion of some blobs and then a `sweep` free; changes nothing.

        Args:
            deleted: Keys of blobs, and their sizes.
            older_than_s: As for `sweep`.
        """
        return sum(deleted.values())

    def sweep(self, older_than_s: float) -> int:
        """Remove the remains of crashed calls outside of any key, such as temporary files.

        Args:
            older_than_s: Only files not written for so long.

        Returns:
            Bytes freed.
        """
        return 0


def map_requests(
    backend: Backend, call: Callable[[T], R], items: Iterable[T], *, window: int | None = None
) -> Iterator[R]:
    """Apply a function that calls a backend: on several threads if each call waits for another machine.

    See `threads.ordered_map`.
    """
    return threads.ordered_map(call, items, window=window, waits=True) if backend.is_remote else map(call, items)


def is_key(key: str) -> bool:
    """Tell whether `check_key` accepts a text."""
    try:
        check_key(key)
    except ValueError:
        return False
    return True

"""The packs of a store as blobs: their names, listings and tables."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.pack import Entries, read_table

_TAIL_BYTES = 64 * 1024
"""Size of the first read at a pack's end, before the size of its table is known: enough for most tables, if a read is a
request."""
_LOCAL_TAIL_BYTES = 4 * 1024
"""The same in a file of this machine: a second read covers larger tables."""
_TIME_DIGITS = 12


def list_packs(backend: Backend, *, since_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """List the packs of a store, in the order of drawing: name and size.

    Args:
        backend: The backend of the store.
        since_s: For a remote store, leave out names drawn before this time, in seconds of Unix time.
    """
    after = f"packs/{_time_text(since_s)}" if backend.is_remote and since_s > 0 else None
    for info in list_blobs(backend, "packs", after=after):
        name, _, ending = info.key.removeprefix("packs/").partition(".")
        if ending == "pack":
            yield name, info.size


def new_pack_name(backend: Backend) -> str:
    """Draw a name no pack ever had. In a remote store, names sort by the time they were drawn."""
    name = uuid.uuid4().hex
    return _time_text(time.time()) + name[_TIME_DIGITS:] if backend.is_remote else name


def _time_text(time_s: float) -> str:
    return f"{max(0, int(time_s * 1000)):0{_TIME_DIGITS}x}"[:_TIME_DIGITS]


def drawn_s(name: str) -> float:
    """Return the time a pack's name was drawn in a remote store, in seconds of Unix time; 0 for no name."""
    return int(name[:_TIME_DIGITS] or "0", 16) / 1000


def read_pack_table(backend: Backend, name: str, *, size: int | None = None) -> Entries:
    """Read the table of a pack, in one read if it is short.

    Args:
        backend: The backend of the pack.
        name: Its name.
        size: Its size, if known.

    Raises:
        BlobNotFoundError: The pack is gone.
        CorruptError: It is damaged.
        BackendError: The storage fails to deliver its table.
    """
    key = pack_key(name)
    if size is None:
        info = backend.stat(key)
        if info is None:
            raise BlobNotFoundError(key)
        size = info.size
    is_far = backend.is_remote or backend.is_carrier
    tail = bytearray(min(size, _TAIL_BYTES if is_far else _LOCAL_TAIL_BYTES))
    begin = size - len(tail)
    try:
        backend.read_into(key, begin, memoryview(tail))
    except BackendError:
        if backend.is_remote:
            raise
        begin = size  # a bad sector before the table must not hide it: read only the needed bytes

    def read(start: int, stop: int) -> bytes | bytearray:
        if start >= begin:
            return tail[start - begin : stop - begin]
        longer = bytearray(stop - start)
        backend.read_into(key, start, memoryview(longer))
        return longer

    return read_table(key, size, read)


def mark_loose(backend: Backend, name: str) -> None:
    """Add a new pack to the index; in a remote store it needs no marker."""
    if not backend.is_remote:
        with contextlib.suppress(BlobExistsError):
            backend.put_new(f"index/{name}.loose", [], durable=False)

"""State of a store: ``format`` blob, identity, condemned lists and generation (``docs/design/protocol.md``)."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from tensorcas_mlflow.backends import STORE_FOLDER, Backend, BlobInfo, Token
from tensorcas_mlflow.base.digest import DIGEST_BYTES
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    ConflictError,
    CorruptError,
    NewerFormatError,
    RefusedError,
    StoreNotFoundError,
)
from tensorcas_mlflow.layout._keys import is_manifest_name, is_pack_name, list_blobs
from tensorcas_mlflow.layout._records import (
    MAX_REF_BYTES,
    VERSION,
    intent_bytes,
    is_whole,
    load_record,
    now,
    record_bytes,
)

MAX_LIST_BYTES = 1 << 30

GENERATION = "condemned/@generation"
"""Replaced by every collector of a remote store before its first deletion."""

Generation = frozenset[tuple[str, Token]]
"""The listing of condemned lists in a remote store. Between two equal listings nothing was deleted except blobs on the
lists, so every other blob seen after the first still exists at the second (``docs/design/protocol.md``)."""


class Condemned(NamedTuple):
    """The blobs one collector is about to delete."""

    key: str
    packs: frozenset[str]
    manifests: frozenset[str]


class Condemnation(NamedTuple):
    """The blobs all collectors are about to delete, at one time."""

    lists: Sequence[Condemned]
    generation: Generation | None
    is_unknown: bool = False
    """True if a damaged database hides them: then a save relies on no blob that was there before."""

    @property
    def packs(self) -> frozenset[str]:
        """Names of packs not to be relied on."""
        return frozenset[str]().union(*(each.packs for each in self.lists))

    @property
    def manifests(self) -> frozenset[str]:
        """Names of manifests not to be relied on."""
        return frozenset[str]().union(*(each.manifests for each in self.lists))


def condemned_bytes(packs: frozenset[str], manifests: frozenset[str]) -> bytes:
    """Serialize a condemned list.

    Raises:
        ValueError: A name is invalid.
    """
    said = {"packs": sorted(packs), "manifests": sorted(manifests)}
    data = record_bytes({"format": VERSION, "created": now(), **said})
    try:
        _parse_list("condemned/new", data)
    except CorruptError as error:
        raise ValueError(f"not the names of packs and manifests: {said}") from error
    return data


def read_condemned(backend: Backend) -> Condemnation:
    """Read every condemned list.

    Raises:
        CorruptError: One is unreadable; nothing may be reused or deleted until somebody has checked it.
    """
    lists: list[Condemned] = []
    listed = list(list_blobs(backend, "condemned"))
    for info in listed:
        if info.key == GENERATION:
            continue
        try:
            lists.append(read_list(backend, info.key))
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            remedy = (
                "if it stays, its collection is dead: make sure of that, and then run "
                f"`tensorcas repair --abandon {info.key}` to delete it"
            )
            raise CorruptError(info.key, f"{error.reason}; {remedy}") from error
    generation = frozenset((info.key, info.token) for info in listed) if backend.is_remote else None
    return Condemnation(lists=lists, generation=generation)


def read_list(backend: Backend, key: str) -> Condemned:
    """Read one condemned list.

    Raises:
        BlobNotFoundError: It is gone.
        CorruptError: It is unreadable.
    """
    return _parse_list(key, backend.get(key, max_bytes=MAX_LIST_BYTES))


def _parse_list(key: str, data: bytes) -> Condemned:
    record = load_record(key, data)
    packs, manifests = record.get("packs"), record.get("manifests")
    if not (_are_texts(packs) and _are_texts(manifests)):
        raise CorruptError(key, "it is not a condemned list")
    if not (all(map(is_pack_name, packs)) and all(map(is_manifest_name, manifests))):
        raise CorruptError(key, "it names a blob that is no pack or manifest")
    return Condemned(key=key, packs=frozenset(packs), manifests=frozenset(manifests))


def begin_first_generation(backend: Backend) -> Generation | None:
    """Give a new store in a remote place a generation no store there had before.

    Returns:
        The listing of its condemned lists; None if it is unknown.
    """
    record = {"format": VERSION, "created": now(), "generation": new_name()}
    try:
        return frozenset({(GENERATION, backend.put_new(GENERATION, [record_bytes(record)]))})
    except BlobExistsError:  # left by an incompletely deleted store, or by another process creating one
        begin_generation(backend)
        return None


def begin_generation(backend: Backend) -> None:
    """Announce that blobs seen in a remote store so far may be deleted from now on.

    A collector does so after creating its list and before its first deletion.
    """
    while backend.is_remote:
        source = f"intents/{new_name()}"
        intent = intent_bytes("0" * 64, np.empty((0, DIGEST_BYTES), np.uint8))
        token = backend.put_new(source, [intent])
        # It contains all fields of the intent: a promote of objects first puts it in the intent's place, and a
        # death then leaves an intent other processes must be able to read.
        said = {**load_record(source, intent.partition(b"\n")[0]), "generation": new_name()}
        del said["check"]
        with suppress(BlobNotFoundError):  # another collector has treated this one as dead
            backend.promote(source, GENERATION, record_bytes(said), token=token, replace=True)
            return


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


FORMAT = "format"
"""Key of the blob."""
FORMAT_VERSION = 2
"""Version of a store with a database; one without it has version 1."""
MAX_FORMAT_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{32}")

Stamp = tuple[int, int, int, int]
"""Identifies a ``format`` file among those that replace each other."""


def new_format(
    chunk_bytes: int, store_id: str | None = None, *, is_carried: bool = False, has_database: bool = False
) -> bytes:
    """Return the blob of a new store; its id is drawn unless given.

    Raises:
        ValueError: The chunk size or id is invalid.
    """
    store_id = store_id or new_name()
    settings: dict[str, Any] = {
        "format": FORMAT_VERSION if has_database else 1,
        "id": store_id,
        "chunk_bytes": chunk_bytes,
        "digest": "blake3-256",
    }
    if is_carried:
        settings["carried"] = True
    if has_database:
        settings["database"] = True
    data = record_bytes(settings) + b"\n"
    try:
        parse_format(data)
    except CorruptError as error:
        raise ValueError(f"a store cannot have chunks of {chunk_bytes} bytes and the id {store_id!r}") from error
    return data


def is_carried(root: str | os.PathLike[str]) -> bool:
    """Tell whether clients of an MLflow server without a store of its own created the store at a folder."""
    path = os.path.join(root, STORE_FOLDER, FORMAT)
    try:
        with open(path, "rb") as file:
            settings = json.loads(file.read(MAX_FORMAT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and settings.get("carried") is True


def stamp_of(root: str) -> Stamp | None:
    """Return the stamp of the ``format`` file of the store at an absolute root; None if there is no such file.

    Raises:
        BackendError: The storage fails.
    """
    path = f"{root}{os.sep}{STORE_FOLDER}{os.sep}{FORMAT}"  # `join` calls more, and a save asks three times
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise BackendError("look at", path, f"{type(error).__name__}: {error}") from error
    except ValueError:  # a NUL in the path
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    # A copy may have the time and size of the file that it replaces, and get its inode.
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def parse_format(blob: bytes) -> tuple[str, int]:
    """Parse the blob.

    Returns:
        The store's id and its chunk size.

    Raises:
        NewerFormatError: A later release created the store.
        CorruptError: It is damaged.
    """
    try:
        settings = json.loads(blob)
        version = settings["format"]
        if type(version) is not int:
            raise CorruptError(FORMAT, "it has no version")
        if not is_whole(blob):
            raise CorruptError(FORMAT, "it does not hash to the check in it")
        # Before everything else: a later version may have other fields.
        if version > FORMAT_VERSION:
            raise NewerFormatError("the store", version, FORMAT_VERSION)
        store_id, chunk_bytes = settings["id"], settings["chunk_bytes"]
        if settings["digest"] != "blake3-256" or not (isinstance(store_id, str) and _ID.fullmatch(store_id)):
            raise CorruptError(FORMAT, "it has impossible settings")
        if type(chunk_bytes) is not int or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise CorruptError(FORMAT, "it has impossible settings")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(FORMAT, f"it does not hold a store's settings: {type(error).__name__}: {error}") from error
    return store_id, chunk_bytes


def check_database(blob: bytes, backend: Backend) -> None:
    """Check that a backend shows the database of a store that has one: without it all small saves seem to be missing.

    Args:
        blob: The store's ``format``.
        backend: The backend.

    Raises:
        RefusedError: It shows none.
    """
    if json.loads(blob).get("database") is True and not backend.has_database:
        raise RefusedError(
            "open",
            FORMAT,
            f"the store at {backend.uri!r} has a database, and none is found: there is no file `blobs.db` beside its "
            "`format`, or the store is reached through a server or an object store; restore the file, or copy the "
            "store on its machine with `tensorcas copy`",
        )


class Identity:
    """The id of an open store, compared with the current id at its place.

    A user may delete a store and create another in its place while a training runs. Data saved there would belong to
    a deleted store and could not be loaded.
    """

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._id = store_id
        self._info: BlobInfo | None = None
        """Description of the ``format`` file at its last reading."""
        self._generation: Generation | None = None
        """In a remote store, the condemned lists at the last reading of ``format``."""

    def note(self, generation: Generation) -> None:
        """Record that a remote store is the opened one as long as its lists are these."""
        self._generation = generation

    def check(self, generation: Generation | None) -> None:
        """Check that the store is the opened one.

        A saver calls it after creating its intent. Deleting the store deletes the intent, and without the intent the
        commit fails. On this machine the check is one `stat` of a file, and through a carrier one small request. In a
        remote store it costs no request while the lists are unchanged: each store has a generation of its own from the
        beginning.

        Args:
            generation: For a remote store, its listing after the intent was created; None for others, and for callers
                that can afford one more request.

        Raises:
            StoreNotFoundError: There is no store any more.
            ConflictError: There is another one.
        """
        info: BlobInfo | None = None
        if self._backend.is_carrier or (generation is None and self._backend.is_remote):
            pass  # a server reports no times, and in a bucket a look costs as much as reading `format`
        elif generation is None:
            info = self._backend.stat(FORMAT)
            if info is None:
                raise StoreNotFoundError(self._backend.uri)
            if info == self._info:
                return
        elif generation == self._generation and any(key == GENERATION for key, _ in generation):
            return
        self._read()
        self._info = info
        if generation is not None:
            self._generation = generation

    def _read(self) -> None:
        try:
            now, _ = parse_format(self._backend.get(FORMAT, max_bytes=MAX_REF_BYTES))
        except BlobNotFoundError:
            raise StoreNotFoundError(self._backend.uri) from None
        if now != self._id:
            raise ConflictError(
                f"{self._backend.uri!r} is store {now} by now, and no longer {self._id}: nothing was committed; "
                "open the store anew"
            )

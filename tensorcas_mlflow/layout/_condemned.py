"""Condemned lists and generations (``docs/design/protocol.md``)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.base.digest import DIGEST_BYTES
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout._index import is_pack_name
from tensorcas_mlflow.layout._keys import is_manifest_name, list_blobs
from tensorcas_mlflow.layout._records import VERSION, intent_bytes, load_record, now, record_bytes

MAX_LIST_BYTES = 1 << 30

GENERATION = "condemned/@generation"
"""Replaced by every collector of a remote store before its first deletion."""

Generation = frozenset[tuple[str, Token]]
"""The listing of condemned lists in a remote store. Between two equal listings nothing was deleted except blobs on the
lists, so every other blob seen after the first still exists at the second (``docs/design/protocol.md``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemned:
    """The blobs one collector is about to delete."""

    key: str
    packs: frozenset[str]
    manifests: frozenset[str]
    strangers: frozenset[str] = frozenset()
    """Names of foreign files, condemned by earlier builds. They are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemnation:
    """The blobs all collectors are about to delete, at one time."""

    lists: Sequence[Condemned]
    generation: Generation | None

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
    data = record_bytes({"format": VERSION, "created": now(), "packs": sorted(packs), "manifests": sorted(manifests)})
    if said := _parse_list("condemned/new", data).strangers:
        raise ValueError(f"not the name of a pack or manifest: {min(said)!r}")
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
    if not _are_texts(packs) or not _are_texts(manifests):
        raise CorruptError(key, "it is not a condemned list")
    strangers = {name for name in packs if not is_pack_name(name)}
    strangers |= {name for name in manifests if not is_manifest_name(name)}
    # Without a check, a strange name may be a damaged one of ours.
    if strangers and "check" not in record:
        raise CorruptError(key, "it is not a condemned list")
    return Condemned(
        key=key,
        packs=frozenset(filter(is_pack_name, packs)),
        manifests=frozenset(filter(is_manifest_name, manifests)),
        strangers=frozenset(strangers),
    )


def begin_first_generation(backend: Backend) -> Generation | None:
    """Give a new store in a remote place a generation no store there had before.

    Returns:
        The listing of its condemned lists; None if it is unknown.
    """
    record = {"format": VERSION, "created": now(), "generation": uuid.uuid4().hex}
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
        source = f"intents/{uuid.uuid4().hex}"
        intent = intent_bytes("0" * 64, np.empty((0, DIGEST_BYTES), np.uint8))
        token = backend.put_new(source, [intent])
        # It contains all fields of the intent: a promote of objects first puts it in the intent's place, and a
        # death then leaves an intent other processes must be able to read.
        said = {**load_record(source, intent.partition(b"\n")[0]), "generation": uuid.uuid4().hex}
        del said["check"]
        with suppress(BlobNotFoundError):  # another collector has treated this one as dead
            backend.promote(source, GENERATION, record_bytes(said), token=token, replace=True)
            return


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)

"""Condemned lists, also where one is damaged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.repair._quarantine import Quarantine, keep_blob
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """All condemned lists of a store."""

    sound: Sequence[p.Condemned]
    damaged: Mapping[str, str]
    """Keys of those that cannot be read, and why."""

    @property
    def packs(self) -> frozenset[str]:
        """Names of packs on sound lists."""
        return frozenset[str]().union(*(each.packs for each in self.sound))


def read_lists(backend: Backend) -> Lists:
    """Read every condemned list there is.

    Raises:
        NewerFormatError: A later release wrote one.
        BackendError: The storage failed.
    """
    sound: list[p.Condemned] = []
    damaged: dict[str, str] = {}
    for info in list(list_blobs(backend, "condemned")):
        if info.key == p.GENERATION:
            continue
        try:
            sound.append(p.read_list(backend, info.key))
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            damaged[info.key] = error.reason
    return Lists(sound=sound, damaged=damaged)


def abandon_lists(backend: Backend, keys: Collection[str], quarantine: Quarantine) -> list[str]:
    """Remove damaged lists whose collectors are dead, and keep their bytes.

    Returns:
        Keys of those that were still there and damaged.
    """
    gone: list[str] = []
    for key in keys:
        info = backend.stat(key)
        try:
            p.read_list(backend, key)
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            keep_blob(quarantine, backend, key, error.reason)
            if info is not None and backend.withdraw(key, info.token):
                gone.append(key)
    return gone


def finished_lists(backend: Backend, lists: Lists) -> list[str]:
    """Give the lists of which nothing is left: names are never used again, so they say nothing any more.

    Args:
        backend: Whose.
        lists: Read before this was called, and so before it is looked what is left.
    """
    if not lists.sound:
        return []
    packs = {name for name, _ in p.list_packs(backend)}
    manifests = {info.key.removeprefix("manifests/") for info in list_blobs(backend, "manifests")}
    return [each.key for each in lists.sound if not each.packs & packs and not each.manifests & manifests]

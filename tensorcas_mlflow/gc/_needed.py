"""Who needs what: intents, refs and the manifests they name, as a survey reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.census import Census, RefSeen
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.store import Ref
from tensorcas_mlflow.store import protocol as p

T = TypeVar("T")
R = TypeVar("R")

_INTENT_READS = 3
_INTENT_PAUSE_S = 0.01
_STEP = re.compile(r"(.*/@)([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """All refs there are."""

    holders: dict[str, list[str]]
    """For each manifest that a ref names the keys of those refs; steps of one series in their order."""
    seen: frozenset[RefSeen]
    """How a remote store has listed them; empty for a local one."""
    damaged: Mapping[str, CorruptError]
    """Those that cannot be read, by key, and why."""

    @property
    def n(self) -> int:
        """How many there are that can be read."""
        return sum(map(len, self.holders.values()))


def in_order(backend: Backend, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function that reads to items: in a remote store to many at once."""
    return threads.ordered_map(read, items, waits=True) if backend.is_remote else map(read, items)


def read_intent(backend: Backend, info: BlobInfo) -> p.Intent | None:
    """Read an intent; None if it is committed or withdrawn meanwhile."""
    for attempt in range(_INTENT_READS):
        try:
            return p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            return None
        except CorruptError:
            # A commit writes the ref over its intent, and this may have been read just then.
            if attempt == _INTENT_READS - 1:
                raise
            time.sleep(_INTENT_PAUSE_S)
    return None


def read_refs(backend: Backend, census: Census, *, but: Collection[str]) -> Refs:
    """Find out which manifests refs name.

    In a local store every ref is read, each time: the token of a file is its number, which another file may get, and
    times of change are clocks' words. In a remote one no two blobs that stand at a key have one token.

    Args:
        backend: Which.
        census: Knows refs of remote stores, and comes to know more.
        but: Keys of refs to leave out.

    Raises:
        NewerFormatError: A later release wrote one.
    """
    infos = sorted((info for info in list_blobs(backend, "refs") if info.key not in but), key=_by_series)
    seen = [RefSeen(info.key, info.token, info.size, info.modified_s) for info in infos] if backend.is_remote else []
    known = {each.key: name for each in seen if (name := census.ref(each)) is not None}
    unknown = [info.key for info in infos if info.key not in known]
    found: dict[str, Ref | None] = {}
    damaged: dict[str, CorruptError] = {}
    for key, read in zip(unknown, in_order(backend, partial(_ref_or_fault, backend), unknown), strict=True):
        if isinstance(read, CorruptError):
            damaged[key] = read
        else:
            found[key] = read
    for each in seen:
        ref = found.get(each.key)
        if ref is not None:
            census.learn_ref(each, ref.manifest)
    holders: dict[str, list[str]] = {}
    for info in infos:
        ref = found.get(info.key)
        name = known.get(info.key) if ref is None else ref.manifest
        if name is not None:
            holders.setdefault(name, []).append(info.key)
    return Refs(holders=holders, seen=frozenset(seen), damaged=damaged)


def _ref_or_fault(backend: Backend, key: str) -> Ref | CorruptError | None:
    try:
        return p.read_ref(backend, key)
    except CorruptError as error:
        return error


def kept_by_damaged(backend: Backend, census: Census, refs: Refs, manifests: Mapping[str, int]) -> frozenset[str]:
    """Name the manifests that damaged refs may keep, and see that it is known what they name.

    A damaged ref may name any manifest there is, unless it still says which. So all of them are kept.

    Args:
        backend: Where.
        census: Comes to know what they name.
        refs: Which were there before ``manifests`` were listed.
        manifests: Those there are, and their sizes.

    Raises:
        CorruptError: One cannot be read, and a damaged ref may need it.
    """
    named = {key: p.manifest_of_damaged_ref(backend, key) for key in refs.damaged}
    kept = frozenset(manifests) if None in named.values() else frozenset(manifests) & {*named.values()}

    def read(name: str) -> tuple[str, Manifest, int] | None:
        who = next(key for key, each in named.items() if each in (name, None))
        try:
            return read_manifest(backend, name, lambda: f"{who} cannot be read, and perhaps")
        except BlobNotFoundError:
            return None  # another collector has deleted it, to whom all refs could be read

    unknown = [name for name in sorted(kept) if census.manifests.get(name) != manifests[name]]
    learn(census, in_order(backend, read, unknown))
    return kept


def learn_needed(backend: Backend, census: Census, refs: Refs, half_committed: Sequence[p.Intent]) -> None:
    """See that it is known what every manifest names that a ref, or an intent which says no digests, needs.

    Raises:
        CorruptError: One cannot be read, and is still needed.
    """
    holders = [(name, keys) for name, keys in refs.holders.items() if name not in census.manifests]
    learn(census, in_order(backend, lambda held: _of_refs(backend, *held), holders))
    intents = [intent for intent in half_committed if intent.manifest not in census.manifests]
    learn(census, in_order(backend, partial(_of_intent, backend), intents))


def learn(census: Census, manifests: Iterable[tuple[str, Manifest, int] | None]) -> None:
    """Take up what some manifests name: names, manifests, and the bytes of their blobs."""
    for found in manifests:
        if found is not None:
            name, manifest, n_bytes = found
            census.learn_manifest(name, manifest.digests, n_bytes=n_bytes)


def check_there(backend: Backend, census: Census, refs: Refs, manifests: Mapping[str, int]) -> None:
    """See that every manifest that refs name is there, as long as it was when it was read.

    Args:
        backend: Where.
        census: Knows what they name.
        refs: Which were there before ``manifests`` were listed.
        manifests: Those there are, and their sizes.

    Raises:
        CorruptError: One is gone or damaged, and a ref still names it.
    """
    for name, keys in refs.holders.items():
        if name not in manifests:
            _check_unneeded(backend, name, keys)
        elif census.manifests.get(name) != manifests[name]:
            _of_refs(backend, name, keys)


def read_manifest(backend: Backend, name: str, needed_by: Callable[[], str]) -> tuple[str, Manifest, int]:
    """Read a manifest: its name, itself, and the bytes of its blob.

    Args:
        backend: Where it is.
        name: Which.
        needed_by: Says in words, for an error, who needs it.

    Raises:
        BlobNotFoundError: There is none.
        CorruptError: It is damaged.
        NewerFormatError: A later release wrote it.
    """
    key = f"manifests/{name}"
    blob = backend.get(key, max_bytes=MAX_BYTES)
    try:
        return name, Manifest.from_blob(blob, name), len(blob)
    except CorruptError as error:
        raise CorruptError(key, f"{error.reason}; {needed_by()} needs it") from error
    except NewerFormatError as error:
        raise NewerFormatError(f"the manifest of {needed_by()}", error.version, error.supported) from error
    except FormatError as error:
        raise CorruptError(key, f"{error}; {needed_by()} needs it") from error


def _of_intent(backend: Backend, intent: p.Intent) -> tuple[str, Manifest, int] | None:
    """Read the manifest of an intent that its commit has half turned into a ref, so that only the manifest says it."""
    try:
        return read_manifest(backend, intent.manifest, lambda: intent.info.key)
    except BlobNotFoundError:
        if backend.stat(intent.info.key) is None:
            return None
        raise _gone(intent.manifest, intent.info.key) from None


def _of_refs(backend: Backend, name: str, keys: Sequence[str]) -> tuple[str, Manifest, int] | None:
    """Read the manifest of some refs; None if they have been dropped since they were read."""
    try:
        return read_manifest(backend, name, lambda: _label(backend, keys[0]))
    except BlobNotFoundError:
        _check_unneeded(backend, name, keys)
        return None


def _check_unneeded(backend: Backend, name: str, keys: Sequence[str]) -> None:
    for key in keys:
        # A ref that has been replaced since needs no look at what it says now: that comes from an intent which was
        # there when intents were read, or which was made after and relies on nothing that is condemned.
        now = p.read_ref(backend, key)
        if now is not None and now.manifest == name:
            raise _gone(name, now.label) from None


def _label(backend: Backend, key: str) -> str:
    ref = p.read_ref(backend, key)
    return key if ref is None else ref.label


def _gone(name: str, needed_by: str) -> CorruptError:
    return CorruptError(f"manifests/{name}", f"it is gone, and {needed_by} needs it")


def _by_series(info: BlobInfo) -> tuple[str, int, str]:
    """Order refs so that steps of one series follow each other: their manifests differ little."""
    step = _STEP.fullmatch(info.key)
    return (info.key, 0, "") if step is None else (step[1], int(step[2]), info.key)

"""Blobs as objects of an S3, GCS or Azure bucket (``docs/format.md``, Object stores)."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from tensorcas_mlflow.backends._buckets import PART_BYTES, Bucket, ObjectInfo, TakenError, TooLongError, joined
from tensorcas_mlflow.backends._contract import Backend, BlobInfo, Children, FoundFile, Token, check_key, is_key
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, CorruptError, RefusedError

_VOID = b"\x00tensorcas: there is no blob here\x00"
_VOID_NONCE_BYTES = 16
VOID_BYTES = len(_VOID) + 2 * _VOID_NONCE_BYTES


def new_void() -> bytes:
    """Create a void; no two are equal."""
    return _VOID + secrets.token_hex(_VOID_NONCE_BYTES).encode()


def is_void(data: bytes) -> bool:
    """Tell whether these bytes are those of a void."""
    return len(data) == VOID_BYTES and data.startswith(_VOID)


def is_void_object(bucket: Bucket, info: ObjectInfo) -> bool:
    """Tell whether an object is a void, or gone; only one of a void's size has to be read."""
    if info.size != VOID_BYTES:
        return False
    found = bucket.get(info.path)
    return found is None or is_void(found[0])


_log = logging.getLogger(__name__)

_NONCE_BYTES = 16

_MOVE = b"\n\x00tensorcas: on its way to\x00"
_INTENTS = "intents/"
_NEVER_AGAIN = ("packs", "index", "manifests", "intents", "condemned", "census", "ref-tables", "quarantine")
"""Folders whose blobs have random names: a deleted name is never written again."""
_MAX_VOIDS = 1 << 17
"""Bound of known voids; beyond it all are forgotten, and each costs one more request."""
_MAX_PROMOTED = 1 << 12
"""Bound of known destinations; beyond it all are forgotten, and to replace such a blob takes three more requests."""
_PAGE = 512
"""Number of keys in a listing checked together."""
_SPACES = (b" ", b"\t")
_MOST_LOOKS = 256
"""From so many keys on, a listing of their folder is mostly cheaper than a request for each, many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A promote's note in its source about the coming write of its destination."""

    dest: str
    before: Token | None
    """Token of the object at the destination: the promote replaces exactly this object. None: it creates the first."""
    data: bytes

    def to_bytes(self) -> bytes:
        said = {"dest": self.dest, "before": self.before, "nonce": secrets.token_hex(_NONCE_BYTES)}
        return self.data + _MOVE + json.dumps(said).encode()

    @classmethod
    def parse(cls, blob: bytes) -> _Move | None:
        data, magic, tail = blob.rpartition(_MOVE)
        if not magic:
            return None
        try:
            said = json.loads(tail)
            before = None if said["before"] is None else str(said["before"])
            return cls(dest=check_key(str(said["dest"])), before=before, data=data)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


class ObjectBackend(Backend):
    """Blobs as objects: a key is a path below the bucket's prefix.

    An object store compares and swaps one object at a time, but a commit concerns two: the intent and the ref, and a
    collector may remove the intent. So `promote` first records in its source the token at its destination, and then
    replaces exactly that object. A withdrawal of the source finds the note, and changes the destination before it
    removes the source; so one or the other fails (``docs/design/protocol.md``, Object stores). Nothing removes the
    object at a destination: a *void*, an object of random bytes that counts as no blob, takes its place. So a
    destination that had no object at all never has none again.
    """

    is_remote = True

    def __init__(self, bucket: Bucket, *, uri: str) -> None:
        self.uri = uri
        self._bucket = bucket
        self._moved: dict[str, tuple[Token, Token]] = {}
        """By source: the token known to the caller of an unfinished promote, and the current one."""
        self._promoted: dict[str, Token] = {}
        """By destination: the token of the last blob that a promote has put there."""
        self._voids: dict[str, Token] = {}
        """By key: the token of the last void seen there. Each is read once, as no two objects have one token."""

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        check_key(key)
        content = joined(pieces, PART_BYTES)
        return self._create(key, content) if isinstance(content, bytes) else self._bucket.upload(key, content)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        check_key(source)
        check_key(dest)
        known, token = token, self._current(source, token)
        content = bytes(data)
        before = self._expected(dest, replace=replace)
        while True:
            moved = self._bucket.swap(source, _Move(dest=dest, before=before, data=content).to_bytes(), token)
            if moved is None:
                self._moved.pop(source, None)
                raise BlobNotFoundError(source)
            self._moved[source] = known, moved
            token = moved
            is_refused = False
            put: Token | None = None
            try:
                put = self._bucket.swap(dest, content, before) if before else self._bucket.create(dest, content)
            except TakenError as error:
                is_refused = error.is_certain
            if put is not None:
                self._note_promoted(dest, put)
                break
            found = self._bucket.get(dest)
            if found is not None and found[0].rstrip() == content.rstrip():
                break  # the answer was lost, and the end of the blob has changed since
            if found is not None and not replace and not is_void(found[0]):
                raise BlobExistsError(dest)
            # Another object is there than expected, or another process has given this commit up; the next round finds
            # out. Or the commit succeeded and was replaced before its answer came. Then the next attempt needs other
            # bytes, because another process may have fenced a promote of exactly these.
            before = None if found is None else found[1].token
            content = content if is_refused else _renewed(content)
        self._moved.pop(source, None)
        self._remove_used(source)

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        found = self._bucket.get(check_key(key))
        token = self._current(key, token)
        if found is None or found[1].token != token or is_void(found[0]):
            return False
        move = _Move.parse(found[0])
        if move is not None and not self._prevent(move):
            self._remove_used(key)
            return False
        if not self._void(key, token):
            return False
        self._moved.pop(key, None)
        # The void of another's blob stays until `sweep`: the storage may carry out the creation of this key a second
        # time, late, and a promote would then find its source again, with the same token in S3.
        if own is not None and _comes_never_again(key):
            self._remove_used(key)
        return True

    def stat(self, key: str) -> BlobInfo | None:
        info = self._bucket.head(check_key(key))
        shown = None if info is None else self._shown(info)
        return None if shown is None else _blob_info(shown)

    def missing(self, keys: Iterable[str]) -> set[str]:
        wanted = {check_key(key) for key in keys}
        folders = {key.rpartition("/")[0] for key in wanted}
        if len(wanted) >= _MOST_LOOKS and len(folders) == 1 and "" not in folders:
            return wanted - {info.key for info in self.list(folders.pop())}
        missing: set[str] = set()

        def look(key: str) -> None:
            if self.stat(key) is None:
                missing.add(key)

        threads.run_all(look, sorted(wanted), waits=True)
        return missing

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        try:
            found = self._bucket.get(check_key(key), max_bytes=max_bytes)
        except TooLongError as error:
            raise CorruptError(key, f"it has {error.size} bytes, more than the {max_bytes} it may have") from error
        if found is None or is_void(found[0]):
            raise BlobNotFoundError(key)
        return found[0]

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        check_key(key)
        stop = start + len(out)
        n_bytes: int | None
        if len(out) == 0:
            n_bytes = None if self.stat(key) is None else 0
        elif stop <= VOID_BYTES:
            # These may be bytes of a void; only the rest of it shows.
            whole = bytearray(VOID_BYTES + 1)
            n_read = self._bucket.read_into(key, 0, memoryview(whole))
            is_there = n_read is not None and not is_void(bytes(whole[:n_read]))
            n_bytes = len(whole[:n_read][start:stop]) if is_there else None
            out[: n_bytes or 0] = whole[start : start + (n_bytes or 0)]
        else:
            n_bytes = self._bucket.read_into(key, start, out)
            if n_bytes is not None and n_bytes < len(out) and self.stat(key) is None:
                n_bytes = None
        if n_bytes is None:
            raise BlobNotFoundError(key)
        if n_bytes < len(out):
            raise CorruptError(key, f"it ends before byte {stop}")

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        walk = (info for info in self._bucket.walk(check_key(prefix), after=after) if is_key(info.path))
        while page := list(islice(walk, _PAGE)):
            yield from map(_blob_info, self._all_shown(page))

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        if most is None:
            objects, names = self._bucket.children(check_key(prefix))
            is_whole = True
        else:
            infos = list(islice(self._bucket.walk(check_key(prefix)), most))
            is_whole = len(infos) < most  # to draw another one may take another request
            below = [info.path[len(prefix) + 1 :].partition("/") for info in infos]
            objects = [info for info, (_, slash, _) in zip(infos, below, strict=True) if not slash]
            names = [name for name, slash, _ in below if slash]
        objects = [info for info in objects if is_key(info.path)]

        def facts() -> list[BlobInfo]:
            return sorted(map(_blob_info, self._all_shown(objects)), key=attrgetter("key"))

        # Only the bytes of an object of a void's size show whether it is one.
        blobs = {info.path.rpartition("/")[2]: info.size != VOID_BYTES or None for info in objects}
        return Children(blobs, frozenset(filter(is_key, names)), facts, is_whole)

    def files(self) -> Iterator[FoundFile]:
        return (FoundFile(info.path, info.size) for info in self._bucket.walk(""))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        if _comes_never_again(check_key(key)):
            self._bucket.delete(key)
            return
        # A storage may carry out a delete request a second time, at any later moment, and remove whatever is there
        # by then. So this replaces the object, by a request that leaves any other object alone.
        first: bytes | None = None
        while (found := self._bucket.get(key)) is not None:
            blob, info = found
            # The current object is another blob, unless a withdraw has changed the white space at its end.
            if is_void(blob) or first not in (None, blob.rstrip()) or self._void(key, info.token):
                return
            first = blob.rstrip()

    def prepare(self, *, database: bool | None = None) -> None:
        super().prepare(database=database)
        key = f"{_INTENTS}{secrets.token_hex(_NONCE_BYTES)}"
        token = self._bucket.create(key, new_void())
        try:
            with suppress(TakenError):
                self._bucket.create(key, new_void())
                raise _careless(self.uri, "If-None-Match")
            if self._bucket.swap(key, new_void(), f"{token}-not") is not None:
                raise _careless(self.uri, "If-Match")
            if self._bucket.swap(key, new_void(), token) is None:
                raise _careless(self.uri, "If-Match")
        finally:
            self._remove_used(key)

    def sweep(self, older_than_s: float) -> int:
        """Remove the voids of withdrawn intents left by calls that died before removing them."""
        before = time.time() - older_than_s
        n_bytes = 0
        for info in self._bucket.walk(_INTENTS.rstrip("/")):
            if info.modified_s <= before and self._shown(info) is None:
                self._bucket.delete(info.path)
                n_bytes += info.size
        return n_bytes

    def _remove_used(self, key: str) -> None:
        """Remove the source of a finished promote or withdraw; nothing can undo the call any more."""
        try:
            self._bucket.delete(key)
        except BackendError as error:
            _log.warning("the call is done, but its intent stays until a collection: %s", error)

    def _create(self, key: str, data: bytes) -> Token:
        while True:
            try:
                return self._bucket.create(key, data)
            except TakenError:
                info = self._bucket.head(key)
            if info is None:
                continue
            if self._shown(info) is not None:
                raise BlobExistsError(key)
            token = self._bucket.swap(key, data, info.token)
            if token is not None:
                return token

    def _expected(self, dest: str, *, replace: bool) -> Token | None:
        """Return the token of the object that is probably at a destination; None if there is probably none."""
        return self._voids.get(dest) or (self._promoted.get(dest) if replace else None)

    def _prevent(self, move: _Move) -> bool:
        """Prevent a promote from completing; return whether it had not completed already."""
        while True:
            found = self._bucket.get(move.dest)
            if found is None and move.before is not None:
                return True  # the object to be replaced is gone for good, for no two objects there are alike
            if found is None:
                # Once there is an object, the promote cannot create the first.
                with suppress(TakenError):
                    self._note_void(move.dest, self._bucket.create(move.dest, new_void))
                    return True
                continue
            blob, info = found
            if info.token != move.before:
                return blob.rstrip() != move.data.rstrip()
            if self._bucket.swap(move.dest, _renewed(blob), info.token) is not None:
                return True

    def _current(self, key: str, token: Token) -> Token:
        known, now = self._moved.get(key, (token, token))
        return now if known == token else token

    def _void(self, key: str, token: Token) -> bool:
        """Replace the object of a token with a void; return whether the object was still there."""
        void = self._bucket.swap(key, new_void(), token)
        if void is not None:
            self._note_void(key, void)
        return void is not None

    def _note_void(self, key: str, token: Token) -> None:
        if len(self._voids) >= _MAX_VOIDS:
            self._voids.clear()
        self._voids[key] = token
        self._promoted.pop(key, None)

    def _note_promoted(self, key: str, token: Token) -> None:
        if len(self._promoted) >= _MAX_PROMOTED:
            self._promoted.clear()
        self._promoted[key] = token
        self._voids.pop(key, None)

    def _shown(self, info: ObjectInfo) -> ObjectInfo | None:
        """Return a caller's view of an object: None for a void."""
        if info.size != VOID_BYTES:
            return info
        if self._voids.get(info.path) == info.token:
            return None
        found = self._bucket.get(info.path)
        if found is None:
            return None
        if is_void(found[0]):
            self._note_void(info.path, found[1].token)
            return None
        return found[1]

    def _all_shown(self, infos: Sequence[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Yield a caller's view of some objects; possible voids are checked many at once."""
        rest = [info for info in infos if info.size != VOID_BYTES or self._voids.get(info.path) != info.token]
        doubtful = [info for info in rest if info.size == VOID_BYTES]
        looks = threads.ordered_map(self._shown, doubtful, waits=True) if doubtful else ()
        shown = dict(zip((info.path for info in doubtful), looks, strict=True))
        for info in rest:
            if (seen := shown.get(info.path, info)) is not None:
                yield seen


def _comes_never_again(key: str) -> bool:
    """Tell whether a deleted key is never written again; keys of refs are, and all fixed names."""
    folder, _, name = key.partition("/")
    return folder in _NEVER_AGAIN and not name.startswith("@")


def _renewed(blob: bytes) -> bytes:
    """Change the bytes of a promoted blob, and so its token, without changing its meaning."""
    if is_void(blob):
        return new_void()
    nonce = secrets.randbits(8 * _NONCE_BYTES)
    return blob.rstrip() + b"\n" + b"".join(_SPACES[nonce >> n & 1] for n in range(8 * _NONCE_BYTES))


def _careless(uri: str, header: str) -> RefusedError:
    return RefusedError(
        "keep a store at",
        uri,
        f"this storage does not honour {header}, so two concurrent writers could lose a checkpoint",
    )


def _blob_info(info: ObjectInfo) -> BlobInfo:
    return BlobInfo(key=info.path, size=info.size, modified_s=info.modified_s, token=info.token)

"""Objects of one bucket through obstore: requests, retries, uploads, and the errors of object stores."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tensorcas_mlflow.base import config, threads
from tensorcas_mlflow.errors import BackendError, ForbiddenError, RefusedError, without_secrets

if TYPE_CHECKING:
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """A store's description of one object."""

    path: str
    """Relative to the bucket's prefix."""
    size: int
    modified_s: float
    token: str
    """Its ETag, without quotes."""


class TakenError(Exception):
    """An object already exists at the path of a new one."""

    def __init__(self, path: str, *, is_certain: bool = False) -> None:
        super().__init__(path)
        self.is_certain = is_certain
        """True if no answer to the request was lost, so the request has created nothing, whatever is there now."""


class TooLongError(Exception):
    """An object longer than allowed."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class PartlySentError(Exception):
    """A failed upload, partly drawn; its cause has the reason."""


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_EXPIRED = re.compile(r"ExpiredToken|TokenRefreshRequired|RequestExpired|ExpiredAuthenticationToken")
_SAID = re.compile(r"<(Code|Message)>([^<]*)")
_OVERLOADED = frozenset({408, 409, 429})
"""Statuses below 500 with the meaning: later."""
_UNEXPLAINED = frozenset({400, 403})
"""Statuses for expired credentials; the body gives the reason, except for HEAD."""


def status_of(error: Exception) -> int | None:
    """Return the status of the answer behind an error; None if there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def says_later(error: Exception) -> bool:
    """Tell whether another client is writing the object at this moment, and may yet fail."""
    # Azure uses the same status for an existing object.
    return status_of(error) == 409 and "BlobAlreadyExists" not in str(error)


def may_have_expired(error: Exception) -> bool:
    """Tell whether credentials have expired, or may have: not every answer has room for the reason."""
    text, status = str(error), status_of(error)
    return bool(_EXPIRED.search(text)) or status == 401 or (status in _UNEXPLAINED and "performing HEAD" in text)


def may_pass(error: Exception) -> bool:
    """Tell whether the same request may succeed a little later."""
    import obstore

    lasting = (
        obstore.exceptions.InvalidPathError,
        obstore.exceptions.PermissionDeniedError,
        obstore.exceptions.UnauthenticatedError,
        FileNotFoundError,
    )
    if isinstance(error, (*lasting, ValueError, TypeError, NotImplementedError)):
        return False
    status = status_of(error)
    return status is None or status >= 500 or status in _OVERLOADED


def translated(action: str, path: str, uri: str, error: Exception, *, n_attempts: int = 1) -> BackendError:
    """Translate an error of obstore to ours.

    Args:
        action: The attempted action.
        path: Path of the object.
        uri: URI of the place.
        error: The last error.
        n_attempts: Number of attempts.
    """
    import obstore

    # It appears as the cause of ours in every traceback.
    error.args = tuple(without_credentials(fact) if isinstance(fact, str) else fact for fact in error.args)
    reason = f"{_said(error)} (in {uri})"
    if n_attempts > 1:
        reason = f"after {n_attempts} attempts: {reason}"
    # For a failed listing obstore raises only a general error.
    status = status_of(error)
    denied = obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError
    if _EXPIRED.search(str(error)):
        return ForbiddenError(action, path, f"the credentials have expired: renew them and try again; {reason}")
    if may_have_expired(error):
        return ForbiddenError(action, path, f"the credentials do not allow it or have expired; {reason}")
    if isinstance(error, denied) or status == 403:
        return ForbiddenError(action, path, reason)
    if isinstance(error, FileNotFoundError) or status == 404:
        return RefusedError(action, path, f"there is no such bucket or container; {reason}")
    return (BackendError if may_pass(error) else RefusedError)(action, path, reason)


def without_credentials(text: str) -> str:
    """Remove the environment's secrets, logins and signatures from a message of obstore or a server."""
    for secret in config.secrets():
        text = text.replace(secret, "…")
    return without_secrets(text)


def _said(error: Exception) -> str:
    """Return the sentence of an error; from an XML answer, perhaps of many lines, its facts."""
    text = without_credentials(str(error))
    said = text.partition("\n")[0].partition("<?xml")[0][:500].rstrip(" \ufeff")
    if "<?xml" not in text.partition("Debug source")[0]:
        return said
    return " ".join([said, *(value for _, value in _SAID.findall(text.partition("Debug source")[0])[:2])])


_MOST_WAITING_BYTES = 8 << 20


def joined(pieces: Iterable[Any], most_bytes: int) -> bytes | Iterator[Any]:
    """Join pieces, copied once, if their total is at most ``most_bytes``; otherwise return all of them in turn."""
    source = iter(pieces)
    drawn: list[memoryview] = []
    n_bytes = 0
    for piece in source:
        drawn.append(memoryview(piece).cast("B"))
        n_bytes += drawn[-1].nbytes
        if n_bytes > most_bytes:
            return itertools.chain(drawn, source)
    return b"".join(drawn)


class _BrokenOffError(Exception):
    """Ends an incomplete upload."""


class Flow:
    """Queue of pieces from the drawing thread to the sending one; few wait in between."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.is_fed = False
        """True if all pieces are in the queue."""
        self.has_begun = False
        """True if the sender has asked for a piece; from then on the upload cannot be repeated."""
        self._changed = threading.Condition()
        self._pieces: deque[Any] = deque()
        self._n_waiting_bytes = 0
        self._is_broken = False
        self._is_closed = False

    def feed(self, pieces: Iterable[Any]) -> None:
        """Queue pieces until there are no more, or the sender has stopped; raise their exceptions."""
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                if not view.nbytes:
                    continue
                with self._changed:
                    while self._n_waiting_bytes > _MOST_WAITING_BYTES and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed:
                        return
                    self._pieces.append(view)
                    self._n_waiting_bytes += view.nbytes
                    self.n_bytes += view.nbytes
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
            raise
        with self._changed:
            self.is_fed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop accepting pieces."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self.has_begun = True
            while not (self._pieces or self.is_fed or self._is_broken):
                self._changed.wait()
            if self._is_broken:
                raise _BrokenOffError
            if not self._pieces:
                raise StopIteration
            piece = self._pieces.popleft()
            self._n_waiting_bytes -= piece.nbytes
            self._changed.notify_all()
            return piece


T = TypeVar("T")

GIVE_UP_S = 60.0
"""After this long no further attempt begins. One attempt may itself take a while, if the store is silent."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 8.0
PART_BYTES = 8 << 20
"""Size of a part of an upload in parts; S3 takes 10,000 of them."""
_PARTS_AT_ONCE = 8

_process: int | None = None
"""The process that sent the first request: obstore's threads run there, and a forked child would wait for them."""


Connect = Callable[[], "tuple[ObjectStore, ObjectStore]"]


class Bucket:
    """Objects by path below a prefix.

    Every request is retried after a possibly transient failure, with growing pauses, for a minute or so. After a
    failure for expired credentials it is retried with new ones, if there are any. After a conditional write with a lost
    answer the client reads the object: if it holds the written bytes, the write was done. So conditional writes must
    use unique bytes.

    Raises from every method:
        BackendError: The store does not answer, or fails.
        ForbiddenError: The store forbids it, or the credentials have expired.
        RefusedError: The store will never do it.
    """

    def __init__(self, connect: Connect, *, uri: str, prefix: str, has_versions: bool) -> None:
        """Take two views of one bucket.

        Args:
            connect: Returns a view for idempotent requests, with retries, and one for conditional writes, without
                retries. Called again for views with new credentials after the last ones have expired.
            uri: URI of the place, for messages.
            prefix: Common beginning of all paths, without slashes around it.
            has_versions: Whether a conditional write names the version of an object and not its ETag.
        """
        self.uri = uri
        self._connect = connect
        self._reader, self._writer = connect()
        self._renewing = threads.Lock()
        self._prefix = f"{prefix}/" if prefix else ""
        self._has_versions = has_versions

    def head(self, path: str) -> ObjectInfo | None:
        """Describe an object, or return None if there is none."""
        import obstore

        def ask(attempt: int) -> ObjectInfo | None:
            try:
                return self._info(obstore.head(self._reader, self._prefix + path))
            except FileNotFoundError:
                return None

        return self._repeated("look at", path, ask)

    def get(self, path: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectInfo] | None:
        """Read an object and its description; None if there is none.

        Raises:
            TooLongError: It is longer than ``max_bytes``.
        """
        import obstore

        def ask(attempt: int) -> tuple[bytes, ObjectInfo] | None:
            try:
                answer = obstore.get(self._reader, self._prefix + path)
            except FileNotFoundError:
                return None
            info = self._info(answer.meta)
            if max_bytes is not None and info.size > max_bytes:
                raise TooLongError(info.size)
            return bytes(answer.bytes()), info

        return self._repeated("read", path, ask)

    def stream(self, path: str) -> tuple[Iterator[Any], ObjectInfo] | None:
        """Read an object in pieces of some 8 MiB, and its description; None if there is none.

        A read broken off in the middle raises and is not resumed.
        """
        import obstore

        def ask(attempt: int) -> Any:
            return _or_none(lambda: obstore.get(self._reader, self._prefix + path))

        answer = self._repeated("read", path, ask)
        if answer is None:
            return None

        def pieces() -> Iterator[Any]:
            try:
                yield from answer.stream(min_chunk_size=PART_BYTES)
            except Exception as error:
                raise translated("read", path, self.uri, error) from error

        return pieces(), self._info(answer.meta)

    def read_into(self, path: str, start: int, out: memoryview) -> int | None:
        """Fill a non-empty buffer with an object's bytes from ``start`` on.

        Returns:
            The number of available bytes; None if there is no object.
        """
        import obstore

        def ask(attempt: int) -> int | None:
            try:
                data = obstore.get_range(self._reader, self._prefix + path, start=start, length=len(out))
            except FileNotFoundError:
                return None
            except Exception as error:
                if status_of(error) == 416:
                    return 0
                raise
            n_bytes = len(data)
            out[:n_bytes] = memoryview(data)
            return n_bytes

        return self._repeated("read", path, ask)

    def walk(self, folder: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """List all objects below a folder, in the order of their paths; without markers, see `_is_marker`.

        Args:
            folder: Relative to the prefix; ``""`` is all of it.
            after: Only paths after this one.
        """
        last = after
        restart = after
        pages: Iterator[Any] | None = None

        def draw(attempt: int) -> Any:
            import obstore

            nonlocal pages, restart
            if pages is None or attempt:
                restart = last
                offset = None if last is None else self._prefix + last
                pages = iter(obstore.list(self._reader, (self._prefix + folder).rstrip("/") or None, offset=offset))
            return next(pages, ())

        while page := self._repeated("list", folder, draw):
            for meta in page:
                if not meta["path"].startswith(self._prefix):
                    continue  # the marker of the prefix itself; its name is not a position in the listing
                info = self._info(meta)
                if last is None or info.path > last:  # some stores begin at the offset and not after it
                    if not self._is_marker(info):
                        yield info
                    last = info.path
                elif info.path != restart and info.size and self.head(info.path) is not None:
                    # Continuing from here, or counting this one as listed, would silently skip objects. A folder's
                    # marker may be out of order: its slash is left out.
                    raise RefusedError(
                        "list", folder, f"this storage does not list in the order of names (in {self.uri})"
                    )

    def children(self, folder: str) -> tuple[list[ObjectInfo], list[str]]:
        """List the objects directly in a folder, and the names of the folders in it."""
        import obstore

        def ask(attempt: int) -> tuple[list[ObjectInfo], list[str]]:
            top = (self._prefix + folder).rstrip("/")
            found = obstore.list_with_delimiter(self._reader, top or None)
            names = [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]
            return [self._info(meta) for meta in found["objects"]], names

        infos, names = self._repeated("list", folder, ask)
        return [info for info in infos if info.path != folder and not self._is_marker(info)], names

    def create(self, path: str, data: bytes | Callable[[], bytes]) -> str:
        """Create an object and return its token.

        Args:
            path: Its path.
            data: Its bytes; or, if deleted bytes must not come back, a function that draws new ones for each attempt.
                The object of an attempt with a lost answer then counts as somebody else's.

        Raises:
            TakenError: There is one; it is unchanged.
        """
        import obstore

        def ask(attempt: int) -> str:
            blob = data if isinstance(data, bytes) else data()
            try:
                return _etag(obstore.put(self._writer, self._prefix + path, blob, mode="create", use_multipart=False))
            except obstore.exceptions.AlreadyExistsError as error:
                return self._settled(path, blob, attempt, error, TakenError(path, is_certain=not attempt))

        return self._repeated("write", path, ask)

    def swap(self, path: str, data: bytes, token: str) -> str | None:
        """Replace an object if it still has a token.

        Returns:
            The new token; None if another object or none is there.
        """
        import obstore

        def ask(attempt: int) -> str | None:
            version: dict[str, Any] = {"e_tag": f'"{token}"'}
            if self._has_versions:
                meta = _or_none(lambda: obstore.head(self._reader, self._prefix + path))
                if meta is None or _etag(meta) != token:
                    return None if not attempt else self._written(path, data)
                version = {"e_tag": meta["e_tag"], "version": meta["version"]}
            try:
                put = obstore.put(self._writer, self._prefix + path, data, mode=version, use_multipart=False)  # type: ignore[arg-type]
                return _etag(put)
            except (obstore.exceptions.PreconditionError, obstore.exceptions.AlreadyExistsError) as error:
                if says_later(error):
                    raise
                return self._written(path, data) if attempt else None
            except FileNotFoundError:
                return None

        return self._repeated("replace", path, ask)

    def put(self, path: str, data: bytes, *, content_type: str | None = None) -> None:
        """Write an object, replacing any, and optionally declare its content type to other programs."""
        import obstore

        said = None if content_type is None else {"Content-Type": content_type}
        whole: dict[str, Any] = {"use_multipart": False, "attributes": said}
        self._repeated("write", path, lambda attempt: obstore.put(self._reader, self._prefix + path, data, **whole))

    def write(self, path: str, pieces: Iterable[Any], *, content_type: str | None = None) -> None:
        """Write an object from pieces, replacing any; in one request if it is small. Raises like `upload`.

        The content type is declared for such a small object only.
        """
        content = joined(pieces, PART_BYTES)
        if isinstance(content, bytes):
            self.put(path, content, content_type=content_type)
        else:
            self.upload(path, content, before=self.head(path))

    def upload(self, path: str, pieces: Iterable[Any], *, before: ObjectInfo | None = None) -> str:
        """Write a large object in parts, drawn as they are sent, replacing any. Returns its token.

        The caller must choose a path nobody else writes.

        Args:
            path: Its path.
            pieces: Its bytes.
            before: The object there, if there is one: it is not mistaken for an upload with a lost answer.

        Raises:
            BaseException: ``pieces`` raised it; nothing is written then.
        """
        import obstore

        self._check_process()
        flow = Flow()

        def ask(attempt: int) -> str:
            reader = self._reader
            try:
                put = obstore.put(
                    reader,
                    self._prefix + path,
                    flow,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            except Exception as error:
                if not flow.has_begun:
                    raise
                if may_have_expired(error):
                    self._renew(reader)  # for the next call
                raise PartlySentError from error
            return _etag(put)

        def send() -> str:
            try:
                return self._repeated("write", path, ask)
            finally:
                flow.close()

        # This thread draws the pieces and another sends them: the source of the pieces may use this bucket meanwhile.
        sent = threads.start(send, "tensorcas-send")
        try:
            flow.feed(pieces)
        except BaseException:
            wait([sent])
            raise
        try:
            return sent.result()
        except PartlySentError as error:
            info = self.head(path) if flow.is_fed else None
            is_new = info is not None and (before is None or info.token != before.token)
            if info is not None and is_new and info.size == flow.n_bytes:
                return info.token  # all parts had arrived, and only the answer to the last request was lost
            cause = error.__cause__
            assert isinstance(cause, Exception)
            raise translated("write", path, self.uri, cause) from cause

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""
        import obstore

        def ask(attempt: int) -> None:
            _or_none(lambda: obstore.delete(self._reader, self._prefix + path))

        self._repeated("delete", path, ask)

    def _settled(self, path: str, data: bytes, attempt: int, error: Exception, refusal: Exception) -> str:
        if says_later(error):
            raise error
        written = self._written(path, data) if attempt else None
        if written is None:
            raise refusal
        return written

    def _written(self, path: str, data: bytes) -> str | None:
        """Return the token of an object if it holds these bytes: an earlier attempt has written them."""
        try:
            found = self.get(path, max_bytes=len(data))
        except TooLongError:
            return None
        return found[1].token if found is not None and found[0] == data else None

    def _is_marker(self, info: ObjectInfo) -> bool:
        # Consoles create a folder as an empty object with a slash at the end of its name. obstore strips the slash and
        # so returns a name without an object. No blob of ours is empty.
        return info.size == 0 and self.head(info.path) is None

    def _info(self, meta: Any) -> ObjectInfo:
        return ObjectInfo(
            path=meta["path"].removeprefix(self._prefix),
            size=meta["size"],
            modified_s=meta["last_modified"].timestamp(),
            token=_etag(meta),
        )

    def _check_process(self) -> None:
        global _process
        _process = _process or os.getpid()
        if os.getpid() != _process:
            raise RefusedError(
                "reach", self.uri, "a process made by fork cannot use its parent's connections: start it with 'spawn'"
            )

    def _renew(self, expired: ObjectStore) -> bool:
        """Connect anew, unless another thread has done so since; return whether it succeeded."""
        with self._renewing:
            if self._reader is expired:
                with suppress(ValueError):
                    self._reader, self._writer = self._connect()
            return self._reader is not expired

    def _repeated(self, action: str, path: str, ask: Callable[[int], T]) -> T:
        """Repeat a request until there is an answer."""
        self._check_process()
        give_up = time.monotonic() + GIVE_UP_S
        has_renewed = False
        for attempt in itertools.count():
            reader = self._reader
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 32)) * (0.5 + random.random() / 2)
            try:
                return ask(attempt)
            except (TakenError, TooLongError, BackendError, PartlySentError):
                raise
            except Exception as error:
                if may_have_expired(error) and not has_renewed:
                    has_renewed = True
                    if self._renew(reader):
                        continue
                if not may_pass(error) or time.monotonic() + pause > give_up:
                    raise translated(action, path, self.uri, error, n_attempts=attempt + 1) from error
            time.sleep(pause)
        raise AssertionError("unreachable")


def _or_none(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except FileNotFoundError:
        return None


def _etag(meta: Any) -> str:
    return (meta["e_tag"] or "").strip('"')

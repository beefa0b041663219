"""Objects of one bucket below a prefix, through obstore: asked again when it fails, and writes known to be done."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends._flow import Flow, joined
from tensorcas_mlflow.backends._object_errors import may_have_expired, may_pass, says_later, status_of, translated
from tensorcas_mlflow.backends._object_info import ObjectInfo, PartlySentError, TakenError, TooLongError
from tensorcas_mlflow.errors import BackendError, RefusedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

GIVE_UP_S = 60.0
"""After so long no further attempt is begun. One may itself take a while, if the store is silent."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 8.0
PART_BYTES = 8 << 20
"""Size of a part of an upload in parts; S3 takes 10,000 of them."""
_PARTS_AT_ONCE = 8

_process: int | None = None
"""The process that has sent the first request: obstore's threads are in that one, and its children wait for them."""


Connect = Callable[[], "tuple[ObjectStore, ObjectStore]"]


class Bucket:
    """Objects by path below a prefix.

    Every request that failed in a way that may pass is made again, with growing pauses, for a minute or so; one that
    failed for expired credentials is made again with new ones, if there are some. After a conditional write whose
    answer was lost, the object is read: if it holds what was written, the write was done. So whoever writes
    conditionally writes bytes that nobody else writes.

    Raises from every method:
        BackendError: The store does not answer, or fails.
        ForbiddenError: It does not allow it, or the credentials have expired.
        RefusedError: It will never do it.
    """

    def __init__(self, connect: Connect, *, uri: str, prefix: str, has_versions: bool) -> None:
        """Take two views of one bucket.

        Args:
            connect: Gives one for what can be asked twice without harm, which may repeat requests by itself, and one
                for conditional writes, which must not repeat any. Asked again, for views with new credentials, when
                those of the last ones have expired.
            uri: Of the place, for messages.
            prefix: What all paths begin with, without slashes around it.
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
        """Read an object, and say what it is; None if there is none.

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
        """Read an object piece by piece, some 8 MiB at a time, and say what it is; None if there is none.

        What breaks off after its beginning raises, and is not taken up again.
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
        """Fill a buffer, which is not empty, with an object's bytes from ``start`` on.

        Returns:
            How many bytes there were for it; None if there is no object.
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
            after: Only what comes after this path.
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
                    continue  # the marker of the prefix itself, whose name says nothing of where the listing is
                info = self._info(meta)
                if last is None or info.path > last:  # some stores begin at the offset and not after it
                    if not self._is_marker(info):
                        yield info
                    last = info.path
                elif info.path != restart and info.size and self.head(info.path) is not None:
                    # To go on from here, or to take this one for listed, would be to leave out objects in silence. A
                    # folder's marker may be out of order: its slash is left out.
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
            path: Where.
            data: Its bytes. Where they must not come again once they are gone, a function that draws others for each
                attempt: what an attempt has left whose answer was lost then counts as somebody else's.

        Raises:
            TakenError: There is one; it is as it was.
        """
        import obstore

        def ask(attempt: int) -> str:
            blob = data if isinstance(data, bytes) else data()
            try:
                return _etag(obstore.put(self._writer, self._prefix + path, blob, mode="create", use_multipart=False))
            except obstore.exceptions.AlreadyExistsError as error:
                return self._settled(path, blob, attempt, error, TakenError(path))

        return self._repeated("write", path, ask)

    def swap(self, path: str, data: bytes, token: str) -> str | None:
        """Replace an object that is still the one of a token.

        Returns:
            The new token; None if there is another object or none.
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
        """Write an object, whatever is there, and perhaps say what its bytes are to those who look at it without us."""
        import obstore

        said = None if content_type is None else {"Content-Type": content_type}
        whole: dict[str, Any] = {"use_multipart": False, "attributes": said}
        self._repeated("write", path, lambda attempt: obstore.put(self._reader, self._prefix + path, data, **whole))

    def write(self, path: str, pieces: Iterable[Any]) -> None:
        """Write an object from pieces, whatever is there; in one request if it is small. Raises as `upload`."""
        content = joined(pieces, PART_BYTES)
        if isinstance(content, bytes):
            self.put(path, content)
        else:
            self.upload(path, content, before=self.head(path))

    def upload(self, path: str, pieces: Iterable[Any], *, before: ObjectInfo | None = None) -> str:
        """Write a large object in parts, drawn as they are sent; whatever is there is replaced. Returns its token.

        A path that nobody else writes is for the caller to choose.

        Args:
            path: Where.
            pieces: Its bytes.
            before: The object there, if there is one: an upload whose answer was lost is not taken for done by it.

        Raises:
            BaseException: What ``pieces`` raises; nothing is written then.
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

        # Drawn here and sent there: what draws them may want to ask this bucket something meanwhile.
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
                return info.token  # all had arrived, and only the answer to the last request was lost
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
        """Give the token of an object if it holds these bytes: an earlier attempt has written them."""
        try:
            found = self.get(path, max_bytes=len(data))
        except TooLongError:
            return None
        return found[1].token if found is not None and found[0] == data else None

    def _is_marker(self, info: ObjectInfo) -> bool:
        # Consoles make a folder by an empty object whose name ends with a slash. obstore leaves the slash out, and so
        # tells a name of no object. No blob of ours is empty.
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
        """Connect anew, unless another thread has done so since; returns whether that could be done."""
        with self._renewing:
            if self._reader is expired:
                with suppress(ValueError):
                    self._reader, self._writer = self._connect()
            return self._reader is not expired

    def _repeated(self, action: str, path: str, ask: Callable[[int], T]) -> T:
        """Ask until there is an answer."""
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

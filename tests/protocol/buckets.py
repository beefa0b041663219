"""A bucket in memory: the real `Bucket` over requests that are steps of a run, whose answers may get lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, TypeVar

import obstore
import pytest

from tensorcas_mlflow.backends import Backend, Bucket, MemoryBackend, ObjectBackend
from tests.protocol.casts import Cast
from tests.protocol.interleave import Actor, Run, View, actors_uuid4

T = TypeVar("T")
Step = Callable[..., Any]
"""Carries out a request, when it is its turn: called with what, where, a function and the paths it may change."""
Loses = Callable[[str, str, int], bool]
"""Says of a write that is done whether its answer gets lost, from what it did, where, and the number of the write."""

MOST_LOST = 3
"""Largest number of lost answers to one write."""
URI = "tensorcas-s3://bucket"
HISTORY = "@history"
"""Holds, where it is kept, every change of an object: it is part of a run's state and no object."""
LATE = "@late"
"""Holds, where it is kept, the path of every request to delete, to be carried out once more; no object."""


def etag(data: bytes) -> str:
    """As S3 has it: equal bytes, equal ETag."""
    return hashlib.md5(data).hexdigest()


class Requests:
    """Stand-in for a store of obstore, for `Bucket`; each call is one request, carried out in one step."""

    def __init__(self, memory: MemoryBackend, step: Step, *, who: str = "", loses: Loses | None = None) -> None:
        self._memory = memory
        self._step = step
        self._who = who
        self._loses = loses
        self._n_writes = 0
        self._n_lost = 0
        self._lost_at: str | None = None

    def head(self, path: str) -> Any:
        return self._meta(path, *self._step("head", path, lambda: self._described(path)))

    def get(self, path: str) -> Any:
        data = self._step("get", path, lambda: self._found(path))
        meta = self._meta(path, len(data), etag(data).encode())
        return SimpleNamespace(meta=meta, bytes=lambda: data)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        data: bytes = self._step("get", path, lambda: self._found(path)[start : start + length])
        return data

    def list(self, folder: str | None, *, offset: str | None = None) -> Iterator[Any]:
        below = "" if folder is None else folder + "/"
        found = self._step("list", below, lambda: self._all(below, offset))
        return iter([[self._meta(*each) for each in found]])

    def list_with_delimiter(self, folder: str | None) -> Any:
        below = "" if folder is None else folder + "/"
        found = self._step("list", below, lambda: self._all(below, None))
        objects = [self._meta(*each) for each in found if "/" not in each[0].removeprefix(below)]
        names = {each[0].removeprefix(below).split("/")[0] for each in found if "/" in each[0].removeprefix(below)}
        return {"objects": objects, "common_prefixes": [below + name for name in sorted(names)]}

    def put(self, path: str, source: bytes | Iterable[Any], *, mode: Any = "overwrite", **options: Any) -> Any:
        data = source if isinstance(source, bytes) else b"".join(map(bytes, source))
        name = f"put {'if absent' if mode == 'create' else 'if unchanged' if isinstance(mode, Mapping) else ''}".strip()

        def write() -> bytes:
            now = self._memory._blobs.get(path)
            if mode == "create" and now is not None:
                raise obstore.exceptions.AlreadyExistsError("taken")
            if isinstance(mode, Mapping) and (now is None or f'"{etag(now[0])}"' != mode.get("version", mode["e_tag"])):
                raise obstore.exceptions.PreconditionError("changed")
            self._note(path, data)
            self._memory._set(path, data)
            return etag(data).encode()

        self._write(name, path, write)
        return {"e_tag": f'"{etag(data)}"', "version": f'"{etag(data)}"'}

    def delete(self, path: str) -> None:
        def remove() -> None:
            if LATE in self._memory._blobs:
                self._memory._set(LATE, self._memory._blobs[LATE][0] + f"{path}\n".encode())
            self._remove(path)

        self._write("delete", path, remove)

    def delete_again(self) -> None:
        """Carry out once more, in one step, every request to delete that anybody has made so far."""
        self._step("delete again", "*", lambda: [self._remove(path) for path in self._late()], self._late, HISTORY)

    def _late(self) -> Sequence[str]:
        return list(dict.fromkeys(self._memory._blobs[LATE][0].decode().splitlines()))

    def _remove(self, path: str) -> None:
        if path in self._memory._blobs:
            self._note(path, b"")
        self._memory.delete(path)

    def _write(self, action: str, path: str, function: Callable[[], object]) -> None:
        changes = (path, HISTORY, LATE)
        again = "again: " if self._lost_at == path else ""
        self._lost_at = None
        self._step(again + action, path, function, *changes)
        self._n_writes += 1
        self._n_lost = self._n_lost + 1 if again else 0
        # More in a row and `Bucket` gives up, as it should.
        if self._n_lost < MOST_LOST and self._loses is not None and self._loses(action, path, self._n_writes):
            self._lost_at = path
            raise obstore.exceptions.GenericError("the connection was closed before the answer came")

    def _note(self, path: str, data: bytes) -> None:
        if HISTORY in self._memory._blobs:
            entry = repr((self._who, path, data)).encode() + b"\n"
            self._memory._set(HISTORY, self._memory._blobs[HISTORY][0] + entry)

    def _found(self, path: str) -> bytes:
        if path not in self._memory._blobs:
            raise FileNotFoundError(path)
        return self._memory._blobs[path][0]

    def _described(self, path: str) -> tuple[int, bytes]:
        data = self._found(path)
        return len(data), etag(data).encode()

    def _all(self, below: str, offset: str | None) -> Sequence[tuple[str, int, bytes]]:
        paths = sorted(path for path in self._memory._blobs if path.startswith(below) and path not in (HISTORY, LATE))
        return [(path, *self._described(path)) for path in paths if offset is None or path > offset]

    def _meta(self, path: str, size: int, tag: bytes) -> dict[str, Any]:
        found = self._memory._blobs.get(path)
        modified_s = 0.0 if found is None else found[1]
        modified = datetime.fromtimestamp(modified_s, UTC)
        quoted = f'"{tag.decode()}"'
        return {"path": path, "size": size, "last_modified": modified, "e_tag": quoted, "version": quoted}


def over(requests: Requests, kind: type[ObjectBackend] = ObjectBackend, *, has_versions: bool = False) -> ObjectBackend:
    """The real backend and the real bucket over some requests."""
    store: Any = requests
    return kind(Bucket(lambda: (store, store), uri=URI, prefix="", has_versions=has_versions), uri=URI)


def delete_again(backend: Backend) -> None:
    """Repeat every delete request, as a network may at any moment."""
    assert isinstance(backend, ObjectBackend)
    requests: Any = backend._bucket._reader
    requests.delete_again()


def quietly(memory: MemoryBackend) -> ObjectBackend:
    """The objects of a run as nobody's view."""
    return over(Requests(memory, lambda action, path, function, *changes: function()))


def objects(
    kind: type[ObjectBackend] = ObjectBackend,
    *,
    loses: Mapping[str, Loses] | None = None,
    has_versions: bool = False,
) -> View:
    """Make a view of a run's blobs as objects of a bucket, with a step at every request.

    Args:
        kind: Of the backend.
        loses: By actor which answers to its writes get lost.
        has_versions: Whether a conditional write has to look up a version first.
    """

    def view(run: Run, actor: Actor) -> Backend:
        def step(action: str, path: str, function: Callable[[], T], *changes: str) -> T:
            return run.call(actor, action, path, function, *changes)

        requests = Requests(run.memory, step, who=actor.name, loses=(loses or {}).get(actor.name))
        return over(requests, kind, has_versions=has_versions)

    return view


def use_memory(patch: pytest.MonkeyPatch) -> None:
    """Have obstore's functions carry out what is asked of `Requests`, and actors draw by their own past."""
    for name in ("head", "get", "get_range", "list", "list_with_delimiter", "put", "delete"):
        patch.setattr(obstore, name, lambda store, *args, _name=name, **more: getattr(store, _name)(*args, **more))
    drawn = SimpleNamespace(token_hex=lambda n_bytes: actors_uuid4().hex, randbits=lambda n_bits: actors_uuid4().int)
    patch.setattr("tensorcas_mlflow.backends._objects.secrets", drawn)
    patch.setattr(
        "tensorcas_mlflow.backends._buckets.time", SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0)
    )


class ObjectCast(Cast):
    """A play over a bucket: what is true in the end is seen through the real backend."""

    def network(self) -> ObjectCast:
        """Add one that carries out, at some moment, each request to delete once more."""
        self.start = {**self.blobs(), LATE: b""}
        self.actors["network"] = delete_again
        return self

    def seen(self, memory: MemoryBackend) -> Backend:
        return quietly(memory)

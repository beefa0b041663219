"""A bucket in memory: the real `Bucket` over requests that are steps of a run, whose answers may get lost."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum
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
Keeps = Callable[[str, str, int], "Kept | None"]
"""Says of a write whether the network keeps its request, from what it does, where, and the number of the write."""

MOST_LOST = 3
"""Largest number of lost answers to one write."""
URI = "tensorcas-s3://bucket"
HISTORY = "@history"
"""Holds, where it is kept, every change of an object: it is part of a run's state and no object."""
LATE = "@late"
"""Holds, where it is kept, the requests that the network is to carry out at some later moment; no object."""
CARRIED = ", late"
"""Behind the name of an actor in the history: the network has carried out its request."""


class Kept(Enum):
    """Fault of a network that keeps a request to write."""

    TWICE = "twice"
    """It is carried out in its turn, and once more later."""
    LATE = "late"
    """It is not carried out in its turn and has no answer; it is carried out later."""


def deletions(action: str, path: str, number: int) -> Kept | None:
    """Keep every request to delete."""
    return Kept.TWICE if action == "delete" else None


def etag(data: bytes) -> str:
    """As S3 has it: equal bytes, equal ETag."""
    return hashlib.md5(data).hexdigest()


class Requests:
    """Stand-in for a store of obstore, for `Bucket`; each call is one request, carried out in one step."""

    def __init__(
        self,
        memory: MemoryBackend,
        step: Step,
        *,
        who: str = "",
        loses: Loses | None = None,
        keeps: Keeps | None = None,
    ) -> None:
        self._memory = memory
        self._step = step
        self._who = who
        self._loses = loses
        self._keeps = keeps
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
        condition = mode.get("version", mode["e_tag"]) if isinstance(mode, Mapping) else mode
        kind = {"create": "if absent", "overwrite": ""}.get(condition, "if unchanged")
        self._write(f"put {kind}".strip(), path, lambda: self._put(path, data, condition, self._who), data, condition)
        return {"e_tag": f'"{etag(data)}"', "version": f'"{etag(data)}"'}

    def delete(self, path: str) -> None:
        self._write("delete", path, lambda: self._remove(path, self._who))

    def carry_out_kept(self) -> None:
        """Carry out, in one step, every request that the network has kept so far."""
        self._step("carry out", "*", lambda: [self._carry_out(*kept) for kept in self._kept()], self._paths, HISTORY)

    def _kept(self) -> Sequence[tuple[str, str, bytes, str | None]]:
        return [ast.literal_eval(line) for line in self._memory._blobs[LATE][0].decode().splitlines()]

    def _paths(self) -> Sequence[str]:
        return list(dict.fromkeys(path for _, path, _, _ in self._kept()))

    def _carry_out(self, who: str, path: str, data: bytes, condition: str | None) -> None:
        if condition is None:
            self._remove(path, who + CARRIED)
            return
        with suppress(obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            self._put(path, data, condition, who + CARRIED)

    def _put(self, path: str, data: bytes, condition: str, who: str) -> bytes:
        now = self._memory._blobs.get(path)
        if condition == "create" and now is not None:
            raise obstore.exceptions.AlreadyExistsError("taken")
        if condition not in ("create", "overwrite") and (now is None or f'"{etag(now[0])}"' != condition):
            raise obstore.exceptions.PreconditionError("changed")
        self._note(who, path, data)
        self._memory._set(path, data)
        return etag(data).encode()

    def _remove(self, path: str, who: str) -> None:
        if path in self._memory._blobs:
            self._note(who, path, b"")
        self._memory.delete(path)

    def _write(
        self, action: str, path: str, function: Callable[[], object], data: bytes = b"", condition: str | None = None
    ) -> None:
        changes = (path, HISTORY, LATE)
        again = "again: " if self._lost_at == path else ""
        self._lost_at = None
        number = self._n_writes + 1
        kept = None if LATE not in self._memory._blobs or self._keeps is None else self._keeps(action, path, number)

        def act() -> object:
            if kept is not None:
                line = repr((self._who, path, data, condition)).encode() + b"\n"
                self._memory._set(LATE, self._memory._blobs[LATE][0] + line)
            return None if kept is Kept.LATE else function()

        self._step(again + action, path, act, *changes)
        self._n_writes = number
        self._n_lost = self._n_lost + 1 if again else 0
        is_lost = self._loses is not None and self._loses(action, path, number)
        # More in a row and `Bucket` gives up, as it should.
        if self._n_lost < MOST_LOST and (is_lost or kept is Kept.LATE):
            self._lost_at = path
            raise obstore.exceptions.GenericError("the connection was closed before the answer came")

    def _note(self, who: str, path: str, data: bytes) -> None:
        if HISTORY in self._memory._blobs:
            entry = repr((who, path, data)).encode() + b"\n"
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


def carry_out_kept(backend: Backend) -> None:
    """Carry out every request that the network has kept, as it may at any moment."""
    assert isinstance(backend, ObjectBackend)
    requests: Any = backend._bucket._reader
    requests.carry_out_kept()


def quietly(memory: MemoryBackend) -> ObjectBackend:
    """The objects of a run as nobody's view."""
    return over(Requests(memory, lambda action, path, function, *changes: function()))


def objects(
    kind: type[ObjectBackend] = ObjectBackend,
    *,
    loses: Mapping[str, Loses] | None = None,
    keeps: Mapping[str, Keeps] | None = None,
    has_versions: bool = False,
) -> View:
    """Make a view of a run's blobs as objects of a bucket, with a step at every request.

    Args:
        kind: Of the backend.
        loses: By actor which answers to its writes get lost.
        keeps: By actor which requests the network keeps, where there is a network; all deletions unless given.
        has_versions: Whether a conditional write has to look up a version first.
    """

    def view(run: Run, actor: Actor) -> Backend:
        def step(action: str, path: str, function: Callable[[], T], *changes: str) -> T:
            return run.call(actor, action, path, function, *changes)

        kept = deletions if keeps is None else keeps.get(actor.name)
        requests = Requests(run.memory, step, who=actor.name, loses=(loses or {}).get(actor.name), keeps=kept)
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
        """Add one that carries out, at some moment, each request that has been kept (`objects`)."""
        self.start = {**self.blobs(), LATE: b""}
        self.actors["network"] = carry_out_kept
        return self

    def seen(self, memory: MemoryBackend) -> Backend:
        return quietly(memory)

"""Runs several actors of real code against one backend in memory, one at a time, switching at every backend call.

Everything an actor draws at random is a function of its own past, so a schedule (who runs at each step) determines the
run. That makes schedules repeatable, and lets two of them be recognised as leading to the same state.
"""

from __future__ import annotations

import _thread
import random
import threading
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeVar

from tensorcas_mlflow.backends import Backend, BlobInfo, Children, FoundFile, MemoryBackend, Token
from tensorcas_mlflow.base.digest import Buffer

GENERATION = "condemned/@generation"

T = TypeVar("T")
Blobs = Mapping[str, bytes]
Program = Callable[[Backend], object]
"""An actor's program, called with its view of the backend. Its result depends on the actor's past alone."""
Meaning = Callable[[bytes], Hashable]
"""Maps the bytes of a blob to all that anybody reads out of them."""
NO_MEANINGS: Mapping[str, Meaning] = MappingProxyType({})
View = Callable[["Run", "Actor"], Backend]
"""Makes an actor's view of the backend."""

_real_uuid4 = uuid.uuid4
_acting = threading.local()


class KilledError(BaseException):
    """Ends the thread of an actor that is not to run any more. Nothing it does on its way out reaches the backend."""


class PrunedError(Exception):
    """Raised by a chooser to end a run that would only repeat another one."""


@dataclass(eq=False, slots=True)
class Actor:
    """One thread of the run. Its past determines what it does next."""

    name: str
    program: Program
    number: int
    go: Any = field(default_factory=_thread.allocate_lock)
    left: Any = field(default_factory=_thread.allocate_lock)
    """Free once the thread has ended."""
    pending: str = "start"
    """The call it is about to make."""
    past: int = 0
    """Hash of all calls so far and their results."""
    n_drawn: int = 0
    said: object = None
    """Result of its program."""
    done: bool = False
    killed: bool = False
    error: BaseException | None = None

    def state(self) -> Hashable:
        """Return what determines its next steps; of an actor that has ended, only the outcome."""
        if self.killed:
            return "killed"
        if self.done:
            said = self.said if isinstance(self.said, Hashable) else self.past
            return ("done", said, self.error and self.past)
        return (self.past, self.pending == "start")

    @property
    def can_run(self) -> bool:
        return not (self.done or self.killed)


@dataclass(frozen=True, slots=True)
class Kill:
    """The decision that an actor never runs again, as if its process had died."""

    actor: Actor


Decision = Actor | Kill
Chooser = Callable[["Run", Actor | None], Decision]
"""Called before every call with the run and the current actor, if that can go on; says what happens next."""


def memory_of(blobs: Blobs, *, is_remote: bool = False) -> MemoryBackend:
    """A backend holding some blobs."""
    backend = MemoryBackend(is_remote=is_remote)
    for key, data in blobs.items():
        backend.put_new(key, [data])
    return backend


def blobs_of(backend: MemoryBackend) -> dict[str, bytes]:
    return {key: data for key, (data, _, _) in backend._blobs.items()}


class Run:
    """One schedule, carried out."""

    def __init__(
        self,
        blobs: Blobs,
        programs: Mapping[str, Program],
        chooser: Chooser,
        *,
        weak_lists: random.Random | None = None,
        view: View | None = None,
        is_remote: bool = False,
        meanings: Mapping[str, Meaning] = NO_MEANINGS,
    ) -> None:
        """Carry out a schedule.

        Args:
            blobs: What the backend holds at the start.
            programs: By actor.
            chooser: The schedule.
            weak_lists: If given, listings take time, and it draws which of the blobs that came or went meanwhile are
                listed.
            view: What the actors see of the backend, if not all there is.
            is_remote: Whether the backend is one of a remote store.
            meanings: Functions by key. Each maps a blob's bytes to what the state of the run counts instead of them.
        """
        self._meanings = meanings
        self.memory = memory_of(blobs, is_remote=is_remote)
        self.content = 0
        """Hash of all blobs, relative to the start."""
        self.actors = [Actor(name, program, number) for number, (name, program) in enumerate(programs.items())]
        self.trace: list[str] = []
        self.weak_lists = weak_lists
        self._broken: BaseException | None = None
        self._chooser = chooser
        self._view: View = view or WatchedBackend
        self._stopping = False
        self._over = _thread.allocate_lock()
        self._over.acquire()
        for actor in self.actors:
            actor.go.acquire()
            actor.left.acquire()
            # An object of `threading` would have this thread wait until the new one runs.
            _thread.start_new_thread(self._act, (actor,))
        self._hand_on(None)
        self._over.acquire()
        self._stopping = True
        for actor in self.actors:
            if not actor.done and actor.go.locked():
                actor.go.release()
        for actor in self.actors:
            actor.left.acquire()
        if self._broken is not None:
            raise self._broken

    def errors(self) -> dict[str, BaseException]:
        """Return the errors raised by actors, by name."""
        return {actor.name: actor.error for actor in self.actors if actor.error is not None}

    def state(self, current: Actor | None) -> int:
        """Hash of everything that determines what can still happen, and of what the ended programs returned."""
        parts = tuple(actor.state() for actor in self.actors)
        return hash((self.content, parts, -1 if current is None else current.number))

    def call(
        self,
        actor: Actor,
        action: str,
        key: str,
        function: Callable[[], T],
        *changes: str | Callable[[], Sequence[str]],
    ) -> T:
        """Make one call of an actor, when it is its turn.

        Args:
            actor: Whose.
            action: What, for the trace.
            key: Where.
            function: Makes the call.
            changes: Keys the call may change, or what gives them when it is its turn.
        """
        if action in ("get", "stat") and key.rpartition("/")[2] == "format":
            # Nobody ever changes it, so when it is looked at makes no difference.
            return function()
        self._wait_for_turn(actor, f"{action} {key}")
        changed = [key for each in changes for key in ([each] if isinstance(each, str) else each())]
        before = [self._hash_of(key) for key in changed]
        try:
            result = function()
        except Exception as error:
            actor.past = hash((actor.past, action, key, type(error)))
            raise
        for each, was in zip(changed, before, strict=True):
            self.content ^= was ^ self._hash_of(each)
        actor.past = hash((actor.past, action, key, _digest_of(result)))
        return result

    def _wait_for_turn(self, actor: Actor, pending: str) -> None:
        self._check_alive(actor)
        actor.pending = pending
        self._hand_on(actor)
        self._check_alive(actor)
        self.trace.append(f"{actor.name}: {pending}")

    def _check_alive(self, actor: Actor) -> None:
        if self._stopping or actor.killed:
            raise KilledError

    def _hash_of(self, key: str) -> int:
        found = self.memory._blobs.get(key)
        return 0 if found is None else hash((key, self._meanings.get(key, _as_it_is)(found[0])))

    def _hand_on(self, current: Actor | None) -> None:
        """Let the chooser decide who is next, and wait until it is this actor's turn again."""
        at_turn = current if current is not None and current.can_run else None
        while True:
            if not any(actor.can_run for actor in self.actors):
                self._over.release()
                return
            try:
                decision = self._chooser(self, at_turn)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the run
                self._broken = error
                self._stopping = True
                self._over.release()
                return
            if isinstance(decision, Actor):
                break
            decision.actor.killed = True
            self.trace.append(f"{decision.actor.name}: dies before {decision.actor.pending}")
            if at_turn is decision.actor:
                at_turn = None
        if not decision.can_run:
            self._broken = AssertionError(
                f"{decision.name} cannot run any more: was this run the same as the last one?"
            )
            self._stopping = True
            self._over.release()
            return
        if decision is current:
            return
        decision.go.release()
        if current is not None and current.can_run:
            current.go.acquire()

    def _act(self, actor: Actor) -> None:
        try:
            self._act_in_turn(actor)
        finally:
            actor.left.release()

    def _act_in_turn(self, actor: Actor) -> None:
        actor.go.acquire()
        _acting.actor = actor
        try:
            if not self._stopping:
                actor.said = actor.program(self._view(self, actor))
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001 - judged by who checks the run
            actor.error = error
        if not actor.killed and not self._stopping:
            actor.done = True
            self._hand_on(None)
        actor.done = True


class WatchedBackend(Backend):
    """One actor's view of the backend in memory."""

    def __init__(self, run: Run, actor: Actor) -> None:
        self.uri = run.memory.uri
        self.is_remote = run.memory.is_remote
        self._run = run
        self._actor = actor

    def _call(self, action: str, key: str, function: Callable[[], T], *changes: str) -> T:
        return self._run.call(self._actor, action, key, function, *changes)

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        data = [bytes(piece) for piece in pieces]
        return self._call("put", key, lambda: self._run.memory.put_new(key, data, durable=durable), key)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        memory = self._run.memory
        self._call(
            "promote", dest, lambda: memory.promote(source, dest, data, token=token, replace=replace), source, dest
        )

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        return self._call("withdraw", key, lambda: self._run.memory.withdraw(key, token), key)

    def stat(self, key: str) -> BlobInfo | None:
        return self._call("stat", key, lambda: self._run.memory.stat(key))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._call("get", key, lambda: self._run.memory.get(key, max_bytes=max_bytes))

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        def read() -> int:
            self._run.memory.read_into(key, start, out)
            return hash(bytes(out))

        self._call("read", key, read)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        def look() -> Sequence[BlobInfo]:
            return tuple(self._run.memory.list(prefix, after=after))

        found = self._call("list", prefix, look)
        draw = self._run.weak_lists
        if draw is not None:
            later = self._call("list on", prefix, look)
            both = {info.key for info in found} & {info.key for info in later}
            everything = {info.key: info for info in (*found, *later)}
            found = tuple(info for key, info in everything.items() if key in both or draw.random() < 0.5)
        return iter(found)

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        return self._call("list", prefix, lambda: self._run.memory.list_dir(prefix))

    def files(self) -> Iterator[FoundFile]:
        return self._run.memory.files()

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._call("delete", key, partial(self._run.memory.delete, key), key)


def _as_it_is(data: bytes) -> bytes:
    return data


def _digest_of(result: Any) -> int:
    """Hash of what a call returned, without tokens and times, which depend on what others did."""
    if isinstance(result, Children):
        result = (result.facts(), sorted(result.segments))
    if isinstance(result, tuple | list):
        return hash(tuple(map(_digest_of, result)))
    if isinstance(result, BlobInfo):
        # What an actor does may depend on whether it has seen this generation before.
        return hash((result.key, result.size, result.token if result.key == GENERATION else 0))
    if isinstance(result, str):
        return 0  # a token
    return hash(result)


def actors_uuid4() -> uuid.UUID:
    """Stands in for ``uuid.uuid4``: in an actor's thread, names that depend on its own past only."""
    actor: Actor | None = getattr(_acting, "actor", None)
    if actor is None:
        return _real_uuid4()
    actor.n_drawn += 1
    return _uuid4_of(actor.name, actor.n_drawn)


@cache
def _uuid4_of(name: str, number: int) -> uuid.UUID:
    return uuid.UUID(int=random.Random(f"{name}/{number}").getrandbits(128), version=4)

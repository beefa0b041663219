"""Plays on the contract of `promote` and `withdraw` alone, and what must be true of every change that is made."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tensorcas_mlflow.backends import Backend, ObjectBackend, is_void, new_void
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError
from tests.protocol.buckets import CARRIED, HISTORY, LATE, Keeps, Kept, Loses, carry_out_kept, etag, objects, quietly
from tests.protocol.interleave import Program, Run
from tests.protocol.schedules import Exploration, explore

DEST = "refs/@1"
OLD = b"the old ref"
START: Mapping[str, Mapping[str, bytes]] = {"absent": {}, "a blob": {DEST: OLD}, "a void": {DEST: new_void()}}


@dataclass(frozen=True, slots=True)
class Record:
    """Summary of the changes so far: all that the checks need to know of them.

    Runs whose changes have one summary are one state, so the exploration follows only one of them.
    """

    at_dest: bytes | None
    given_up: frozenset[str] = frozenset()
    """Promoters whose intents were withdrawn."""
    ended: frozenset[str] = frozenset()
    """Actors that removed a blob from the destination."""
    commits: tuple[str, ...] = ()
    """Writers of the destination in alphabetical order, once for each write."""
    failure: str | None = None
    """The first change that was not allowed."""


@dataclass
class Play:
    """A cast of actors that promote, withdraw, delete and look, with the blobs at the start."""

    start: Mapping[str, bytes]
    actors: dict[str, Program] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """By actor that promotes or puts: its source, "" for one that puts."""
    replaces: set[str] = field(default_factory=set)
    withdrawn_by: dict[str, str] = field(default_factory=dict)
    """By actor that withdraws: what."""
    removers: set[str] = field(default_factory=set)
    """Actors that may remove the blob at the destination."""
    loses: dict[str, Loses] = field(default_factory=dict)
    keeps: dict[str, Keeps] | None = None
    """By actor which requests the network keeps; None for all deletions."""

    def promoter(self, name: str, *, replace: bool, times: int = 1, declares: bool = False) -> Play:
        """Add one that promotes an intent of its own, again and again if it is refused.

        Args:
            name: Of the actor.
            replace: Whether it replaces a blob at the destination.
            times: Number of its attempts.
            declares: Whether it also creates the intent; otherwise the intent is there at the start.
        """
        source = f"intents/{name}"

        def program(backend: Backend) -> str:
            token = backend.put_new(source, [intent_of(name)]) if declares else etag(intent_of(name))
            for _ in range(times):
                try:
                    backend.promote(source, DEST, ref_of(name), token=token, replace=replace)
                except BlobExistsError:
                    continue
                except BlobNotFoundError:
                    return "gone"
                return "promoted"
            return "taken"

        if not declares:
            self.start = {**self.start, source: intent_of(name)}
        self.sources[name] = source
        if replace:
            self.replaces.add(name)
        return self._add(name, program)

    def putter(self, name: str, key: str = DEST) -> Play:
        def program(backend: Backend) -> str:
            try:
                backend.put_new(key, [ref_of(name)])
            except BlobExistsError:
                return "taken"
            return "put"

        self.sources[name] = ""
        return self._add(name, program)

    def withdrawer(self, name: str, key: str) -> Play:
        def program(backend: Backend) -> bool | None:
            info = backend.stat(key)
            return None if info is None else backend.withdraw(key, info.token)

        self.withdrawn_by[name] = key
        if key == DEST:
            self.removers.add(name)
        return self._add(name, program)

    def deleter(self, name: str, key: str = DEST) -> Play:
        self.removers.add(name)
        return self._add(name, lambda backend: backend.delete(key))

    def network(self) -> Play:
        """Add one that carries out, at some moment, each request that has been kept."""
        self.start = {**self.start, LATE: b""}
        return self._add("network", carry_out_kept)

    def keeping(self, name: str, number: int, kept: Kept) -> Play:
        """Add a network that keeps one of an actor's writes."""
        self.keeps = {name: lambda action, path, n: kept if n == number else None}
        return self.network()

    def looker(self, name: str, look: Callable[[Backend], object]) -> Play:
        """Add one that looks at the destination; it says what it sees, as `check` knows it."""
        return self._add(name, look)

    def losing(self, name: str, number: int) -> Play:
        """Have the answer to one of an actor's writes get lost."""
        self.loses[name] = lambda action, path, n: n == number
        return self

    def explore(
        self, kind: type[ObjectBackend] = ObjectBackend, *, deaths: Sequence[str] = (), has_versions: bool = False
    ) -> Exploration:
        """Try all schedules."""
        start = {**self.start, HISTORY: b""}
        view = objects(kind, loses=self.loses, keeps=self.keeps, has_versions=has_versions)
        meanings = {HISTORY: cache(self._record)}
        return explore(
            start, self.actors, self.check, max_preemptions=None, deaths=deaths, view=view, meanings=meanings
        )

    def check(self, run: Run) -> str | None:
        """Say what is wrong after a run."""
        try:
            for name, error in run.errors().items():
                raise AssertionError(f"{name} raised {error!r}") from error
            record = self._record(run.memory._blobs[HISTORY][0])
            assert record.failure is None, record.failure
            self._check_end(run, record)
        except AssertionError as error:
            return f"{error}\n{run.memory._blobs[HISTORY][0].decode()}"
        return None

    def _add(self, name: str, program: Callable[[Backend], object]) -> Play:
        self.actors[name] = program
        return self

    def _record(self, lines: bytes) -> Record:
        """Read every change of an object: by whom, where, and to what (nothing if it was deleted)."""
        record = Record(at_dest=shown(self.start.get(DEST, b"")))
        for line in lines.decode().splitlines():
            try:
                record = self._after(record, *ast.literal_eval(line))
            except AssertionError as error:
                return replace(record, failure=str(error))
        return record

    def _after(self, record: Record, who: str, path: str, data: bytes) -> Record:
        """Return the record after one more change, which must be an allowed one."""
        is_own_turn = not who.endswith(CARRIED)
        who = who.removesuffix(CARRIED)
        if is_own_turn and path == self.sources.get(who) and data == intent_of(who):
            record = replace(record, given_up=record.given_up - {who})  # it declares, and its promise begins now
        if path in self.sources.values() and shown(data) is None and who in self.withdrawn_by and is_void(data):
            # A ref that stands when its intent is withdrawn is one that nobody takes for committed.
            name = path.rpartition("/")[2]
            # Only an intent that came back after its commit may go: the commit stands.
            assert self.keeps or record.at_dest != ref_of(name), f"{path} was withdrawn although it is promoted"
            record = replace(record, given_up=record.given_up | {name})
        if path != DEST:
            return record
        commits = tuple(sorted([*record.commits, who])) if shown(data) == ref_of(who) else record.commits
        record, at_dest = replace(record, at_dest=shown(data), commits=commits), record.at_dest
        if record.at_dest == at_dest:
            return record
        if record.at_dest is None:
            assert who in self.removers, f"{who} lost {at_dest!r}"
            # Who withdraws or deletes takes away what it has seen, and not what has taken its place.
            assert who not in record.ended, f"{who} lost {at_dest!r} too"
            return replace(record, ended=record.ended | {who})
        assert record.at_dest == ref_of(who), f"{who} wrote {data!r}"
        assert at_dest is None or who in self.replaces, f"{who} replaced {at_dest!r}"
        assert who not in record.given_up, f"{who} was promoted after its source was withdrawn"
        return record

    def _check_end(self, run: Run, record: Record) -> None:
        commits = record.commits
        memory = quietly(run.memory)
        for actor in run.actors:
            name, said = actor.name, actor.said
            source = self.sources.get(name)
            if not source:
                continue
            is_withdrawn = any(self._said(run, who) is True for who, key in self.withdrawn_by.items() if key == source)
            assert commits.count(name) <= 1 or self.loses or self.keeps, f"{name} was promoted twice"
            if said == "promoted":
                assert name in commits, f"{name} says it is promoted"
                # A creation that is carried out late leaves an intent of nobody, which a collection gives up.
                assert self.keeps or memory.stat(source) is None, f"{source} is still there"
            elif said == "gone":
                assert name not in commits or self.loses, f"{name} is promoted and says it is not"
                assert is_withdrawn or self.loses, f"nobody withdrew the source of {name}"
            elif said == "taken":
                assert name not in commits, f"{name} is promoted and says it is not"
                assert is_withdrawn or memory.stat(source) is not None, f"{source} is gone"
            else:
                assert actor.killed, f"{name} said {said!r}"
                assert name in commits or is_withdrawn or memory.stat(source) is not None, f"{source} is gone"
        last = shown(run.memory._blobs[DEST][0]) if DEST in run.memory._blobs else None
        deleters = self.removers - self.withdrawn_by.keys()
        has_deleted = any(not actor.killed and actor.name in deleters for actor in run.actors)
        assert not has_deleted or last != OLD, "what was deleted is there"
        assert (memory.stat(DEST) is None) == (last is None), "a void shows"
        assert [info.key for info in memory.list("refs")] == [DEST] * (last is not None), "a void is listed"
        for name, actor_said in ((actor.name, actor.said) for actor in run.actors):
            if name.startswith("look"):
                known = {None, OLD, *map(ref_of, self.sources)}
                assert actor_said in known, f"{name} saw {actor_said!r}"

    def _said(self, run: Run, name: str) -> object:
        return next(actor.said for actor in run.actors if actor.name == name)


def intent_of(name: str) -> bytes:
    return f"the intent of {name}".encode()


def ref_of(name: str) -> bytes:
    return f"the ref of {name}".encode()


def shown(data: bytes) -> bytes | None:
    """Return an object's bytes as a reader takes them: without trailing white space, None for a void."""
    return None if not data or is_void(data) else data.rstrip()

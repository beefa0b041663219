"""Each rule of the protocol, switched off: the explorer must find a schedule that loses a committed checkpoint.

That is what shows that the explorations of the real code could fail.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, BlobInfo, MemoryBackend, Token
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance import _gc
from tensorcas_mlflow.maintenance._gc_survey import Survey, survey
from tensorcas_mlflow.store import PendingSave, _save, protocol
from tensorcas_mlflow.store import _save as _claim
from tensorcas_mlflow.store.protocol import Condemnation, intent_bytes
from tests.protocol.casts import Cast
from tests.protocol.interleave import Run, WatchedBackend
from tests.protocol.schedules import Exploration, Script, explore
from tests.protocol.test_schedules import (
    old_pack,
    save_against_collection,
    spared_by_another,
    trained_and_dropped,
    two_copies,
)

Patch = Callable[[pytest.MonkeyPatch], None]


# --- the writer's rules


def probe_before_reading_the_lists(patch: pytest.MonkeyPatch) -> None:
    declare = PendingSave._declare

    def probe_then_declare(self: PendingSave, known: str | None) -> None:
        put_new = self._backend.put_new

        class ProbesOnceDeclared:
            def __getattr__(this, name: str) -> Any:  # noqa: N805
                return getattr(backend, name)

            def put_new(this, *args: Any, **kwargs: Any) -> Token:  # noqa: N805
                token = put_new(*args, **kwargs)
                self._backend = backend
                self._catalog.refresh()
                places = self._catalog.find(self._unique)
                there = {
                    name: backend.stat(pack_key(name)) is not None
                    for name in sorted({places.packs[number] for number in places.pack[places.found]})
                }
                self._catalog.probed = (places, there)  # type: ignore[attr-defined]
                return token

        backend = self._backend
        self._backend = ProbesOnceDeclared()  # type: ignore[assignment]
        declare(self, known)

    def probe(
        backend: Backend, catalog: Any, digests: Any, condemned: Condemnation, *, check_bases: Any, **_: Any
    ) -> Any:
        check_bases()
        places, there = catalog.probed
        names = [places.packs[number] if found else "" for number, found in zip(places.pack, places.found, strict=True)]
        return np.array([not there.get(name, False) or name in condemned.packs for name in names])

    patch.setattr(PendingSave, "_declare", probe_then_declare)
    patch.setattr(_save, "probe", probe)


def rely_on_condemned_packs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_save, "read_condemned", lambda backend: Condemnation(lists=(), generation=None))


def take_the_index_for_evidence(patch: pytest.MonkeyPatch) -> None:
    def probe(
        backend: Backend, catalog: Any, digests: Any, condemned: Condemnation, *, check_bases: Any, **_: Any
    ) -> Any:
        check_bases()
        catalog.refresh()
        return ~catalog.find(digests, condemned.packs).found

    patch.setattr(_save, "probe", probe)


def begin_no_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(protocol, "begin_generation", lambda backend: None)


def name_no_digests_in_the_intent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_claim, "intent_bytes", lambda manifest, digests, **more: intent_bytes(manifest, digests[:0], **more))


def give_a_manifest_the_same_name_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_save, "new_name", lambda: "0" * 8 + uuid.uuid4().hex[8:])


class UnfencedBackend(WatchedBackend):
    """A view whose commit succeeds although the intent was withdrawn."""

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        try:
            super().promote(source, dest, data, token=token, replace=replace)
        except BlobNotFoundError:
            with suppress(BlobExistsError):
                super().put_new(dest, [data])


# --- the collector's rules


def look_only_once(patch: pytest.MonkeyPatch) -> None:
    def lazy(backend: Any, grace_s: float, *, count_stale: bool, **more: Any) -> Survey:
        if not count_stale:
            return survey(backend, grace_s, count_stale=False, **more)
        if not hasattr(backend, "surveyed"):
            backend.surveyed = survey(backend, grace_s, count_stale=True)
        surveyed: Survey = backend.surveyed
        return surveyed

    patch.setattr(_gc, "survey", lazy)


def look_through(patch: pytest.MonkeyPatch, view: Callable[[Backend], Any]) -> None:
    """Have collectors survey another view of the backend."""
    patch.setattr(_gc, "survey", lambda backend, *args, **kwargs: survey(view(backend), *args, **kwargs))


def do_not_count_intents(patch: pytest.MonkeyPatch) -> None:
    look_through(patch, lambda backend: Without("intents", backend))


def do_not_abort_what_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_gc, "_abort", lambda backend, key: False)
    patch.setattr(_gc, "survey", lambda *args, **kwargs: survey(*args, **{**kwargs, "count_stale": False}))


def read_refs_before_intents(patch: pytest.MonkeyPatch) -> None:
    look_through(patch, lambda backend: Early("refs", "intents", backend))


def read_packs_before_condemned_lists(patch: pytest.MonkeyPatch) -> None:
    look_through(patch, lambda backend: Early("packs", "condemned", backend))


def ignore_the_lists_of_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Survey, "condemned_packs", lambda self: frozenset())


def drop_the_lists_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    def careless(backend: Backend, grace_s: float, *, count_stale: bool, **more: Any) -> Survey:
        state = survey(backend, grace_s, count_stale=count_stale, **more)
        if count_stale:
            return state
        for condemned in state.dead_lists:
            backend.delete(condemned.key)
        return replace(state, lists=[], dead_lists=[])

    patch.setattr(_gc, "survey", careless)


def finish_a_list_without_listing_it(patch: pytest.MonkeyPatch) -> None:
    honest = protocol.condemned_bytes
    others: set[str] = set()

    def noting(*args: Any, **kwargs: Any) -> Survey:
        state = survey(*args, **kwargs)
        others.clear()
        others.update(state.condemned_packs())
        return state

    patch.setattr(_gc, "survey", noting)
    patch.setattr(protocol, "condemned_bytes", lambda packs, *more: honest(packs - others, *more))


class ListGoesFirst(WatchedBackend):
    """A view of a collector that removes its list before it deletes what is on it."""

    _own = ""

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        if key.startswith("condemned/"):
            self._own = key
        return super().put_new(key, pieces, durable=durable)

    def delete(self, *keys: str) -> None:
        if self._own and any(key.startswith("packs/") for key in keys):
            super().delete(self._own)
        super().delete(*keys)


class AllListsGo(WatchedBackend):
    """A view of a collector that, when it is done, removes all lists whatever has become of what is on them."""

    def delete(self, *keys: str) -> None:
        super().delete(*keys)
        if any(key.startswith("condemned/") for key in keys):
            for info in list(super().list("condemned")):
                super().delete(info.key)


class Around:
    """Passes everything on to a backend."""

    def __init__(self, backend: Backend) -> None:
        self._inner = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Without(Around):
    """Leaves out what is below one prefix."""

    def __init__(self, prefix: str, backend: Backend) -> None:
        super().__init__(backend)
        self._prefix = prefix

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        return iter(()) if prefix == self._prefix else self._inner.list(prefix, after=after)


class Early(Around):
    """Shows the blobs below one prefix as they were when another one was listed."""

    def __init__(self, prefix: str, when: str, backend: Backend) -> None:
        super().__init__(backend)
        self._prefix = prefix
        self._when = when
        self._then: MemoryBackend | None = None

    def _at(self, key: str) -> Backend:
        return self._then if self._then is not None and key.startswith(self._prefix) else self._inner

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if prefix == self._when and self._then is None:
            then = MemoryBackend()
            for info in self._inner.list(self._prefix):
                try:
                    then.put_new(info.key, [self._inner.get(info.key)])
                except BlobNotFoundError:
                    continue
            self._then = then
        return self._at(prefix).list(prefix, after=after)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._at(key).get(key, max_bytes=max_bytes)

    def stat(self, key: str) -> BlobInfo | None:
        return self._at(key).stat(key)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self._at(key).read_into(key, start, out)


# --- what is found


@dataclass(frozen=True)
class RuleOff:
    name: str
    cast: Callable[[], Cast]
    max_preemptions: int
    patch: Patch | None = None
    view: type[WatchedBackend] | None = None
    is_remote: bool = False


def warm_writer() -> Cast:
    """A writer that has read the index before its pack was collected."""
    cast = old_pack()
    blobs = cast.blobs()
    return cast.executor("collector", blobs).writer("writer", "ac", 1, warm_from=blobs)


def a_save_and_two_collectors() -> Cast:
    """Somebody saves again what two collectors have planned to delete."""
    return old_pack().writer("writer", "ab", 1).collector("first").collector("second")


def a_save_and_a_planned_collection() -> Cast:
    """Somebody saves what shares a chunk with a pack that a collector has planned to delete."""
    cast = old_pack()
    return cast.executor("collector", cast.blobs(), grace_s=3600).writer("writer", "ac", 1)


RULES = [
    RuleOff("the lists are read before the index", a_save_and_a_planned_collection, 2, probe_before_reading_the_lists),
    RuleOff("what is condemned is not relied on", a_save_and_a_planned_collection, 2, rely_on_condemned_packs),
    RuleOff("an index entry is no evidence", warm_writer, 1, take_the_index_for_evidence),
    RuleOff("the intent names the digests", a_save_and_a_planned_collection, 2, name_no_digests_in_the_intent),
    RuleOff(
        "a deleted manifest's name is not used again",
        a_save_and_two_collectors,
        2,
        give_a_manifest_the_same_name_again,
    ),
    RuleOff("the commit is fenced", save_against_collection, 2, view=UnfencedBackend),
    RuleOff("a collector looks again", a_save_and_a_planned_collection, 2, look_only_once),
    RuleOff("intents count", save_against_collection, 2, do_not_count_intents),
    RuleOff("what does not count is aborted", save_against_collection, 2, do_not_abort_what_is_not_counted),
    RuleOff("intents are read before refs", a_save_and_a_planned_collection, 2, read_refs_before_intents),
    RuleOff("lists are read before packs", two_copies, 2, read_packs_before_condemned_lists),
    RuleOff("a condemned copy is no copy", two_copies, 2, ignore_the_lists_of_others),
    RuleOff("a dead list is finished", a_save_and_two_collectors, 2, drop_the_lists_of_the_dead),
    RuleOff("a collector begins a generation", trained_and_dropped, 2, begin_no_generation, is_remote=True),
    RuleOff("the list goes last", a_save_and_a_planned_collection, 2, view=ListGoesFirst),
]


def explore_without(rule: RuleOff, patch: pytest.MonkeyPatch) -> Exploration:
    cast = rule.cast()
    blobs = cast.blobs()
    if rule.patch is not None:
        rule.patch(patch)

    def check(run: Run) -> str | None:
        broken = [error for error in run.errors().values() if isinstance(error, TypeError | AttributeError)]
        if broken:
            raise broken[0]
        problem = cast.check(run)
        return problem if problem is not None and problem.startswith("LOSS after the run") else None

    return explore(
        blobs,
        cast.actors,
        check,
        max_preemptions=rule.max_preemptions,
        view=rule.view,
        max_schedules=20_000,
        is_remote=rule.is_remote,
    )


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_protocol_without_one_of_its_rules_loses_a_checkpoint(rule: RuleOff, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explore_without(rule, monkeypatch)

    print(f"{rule.name}: lost after {found.n_schedules} schedules")
    assert found.failure is not None, str(found)


def play(cast: Cast, *steps: tuple[str, str], view: type[WatchedBackend] | None = None) -> str:
    return cast.check(Run(cast.blobs(), cast.actors, Script(*steps), view=view)) or "nothing is lost"


def test_finishing_another_collectors_list_without_an_own_list_loses_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The explorer would need five preemptions for this one."""
    finish_a_list_without_listing_it(monkeypatch)
    cast = old_pack().writer("writer", "ac", 1).collector("owner").collector("other")

    problem = play(
        cast,
        ("owner", "put condemned/"),
        ("writer", "promote"),
        ("owner", "delete condemned/"),
        ("other", "delete packs/"),
        ("owner", ""),
        ("writer", ""),
        ("other", ""),
    )

    assert problem.startswith("LOSS after the run")


def test_deleting_a_list_while_something_on_it_is_spared_loses_a_checkpoint() -> None:
    """The explorer would need five preemptions for this one."""
    assert play(*spared_by_another(), view=AllListsGo).startswith("LOSS after the run")

"""The rules of the save/collect protocol as a small machine of their own, every state of which can be visited.

It says what ``docs/design/protocol.md`` says and no more: a step is one call of a backend, what a call has shown is
kept by who made it, and a collector may plan whatever it likes, take anybody for dead, and stop for ever. So a plan, a
clock and a crash need no states of their own: the promise is checked in each state there is. Chunks may be stored as
deltas against the entry of a pack.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from typing import Any, TypeVar

from tests.protocol.abstract_world import (
    RAW,
    Actor,
    Collector,
    Entry,
    Listed,
    Name,
    Ref,
    Rules,
    State,
    Step,
    Survey,
    World,
    Writer,
)

T = TypeVar("T")
NOBODY: frozenset[int] = frozenset()

_AFTER = {
    "list": ("read",),
    "read": ("read",),
    "look": ("look",),
    "write": ("manifest",),
    "plan": ("abort",),
    "abort": ("abort",),
    "copy": ("put",),
    "delete": ("delete",),
}
"""Steps that follow a step without a break in a coarse machine."""


def _loss(state: State) -> str | None:
    return state[0].loss()


@dataclass(slots=True)
class Visit:
    """Result of a visit."""

    n_states: int = 0
    loss: str | None = None
    path: list[str] = field(default_factory=list)
    """Next step of each actor, up to the loss."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The actors under some rules."""

    rules: Rules = field(default_factory=Rules)
    max_attempts: int = 2
    is_coarse: bool = False
    """True if an actor continues alone while it repeats a step for another item, or writes a blob unknown to others."""

    def visit(
        self, start: State, *, max_states: int | None = None, check: Callable[[State], str | None] = _loss
    ) -> Visit:
        """Visit every state that can be reached from one, depth first, until one shows a loss.

        States are told apart by 64 bits of hash: of ten million, two are taken for one with a chance of 3 in a million.
        """
        seen = {hash(start)}
        path = [(start, self._after(start))]
        while path:
            after = next((each for each in path[-1][1] if hash(each) not in seen), None)
            if after is None:
                path.pop()
                continue
            seen.add(hash(after))
            if (loss := check(after)) is not None:
                return Visit(len(seen), loss, _told([*(state for state, _ in path), after]))
            if len(seen) == max_states:
                break
            path.append((after, self._after(after)))
        return Visit(len(seen))

    def lead(self, start: State, *moves: tuple[int, str, Callable[[Any], bool]]) -> State:
        """Let actors take steps one after another.

        Args:
            moves: Number of an actor, the step it stops before, and what has to hold for it then.
        """
        state = start
        for number, at, is_wanted in moves:
            waiting, seen = [state], {state}
            while not (waiting[-1][1][number].at == at and is_wanted(waiting[-1][1][number])):
                fresh = [each for each in self._after(waiting.pop(), of=number) if each not in seen]
                seen.update(fresh)
                waiting += fresh
            state = waiting[-1]
        return state

    def walk(self, start: State, draw: random.Random) -> str | None:
        """Take random steps until nobody can take one; give the loss, if there was one."""
        state: State | None = start
        while state is not None:
            if (loss := state[0].loss()) is not None:
                return loss
            number = draw.randrange(len(state[1]))
            after = list(self._after(state, of=number)) or list(self._after(state))
            state = draw.choice(after) if after else None
        return None

    def _after(self, state: State, *, of: int | None = None) -> Iterator[State]:
        """Give what a step leads to, of anybody or of one actor."""
        world, actors = state
        for number, actor in enumerate(actors):
            if of not in (None, number):
                continue
            waiting = list(self._steps(world, actor))
            while waiting:
                changed, later = waiting.pop()
                if self.is_coarse and later.at in _AFTER.get(actor.at, ()):
                    waiting += self._steps(changed, later)
                else:
                    yield changed, (*actors[:number], later, *actors[number + 1 :])

    def _steps(self, world: World, actor: Actor) -> Iterable[Step]:
        if isinstance(actor, Writer):
            return self._write(world, actor)
        if isinstance(actor, Collector):
            return self._collect(world, actor)
        if actor.at == "drop":
            refs = frozenset(ref for ref in world.refs if ref.step != actor.step)
            return [(world._replace(refs=refs), actor._replace(at="done"))]
        return []

    def _write(self, world: World, me: Writer) -> Iterator[Step]:
        rules = self.rules
        match me.at:
            case "declare":
                late = not rules.intent_comes_first
                for base in self._bases(world, me):
                    named = me._replace(base=base)
                    intent = named.intent
                    if not rules.intent_names_chunks:
                        intent = intent._replace(chunks=frozenset())
                    if not rules.intent_names_bases:
                        intent = intent._replace(bases=frozenset())
                    after = world._replace(intents=world.intents | {intent})
                    if late or not rules.lists_before_packs_at_saves:
                        yield after, self._begin_looking(world, named)
                    else:
                        yield after, named._replace(at="list")
            case "list":
                lists = tuple(sorted(each.collector for each in world.lists))
                known = _with_deltas(world.entries) if rules.new_delta_is_not_relied_on else NOBODY
                yield world, self._listed(me._replace(to_read=lists, known=known), world)
            case "read":
                number, *rest = me.to_read
                found = [each.packs for each in world.lists if each.collector == number]
                condemned = me.condemned.union(*found) if rules.condemned_is_not_relied_on else me.condemned
                yield world, self._listed(me._replace(to_read=tuple(rest), condemned=condemned), world)
            case "index":
                yield world, self._begin_looking(world, me)
            case "look":
                pack, *rest = me.to_look
                there = me.there | ({pack} & world.packs)
                yield world, self._looked(me._replace(to_look=tuple(rest), there=there))
            case "write":
                yield self._written(world, me)
            case "manifest":
                name = me.number, me.attempt
                yield world._replace(manifests=world.manifests | {name}), me._replace(at="commit")
            case "commit":
                yield from self._commit(world, me)

    def _bases(self, world: World, me: Writer) -> Iterable[int]:
        """Packs whose entry it may take for a base; it may also take none."""
        if me.delta is None:
            return [RAW]
        return [RAW, *(e.pack for e in world.entries if e.chunk == me.delta[1] and e.base == RAW)]

    def _listed(self, me: Writer, world: World) -> Writer:
        if me.to_read:
            return me._replace(at="read")
        if not self.rules.lists_before_packs_at_saves:
            return me._replace(at="write")
        if not self.rules.intent_comes_first:
            return me._replace(at="declare")
        return me._replace(at="index")

    def _begin_looking(self, world: World, me: Writer) -> Writer:
        """The index is read: it names every pack there ever was."""
        named = {pack for e in self._found(world, me) for pack in (e.pack, e.base)} | {me.base}
        wanted = named - {RAW} - me.condemned
        if not self.rules.packs_are_looked_at:
            return self._looked(me._replace(there=frozenset(wanted)))
        return self._looked(me._replace(to_look=tuple(sorted(wanted))))

    def _found(self, world: World, me: Writer) -> list[Entry]:
        """Return the copies of its chunks that it may rely on."""
        is_new_fine = not self.rules.new_delta_is_not_relied_on
        return [
            e for e in world.entries if e.chunk in me.chunks and (is_new_fine or e.base == RAW or e.pack in me.known)
        ]

    def _looked(self, me: Writer) -> Writer:
        if me.to_look:
            return me._replace(at="look")
        return me._replace(at="write" if self.rules.lists_before_packs_at_saves else "list")

    def _written(self, world: World, me: Writer) -> Step:
        usable = me.there - me.condemned
        held = {e.chunk for e in self._found(world, me) if {e.pack, e.base} - {RAW} <= usable}
        pack = 10 * (me.number + 1) + me.attempt
        base = me.base if me.base in usable else RAW
        new = {
            Entry(pack, chunk, base if me.delta is not None and chunk == me.delta[0] else RAW)
            for chunk in me.chunks - held
        }
        later = me._replace(at="manifest", to_look=(), there=frozenset(), condemned=frozenset(), known=frozenset())
        if not new:
            return world, later
        return world._replace(packs=world.packs | {pack}, entries=world.entries | new), later

    def _commit(self, world: World, me: Writer) -> Iterator[Step]:
        mine = frozenset(each for each in world.intents if each.writer == me.number and each.attempt == me.attempt)
        if mine or not self.rules.commit_is_fenced:
            ref = Ref(me.number, me.intent.manifest, me.chunks)
            refs = frozenset(each for each in world.refs if each.step != ref.step) | {ref}
            yield world._replace(refs=refs, intents=world.intents - mine), me._replace(at="done", base=RAW)
        elif me.attempt + 1 < self.max_attempts:
            begin = "declare" if self.rules.intent_comes_first else "list"
            yield world, me._replace(at=begin, attempt=me.attempt + 1, base=RAW)
        else:
            yield world, me._replace(at="done", base=RAW)

    def _collect(self, world: World, me: Collector) -> Iterator[Step]:  # noqa: C901, PLR0912  # one case a state
        rules = self.rules
        match me.at:
            case "plan":
                others = [each for each in world.lists if each.collector != me.number]
                choose = _all_or_none if me.is_greedy else _subsets
                for ignored in choose(sorted(world.intents)):
                    for planned in self._plans(world, me):
                        for dead in choose(others):
                            planned = planned._replace(ignored=ignored, dead=frozenset(dead))
                            at = "abort" if ignored and rules.dead_intents_are_withdrawn else "see"
                            yield world, planned._replace(at=at, to_see=self._order())
            case "abort":
                ignored = me.ignored[1:]
                later = me._replace(ignored=ignored, at="abort" if ignored else "see")
                yield world._replace(intents=world.intents - {me.ignored[0]}), later
            case "see" | "see again":
                seen = self._see(world, me, me.to_see[0])
                later = me._replace(seen=seen, to_see=me.to_see[1:])
                if later.to_see:
                    yield world, later
                elif me.at == "see":
                    yield from self._chosen(world, later)
                else:
                    yield world, self._decided(later)
            case "copy":
                copied = tuple(e for e in me.copies if e.pack in world.packs and {e.base} - {RAW} <= world.packs)
                yield world, me._replace(at="put" if copied else "condemn", copies=copied)
            case "put":
                pack = 100 * (me.number + 1)
                going = me.packs | self._condemned(me.seen)
                new = {e._replace(pack=pack, base=RAW if e.base in going else e.base) for e in me.copies}
                after = world._replace(packs=world.packs | {pack}, entries=world.entries | new)
                yield after, me._replace(at="condemn", copies=())
            case "condemn":
                inherited = frozenset().union(*(each.packs for each in me.dead))
                listed_packs = me.packs if rules.finisher_lists_too else me.packs - inherited
                after = world._replace(lists=world.lists | {Listed(me.number, listed_packs, me.manifests)})
                if rules.collector_looks_again:
                    yield after, me._replace(at="see again", to_see=self._order(), seen=Survey())
                else:
                    yield after, self._decided(me)
            case "delete":
                yield from self._delete(world, me)
            case "unlist":
                yield self._without(world, me.number), me._replace(at="delete" if self._has_more(me) else "finish")
            case "finish":
                yield from self._finish(world, me)

    def _plans(self, world: World, me: Collector) -> Iterator[Collector]:
        """Give what it may want to delete."""
        if me.is_greedy:
            yield me._replace(packs=world.packs)
            return
        if me.wanted is not None:
            yield me._replace(packs=world.packs & me.wanted)
            return
        for packs in _subsets(world.packs):
            yield me._replace(packs=frozenset(packs))

    def _order(self) -> tuple[str, ...]:
        first = ("intents", "refs") if self.rules.intents_before_refs else ("refs", "intents")
        then = ("lists", "packs") if self.rules.lists_before_packs_at_surveys else ("packs", "lists")
        return (*first, *then)

    def _see(self, world: World, me: Collector, what: str) -> Survey:
        match what:
            case "intents":
                ignored = frozenset(() if self.rules.dead_intents_are_withdrawn else me.ignored)
                counted = world.intents - ignored if self.rules.intents_count else frozenset()
                return me.seen._replace(intents=counted)
            case "refs":
                return me.seen._replace(refs=world.refs)
            case "lists":
                return me.seen._replace(lists=world.lists)
            case _:
                return me.seen._replace(packs=world.packs, manifests=world.manifests, entries=world.entries)

    def _condemned(self, seen: Survey) -> frozenset[int]:
        if not self.rules.condemned_copy_is_no_copy:
            return frozenset()
        return frozenset().union(*(each.packs for each in seen.lists))

    def _at_risk(
        self,
        seen: Survey,
        packs: frozenset[int],
        *,
        known: frozenset[int] | None = None,
    ) -> set[str]:
        """Return the needed chunks of which no copy will be left whole.

        Args:
            packs: Those that this collector may delete.
            known: Packs whose deltas count as copies; None if all do.
        """
        going = packs | self._condemned(seen)
        there = [e for e in _whole(seen) if known is None or e.base == RAW or e.pack in known]
        safe = {
            e.chunk for e in there if e.pack not in going and (e.base not in going or not self.rules.bases_are_kept)
        }
        return _live(seen) - safe

    def _chosen(self, world: World, me: Collector) -> Iterator[Step]:
        """After the first look: what may be deleted, and what is copied first."""
        seen, rules = me.seen, self.rules
        dead = me.dead & seen.lists
        inherited = frozenset().union(*(each.packs for each in dead)) & seen.packs
        if not rules.dead_list_is_finished:
            for each in dead:
                world = self._without(world, each.collector)
            seen, dead, inherited = seen._replace(lists=seen.lists - dead), frozenset(), frozenset()
        packs = ((me.packs & seen.packs) - self._condemned(seen)) | inherited
        manifests = seen.manifests - _live_manifests(seen)
        at_risk = self._at_risk(seen, packs)
        copied: dict[str, Entry] = {}
        for e in sorted(_whole(seen)):
            if e.pack in packs and e.chunk in at_risk:
                copied.setdefault(e.chunk, e)
        later = me._replace(dead=dead, packs=packs, manifests=manifests)
        later = later._replace(known=_with_deltas(seen.entries) & seen.packs)
        if not packs and not manifests and not dead:
            yield world, Collector(me.number, at="done")
            return
        seen = Survey(lists=seen.lists) if rules.collector_looks_again else seen
        later = later._replace(seen=seen, copies=tuple(copied.values()))
        yield world, later._replace(at="copy" if copied else "condemn")

    def _decided(self, me: Collector) -> Collector:
        """After the second look: what is deleted."""
        known = me.known | {100 * (me.number + 1)} if self.rules.new_delta_is_no_copy else None
        at_risk = self._at_risk(me.seen, me.packs, known=known)
        spared = frozenset(pack for each in me.seen.intents for pack in each.bases)
        for e in _whole(me.seen):
            if e.chunk in at_risk:
                spared |= {e.pack, e.base} if self.rules.bases_are_kept else {e.pack}
        spared &= me.packs
        later = me._replace(
            packs=me.packs - spared,
            spared=spared,
            manifests=me.manifests - _live_manifests(me.seen),
            known=frozenset(),
            seen=Survey(manifests=me.seen.manifests),
        )
        if not self.rules.list_goes_last:
            return later._replace(at="unlist")
        return later._replace(at="delete" if self._has_more(later) else "unlist")

    def _has_more(self, me: Collector) -> bool:
        return bool(me.packs or me.manifests)

    def _delete(self, world: World, me: Collector) -> Iterator[Step]:
        # Manifests in one step: nothing else is looked at between two of them.
        if me.manifests:
            after = world._replace(manifests=world.manifests - me.manifests)
            seen = Survey(manifests=me.seen.manifests - me.manifests)
            later = me._replace(manifests=frozenset(), seen=seen)
        else:
            pack = min(me.packs)
            after = world._replace(packs=world.packs - {pack})
            later = me._replace(packs=me.packs - {pack})
        if self._has_more(later):
            yield after, later
        else:
            yield after, later._replace(at="unlist" if self.rules.list_goes_last else "finish")

    def _finish(self, world: World, me: Collector) -> Iterator[Step]:
        for each in me.dead:
            stays = each.packs & me.spared or each.manifests & me.seen.manifests
            if not stays or not self.rules.old_list_stays:
                world = self._without(world, each.collector)
        yield world, Collector(me.number, at="done")

    def _without(self, world: World, collector: int) -> World:
        return world._replace(lists=frozenset(each for each in world.lists if each.collector != collector))


def _live(seen: Survey) -> set[str]:
    """Return the needed chunks: those of intents and refs."""
    return set[str]().union(*(each.chunks for each in (*seen.intents, *seen.refs)))


def _with_deltas(entries: Iterable[Entry]) -> frozenset[int]:
    return frozenset(e.pack for e in entries if e.base != RAW)


def _whole(seen: Survey) -> list[Entry]:
    """Return the copies that can be decoded: a delta of which the base is gone is none."""
    return [e for e in seen.entries if {e.pack, e.base} - {RAW} <= seen.packs]


def _live_manifests(seen: Survey) -> frozenset[Name]:
    return frozenset([each.manifest for each in seen.intents] + [each.manifest for each in seen.refs])


def _subsets(items: Collection[T]) -> Iterable[tuple[T, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def _all_or_none(items: Collection[T]) -> Iterable[tuple[T, ...]]:
    return [(), tuple(items)] if items else [()]


def _told(states: Sequence[State]) -> list[str]:
    """Say who did what from state to state."""
    return [
        f"{type(actor).__name__.lower()} {actor[0]}: {actor.at}"
        for (_, before), (_, after) in pairwise(states)
        for actor, later in zip(before, after, strict=True)
        if actor != later
    ]

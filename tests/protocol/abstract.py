"""The rules of the save/collect protocol as a small machine of their own, every state of which can be visited.

It says what ``docs/design/protocol.md`` says and no more: a step is one call of a backend, what a call has shown is
kept by who made it, and a collector may plan whatever it likes, take anybody for dead, and stop for ever. So a plan, a
clock and a crash need no states of their own: the promise is checked in each state there is. Chunks may be stored as
deltas against the entry of a pack. They may be made by recipes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise, product
from typing import Any, TypeVar

from tests.protocol.abstract_world import (
    RAW,
    Actor,
    Collector,
    Deriver,
    Entry,
    Listed,
    Name,
    Recipe,
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


def useless(state: State) -> str | None:
    """Say which new recipe cannot be evaluated although its intent exists."""
    world, actors = state
    writers = {each.writer for each in world.intents}
    for actor in actors:
        if not isinstance(actor, Deriver) or actor.number not in writers or actor.recipe not in world.recipes:
            continue
        if not world.stored().issuperset(actor.recipe.inputs):
            return f"recipe {actor.recipe.number} has lost an input"
    return None


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
    has_recipes: bool = False
    """True if collectors list recipes."""
    recipes_before_packs: bool = False
    """The order of the two listings in a survey; no rule asks for either."""
    declared_chunk_needs_pack: bool = True
    """True if no recipe stands for a chunk that an intent names; spares a save some work and saves no ref."""

    derivers_declare: bool = True
    """False if the intent of a deriver names nothing."""
    derivers_name_packs: bool = True
    """False if the intent of a deriver names the inputs only."""
    derivers_read_lists: bool = True

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
        if isinstance(actor, Deriver):
            return self._derive(world, actor)
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

    def _derive(self, world: World, me: Deriver) -> Iterator[Step]:
        match me.at:
            case "declare":
                # The index names every pack there ever was.
                copies = [[e for e in world.entries if e.chunk == chunk] for chunk in me.recipe.inputs]
                for chosen in product(*copies):
                    packs = frozenset(pack for e in chosen for pack in (e.pack, e.base)) - {RAW}
                    named = me._replace(packs=packs)
                    intent = named.intent
                    if not self.derivers_declare:
                        intent = intent._replace(chunks=frozenset(), bases=frozenset())
                    if not self.derivers_name_packs:
                        intent = intent._replace(bases=frozenset())
                    named = named._replace(at="list") if self.derivers_read_lists else _lists_seen(named)
                    yield world._replace(intents=world.intents | {intent}), named
            case "list":
                lists = tuple(sorted(each.collector for each in world.lists))
                yield world, _lists_seen(me._replace(to_read=lists))
            case "read":
                number, *rest = me.to_read
                found = [each.packs for each in world.lists if each.collector == number]
                yield world, _lists_seen(me._replace(to_read=tuple(rest), condemned=me.condemned.union(*found)))
            case "look":
                pack, *rest = me.to_look
                if pack in world.packs:
                    yield world, me._replace(to_look=tuple(rest), at="look" if rest else "put")
                else:
                    yield world, me._replace(to_look=(), at="withdraw")
            case "put":
                yield world._replace(recipes=world.recipes | {me.recipe}), me._replace(at="withdraw")
            case "withdraw":
                intents = frozenset(each for each in world.intents if each.writer != me.number)
                yield world._replace(intents=intents), me._replace(at="done", packs=NOBODY)

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
                made = tuple(recipe for recipe in me.made if world.stored().issuperset(recipe.inputs))
                yield world, me._replace(at="put" if copied or made else "condemn", copies=copied, made=made)
            case "put":
                pack = 100 * (me.number + 1)
                going = me.packs | self._condemned(me.seen)
                new = {e._replace(pack=pack, base=RAW if e.base in going else e.base) for e in me.copies}
                new |= {Entry(pack, recipe.product) for recipe in me.made}
                after = world._replace(packs=world.packs | {pack}, entries=world.entries | new)
                yield after, me._replace(at="condemn", copies=(), made=())
            case "condemn":
                inherited = frozenset().union(*(each.packs for each in me.dead))
                listed = Listed(me.number, me.packs, me.manifests, me.recipes)
                if not rules.finisher_lists_too:
                    recipes = me.recipes.difference(*(each.recipes for each in me.dead))
                    listed = listed._replace(packs=me.packs - inherited, recipes=recipes)
                after = world._replace(lists=world.lists | {listed})
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
            yield me._replace(packs=world.packs, recipes=world.recipes)
            return
        if me.wanted is not None:
            yield me._replace(packs=world.packs & me.wanted, recipes=world.recipes & me.wanted)
            return
        for packs, recipes in product(_subsets(world.packs), _subsets(world.recipes)):
            yield me._replace(packs=frozenset(packs), recipes=frozenset(recipes))

    def _order(self) -> tuple[str, ...]:
        first = ("intents", "refs") if self.rules.intents_before_refs else ("refs", "intents")
        then = ["lists", "packs"] if self.rules.lists_before_packs_at_surveys else ["packs", "lists"]
        if not self.has_recipes:
            return (*first, *then)
        if not self.rules.lists_before_recipes_at_surveys:
            return (*first, "recipes", *then)
        then.insert(then.index("packs") + (not self.recipes_before_packs), "recipes")
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
            case "recipes":
                return me.seen._replace(recipes=world.recipes)
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
        standing: Collection[Recipe],
        *,
        known: frozenset[int | Recipe] | None = None,
    ) -> set[str]:
        """Return the needed chunks of which no copy will be left whole.

        Args:
            packs: Those that this collector may delete.
            standing: Recipes that stand for their products, if their inputs are safe.
            known: Packs whose deltas count as copies; None if all do.
        """
        going = packs | self._condemned(seen)
        there = [e for e in _whole(seen) if known is None or e.base == RAW or e.pack in known]
        safe = {
            e.chunk for e in there if e.pack not in going and (e.base not in going or not self.rules.bases_are_kept)
        }
        live = self._live(seen)
        inputs = safe
        if not self.rules.condemned_input_is_no_input:
            inputs = {e.chunk for e in there if not {e.pack, e.base} & packs}
        made = {recipe.product for recipe in standing if inputs.issuperset(recipe.inputs)}
        if self.rules.inputs_need_packs:
            made = made.difference(*(recipe.inputs for recipe in seen.recipes if recipe.product in live))
        if self.declared_chunk_needs_pack:
            made = made.difference(*(each.chunks for each in seen.intents))
        return live - safe - made

    def _live(self, seen: Survey) -> set[str]:
        """Return the needed chunks: those of intents and refs, and the inputs of recipes that make needed ones."""
        kept = [each.chunks for each in seen.intents] + [each.chunks for each in seen.refs]
        live = set[str]().union(*kept)
        if not self.rules.inputs_are_kept:
            return live
        keeping = seen.recipes
        if not self.rules.inputs_of_a_condemned_recipe_are_kept:
            keeping = keeping.difference(*(each.recipes for each in seen.lists))
        while more := live.union(*(recipe.inputs for recipe in keeping if recipe.product in live)) - live:
            live |= more
        return live

    def _standing(self, seen: Survey, recipes: frozenset[Recipe]) -> frozenset[Recipe]:
        """Return the recipes that are neither condemned nor among those that this collector may delete."""
        if not self.rules.condemned_recipe_stands_for_nothing:
            return seen.recipes - recipes
        return seen.recipes.difference(recipes, *(each.recipes for each in seen.lists))

    def _chosen(self, world: World, me: Collector) -> Iterator[Step]:
        """After the first look: what may be deleted, and what is copied first."""
        seen, rules = me.seen, self.rules
        dead = me.dead & seen.lists
        inherited = frozenset().union(*(each.packs for each in dead)) & seen.packs
        their_recipes = frozenset[Recipe]().union(*(each.recipes for each in dead)) & seen.recipes
        if not rules.dead_list_is_finished:
            for each in dead:
                world = self._without(world, each.collector)
            seen, dead, inherited = seen._replace(lists=seen.lists - dead), frozenset(), frozenset()
            their_recipes = frozenset()
        packs = ((me.packs & seen.packs) - self._condemned(seen)) | inherited
        recipes = (me.recipes & seen.recipes).difference(*(each.recipes for each in seen.lists)) | their_recipes
        manifests = seen.manifests - _live_manifests(seen)
        at_risk = self._at_risk(seen, packs, self._standing(seen, recipes))
        there = _whole(seen)
        copied: dict[str, Entry] = {}
        for e in sorted(there):
            if e.pack in packs and e.chunk in at_risk:
                copied.setdefault(e.chunk, e)
        made: dict[str, Recipe] = {}
        for recipe in sorted(their_recipes):
            if recipe.product in at_risk - copied.keys() and {e.chunk for e in there}.issuperset(recipe.inputs):
                made.setdefault(recipe.product, recipe)
        later = me._replace(dead=dead, packs=packs, manifests=manifests, recipes=recipes)
        later = later._replace(known=seen.recipes | (_with_deltas(seen.entries) & seen.packs))
        if not packs and not manifests and not recipes and not dead:
            yield world, Collector(me.number, at="done")
            return
        seen = Survey(lists=seen.lists) if rules.collector_looks_again else seen
        later = later._replace(seen=seen, copies=tuple(copied.values()), made=tuple(made.values()))
        yield world, later._replace(at="copy" if copied or made else "condemn")

    def _decided(self, me: Collector) -> Collector:
        """After the second look: what is deleted."""
        standing = self._standing(me.seen, me.recipes)
        if self.rules.new_recipe_stands_for_nothing:
            standing &= me.known
        known = me.known | {100 * (me.number + 1)} if self.rules.new_delta_is_no_copy else None
        at_risk = self._at_risk(me.seen, me.packs, standing, known=known)
        spared = frozenset(pack for each in me.seen.intents for pack in each.bases)
        for e in _whole(me.seen):
            if e.chunk in at_risk:
                spared |= {e.pack, e.base} if self.rules.bases_are_kept else {e.pack}
        spared &= me.packs
        lacking = at_risk if self.rules.needed_recipe_is_spared else ()
        spared_recipes = frozenset(recipe for recipe in me.recipes & me.seen.recipes if recipe.product in lacking)
        later = me._replace(
            packs=me.packs - spared,
            spared=spared,
            manifests=me.manifests - _live_manifests(me.seen),
            recipes=me.recipes - spared_recipes,
            spared_recipes=spared_recipes,
            known=frozenset(),
            seen=Survey(manifests=me.seen.manifests),
        )
        if not self.rules.list_goes_last:
            return later._replace(at="unlist")
        return later._replace(at="delete" if self._has_more(later) else "unlist")

    def _has_more(self, me: Collector) -> bool:
        return bool(me.packs or me.manifests or me.recipes)

    def _delete(self, world: World, me: Collector) -> Iterator[Step]:
        # Manifests in one step: nothing else is looked at between two of them.
        if me.manifests:
            after = world._replace(manifests=world.manifests - me.manifests)
            seen = Survey(manifests=me.seen.manifests - me.manifests)
            later = me._replace(manifests=frozenset(), seen=seen)
        elif me.recipes:
            recipe = min(me.recipes)
            after = world._replace(recipes=world.recipes - {recipe})
            later = me._replace(recipes=me.recipes - {recipe})
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
            stays = each.packs & me.spared or each.manifests & me.seen.manifests or each.recipes & me.spared_recipes
            if not stays or not self.rules.old_list_stays:
                world = self._without(world, each.collector)
        yield world, Collector(me.number, at="done")

    def _without(self, world: World, collector: int) -> World:
        return world._replace(lists=frozenset(each for each in world.lists if each.collector != collector))


def _lists_seen(me: Deriver) -> Deriver:
    if me.to_read:
        return me._replace(at="read")
    if me.packs & me.condemned:
        return me._replace(at="withdraw", condemned=NOBODY)
    return me._replace(at="look", to_look=tuple(sorted(me.packs)), condemned=NOBODY)


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

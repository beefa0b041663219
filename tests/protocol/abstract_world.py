"""Parts of the abstract machine of the save/collect protocol: the blobs of a backend, and the actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Name = tuple[int, int]
"""Of a manifest: who wrote it, at which attempt. No name is used again."""

RAW = -1
"""Stands for the base of an entry that has none."""


class Entry(NamedTuple):
    """One chunk in one pack."""

    pack: int
    chunk: str
    base: int = RAW
    """The pack that holds what it is a delta against."""


class Intent(NamedTuple):
    writer: int
    attempt: int
    chunks: frozenset[str]
    bases: frozenset[int]
    """Packs that hold the bases of deltas it may write."""

    @property
    def manifest(self) -> Name:
        return self.writer, self.attempt


class Ref(NamedTuple):
    step: int
    manifest: Name
    chunks: frozenset[str]


class Listed(NamedTuple):
    """A condemned list."""

    collector: int
    packs: frozenset[int]
    manifests: frozenset[Name]


class World(NamedTuple):
    """Blobs of the backend. The index names all packs that ever existed: an entry is no evidence."""

    packs: frozenset[int]
    entries: frozenset[Entry]
    """Of all packs that ever were."""
    manifests: frozenset[Name]
    intents: frozenset[Intent]
    refs: frozenset[Ref]
    lists: frozenset[Listed]

    def loss(self) -> str | None:
        """Say which ref does not load, if one does not."""
        stored = self.stored()
        for ref in self.refs:
            if ref.manifest not in self.manifests:
                return f"step {ref.step} has no manifest"
            for chunk in ref.chunks:
                if chunk not in stored:
                    return f"step {ref.step} has no chunk {chunk}"
        return None

    def stored(self) -> set[str]:
        """Return the chunks with a copy in a pack that can be decoded."""
        return {e.chunk for e in self.entries if {e.pack, e.base} - {RAW} <= self.packs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules; each can be switched off."""

    intent_comes_first: bool = True
    lists_before_packs_at_saves: bool = True
    condemned_is_not_relied_on: bool = True
    packs_are_looked_at: bool = True
    commit_is_fenced: bool = True
    intent_names_chunks: bool = True
    intent_names_bases: bool = True
    collector_looks_again: bool = True
    intents_count: bool = True
    dead_intents_are_withdrawn: bool = True
    intents_before_refs: bool = True
    lists_before_packs_at_surveys: bool = True
    condemned_copy_is_no_copy: bool = True
    bases_are_kept: bool = True
    list_goes_last: bool = True
    dead_list_is_finished: bool = True
    finisher_lists_too: bool = True
    old_list_stays: bool = True
    new_delta_is_not_relied_on: bool = True
    new_delta_is_no_copy: bool = True


class Writer(NamedTuple):
    """A save of some chunks under one step."""

    number: int
    chunks: frozenset[str]
    delta: tuple[str, str] | None = None
    """A chunk that it may write as a delta, and the chunk against which."""
    attempt: int = 0
    at: str = "declare"
    base: int = RAW
    to_read: tuple[int, ...] = ()
    """Collectors whose lists it has seen and not read yet."""
    condemned: frozenset[int] = frozenset()
    to_look: tuple[int, ...] = ()
    there: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()
    """Packs with deltas that it has found in the index before it read the lists."""

    @property
    def intent(self) -> Intent:
        return Intent(self.number, self.attempt, self.chunks, frozenset({self.base} - {RAW}))


class Survey(NamedTuple):
    """Blobs that a collector has seen."""

    intents: frozenset[Intent] = frozenset()
    refs: frozenset[Ref] = frozenset()
    lists: frozenset[Listed] = frozenset()
    packs: frozenset[int] = frozenset()
    manifests: frozenset[Name] = frozenset()
    entries: frozenset[Entry] = frozenset()


class Collector(NamedTuple):
    """One collection."""

    number: int
    is_greedy: bool = False
    """True if it plans to delete all packs, and treats all other actors as dead or none."""
    at: str = "plan"
    ignored: tuple[Intent, ...] = ()
    """Intents it takes for dead."""
    packs: frozenset[int] = frozenset()
    """Packs of the plan: first the wanted, then the allowed, then the final ones."""
    manifests: frozenset[Name] = frozenset()
    dead: frozenset[Listed] = frozenset()
    """Lists it takes for those of dead collectors."""
    to_see: tuple[str, ...] = ()
    seen: Survey = Survey()
    copies: tuple[Entry, ...] = ()
    spared: frozenset[int] = frozenset()
    wanted: frozenset[int] | None = None
    """The only plan it may make; None if it may plan anything."""
    known: frozenset[int] = frozenset()
    """Packs with deltas that it has seen or written before it wrote its list."""


class Deletion(NamedTuple):
    """Drops one ref."""

    step: int
    at: str = "drop"


Actor = Writer | Collector | Deletion
State = tuple[World, tuple[Actor, ...]]
Step = tuple[World, Actor]

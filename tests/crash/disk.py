"""Possible contents of a disk after a power cut, computed from the calls before it.

After Pillai et al., *All File Systems Are Not Created Equal* (OSDI 2014): a file system promises of data what was
synced with its file, and of a name what was synced with its folder, and nothing else; whatever was done since may have
happened or not, each by itself, in any order. Only changes of one name keep their order, and each of them is whole.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Node = int
"""A file or folder, whatever its names are; 0 is the folder in which everything lies."""
SECTOR_BYTES = 512
"""A disk writes so many bytes whole or not at all."""
PAGE_BYTES = 4096
"""The system writes files so many bytes at a time."""
Tree = dict[str, "tuple[Node, bytes | None]"]
"""Nodes below the top by path, folders first; a file's node comes with its bytes."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name came to stand for another file or folder, or for none."""

    folder: Node
    name: str
    node: Node | None


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were written to a file."""

    node: Node
    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resized:
    """A file was cut, or lengthened."""

    node: Node
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """A file's bytes, or a folder's names, are durable as they were."""

    node: Node


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """A sync of a file's bytes failed. The system keeps them in memory and never writes them again (fsyncgate)."""

    node: Node


@dataclass(frozen=True, slots=True)
class Mark:
    """Something the program said, such as that a save has returned."""

    said: Any


Effect = Named | Wrote | Resized | Synced | SyncFailed | Mark
Entry = tuple[Effect, ...]
"""The effects of one call."""


class Fate(Protocol):
    """Decides what of that which was not synced a cut has left."""

    def name(self, folder: Node, name: str, versions: Sequence[Node | None]) -> Node | None:
        """Choose what a name stands for: the first version is the durable one, the last the latest."""

    def data(self, durable: bytes, writes: Sequence[Wrote | Resized]) -> bytes:
        """Choose what a file holds."""


@dataclass
class Disk:
    """All that is durable, and what was done since, at one moment."""

    folders: set[Node] = field(default_factory=lambda: {0})
    names: dict[tuple[Node, str], list[Node | None]] = field(default_factory=dict)
    """Of each name the durable version and, in order, those since."""
    durable: dict[Node, bytes] = field(default_factory=dict)
    writes: dict[Node, list[Wrote | Resized]] = field(default_factory=dict)
    unwritten: dict[Node, dict[int, bytes]] = field(default_factory=dict)
    """Pages of which a sync has failed, by number: programs see them as long as the machine runs."""

    def apply(self, entry: Entry) -> None:
        """Do what one call did."""
        for effect in entry:
            if isinstance(effect, Named):
                self.names.setdefault((effect.folder, effect.name), [None]).append(effect.node)
            elif isinstance(effect, Wrote | Resized):
                self.writes.setdefault(effect.node, []).append(effect)
            elif isinstance(effect, Synced):
                self._sync(effect.node)
            elif isinstance(effect, SyncFailed):
                self._fail_to_sync(effect.node)

    def unsettled_folders(self) -> list[Node]:
        """Folders of which some name is not durable."""
        return sorted({folder for (folder, _), versions in self.names.items() if len(versions) > 1})

    def tree(self, fate: Fate) -> Tree:
        """Return the files and folders on the disk after a cut."""
        below: dict[Node, list[tuple[str, Node]]] = {}
        for (folder, name), versions in sorted(self.names.items()):
            node = fate.name(folder, name, versions) if len(versions) > 1 else versions[0]
            if node is not None:
                below.setdefault(folder, []).append((name, node))
        held: dict[Node, bytes] = {}
        tree: Tree = {}
        open_ = [(0, "")]
        while open_:
            folder, path = open_.pop()
            for name, node in below.get(folder, ()):
                place = f"{path}/{name}" if path else name
                if node in self.folders:
                    tree[place] = (node, None)
                    open_.append((node, place))
                    continue
                if node not in held:
                    writes = self.writes.get(node, [])
                    durable = self.durable.get(node, b"")
                    if fate == KILL:
                        durable = self._in_memory(node)
                    held[node] = fate.data(durable, writes) if writes else durable
                tree[place] = (node, held[node])
        return tree

    def _sync(self, node: Node) -> None:
        if node in self.folders:
            for (folder, _), versions in self.names.items():
                if folder == node:
                    del versions[:-1]
        else:
            held, pages = applied(self._in_memory(node), writes := self.writes.pop(node, [])), _pages(writes)
            unwritten = self.unwritten.pop(node, {})
            left = {n: page for n, page in unwritten.items() if n not in pages and n * PAGE_BYTES < len(held)}
            old = self.durable.get(node, b"")
            self.durable[node] = _with_pages(held, {n: _page(old, n) for n in left})
            if left:
                self.unwritten[node] = left

    def _fail_to_sync(self, node: Node) -> None:
        writes = self.writes.pop(node, [])
        held = applied(self._in_memory(node), writes)
        self.unwritten.setdefault(node, {}).update({n: _page(held, n) for n in _pages(writes)})
        # The size is kept apart from the bytes.
        durable = self.durable.get(node, b"")
        self.durable[node] = durable[: len(held)] + bytes(max(0, len(held) - len(durable)))

    def _in_memory(self, node: Node) -> bytes:
        """Return the bytes of a file as programs see them, without those since the last sync."""
        return _with_pages(self.durable.get(node, b""), self.unwritten.get(node, {}))


def _pages(writes: Sequence[Wrote | Resized]) -> set[int]:
    """Return the numbers of the pages that some writes touch."""
    return {
        n
        for each in writes
        if isinstance(each, Wrote)
        for n in range(each.at // PAGE_BYTES, -(-(each.at + len(each.data)) // PAGE_BYTES))
    }


def _page(data: bytes, n: int) -> bytes:
    return data[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]


def _with_pages(data: bytes, pages: dict[int, bytes]) -> bytes:
    """Put pages into a content, whose size stays."""
    result = bytearray(data)
    for n, page in pages.items():
        result[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] = page.ljust(PAGE_BYTES, b"\0")
    return bytes(result[: len(data)])


def applied(data: bytes, writes: Sequence[Wrote | Resized]) -> bytes:
    """Write to bytes."""
    held = bytearray(data)
    for each in writes:
        if isinstance(each, Resized):
            held[each.size :] = b""
            held.extend(bytes(each.size - len(held)))
        else:
            held.extend(bytes(max(0, each.at - len(held))))
            held[each.at : each.at + len(each.data)] = each.data
    return bytes(held)


def put_down(tree: Tree, top: Path) -> None:
    """Make a tree real. Names of one file are links to it."""
    first: dict[Node, str] = {}
    for path, (node, data) in tree.items():
        place = os.path.join(top, path)
        if data is None:
            os.mkdir(place)
        elif node in first:
            os.link(first[node], place)
        else:
            first[node] = place
            with open(place, "wb") as file:
                file.write(data)


# --- fates


@dataclass(frozen=True)
class Plain:
    """The same for all names, and the same for all bytes."""

    names: str = "all"
    """``all``, ``none``, ``made`` (nothing removed is gone) or ``removed`` (nothing made is there)."""
    bytes_: str = "all"
    """``all``, ``none``, ``torn`` (the first half of the writes) or ``zeros`` (as long; blank where not synced)."""
    but: Node | None = None
    """A folder of whose names all that was done is there, if none else is, and the other way round."""

    def name(self, folder: Node, name: str, versions: Sequence[Node | None]) -> Node | None:
        how = {"all": "none", "none": "all"}.get(self.names, self.names) if folder == self.but else self.names
        if how == "all":
            return versions[-1]
        if how == "made":
            return next((node for node in reversed(versions) if node is not None), None)
        if how == "removed" and versions[-1] is None:
            return None
        return versions[0]

    def data(self, durable: bytes, writes: Sequence[Wrote | Resized]) -> bytes:
        whole = applied(durable, writes)
        if self.bytes_ == "all":
            return whole
        if self.bytes_ == "zeros":
            return durable[: len(whole)] + bytes(max(0, len(whole) - len(durable)))
        return applied(durable, _first_half(writes)) if self.bytes_ == "torn" else durable


KILL = Plain()
"""What a process leaves that is killed."""


@dataclass(frozen=True)
class Drawn:
    """Each for itself, by lot."""

    draw: random.Random

    def name(self, folder: Node, name: str, versions: Sequence[Node | None]) -> Node | None:
        return self.draw.choice([versions[0], versions[-1], self.draw.choice(versions)])

    def data(self, durable: bytes, writes: Sequence[Wrote | Resized]) -> bytes:
        n = self.draw.randrange(len(writes) + 1)
        some = [*writes[:n], *_first_half(writes[n : n + 1])] if self.draw.random() < 0.5 else list(writes[:n])
        if durable and self.draw.random() < 0.3:  # of a file that grows, later sectors may reach the disk alone
            some = [each for each in _sectors(writes) if self.draw.random() < 0.5]
        data = applied(durable, some)
        blank = durable[: len(data)] + bytes(max(0, len(data) - len(durable)))
        return blank if self.draw.random() < 0.2 else data


def fates(disk: Disk, *, n_drawn: int, seed: int) -> Iterator[Fate]:
    """Yield possible fates of a disk: the plain ones, each folder by itself, and some at random."""
    yield KILL
    for names in ("all", "none", "made", "removed"):
        for bytes_ in ("none", "torn", "zeros") if names == "all" else ("none",):
            yield Plain(names, bytes_)
    for folder in disk.unsettled_folders():
        yield Plain("none", "none", folder)
        yield Plain("all", "all", folder)
    draw = random.Random(seed)
    for _ in range(n_drawn):
        yield Drawn(draw)


def _first_half(writes: Sequence[Wrote | Resized]) -> list[Wrote | Resized]:
    if not writes:
        return []
    first, last = list(writes[: len(writes) // 2]), writes[len(writes) // 2]
    if isinstance(last, Wrote):
        first.append(Wrote(last.node, last.at, last.data[: len(last.data) // 2]))
    return first


def _sectors(writes: Sequence[Wrote | Resized]) -> Iterator[Wrote | Resized]:
    """Take writes apart."""
    for each in writes:
        if isinstance(each, Resized):
            yield each
            continue
        for begin in range(each.at // SECTOR_BYTES * SECTOR_BYTES, each.at + len(each.data), SECTOR_BYTES):
            at = max(begin, each.at)
            yield Wrote(each.node, at, each.data[at - each.at : begin + SECTOR_BYTES - each.at])

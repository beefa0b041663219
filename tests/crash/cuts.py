"""Every state in which a cut may leave what a program did, looked at one after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.crash.disk import Disk, Entry, Tree, fates, put_down
from tests.crash.world import Content, Key, allowed, check, empty

May = dict[Key, set[Content]]
"""What may be found of each thing."""


class Cuts:
    """Looks at states after cuts, each different one once."""

    def __init__(self, scratch: Path, *, first: Callable[[Path], None] = lambda top: None) -> None:
        """Look at states in a folder.

        Args:
            scratch: The folder.
            first: What is done with each state before it is looked at.
        """
        self.n_states = 0
        """States met."""
        self.n_checked = 0
        """Different ones, which were checked."""
        self._scratch = scratch
        self._first = first
        self._seen: set[bytes] = set()

    def check(
        self,
        log: Sequence[Entry],
        folders: set[int],
        *,
        at: Iterable[int] | None = None,
        n_drawn: int,
        stride: int = 1,
        may: May | None = None,
    ) -> None:
        """Cut after each of some entries of a log.

        Args:
            log: What was done.
            folders: Which nodes are folders.
            at: After how many entries; after each if not given.
            n_drawn: How many states to draw by lot for each.
            stride: Of the states one in so many is checked.
            may: What may be found, if that is not what `allowed` says.
        """
        positions = set(range(len(log) + 1)) if at is None else set(at)
        disk = Disk(folders=folders)
        for n in range(len(log) + 1):
            if n > 0:
                disk.apply(log[n - 1])
            if n not in positions:
                continue
            may_be = allowed(log[:n]) if may is None else may
            for number, fate in enumerate(fates(disk, n_drawn=n_drawn, seed=n)):
                self.n_states += 1
                tree = disk.tree(fate)
                mark = _mark_of(tree, repr(sorted(may_be.items(), key=repr)))
                if mark in self._seen:
                    continue
                self._seen.add(mark)
                if len(self._seen) % stride:
                    continue
                self.n_checked += 1
                self._check(tree, may_be, f"cut after {n} calls, state {number}: {fate}")

    def _check(self, tree: Tree, may: May, words: str) -> None:
        # To remove the one before takes longer than all else.
        top = empty(self._scratch / str(self.n_checked))
        put_down(tree, top)
        try:
            self._first(top)
            check(top, may, self._scratch, saves_first=self.n_checked % 2 == 0)
        except BaseException as error:
            error.add_note(f"{words}\nin {top}")
            raise


def _mark_of(tree: Tree, words: str) -> bytes:
    mark = hashlib.blake2b(words.encode())
    for path, (_, data) in sorted(tree.items()):
        mark.update(path.encode() + (b"/" if data is None else b"\0" + data) + b"\n")
    return mark.digest()

"""What stands on a pickle's stack when nobody imports or calls anything: names of things, and what was to be done.

``None``, booleans, whole numbers, texts, short bytes and tuples stand for themselves. What comes from a file may be
nested as deep as the file is long, and one tuple may hold another a thousand times over: it is never hashed, compared
or printed, and what walks it remembers where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Symbol = Any
"""One of the classes below, or what stands for itself."""


class Opaque:
    """Something nobody here needs to know: a float, an extension, what a memo has forgotten."""

    __slots__ = ()


OPAQUE: Final = Opaque()


class Global:
    """A thing that a pickle names, such as ``numpy.ndarray``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        """Module and qualified name, with a dot between."""


DICT: Final = Global("builtins.dict")
LIST: Final = Global("builtins.list")
SET: Final = Global("builtins.set")


class Blob:
    """Bytes or text too long to be kept, or an array that lies in the file."""

    __slots__ = ("at", "data", "is_text", "n_bytes")

    def __init__(self, n_bytes: int, at: int = -1, data: bytes = b"", *, is_text: bool = False) -> None:
        self.n_bytes = n_bytes
        self.at = at
        """Where they begin in their file; -1 where nobody asked."""
        self.data = data
        """Themselves, if they are very few."""
        self.is_text = is_text


class Persistent:
    """What a pickle leaves to its reader to find, by an id that means something to it."""

    __slots__ = ("id",)

    def __init__(self, pid: Symbol) -> None:
        self.id = pid


_EMPTY: Final[list[Symbol]] = []
"""Stands for every list in which nothing is yet; most stay so, and there are hundreds of thousands. Never changed."""


class Made:
    """What a call would have made, and what would have been done to it since; a list or dict is one too."""

    __slots__ = ("args", "elements", "function", "n_elements", "pairs", "state")

    def __init__(self, function: Symbol, args: Symbol = ()) -> None:
        self.function = function
        self.args = args
        self.state: Symbol = None
        """What BUILD was given."""
        self.pairs = _EMPTY
        """Keys and values in turn, the first ones only if there were too many to keep."""
        self.elements = _EMPTY
        """What was appended, the first ones only if there were too many to keep."""
        self.n_elements = 0

    def add_pairs(self, pairs: list[Symbol], max_items: int) -> None:
        """Set items; so many are kept."""
        self.pairs = _joined(self.pairs, pairs, 2 * max_items)

    def add_elements(self, elements: list[Symbol], max_items: int) -> None:
        """Append; so many are kept."""
        self.n_elements += len(elements)
        self.elements = _joined(self.elements, elements, max_items)

    def add_state(self, state: Symbol) -> None:
        """Set the state; of an object whose state is set twice, the later one besides."""
        self.state = state if self.state is None else (self.state, state)

    def is_made_by(self, *names: str) -> bool:
        """Tell whether one of these is what was called."""
        return type(self.function) is Global and self.function.name in names

    def items(self) -> Iterator[tuple[Symbol, Symbol]]:
        """Say the keys and values that were kept, in order."""
        pairs = iter(self.pairs)
        return zip(pairs, pairs, strict=False)

    def get(self, key: str) -> Symbol:
        """Look up the value of a text; `OPAQUE` if it was not kept."""
        return next((value for name, value in self.items() if type(name) is str and name == key), OPAQUE)


def _joined(there: list[Symbol], more: list[Symbol], max_items: int) -> list[Symbol]:
    if not there:
        return more[:max_items]
    if len(there) < max_items:
        there += more[: max_items - len(there)]
    return there


def name_of(symbol: Symbol) -> str:
    """Say what a global is called; "" for anything else."""
    return symbol.name if type(symbol) is Global else ""

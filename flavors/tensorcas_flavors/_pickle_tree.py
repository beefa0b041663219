"""Tree of a pickle, read without importing or calling anything that the pickle names.

`_facts` reads pickles that this process has just made, to describe an object independently of memory addresses. Of
other pickles the reader tells the code that they name.

Numbers, texts, bytes and tuples stand for themselves. All else is a `PickleNode`, a `Named` or a `ReferenceNode`.
"""

from __future__ import annotations

import io
import pickle
from functools import partial
from typing import Any, ClassVar, NamedTuple

from tensorcas_flavors._pickling import MAGIC, is_pickle
from tensorcas_mlflow.adapter import Array

LIST, DICT, SET, FROZENSET, BYTEARRAY, BUFFER = "list", "dict", "set", "frozenset", "bytearray", "buffer"
"""Kinds of nodes that no call made."""
CALL = "call"


class Named:
    """Class or function that a pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        """Module and qualified name, with a colon between."""


class ReferenceNode:
    """Persistent id, which stands for a part that the pickle lacks."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class PickleNode:
    """Container, or result of a call, with its later changes."""

    __slots__ = ("args", "elements", "is_shared", "kind", "number", "pairs", "states")

    def __init__(self, kind: str, args: Any = ()) -> None:
        self.kind = kind
        self.args = args
        """Of a call: the kind of call, the callable, and the arguments."""
        self.elements: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []
        self.states: list[Any] = []
        """States given to BUILD, and arguments of calls made for their effect alone."""
        self.number: int | None = None
        """Number in the pickle's memo."""
        self.is_shared = False
        """True if the pickle refers to the node more than once."""


class PickleTree(NamedTuple):
    """Tree of one pickle."""

    root: Any
    code: set[str]
    """Names of its classes and functions."""
    shared_tuples: set[int]
    """Ids of the tuples to which the pickle refers more than once."""


def read_pickle_tree(skeleton: Array) -> PickleTree:
    """Read the tree of a skeleton that this process has made."""
    reader = _PickleReader(io.BytesIO(skeleton[len(MAGIC) :].tobytes()))
    return PickleTree(reader.load(), reader.names, reader.shared_tuples)


def named_modules(skeleton: Array) -> set[str]:
    """List the top-level modules whose classes and functions a skeleton's pickle names. Nothing is unpickled.

    Of a damaged pickle, modules after the damage are missing. A pickle made to mislead may name others.

    Raises:
        MemoryError: This machine has too little memory for the rest of the pickle.
    """
    if not is_pickle(skeleton):
        return set()
    reader = _PickleReader(io.BytesIO(skeleton[len(MAGIC) :].tobytes()))
    try:
        reader.load()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - damage may raise anything
        pass
    modules = {name.partition(":")[0].partition(".")[0] for name in reader.names}
    return {module for module in modules if module.isidentifier()}


_PYTHONS: Any = vars(pickle)["_Unpickler"]
"""Unpickler written in Python."""


class _PickleReader(_PYTHONS):  # type: ignore[misc]
    """Python's own unpickler, which makes nodes instead of importing, calling and changing."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PYTHONS.dispatch)

    def load(self) -> Any:
        self.names: set[str] = set()
        self.shared_tuples: set[int] = set()
        # Python's own reads through a layer for frames, which only say how much to read from a file at once.
        read = self.read = self._file_read
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        dispatch = self.dispatch
        try:
            while True:
                dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    def find_class(self, module: str, name: str) -> Named:
        self.names.add(f"{module}:{name}")
        return Named(f"{module}:{name}")

    def get_extension(self, code: int) -> None:
        self.append(self.find_class("copyreg", str(code)))

    def persistent_load(self, value: Any) -> ReferenceNode:
        return ReferenceNode(value)

    def _remember(self) -> None:
        top = self.stack[-1]
        if type(top) is PickleNode and top.number is None:
            top.number = len(self.memo)
        self.memo[len(self.memo)] = top

    def _recall(self, n_bytes: int) -> None:
        part = self.memo[int.from_bytes(self.read(n_bytes), "little")]
        if type(part) is PickleNode:
            part.is_shared = True
        elif type(part) is tuple:
            self.shared_tuples.add(id(part))
        self.append(part)

    def _begin(self, kind: str) -> None:
        self.append(PickleNode(kind))

    def _make_frozenset(self) -> None:
        node = PickleNode(FROZENSET)
        node.elements = self.pop_mark()
        self.append(node)

    def _make_bytearray(self) -> None:
        node = PickleNode(BYTEARRAY)
        node.elements = [self.read(int.from_bytes(self.read(8), "little"))]
        self.append(node)

    def _call(self, how: str, n_args: int) -> None:
        args = self.stack[-n_args:]
        del self.stack[-n_args:]
        self.stack[-1] = PickleNode(CALL, (how, self.stack[-1], *args))

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is PickleNode:
            self.stack[-1].states.append(state)

    def _pop(self) -> None:
        if not self.stack:
            self.pop_mark()
            return
        dropped = self.stack.pop()
        # A call for its effect alone changes its first argument.
        if type(dropped) is PickleNode and dropped.kind == CALL:
            _, function, args, *_ = dropped.args
            if type(args) is tuple and args and type(args[0]) is PickleNode:
                args[0].states.append((function, args[1:]))

    def _append_one(self) -> None:
        self.stack[-2].elements.append(self.stack.pop())

    def _append_all(self) -> None:
        elements = self.pop_mark()
        self.stack[-1].elements.extend(elements)

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].pairs.append((key, value))

    def _set_all(self) -> None:
        flat = self.pop_mark()
        self.stack[-1].pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    dispatch.update(
        {
            pickle.FRAME[0]: lambda self: self.read(8),
            pickle.MEMOIZE[0]: _remember,
            pickle.BINGET[0]: partial(_recall, n_bytes=1),
            pickle.LONG_BINGET[0]: partial(_recall, n_bytes=4),
            pickle.EMPTY_LIST[0]: partial(_begin, kind=LIST),
            pickle.EMPTY_DICT[0]: partial(_begin, kind=DICT),
            pickle.EMPTY_SET[0]: partial(_begin, kind=SET),
            pickle.FROZENSET[0]: _make_frozenset,
            pickle.BYTEARRAY8[0]: _make_bytearray,
            pickle.NEXT_BUFFER[0]: partial(_begin, kind=BUFFER),
            pickle.READONLY_BUFFER[0]: lambda _: None,
            pickle.REDUCE[0]: partial(_call, how="reduce", n_args=1),
            pickle.NEWOBJ[0]: partial(_call, how="new", n_args=1),
            pickle.NEWOBJ_EX[0]: partial(_call, how="new", n_args=2),
            pickle.BUILD[0]: _build,
            pickle.POP[0]: _pop,
            pickle.APPEND[0]: _append_one,
            pickle.APPENDS[0]: _append_all,
            pickle.ADDITEMS[0]: _append_all,
            pickle.SETITEM[0]: _set_one,
            pickle.SETITEMS[0]: _set_all,
        }
    )

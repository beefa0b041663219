"""What an object holds besides its arrays, in a form that needs no pickle to read.

With ``into=`` no stored pickle is read. So the skeleton goes on after its pickle with facts, as JSON:

* ``values``: the plain values (`_plain_values`) that lie openly in the object: in lists, dicts, sets and deques, and in
  attributes of objects that pickle by their attributes. These can be filled in.
* ``rest``: a digest of all else: of classes, keys, sizes, tuples, and of what objects say of themselves that decide
  what is pickled of them. A live object of which it is another is refused.
* ``parts``: a short digest of each attribute or item of the object itself, so that a refusal can name one.

A digest does not depend on what is one object and what is an equal one, where nobody can change either; nor on the
order in which a set is walked.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from tensorcas_flavors._generic_parts import MEMBER
from tensorcas_flavors._plain_values import Encoder, NotPlainError, decode, is_value, with_tail
from tensorcas_flavors._skeleton_tree import BYTEARRAY, CALL, DICT, FROZENSET, LIST, SET, Named, Node, Part, read_tree
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

REMEDY = "load a new one, without into= (or original=)"

END = b"TCGNF1\n"
_DIGEST_BYTES = 16
_PART_BYTES = 2
_MAX_SAID = 64
"""An object of more attributes or items has no digests of each."""
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_PLAIN_KINDS = frozenset((LIST, DICT, SET, FROZENSET, BYTEARRAY))
_COLLECTIONS = frozenset((deque, OrderedDict, defaultdict))
_MAKES_CLASS = frozenset(
    ("cloudpickle.cloudpickle:_make_skeleton_class", "cloudpickle.cloudpickle:_make_skeleton_enum")
)
_MAKES_VALUES = frozenset(
    (
        "numpy:dtype",
        "datetime:date",
        "datetime:datetime",
        "datetime:time",
        "datetime:timedelta",
        "datetime:timezone",
        "fractions:Fraction",
        "builtins:range",
        "builtins:slice",
        "builtins:complex",
        "uuid:UUID",
        "pathlib:PosixPath",
        "pathlib:PurePosixPath",
        "zoneinfo:ZoneInfo._unpickle",
    )
)
"""Nobody can change what these make, so that equal ones are as good as one."""

Path = tuple[Any, ...]
"""A key and the path before it, or nothing."""


class Place(NamedTuple):
    """Where an object holds a value that can be replaced."""

    container: Any
    """A list, dict, deque or array of objects; an object with slots; or the place of a tuple."""
    key: Any

    def get(self) -> Any:
        """Return what is there."""
        container = self.container
        if type(container) is Place:
            return container.get()[self.key]
        for kind in _HOLDERS:
            if isinstance(container, kind):
                return kind.__getitem__(container, self.key)
        return container.reshape(-1)[self.key] if type(container) is np.ndarray else getattr(container, self.key)

    def put(self, value: Any) -> None:
        """Put something else there; a tuple is made anew for it."""
        container = self.container
        if type(container) is Place:
            held = container.get()
            items = (*held[: self.key], value, *held[self.key + 1 :])
            container.put(items if type(held) is tuple else tuple.__new__(type(held), items))
            return
        for kind in _HOLDERS:
            if isinstance(container, kind):
                kind.__setitem__(container, self.key, value)
                return
        if type(container) is np.ndarray:
            container.reshape(-1)[self.key : self.key + 1].fill(value)
        else:
            object.__setattr__(container, self.key, value)


_HOLDERS: tuple[Any, ...] = (list, dict, deque)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A place in an object where a plain value stands."""

    path: Path
    value: Any
    """What stands there, as JSON."""
    container: Any
    """The list, dict, set, deque or bytearray that stands there; None for other values."""
    place: Place | None
    """Where another value can be put; None if only the container's content can be changed."""


class Facts(NamedTuple):
    """What is said of an object; see the head of this module."""

    holes: list[Hole]
    rest: str
    parts: list[str]
    """Digests of what comes before the first attribute or item, then of each."""
    names: list[str]
    """Names of those."""
    code: set[str]
    """Names of the classes and functions that the pickle calls."""
    fixed: set[Any]
    """Parts that cannot be filled, since an object decides itself what is pickled of it."""


def facts_of(skeleton: Array, memo: Mapping[int, object]) -> Facts:
    """Say what an object holds whose skeleton was just made; ``memo`` has the objects in it by their numbers."""
    tree = read_tree(skeleton)
    return _Walk(memo, tree.shared_tuples).run(tree.root)._replace(code=tree.code)


def with_facts(skeleton: Array, facts: Facts) -> Array:
    """Return a skeleton with facts at its end."""
    return with_tail(skeleton, facts_json(facts), END)


def facts_json(facts: Facts) -> dict[str, Any]:
    """Return what is stored of facts."""
    values = [hole.value for hole in facts.holes]
    return {"values": values, "rest": facts.rest, "parts": "".join(facts.parts)}


def plan_values(adapter: str, facts: Facts, stored: Any) -> Callable[[], None]:
    """Find what of a live object is to be replaced by a stored value, and change nothing yet.

    Args:
        adapter: The adapter's name, for errors.
        facts: Of the live object.
        stored: What `facts_json` made of the stored one, or anything.

    Returns:
        What changes it. It cannot fail.

    Raises:
        AdapterError: The live object differs in something that only the pickle says.
    """
    try:
        values, rest, parts = stored["values"], stored["rest"], stored["parts"]
        is_sound = type(values) is list and type(parts) is str
    except (TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise AdapterError(adapter, f"the stored model does not say what an original must be like: {REMEDY}")
    if rest != facts.rest or len(values) != len(facts.holes):
        raise _misfit(adapter, _where(facts, parts))
    changes: list[Callable[[], None]] = []
    for hole, value in zip(facts.holes, values, strict=True):
        if json.dumps(value) == json.dumps(hole.value):
            continue
        new = decode(adapter, value)
        if hole.container is not None and _holds_alike(hole.container, new):
            changes.append(partial(_assign, hole.container, new))
        elif hole.place is not None:
            changes.append(partial(hole.place.put, new))
        else:
            raise _misfit(adapter, f"{_dotted(hole.path)!r} differs, and cannot be changed in place")

    def apply() -> None:
        for change in changes:
            change()

    return apply


def _misfit(adapter: str, reason: str) -> AdapterError:
    return AdapterError(adapter, f"the stored model does not fit the original: {reason}: {REMEDY}")


def _where(facts: Facts, parts: str) -> str:
    step = 2 * _PART_BYTES
    stored = [parts[i : i + step] for i in range(0, len(parts), step)]
    differing = [i for i, (mine, its) in enumerate(zip(facts.parts, stored, strict=False)) if mine != its]
    if len(stored) != len(facts.parts) or not differing or not differing[0]:
        return "its class, its attributes, its keys or their order are others"
    return f"{facts.names[differing[0] - 1]!r} differs in more than arrays and plain values"


def _holds_alike(container: Any, new: Any) -> bool:
    if type(container) in _COLLECTIONS:
        return type(new) is (list if type(container) is deque else dict)
    # One whose memory somebody looks at cannot change its size.
    return type(container) is type(new) and (type(new) is not bytearray or len(container) == len(new))


def _assign(container: Any, new: Any) -> None:
    """Give a container the content of another, and keep the containers in it that can be kept."""
    if isinstance(container, bytearray):
        container[:] = new
    elif isinstance(container, dict):
        if list(container) == list(new) and [type(key) for key in container] == [type(key) for key in new]:
            _assign_items(container, new, dict.__setitem__, list(container.items()))
        else:
            container.clear()
            container.update(new)
    elif isinstance(container, list):
        if len(container) == len(new):
            _assign_items(container, new, list.__setitem__, list(enumerate(container)))
        else:
            container[:] = new
    else:  # a set or a deque
        container.clear()
        for element in new:
            container.add(element) if isinstance(container, set) else container.append(element)


def _assign_items(container: Any, new: Any, put: Callable[..., None], items: list[tuple[Any, Any]]) -> None:
    for key, held in items:
        if type(held) in (list, dict, set, bytearray) and type(held) is type(new[key]):
            _assign(held, new[key])
        else:
            put(container, key, new[key])


def _dotted(path: Path) -> str:
    keys = []
    while path:
        path, key = path
        keys.append(str(key))
    return ".".join(reversed(keys))


class _Visit(NamedTuple):
    part: Any
    path: Path
    is_open: bool
    """Whether the live object itself holds it, so that its content can be changed."""
    place: Place | None = None
    in_class: bool = False
    """Whether it is part of a class that travels by value: functions there go by their names."""


class _Cut(NamedTuple):
    name: str


_Step = _Visit | _Cut


class _Walk:
    """One pass over a tree, in the order of the pickle."""

    def __init__(self, memo: Mapping[int, object], shared_tuples: set[int]) -> None:
        self._memo = memo
        self._shared_tuples = shared_tuples
        self._numbers: dict[int, int] = {}
        self._tokens: list[str] = []
        self._stack: list[_Step] = []
        self._facts = Facts([], "", [], [], set(), set())
        self._encode = Encoder().encode
        self._all = blake2b(digest_size=_DIGEST_BYTES)

    def run(self, root: Any) -> Facts:
        self._stack.append(_Visit(root, (), True))
        while self._stack:
            step = self._stack.pop()
            if type(step) is _Cut:
                self._end_part()
                self._facts.names.append(step.name)
            else:
                steps = self._visit(step)  # type: ignore[arg-type]
                steps.reverse()
                self._stack += steps
        self._end_part()
        return self._facts._replace(rest=self._all.hexdigest())

    def _end_part(self) -> None:
        text = "\n".join([*self._tokens, ""]).encode("utf-8", "surrogatepass")
        self._all.update(text)
        self._facts.parts.append(blake2b(text, digest_size=_PART_BYTES).hexdigest())
        self._tokens.clear()

    def _visit(self, visit: _Visit) -> list[_Step]:
        """Say what a part is itself, and return what it holds."""
        part, kind = visit.part, type(visit.part)
        if kind in _ATOMS:
            if visit.place is None:
                self._say_atom(part)
                return []
            return self._say_value(visit, self._encode(part))
        if kind is Part and is_value(part):
            return self._say_value(visit, self._encode(part))
        if kind is Named:
            self._tokens.append(f"named {part.name}")
            return []
        if kind is Part:
            return self._visit_row(visit)
        if (kind is tuple or part.kind in _PLAIN_KINDS) and (value := self._plain(part)) is not None:
            is_held = visit.is_open and kind is Node and part.kind != FROZENSET
            return self._say_value(visit, value, self._live(part) if is_held else None)
        if not self._is_new(part):
            return []
        if kind is tuple:
            self._tokens.append(f"tuple {len(part)}")
            return self._elements(visit, part, None if id(part) in self._shared_tuples else visit.place)
        if part.kind == CALL:
            return self._visit_call(visit)
        self._tokens.append(f"{part.kind} {len(part.elements)} {len(part.pairs)}")
        live = self._live(part) if visit.is_open else None
        return self._elements(visit, part.elements, live) + self._pairs(visit, part.pairs, live)

    def _say_atom(self, part: Any) -> None:
        self._tokens.append(json.dumps(self._encode(part)) if part != part else repr(part))

    def _say_value(self, visit: _Visit, value: Any, container: Any = None) -> list[_Step]:
        if visit.place is None and container is None:
            self._tokens.append(json.dumps(value))
        else:
            self._tokens.append("?")
            self._facts.holes.append(Hole(path=visit.path, value=value, container=container, place=visit.place))
        return []

    def _visit_row(self, visit: _Visit) -> list[_Step]:
        ref = visit.part.ref
        key: Any = ref
        facts: Sequence[Any] = ()
        if type(ref) is not tuple:
            self._tokens.append(repr(ref))
        elif ref[0] == MEMBER:
            key = ref[1:3]
            self._tokens.append(repr(ref))
        else:
            word, key, _, *facts = ref
            self._tokens.append(f"{word} {key}")
        if not visit.is_open:
            self._facts.fixed.add(key)
        # How an array lies in memory, and whether it is read-only, is the live one's own business.
        return [_Visit(fact, visit.path, False) for fact in facts[2:]]

    def _is_new(self, part: Any) -> bool:
        """Number what can be told from its copies, and tell whether it is met for the first time."""
        if type(part) is Node and part.kind == CALL and _name_of(part.args[1]) in _MAKES_VALUES:
            return True
        n_met = len(self._numbers)
        number = self._numbers.setdefault(id(part), n_met)
        if number < n_met:
            self._tokens.append(f"again {number}")
        return number == n_met

    def _plain(self, part: Any) -> Any:
        try:
            return self._encode(part)
        except NotPlainError:
            return None

    def _content(self, node: Node, kind: type) -> Any:
        """Return what a collection holds as JSON: a list of elements, or a dict; None if not all of it is plain."""
        flat = [each for pair in node.pairs for each in pair] if issubclass(kind, dict) else node.elements
        try:
            values = [self._encode(each) for each in flat]
        except NotPlainError:
            return None
        return {"d": values} if issubclass(kind, dict) else values

    def _live(self, part: Node) -> Any:
        return None if part.number is None else self._memo.get(part.number)

    def _elements(self, visit: _Visit, elements: Sequence[Any], holder: Any = None) -> list[_Step]:
        """Return visits of elements; ``holder`` is the container, or the place of the tuple, that can be changed."""
        return [
            _Visit(each, (visit.path, i), visit.is_open, None if holder is None else Place(holder, i), visit.in_class)
            for i, each in enumerate(elements)
        ]

    def _pairs(self, visit: _Visit, pairs: Sequence[tuple[Any, Any]], holder: Any) -> list[_Step]:
        """Return visits of keys and values; ``holder`` is the dict, or object, that values can be changed in."""
        keys = list(dict.keys(holder)) if isinstance(holder, dict) else [key for key, _ in pairs]
        is_said = visit.path == () and len(pairs) <= _MAX_SAID and not self._facts.names
        steps: list[_Step] = []
        for key, _ in pairs:
            if type(key) in _ATOMS:
                self._say_atom(key)
        for (key, value), live_key in zip(pairs, keys, strict=True):
            path = (visit.path, live_key)
            if is_said:
                steps.append(_Cut(str(live_key)))
            if type(key) not in _ATOMS:
                steps.append(_Visit(key, path, False, None, visit.in_class))
            place = None if holder is None else Place(holder, live_key)
            steps.append(_Visit(value, path, visit.is_open, place, visit.in_class))
        return steps

    def _visit_call(self, visit: _Visit) -> list[_Step]:
        node, live = visit.part, self._live(visit.part)
        how, function, args, *keywords = node.args
        kind = type(live)
        closed = _Visit(None, visit.path, False, None, visit.in_class)
        if isinstance(live, FunctionType) and visit.in_class:
            # As with a class that is imported, the code is that of the live process.
            self._tokens.append(f"function {live.__module__} {live.__qualname__}")
            return []
        if isinstance(live, type) and _name_of(function) in _MAKES_CLASS:
            # Its arguments have a number in them that every process draws anew.
            self._tokens.append(f"class {live.__module__} {live.__qualname__}")
            return [closed._replace(part=state, in_class=True) for state in node.states]
        opened = visit if visit.is_open else None
        content = self._content(node, kind) if opened and kind in _COLLECTIONS else None
        sizes = () if content is not None else (len(node.elements), len(node.pairs))
        self._tokens.append(f"{how} {len(node.states)} {sizes}")
        steps: list[_Step] = [closed._replace(part=function)]
        if opened and _is_named_tuple(kind) and type(args) is tuple:
            steps += self._elements(opened, args, None if node.is_shared else visit.place)
        else:
            steps.append(closed._replace(part=args))
        steps += [closed._replace(part=each) for each in keywords]
        for state in node.states:
            steps += self._state(opened, live, state) if opened else [closed._replace(part=state)]
        if content is not None:
            return [*steps, *self._say_value(visit._replace(place=None), content, live)]
        has_own = opened and _pickles_its_items(live)
        steps += self._elements(visit if has_own else closed, node.elements, live if has_own else None)
        return steps + self._pairs(visit if has_own else closed, node.pairs, live if has_own else None)

    def _state(self, visit: _Visit, live: Any, state: Any) -> list[_Step]:
        """Return visits of what BUILD is given: attributes can be changed if it is given all of them as they are."""
        closed = visit._replace(is_open=False, place=None)
        cls: Any = type(live)
        if cls is np.ndarray and type(state) is tuple and type(state[-1]) is Node:
            can_put = live.flags.c_contiguous and live.flags.writeable
            elements = self._elements(visit, state[-1].elements, live if can_put else None)
            return [closed._replace(part=state[:-1]), *elements]
        attributes, slots = state, None
        if type(state) is tuple and len(state) == 2 and _pickles_by_default(cls):
            attributes, slots = state
        steps: list[_Step] = []
        if type(attributes) is Node and attributes.number is not None and self._live(attributes) is _attributes(live):
            if _may_change(cls):
                steps.append(_Visit(attributes, visit.path, True))
            else:
                steps += self._pairs(visit, attributes.pairs, None)
        else:
            steps.append(closed._replace(part=attributes))
        if type(slots) is Node and slots.kind == DICT:
            owner = live if _may_change(cls) else None
            steps += self._pairs(visit, slots.pairs, owner)
        elif slots is not None:
            steps.append(closed._replace(part=slots))
        return steps


def _attributes(live: Any) -> Any:
    try:
        return object.__getattribute__(live, "__dict__")
    except AttributeError:
        return None


def _name_of(function: Any) -> str:
    return function.name if type(function) is Named else ""


@lru_cache(maxsize=4096)
def _pickles_by_default(kind: Hashable) -> bool:
    """Tell whether objects of a class leave it to Python what is pickled of them."""
    ways = [getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")]
    return all(ways) and kind not in cloudpickle.Pickler.dispatch_table


def _pickles_its_items(live: Any) -> bool:
    """Tell whether a list or dict of some class pickles the items that it holds."""
    kind: Any = type(live)
    if kind in _COLLECTIONS:
        return True
    is_sequence = issubclass(kind, list) and kind.__iter__ is list.__iter__
    is_mapping = issubclass(kind, dict) and kind.items is dict.items
    return (is_sequence or is_mapping) and _pickles_by_default(kind)


@lru_cache(maxsize=4096)
def _may_change(kind: Hashable) -> bool:
    """Tell whether attributes of a class's objects may be set: it is not frozen, nor equal by what it holds."""
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return not is_frozen and getattr(kind, "__hash__", None) in (None, object.__hash__)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and getattr(getattr(kind, "__getnewargs__", None), "__module__", "") == "collections"

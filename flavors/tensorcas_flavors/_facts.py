"""Facts of an object: JSON beside its pickle, from which a live object is filled without reading the pickle.

`facts_of` describes an object that was just pickled. It reads the pickle as a tree (`_pickle_tree`) and calls nothing
that the pickle names. The facts are

* ``values``: the plain values that lie openly in the object: in lists, dicts, sets and deques, and in attributes of
  objects that pickle by their attributes. `plan_values` puts them into a live object.
* ``rest``: a digest of all else: classes, keys, sizes, tuples, and the state of objects that decide themselves what is
  pickled of them. `plan_values` refuses a live object with another digest.
* ``sections``: a short digest of each attribute or item of the object itself, so that a refusal can name one.

Immutable parts are described by value: a digest ignores whether two equal ones are one object, and ignores the order in
which a set is walked.

Plain values are None, booleans, numbers, texts, bytes, dates and times, numpy scalars, and lists, tuples, dicts and
sets of plain values. Each value has one JSON form: equal bits give equal text, and ``1`` differs from ``1.0`` and
``True``.

An adapter that takes parts out of a pickle leaves references there. A reference is the name of a row, or a tuple of a
word, the key of a part, a number, and facts about the part:

* ``(VALUE, word, *arguments)`` spells out a value that pickle would call something to make;
* ``(MEMBER, row, number, …)`` is one of many parts in one row;
* of any other reference, the word, the key and the facts from the third on belong to the digest.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from hashlib import blake2b
from json.encoder import encode_basestring
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from tensorcas_flavors._pickle_tree import (
    BYTEARRAY,
    CALL,
    DICT,
    FROZENSET,
    LIST,
    SET,
    Named,
    PickleNode,
    ReferenceNode,
    read_pickle_tree,
)
from tensorcas_flavors._pickling import OF_ARRAYS, TakeOut, ViewOf, dump_skeleton
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.errors import AdapterError, FormatError

REMEDY = "load a new one, without into= (or original=)"
VALUE, MEMBER = "value", "member"
"""First words of references; see the head of this module."""
END = b"TCFACT1\n"
"""Last bytes of a skeleton that ends with facts."""

_LENGTH_BYTES = 8
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_MAX_JSON_INT = 1 << 63
_MAX_SCALAR_BYTES = 4096
_DIGEST_BYTES = 16
_SECTION_BYTES = 2
_MAX_SECTIONS = 64
"""An object with more attributes or items has no digest of each."""
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_JSON_ATOMS = frozenset((type(None), bool, int, float, str))
_EXACT = _JSON_ATOMS - {float}
_TEXTS = _EXACT - {int}
_NUMPYS = (np.bool_, np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64)
_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, **{kind: kind for kind in _NUMPYS}}
"""Classes of numbers that a column may hold, each with the dtype of an array of them."""
_INTEGERS = (np.int8, np.int16, np.int32, np.int64)
_MIN_COLUMN = 16
json_text = partial(json.dumps, ensure_ascii=False)
"""JSON with all texts as they are: escapes of two lone surrogates would be read as one character."""
_PLAIN_KINDS = frozenset((LIST, DICT, SET, FROZENSET, BYTEARRAY))
_TUPLE = "tuple"
_LIVE_KINDS: dict[Any, str] = {list: LIST, dict: DICT, set: SET, frozenset: FROZENSET, tuple: _TUPLE}
_COLLECTIONS = frozenset((deque, OrderedDict, defaultdict))
_MAKES_CLASS = frozenset(
    ("cloudpickle.cloudpickle:_make_skeleton_class", "cloudpickle.cloudpickle:_make_skeleton_enum")
)
_OF_BUFFER = "numpy._core.numeric:_frombuffer"
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
"""Callables whose results are immutable, so that equal results are as good as one."""


def misfit(adapter: str, reason: str) -> AdapterError:
    """Return the error for a live object that the stored one cannot fill."""
    return AdapterError(adapter, f"the stored model does not fit the original: {reason}: {REMEDY}")


def no_facts(adapter: str) -> AdapterError:
    """Return the error for a stored model without facts."""
    return AdapterError(adapter, f"the stored model does not say what an original must be like: {REMEDY}")


class NotPlainError(Exception):
    """A value is not plain."""


def take_value(part: object) -> tuple[Any, ...] | None:
    """Return the reference that stands for a scalar, a date or the like in a skeleton; None for anything else."""
    described = _described(part)
    return None if described is None else (VALUE, *described)


def _described(part: Any) -> tuple[Any, ...] | None:
    kind = type(part)
    if kind is complex:
        return "complex", part.real, part.imag
    if kind is datetime or kind is time:
        return None if part.tzinfo is not None or part.fold else (kind.__name__, part.isoformat())
    if kind is date:
        return "date", part.isoformat()
    if kind is timedelta:
        return "timedelta", part.days, part.seconds, part.microseconds
    if kind is Decimal:
        return "Decimal", str(part)
    if kind.__module__ == "numpy" and part.nbytes <= _MAX_SCALAR_BYTES:
        try:
            return "numpy", dtype_name(part.dtype), part.tobytes()
        except ValueError:
            return None
    return None


_IS_TAKEN = frozenset((complex, datetime, date, time, timedelta, Decimal))


def is_taken(kind: type) -> bool:
    """Tell whether `take_value` may return a reference for instances of a class."""
    return kind in _IS_TAKEN or (issubclass(kind, np.generic) and kind.__module__ == "numpy" and kind is not np.void)


def make_value(adapter: str, word: Any, *arguments: Any) -> Any:
    """Return the value that the reference ``(VALUE, word, *arguments)`` stands for.

    Raises:
        AdapterError: No value has such a reference.
    """
    make = _MAKERS.get(word) if type(word) is str else None
    try:
        if make is not None:
            return make(*arguments)
    except (ValueError, TypeError, ArithmeticError, FormatError):
        pass
    raise AdapterError(adapter, f"a value cannot be read: {(word, *arguments)!r:.100}")


def _numpy(name: str, data: bytes) -> Any:
    (scalar,) = np.frombuffer(data, dtype=parse_dtype(name))
    return scalar


_MAKERS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": timedelta,
    "Decimal": Decimal,
    "numpy": _numpy,
}


def is_value(part: Any) -> bool:
    """Tell whether a part of a pickle's tree is a reference of `take_value`."""
    return type(part) is ReferenceNode and type(part.value) is tuple and part.value[0] == VALUE


class Encoder:
    """Writer of plain values as JSON, for live values and for parts of a pickle's tree.

    An encoder remembers containers by identity: everything it has written must stay alive as long as it is used.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int] | None] = {}

    def encode(self, part: Any) -> Any:
        """Return a value as JSON.

        Raises:
            NotPlainError: The value is not plain, too large or too deep, or the pickle refers twice to something in it.
        """
        return self._encode(part, 0)[0]

    def _encode(self, part: Any, depth: int) -> tuple[Any, int]:
        """Return the JSON, and the number of values in it."""
        kind = type(part)
        if kind is bool or part is None or kind is str:
            return part, 1
        if kind is int:
            return (part if -_MAX_JSON_INT <= part < _MAX_JSON_INT else {"i": hex(part)}), 1
        if kind is float:
            return (part if part - part == 0 else {"f": struct.pack(">d", part).hex()}), 1
        if kind is bytes:
            return {"b": base64.b64encode(part).decode()}, 1
        if id(part) not in self._known:
            if depth > _MAX_DEPTH:
                raise NotPlainError
            self._known[id(part)] = None
            value, n_values = self._container(part, depth + 1)
            if n_values <= _MAX_VALUES:
                self._known[id(part)] = value, n_values
        known = self._known[id(part)]
        if known is None:
            raise NotPlainError
        return known

    def _container(self, part: Any, depth: int) -> tuple[Any, int]:
        kind = _LIVE_KINDS.get(type(part), "")
        elements: Any = [part, part.values()] if kind == DICT else part
        if type(part) is PickleNode:
            if part.is_shared:
                raise NotPlainError
            kind, elements = part.kind, part.elements
            if kind == DICT:
                elements = list(zip(*part.pairs, strict=True)) or [(), ()]
        if kind in (LIST, _TUPLE):
            return self._all(None if kind == LIST else "t", elements, depth)
        if kind == DICT:
            columns = [self._all(None, each, depth) for each in elements]
            return {"d": [column for column, _ in columns]}, 1 + sum(n - 1 for _, n in columns)
        if kind in (SET, FROZENSET):
            return self._set("s" if kind == SET else "z", list(elements), depth)
        if kind == BYTEARRAY:
            return {"y": base64.b64encode(elements[0]).decode()}, 1
        reference = part.value if is_value(part) else take_value(part) if is_taken(type(part)) else None
        if reference is None:
            raise NotPlainError
        return self._all("v", reference[1:], depth)

    def _set(self, word: str, elements: list[Any], depth: int) -> tuple[Any, int]:
        # The order in which a set is walked differs from process to process.
        if set(map(type, elements)) == {str}:
            return {word: sorted(elements, key=encode_basestring)}, 1 + len(elements)
        found = [self._encode(part, depth) for part in elements]
        return {word: sorted((value for value, _ in found), key=json_text)}, 1 + sum(n for _, n in found)

    def _all(self, word: str | None, parts: Any, depth: int) -> tuple[Any, int]:
        values, n_values = encode_column(parts), len(parts)
        if values is None:
            found = [self._encode(part, depth) for part in parts]
            values, n_values = [value for value, _ in found], sum(n for _, n in found)
        return (values if word is None else {word: values}), 1 + n_values


def encode_column(parts: Any) -> Any:
    """Return texts, or many numbers of one class, as the JSON of their list; None for anything else."""
    kinds = set(map(type, parts))
    if kinds <= _TEXTS:
        return list(parts)
    kind = kinds.pop()
    dtype = _NUMBERS.get(kind)
    if dtype is None or kinds or len(parts) < _MIN_COLUMN:
        return None
    try:
        numbers: Any = np.fromiter(parts, dtype, len(parts))
    except OverflowError:  # an integer of more than 64 bits
        return None
    if kind is int:
        numbers = next(each for each in map(numbers.astype, _INTEGERS) if np.array_equal(each, numbers))
    return {"c": [kind is dtype, dtype_name(numbers.dtype), base64.b64encode(numbers).decode()]}


def encode_long(part: Any) -> Any:
    """Return the JSON of a long list or dict of which `encode_column` takes all; None for any other."""
    if not _MIN_COLUMN <= len(part) < _MAX_VALUES // 2:
        return None
    if type(part) is list:
        return encode_column(part)
    keys, values = encode_column(part), encode_column(part.values())
    return None if keys is None or values is None else {"d": [keys, values]}


def decode(adapter: str, value: Any) -> Any:
    """Return the plain value that some JSON stands for.

    Raises:
        AdapterError: `Encoder` writes no such JSON.
    """
    if type(value) in _JSON_ATOMS:
        return value
    if type(value) is list:
        return value[:] if _JSON_ATOMS.issuperset(map(type, value)) else [decode(adapter, each) for each in value]
    try:
        ((word, content),) = value.items()
        if word == "v":
            return make_value(adapter, *decode(adapter, content))
        return _DECODERS[word](decode(adapter, content) if type(content) in (list, dict) else content)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, FormatError) as error:
        raise AdapterError(adapter, f"a value cannot be read: {str(value)[:100]}") from error


def _column_of(content: Any) -> list[Any]:
    is_numpys, name, data = content
    numbers = np.frombuffer(base64.b64decode(data, validate=True), parse_dtype(name))
    return list(numbers) if is_numpys else numbers.tolist()


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "b": lambda text: base64.b64decode(text, validate=True),
    "y": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "t": tuple,
    "s": set,
    "z": frozenset,
    "c": _column_of,
    "d": lambda columns: dict(zip(*columns, strict=True)),
}


def is_same_json(one: Any, other: Any) -> bool:
    """Tell whether two pieces of JSON are equal; 1 equals neither True nor 1.0."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return bool(one == other) if type(one) in _EXACT else json_text(one) == json_text(other)


def with_tail(skeleton: Array, value: Any) -> Array:
    """Return a skeleton with JSON after its pickle: the text, its length in 8 bytes, and `END`."""
    text = json_text(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
    tail = text + len(text).to_bytes(_LENGTH_BYTES, "little") + END
    return np.concatenate([skeleton, np.frombuffer(tail, dtype=np.uint8)])


def read_tail(adapter: str, skeleton: Array | None) -> Any:
    """Return the JSON after a skeleton's pickle, None if there is none. No pickle is read.

    Raises:
        AdapterError: The skeleton ends with something else than JSON and its length.
    """
    data = b"" if skeleton is None else skeleton.tobytes()
    if not data.endswith(END):
        return None
    stop = len(data) - len(END) - _LENGTH_BYTES
    start = stop - int.from_bytes(data[max(stop, 0) :][:_LENGTH_BYTES], "little")
    try:
        return json.loads(data[max(start, 0) : max(stop, 0)])
    except (ValueError, RecursionError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error


class Items:
    """Base of containers whose items `LivePlace` sets with ``__setitem__``, such as views of a library's object."""


class LivePlace(NamedTuple):
    """Position in a live object at which another value can be put."""

    container: Any
    """A list, dict, deque, array of objects or `Items`; an object with slots; or the place of a tuple."""
    key: Any

    @property
    def is_in_tuple(self) -> bool:
        """True if the value is an item of a tuple."""
        return type(self.container) is LivePlace

    @property
    def root(self) -> Any:
        """The container that is changed in the end."""
        return self.container.root if type(self.container) is LivePlace else self.container

    def get(self) -> Any:
        """Return the value that stands there."""
        container = self.container
        if type(container) is LivePlace:
            return container.get()[self.key]
        for kind in _HOLDERS:
            if isinstance(container, kind):
                return kind.__getitem__(container, self.key)
        if type(container) is np.ndarray:
            return container.flat[self.key]
        return container[self.key] if isinstance(container, Items) else getattr(container, self.key)  # type: ignore[index]

    def put(self, value: Any) -> None:
        """Put another value there; a tuple is replaced by a new one."""
        container = self.container
        if type(container) is LivePlace:
            held = container.get()
            items = (*held[: self.key], value, *held[self.key + 1 :])
            container.put(items if type(held) is tuple else tuple.__new__(type(held), items))
            return
        for kind in _HOLDERS:
            if isinstance(container, kind):
                kind.__setitem__(container, self.key, value)
                return
        if type(container) is np.ndarray:
            # Assignment would spread a list, or an array, over the elements.
            container[(*np.unravel_index(self.key, container.shape), ...)].fill(value)
        elif isinstance(container, Items):
            container[self.key] = value  # type: ignore[index]
        else:
            object.__setattr__(container, self.key, value)


_HOLDERS: tuple[Any, ...] = (list, dict, deque)


class Slot(NamedTuple):
    """One value in an object, with its fact."""

    path: Any
    """Keys that lead to it: as text, or as a key and the path before it."""
    fact: Any
    """JSON that describes the value."""
    value: Any
    """The live value; None where nothing can be changed inside it."""
    place: LivePlace | None
    """Place for another value; None if only the value's content can be changed."""


class Facts(NamedTuple):
    """Facts of an object; see the head of this module."""

    slots: list[Slot]
    """The plain values."""
    rest: str
    sections: list[str]
    """Digests: of all before the first attribute or item, then of each attribute or item."""
    names: list[str]
    """Names of the attributes and items that have a digest."""
    code: set[str]
    """Names of the classes and functions that the pickle calls."""
    fixed: set[Any]
    """Keys of parts that cannot be filled, since their owner pickles a state of its own."""


def facts_of(adapter: str, obj: object, take_out: TakeOut, *, view_of: ViewOf | None = None) -> Facts:
    """Return the facts of an object.

    Args:
        adapter: The adapter's name, for errors.
        obj: Anything that can be pickled.
        take_out: As `dump_skeleton` has it.
        view_of: Likewise.

    Raises:
        AdapterError: Something in the object cannot be pickled.
    """
    memo: dict[int, object] = {}
    return facts_of_skeleton(dump_skeleton(adapter, obj, take_out, view_of=view_of, memo=memo), memo)


def facts_of_skeleton(skeleton: Array, memo: Mapping[int, object]) -> Facts:
    """Return the facts of an object whose skeleton this process just made; ``memo`` is that of `dump_skeleton`."""
    tree = read_pickle_tree(skeleton)
    return _Walk(memo, tree.shared_tuples).run(tree.root)._replace(code=tree.code)


def facts_json(facts: Facts) -> dict[str, Any]:
    """Return the JSON that is stored of facts."""
    return {"values": [slot.fact for slot in facts.slots], "rest": facts.rest, "sections": "".join(facts.sections)}


_N_KNOWN = 16
_MOST_KNOWN_BYTES = 1 << 20
_known: dict[bytes, dict[str, Any]] = {}
"""`facts_json` of the last skeletons that name no code, by digest: the steps of a series often have equal skeletons."""


def stored_facts(skeleton: Array, memo: Mapping[int, object]) -> tuple[dict[str, Any], set[str]]:
    """Return `facts_json` of an object, and the names of the code that its pickle calls; see `facts_of_skeleton`."""
    key = blake2b(skeleton.data, digest_size=32).digest()
    known = _known.get(key)
    if known is not None:
        return known, set()
    facts = facts_of_skeleton(skeleton, memo)
    stored = facts_json(facts)
    # Without code the pickle makes plain containers only: the live ones are of these classes, and tell nothing more.
    if not facts.code and len(skeleton) <= _MOST_KNOWN_BYTES:
        if len(_known) >= _N_KNOWN:
            _known.clear()
        _known[key] = stored
    return stored, facts.code


def plan_values(adapter: str, facts: Facts, stored: Any) -> Callable[[], None]:
    """Compare a live object with a stored one, and plan the replacement of its plain values. Nothing changes yet.

    Args:
        adapter: The adapter's name, for errors.
        facts: Of the live object.
        stored: `facts_json` of the stored object; it is not trusted.

    Returns:
        A function that replaces the values. It cannot fail.

    Raises:
        AdapterError: The live object differs in something that only the pickle can restore.
    """
    try:
        values, rest, sections = stored["values"], stored["rest"], stored["sections"]
        is_sound = type(values) is list and type(sections) is str
    except (TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise no_facts(adapter)
    if rest != facts.rest or len(values) != len(facts.slots):
        raise misfit(adapter, _difference(facts, sections))
    changes: list[Callable[[], None]] = []
    for slot, value in zip(facts.slots, values, strict=True):
        if is_same_json(value, slot.fact):
            continue
        new = decode(adapter, value)
        if slot.value is not None and _can_hold(slot.value, new):
            changes.append(partial(_assign, slot.value, new))
        elif slot.place is not None:
            changes.append(partial(slot.place.put, new))
        else:
            raise misfit(adapter, f"{_dotted(slot.path)!r} differs, and cannot be changed in place")

    def apply() -> None:
        for change in changes:
            change()

    return apply


def _difference(facts: Facts, sections: str) -> str:
    step = 2 * _SECTION_BYTES
    stored = [sections[i : i + step] for i in range(0, len(sections), step)]
    differing = [i for i, (mine, its) in enumerate(zip(facts.sections, stored, strict=False)) if mine != its]
    if len(stored) != len(facts.sections) or not differing or not differing[0]:
        return "its class, its attributes, its keys or their order are others"
    return f"{facts.names[differing[0] - 1]!r} differs in more than arrays and plain values"


def _can_hold(container: Any, new: Any) -> bool:
    """Tell whether a container can be given the content of a decoded one."""
    if type(container) in _COLLECTIONS:
        return type(new) is (list if type(container) is deque else dict)
    # A bytearray whose memory is exported cannot change its size.
    return type(container) is type(new) and (type(new) is not bytearray or len(container) == len(new))


def _assign(container: Any, new: Any) -> None:
    """Give a container the content of another one, and keep the inner containers that can be kept."""
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


ValuePath = tuple[Any, ...]
"""A key and the path before it, or nothing."""


def _dotted(path: ValuePath) -> str:
    keys = []
    while path:
        path, key = path
        keys.append(str(key))
    return ".".join(reversed(keys))


class _Visit(NamedTuple):
    """One part of the tree that is yet to be described."""

    part: Any
    path: ValuePath
    is_open: bool
    """True if the live object itself holds the part, so that the part's content can be changed."""
    place: LivePlace | None = None
    in_class: bool = False
    """True if the part belongs to a class that travels by value; functions there are described by their names."""


class _SectionStart(NamedTuple):
    """Start of the section of an attribute or item."""

    name: str


_Step = _Visit | _SectionStart


class _Walk:
    """Pass over a pickle's tree, in the order of the pickle."""

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
            if type(step) is _SectionStart:
                self._end_section()
                self._facts.names.append(step.name)
            else:
                steps = self._visit(step)  # type: ignore[arg-type]
                steps.reverse()
                self._stack += steps
        self._end_section()
        return self._facts._replace(rest=self._all.hexdigest())

    def _end_section(self) -> None:
        text = "\n".join([*self._tokens, ""]).encode("utf-8", "surrogatepass")
        self._all.update(text)
        self._facts.sections.append(blake2b(text, digest_size=_SECTION_BYTES).hexdigest())
        self._tokens.clear()

    def _visit(self, visit: _Visit) -> list[_Step]:
        """Describe a part itself, and return visits of the parts that it holds."""
        part, kind = visit.part, type(visit.part)
        if kind in _ATOMS:
            if visit.place is None:
                self._add_atom(part)
                return []
            return self._add_value(visit, self._encode(part))
        if kind is ReferenceNode and is_value(part):
            return self._add_value(visit, self._encode(part))
        if kind is Named:
            self._tokens.append(f"named {part.name}")
            return []
        if kind is ReferenceNode:
            return self._visit_row(visit)
        if (kind is tuple or part.kind in _PLAIN_KINDS) and (value := self._plain(part)) is not None:
            is_held = visit.is_open and kind is PickleNode and part.kind != FROZENSET
            return self._add_value(visit, value, self._live(part) if is_held else None)
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

    def _add_atom(self, part: Any) -> None:
        self._tokens.append(json_text(self._encode(part)) if part != part else repr(part))

    def _add_value(self, visit: _Visit, value: Any, container: Any = None) -> list[_Step]:
        if visit.place is None and container is None:
            self._tokens.append(json_text(value))
        else:
            self._tokens.append("?")
            self._facts.slots.append(Slot(visit.path, value, container, visit.place))
        return []

    def _visit_row(self, visit: _Visit) -> list[_Step]:
        reference = visit.part.value
        key: Any = reference
        facts: Sequence[Any] = ()
        if type(reference) is not tuple:
            self._tokens.append(f"array {reference}")
        elif reference[0] == MEMBER:
            key = reference[1:3]
            self._tokens.append(repr(reference))
        else:
            word, key, _, *facts = reference
            self._tokens.append(f"{word} {key}")
        if not visit.is_open:
            self._facts.fixed.add(key)
        # Memory order and the read-only flag of an array stay those of the live one.
        return [_Visit(fact, visit.path, False) for fact in facts[2:]]

    def _is_new(self, part: Any) -> bool:
        """Number a part whose copies could be told apart, and tell whether the walk meets it for the first time."""
        if type(part) is PickleNode and part.kind == CALL and _name_of(part.args[1]) in _MAKES_VALUES:
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

    def _content(self, node: PickleNode, kind: type) -> Any:
        """Return the content of a collection as JSON, a list or a dict; None if some of it is not plain."""
        content = PickleNode(DICT if issubclass(kind, dict) else LIST)
        content.elements, content.pairs = node.elements, node.pairs
        try:
            return Encoder().encode(content)
        except NotPlainError:
            return None

    def _live(self, part: PickleNode) -> Any:
        return None if part.number is None else self._memo.get(part.number)

    def _elements(self, visit: _Visit, elements: Sequence[Any], holder: Any = None) -> list[_Step]:
        """Return visits of elements; ``holder`` is the container, or the place of the tuple, that can be changed."""
        return [
            _Visit(
                each, (visit.path, i), visit.is_open, None if holder is None else LivePlace(holder, i), visit.in_class
            )
            for i, each in enumerate(elements)
        ]

    def _pairs(self, visit: _Visit, pairs: Sequence[tuple[Any, Any]], holder: Any) -> list[_Step]:
        """Return visits of keys and values; ``holder`` is the dict or object in which values can be changed."""
        keys = list(dict.keys(holder)) if isinstance(holder, dict) else [key for key, _ in pairs]
        has_sections = visit.path == () and len(pairs) <= _MAX_SECTIONS and not self._facts.names
        steps: list[_Step] = []
        for key, _ in pairs:
            if type(key) in _ATOMS:
                self._add_atom(key)
        for (key, value), live_key in zip(pairs, keys, strict=True):
            path = (visit.path, live_key)
            if has_sections:
                steps.append(_SectionStart(str(live_key)))
            if type(key) not in _ATOMS:
                steps.append(_Visit(key, path, False, None, visit.in_class))
            place = None if holder is None else LivePlace(holder, live_key)
            steps.append(_Visit(value, path, visit.is_open, place, visit.in_class))
        return steps

    def _visit_call(self, visit: _Visit) -> list[_Step]:
        node, live = visit.part, self._live(visit.part)
        how, function, args, *keywords = node.args
        if _name_of(function) == _OF_BUFFER and type(args) is tuple and type(args[0]) is PickleNode:
            # A writable array is pickled as a bytearray, a read-only one as bytes.
            args = (*args[0].elements, *args[1:])
            node.args = (how, function, args)  # keeps the tuple, whose id is a number of the walk
        kind = type(live)
        closed = _Visit(None, visit.path, False, None, visit.in_class)
        if isinstance(live, FunctionType) and visit.in_class:
            # As with an imported class, the code is that of the live process.
            self._tokens.append(f"function {live.__module__} {live.__qualname__}")
            return []
        if isinstance(live, type) and _name_of(function) in _MAKES_CLASS:
            # Its arguments hold a number that every process draws anew.
            self._tokens.append(f"class {live.__module__} {live.__qualname__}")
            return [closed._replace(part=state, in_class=True) for state in node.states]
        opened = visit if visit.is_open else None
        content = self._content(node, kind) if opened and kind in _COLLECTIONS else None
        sizes = () if content is not None else (len(node.elements), len(node.pairs))
        self._tokens.append(f"{how} {len(node.states)} {sizes}")
        steps: list[_Step] = [closed._replace(part=function)]
        if opened and _is_named_tuple(kind) and type(args) is tuple:
            steps += self._elements(opened, args, None if node.is_shared else visit.place)
        elif opened and _name_of(function) in OF_ARRAYS and type(args) is tuple:
            held = OF_ARRAYS[_name_of(function)]
            for i, each in enumerate(args):
                path = (visit.path, i)
                steps.append((visit if i in held else closed)._replace(part=each, path=path, place=None))
        else:
            steps.append(closed._replace(part=args))
        steps += [closed._replace(part=each) for each in keywords]
        for state in node.states:
            steps += self._state(opened, live, state) if opened else [closed._replace(part=state)]
        if content is not None:
            return [*steps, *self._add_value(visit._replace(place=None), content, live)]
        has_own = opened and _pickles_its_items(live)
        steps += self._elements(visit if has_own else closed, node.elements, live if has_own else None)
        return steps + self._pairs(visit if has_own else closed, node.pairs, live if has_own else None)

    def _state(self, visit: _Visit, live: Any, state: Any) -> list[_Step]:
        """Return visits of a state given to BUILD; attributes can change if it is the object's own ``__dict__``."""
        closed = visit._replace(is_open=False, place=None)
        cls: Any = type(live)
        if cls is np.ndarray and type(state) is tuple and type(state[-1]) is PickleNode:
            can_put = live.flags.c_contiguous and live.flags.writeable
            elements = self._elements(visit, state[-1].elements, live if can_put else None)
            return [closed._replace(part=state[:-1]), *elements]
        attributes, slots = state, None
        if type(state) is tuple and len(state) == 2 and _pickles_by_default(cls):
            attributes, slots = state
        steps: list[_Step] = []
        if (
            type(attributes) is PickleNode
            and attributes.number is not None
            and self._live(attributes) is _attributes(live)
        ):
            if _may_change(cls):
                steps.append(_Visit(attributes, visit.path, True))
            else:
                steps += self._pairs(visit, attributes.pairs, None)
        else:
            steps.append(closed._replace(part=attributes))
        if type(slots) is PickleNode and slots.kind == DICT:
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
    """Tell whether a class leaves the pickling of its objects to Python."""
    ways = [getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")]
    return all(ways) and kind not in cloudpickle.Pickler.dispatch_table


def _pickles_its_items(live: Any) -> bool:
    """Tell whether a live list or dict pickles the items that it holds."""
    kind: Any = type(live)
    if kind in _COLLECTIONS:
        return True
    is_sequence = issubclass(kind, list) and kind.__iter__ is list.__iter__
    is_mapping = issubclass(kind, dict) and kind.items is dict.items
    return (is_sequence or is_mapping) and _pickles_by_default(kind)


@lru_cache(maxsize=4096)
def _may_change(kind: Hashable) -> bool:
    """Tell whether attributes of a class's objects may be set: the class is not frozen and does not hash by content."""
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return not is_frozen and getattr(kind, "__hash__", None) in (None, object.__hash__)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and getattr(getattr(kind, "__getnewargs__", None), "__module__", "") == "collections"

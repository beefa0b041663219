"""Long lists and dicts come back exactly, into a new object and into a live one, or the load is refused."""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from tensorcas_flavors._facts import Encoder, decode
from tensorcas_mlflow.adapter import SKELETON, Adapter, adapter_named
from tensorcas_mlflow.errors import AdapterError
from tests.python_calls import calls_of


class Word(str):
    __slots__ = ()


class Level(enum.IntEnum):
    LOW = 0


class Words(list[Any]):
    pass


class Table(dict[Any, Any]):
    pass


class Kept(BaseEstimator):  # type: ignore[misc]
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept


N = 300
WORDS = [f"w{i}" for i in range(N)]
(NAN,) = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))
VALUES: dict[str, list[Any]] = {
    "words": WORDS,
    "word of a subclass": [*WORDS, Word("w")],
    "word of numpy": [*WORDS, np.str_("w")],
    "words of numpy": [np.str_(word) for word in WORDS],
    "words and more": [*WORDS, None, True, 1, 1.0],
    "lone surrogates": [*WORDS, "\ud83d\ude00", "\U0001f600", "\ud83d", "\ude00"],
    "control characters": [*WORDS, "\0", "a\nb", "\r", "\x85", "\u2028", '"', "\\", "\\u0041", ""],
    "words like references": [*WORDS, "#1", "=1", "#", "="],
    "truth values": [i % 3 == 0 for i in range(N)],
    "truth values and numbers": [*([True, 1] * N), 0, False],
    "small integers": list(range(-20, N)),
    "integers of 64 bits": [*range(N), 2**63 - 1, -(2**63)],
    "integers of more than 64 bits": [*range(N), 2**63],
    "negative integers of more than 64 bits": [*range(N), -(2**63) - 1],
    "huge integers": [10**5000 + i for i in range(N)],
    "integer of a subclass": [*range(N), Level.LOW],
    "floats": [*(i / 7 for i in range(N)), -0.0, 0.0, 5e-324, math.inf, -math.inf],
    "NaN": [*(i / 7 for i in range(N)), math.nan, NAN],
    "floats and integers": [*(i / 7 for i in range(N)), 1],
    "floats of numpy and of Python": [*(i / 7 for i in range(N)), np.float64(1)],
    "float64 of numpy": [*(np.float64(i / 7) for i in range(N)), np.float64(NAN), np.float64(-0.0)],
    "float32 of numpy": list(np.array([*range(N), 0x7FC00001, 0xFFC00000, 1 << 31], np.uint32).view(np.float32)),
    "longdouble of numpy": [np.longdouble(i) / 7 for i in range(N)],
    "int64 of numpy": [np.int64(i) for i in range(N)],
    "longlong of numpy": [np.longlong(i) for i in range(N)],
    "integers of numpy of two sizes": [*(np.int64(i) for i in range(N)), np.int32(1)],
    "truth values of numpy": [np.bool_(i % 2) for i in range(N)],
    "times of two units": [*(np.datetime64(i, "s") for i in range(N)), np.datetime64(1, "ms")],
    "bytes": [b"w%d" % i for i in range(N)],
}
MADE: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "values": lambda values: dict(enumerate(values)),
    "values by word": lambda values: {f"w{i}": value for i, value in reversed(list(enumerate(values)))},
    "keys": lambda values: {value: i for i, value in enumerate(values)},
    "keys and values": lambda values: dict(zip(values, values, strict=True)),
    "set": set,
    "list of lists": lambda values: [values, list(values), [], {}],
    "list of one's own": Words,
    "dict of one's own": lambda values: Table(enumerate(values)),
    "ordered dict": lambda values: OrderedDict(enumerate(values)),
    "shared": lambda values: {"a": values, "b": [values], "c": {"d": values}},
}
ADAPTERS = ("sklearn", "generic")


def exact(value: Any) -> Any:
    """Return a description of a value that differs for values of other classes, bits or order."""
    kind = type(value)
    if issubclass(kind, dict):
        return kind, [(exact(key), exact(each)) for key, each in value.items()]
    if issubclass(kind, list | tuple):
        return kind, [exact(each) for each in value]
    if kind is set:
        return kind, sorted(repr(exact(each)) for each in value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is int:
        return kind, hex(value)
    if kind is np.longdouble:
        return kind, repr(value)
    # Where longlong has 64 bits, pickle returns int64.
    return (
        (str(value.dtype), value.tobytes()) if isinstance(value, np.generic) and kind is not np.str_ else (kind, value)
    )


def wrapped(adapter: str, kept: Any) -> Any:
    return Kept(kept) if adapter == "sklearn" else {"kept": kept, "w": np.ones(3)}


def unwrapped(model: Any) -> Any:
    return model.kept if isinstance(model, Kept) else model["kept"]


def stored(adapter: Adapter, model: Any) -> dict[str, Any]:
    return {name: np.array(row) for name, row in adapter.extract(model).items()}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("what", VALUES)
def test_long_container_comes_back_exactly(what: str, make: str, name: str) -> None:
    adapter, kept = adapter_named(name), MADE[make](VALUES[what])
    model = wrapped(name, kept)
    before = exact(kept)

    rows = stored(adapter, model)

    assert exact(unwrapped(adapter.reconstruct(dict(rows)))) == before == exact(kept)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("make", ["list", "values by word", "keys"])
@pytest.mark.parametrize("what", VALUES)
def test_long_container_is_filled_exactly_or_the_load_is_refused(what: str, make: str, name: str) -> None:
    adapter, kept = adapter_named(name), MADE[make](VALUES[what])
    rows = stored(adapter, wrapped(name, kept))
    for other in (WORDS[:-1], list(range(N + 1)), WORDS[:2], kept):
        live = wrapped(name, other if other is kept else MADE[make](other))
        before = exact(unwrapped(live))
        try:
            adapter.reconstruct(dict(rows), live)
        except AdapterError:
            assert exact(unwrapped(live)) == before
            assert not what.startswith(("words", "integers of", "floats", "NaN", "lone")) or "subclass" in what
        else:
            assert exact(unwrapped(live)) == exact(kept)


@pytest.mark.parametrize("name", ADAPTERS)
def test_long_list_in_two_places_stays_one_list(name: str) -> None:
    adapter, words, alike = adapter_named(name), list(WORDS), list(WORDS)

    again = unwrapped(adapter.reconstruct(stored(adapter, wrapped(name, [words, {"a": words}, alike]))))

    assert again[0] is again[1]["a"]
    assert again[0] is not again[2]
    assert again == [WORDS, {"a": WORDS}, WORDS]


@pytest.mark.parametrize("what", VALUES)
def test_equal_facts_have_equal_values(what: str) -> None:
    encoded = [Encoder().encode(values) for values in VALUES.values() if _is_plain(values)]
    if not _is_plain(VALUES[what]):
        return
    mine = Encoder().encode(VALUES[what])

    assert encoded.count(mine) == 1
    assert exact(decode("test", mine)) == exact(VALUES[what])


def _is_plain(values: list[Any]) -> bool:
    return not any(type(value) in (Word, Level, np.str_, np.longdouble) for value in values)


@pytest.mark.parametrize(
    "column",
    [[], [False], [False, "int8"], [False, "int8", "?"], [False, "int16", "AA=="], [False, "object", ""], 5, {"d": 1}],
)
def test_forged_column_is_refused(column: Any) -> None:
    with pytest.raises(AdapterError):
        decode("test", {"c": column})


def test_calls_of_a_vocabulary_do_not_grow_with_it() -> None:
    counts = []
    for n_words in (500, 5000):
        words = [f"w{i}" for i in range(n_words)]
        texts = [" ".join(words[i::10]) for i in range(10)]
        model = make_pipeline(TfidfVectorizer(max_features=n_words - 1), LogisticRegression()).fit(texts, [0, 1] * 5)
        adapter = adapter_named("sklearn")
        rows = stored(adapter, model)
        adapter.reconstruct(dict(rows))
        with calls_of() as calls:
            adapter.extract(model)
            adapter.reconstruct(dict(rows))
            adapter.reconstruct(dict(rows), model)
        counts.append(len(calls))

    assert counts[1] < counts[0] + 100
    assert len(rows[SKELETON]) < 4096

"""Any picklable object comes back as from a pickle, and its arrays, texts and buffers are rows."""

from __future__ import annotations

import math
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import SKELETON, Array, adapter_for, adapter_named
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import AdapterError

ADAPTER = GenericAdapter()
TEXT = "".join(f"tree {i}\n" for i in range(1000))


class Layer:
    def __init__(self, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.W = rng.normal(size=(n, n))
        self.b = rng.normal(size=n)


class Net:
    """A model as users write it."""

    def __init__(self, n: int = 40, seed: int = 0) -> None:
        self.layers = [Layer(n, seed), Layer(n, seed + 1)]
        self.tables = {"in": np.arange(100) + seed, 3: np.arange(200) + seed}
        self.history: list[float] = [0.5]
        self.n_steps = 0

    def predict(self, data: Any, scale: float = 1.0, *, shift: float = 0.0) -> Any:
        return np.asarray(data) @ self.layers[0].W * scale + shift


class Subclass(np.ndarray):
    pass


@dataclass(slots=True)
class Slotted:
    weights: Array = field(default_factory=lambda: np.arange(100.0))
    unset: Array = field(init=False)


def read_back(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the rows as a store returns them: C-contiguous, writable and owned; refuse rows without a spec."""
    specs = {name: Spec.of(name, array) for name, array in tensors.items()}
    rows = {name: np.empty(array.shape, dtype=specs[name].numpy_dtype) for name, array in tensors.items()}
    for name, array in tensors.items():
        rows[name][...] = array
    return rows


def round_trip(model: Any) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(model)))


# --- which models


@pytest.mark.parametrize(
    "model", [Net(), {}, {"w": np.zeros(3)}, [1], np.zeros(3), Slotted(), math.sqrt, lambda x: x, object(), (1,)]
)
def test_generic_adapter_accepts_every_kind_of_object(model: object) -> None:
    assert ADAPTER.accepts(model)
    assert adapter_for(model).name == "generic"


@pytest.mark.parametrize(
    "model",
    [
        None,
        True,
        1,
        1.5,
        2j,
        np.float32(1),
        "path/to/model",
        b"model",
        bytearray(3),
        memoryview(b""),
        Path("x"),
        Net,
        sys,
    ],
)
def test_likely_mistakes_are_not_accepted(model: object) -> None:
    assert not ADAPTER.accepts(model)
    with pytest.raises(AdapterError, match="no adapter takes"):
        adapter_for(model)


def test_the_adapter_is_found_by_its_name() -> None:
    assert isinstance(adapter_named("generic"), GenericAdapter)


# --- what is a row


def test_arrays_are_named_by_the_path_that_leads_to_them() -> None:
    names = list(ADAPTER.extract({"net": Net(), "slots": Slotted(), ("a", 1): np.zeros(99), "": np.ones(99)}))

    assert sorted(names) == [
        "%",
        "('a',%201)".replace("%20", " "),
        SKELETON,
        "net.layers.0.W",
        "net.layers.0.b",
        "net.layers.1.W",
        "net.layers.1.b",
        "net.tables.3",
        "net.tables.in",
        "slots.weights",
    ]


def test_names_hold_nothing_a_manifest_refuses() -> None:
    model = {"new\nline": np.zeros(99), "nul\0": np.zeros(99), "a.b": np.zeros(99), "\ud800": np.zeros(99)}
    model |= {SKELETON: np.zeros(99), "__buffer__/0": np.zeros(99), "long " * 800: np.zeros(99), "é": np.zeros(99)}
    deep: Any = np.ones(99)
    for _ in range(200):
        deep = {"down": deep}

    rows = read_back(ADAPTER.extract({"all": model, "deep": deep, SKELETON: np.zeros(99), "__buffer__/0": np.ones(99)}))
    again = ADAPTER.reconstruct(rows)

    assert len(rows) == 12
    assert again["all"].keys() == model.keys()
    assert again[SKELETON].sum() == 0
    assert again["__buffer__/0"].sum() == 99


def test_two_keys_with_one_text_are_two_rows() -> None:
    model = {"1": np.zeros(99), 1: np.ones(99), "a": {"b": np.zeros(99)}, "a.b": np.ones(99)}

    again = round_trip(model)

    assert {key: float(np.sum(again[key])) for key in ("1", 1, "a.b")} == {"1": 0.0, 1: 99.0, "a.b": 99.0}
    assert again["a"]["b"].sum() == 0


def test_every_array_of_numbers_is_a_row_however_small() -> None:
    model = {"w": np.zeros(3), "none": np.empty((0, 3)), "zero": np.array(7.0), "layers": [{"b": np.ones(2, ">i2")}]}

    rows = ADAPTER.extract(model)
    again = round_trip(model)

    assert {name: rows[name].shape for name in rows if name != SKELETON} == {
        "w": (3,),
        "none": (0, 3),
        "zero": (),
        "layers.0.b": (2,),
    }
    assert (again["zero"].shape, again["layers"][0]["b"].dtype.str) == ((), ">i2")


def test_short_texts_stay_in_the_skeleton() -> None:
    model = {"text": "x" * 4095, "bytes": b"x" * 4095}

    assert list(ADAPTER.extract(model)) == [SKELETON]
    assert round_trip(model) == model


def test_many_similar_small_arrays_are_one_row() -> None:
    model = {
        "bias": {f"b{i}": np.full(4, i, dtype="f4") for i in range(300)},
        "uneven": [np.arange(i % 5) for i in range(300)],
        "layers": [{"g": np.array(i), "h": np.ones(3, dtype=bool)} for i in range(300)],
        "*": np.zeros(2),
        "one": np.zeros(2),
    }
    model["again"] = model["uneven"][7]  # type: ignore[index]

    rows = ADAPTER.extract(model)
    again = round_trip(model)

    assert {name: rows[name].shape for name in rows if name != SKELETON} == {
        "bias.*": (300, 4),
        "again": (2,),
        "uneven.*": (598,),
        "layers.*.g": (300,),
        "layers.*.h": (300, 3),
        "%2A": (2,),
        "one": (2,),
    }
    assert all(np.array_equal(again["bias"][name], array) for name, array in model["bias"].items())  # type: ignore[union-attr]
    assert [part.tolist() for part in again["uneven"]] == [part.tolist() for part in model["uneven"]]  # type: ignore[union-attr]
    assert [int(layer["g"]) for layer in again["layers"]] == list(range(300))
    assert again["again"] is again["uneven"][7]
    again["bias"]["b0"][:] = 9
    assert again["bias"]["b1"][0] == 1


def test_small_arrays_made_by_pickling_are_one_row_per_dtype() -> None:
    class Lazy:
        def __init__(self, n: int) -> None:
            self.n = n

        def __getstate__(self) -> dict[str, Any]:
            return {"n": self.n, "array": np.full(2, self.n)}

    rows = ADAPTER.extract([Lazy(1), Lazy(2)])

    assert {name: row.tolist() for name, row in rows.items() if name != SKELETON} == {
        "__array__/int64": [[1, 1], [2, 2]]
    }
    assert [part.array.tolist() for part in round_trip([Lazy(1), Lazy(2)])] == [[1, 1], [2, 2]]


def test_long_texts_and_bytes_are_rows_of_bytes() -> None:
    odd = "é\ud800" * 4000
    model = {"text": TEXT, "odd": odd, "raw": b"ab" * 4000, "array": bytearray(b"cd" * 4000)}

    rows = ADAPTER.extract(model)

    assert list(rows) == ["text", "odd", "raw", "array", SKELETON]
    assert rows["text"].tobytes() == TEXT.encode()
    assert round_trip(model) == model
    assert type(round_trip(model)["array"]) is bytearray


def test_rows_keep_their_names_from_step_to_step() -> None:
    net = Net()
    before = ADAPTER.extract(net)
    net.n_steps += 1
    net.layers[1].W = net.layers[1].W * 2
    net.history.append(0.25)
    after = ADAPTER.extract(net)

    assert list(before) == list(after)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == ["layers.1.W", SKELETON]


def test_arrays_are_not_copied() -> None:
    net = Net()

    assert ADAPTER.extract(net)["layers.0.W"] is net.layers[0].W


def test_an_unchanged_model_gives_the_same_rows() -> None:
    net = {"net": Net(), "text": TEXT, "state": np.random.RandomState(0), "sub": np.ones(999).view(Subclass)}
    first = {name: row.copy() for name, row in ADAPTER.extract(net).items()}
    second = ADAPTER.extract(net)

    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_naming_rows_runs_no_code_of_the_model() -> None:
    class Touchy:
        def __init__(self) -> None:
            self.w = np.ones(99)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise RuntimeError(f"nobody asked for {name}")

        @property
        def expensive(self) -> Any:
            raise RuntimeError("nobody asked")

    assert list(ADAPTER.extract(Touchy())) == ["w", SKELETON]


def test_objects_in_a_cycle_are_walked_once() -> None:
    net = Net()
    net.myself = [net, deque([net])]  # type: ignore[attr-defined]

    again = round_trip(net)

    assert again.myself[0] is again
    assert again.myself[1][0] is again


# --- what comes back


def test_an_array_held_twice_comes_back_as_one_array() -> None:
    weights = np.ones(99)
    text, raw = TEXT[:], bytearray(9999)

    again = round_trip({"a": weights, "b": [weights], "c": text, "d": (text, raw), "e": raw})

    assert again["a"] is again["b"][0]
    assert again["c"] is again["d"][0]
    assert again["d"][1] is again["e"]


def test_views_of_one_array_come_back_as_arrays_of_their_own() -> None:
    base = np.arange(1000.0)

    model = {"base": base, "same": base[:], "half": base[:500], "odd": base[1::2]}
    again = round_trip(model)

    assert all(np.array_equal(again[key], model[key]) for key in model)
    assert not any(np.shares_memory(again["base"], again[key]) for key in ("same", "half", "odd"))


def test_equal_texts_made_by_pickling_stay_apart() -> None:
    class Lazy:
        def __init__(self, word: str) -> None:
            self.word = word

        def __getstate__(self) -> dict[str, Any]:
            return {"word": self.word * 2000, "array": np.full(99, len(self.word))}

    again = round_trip([Lazy(f"w{i}" + "x" * i) for i in range(20)])

    assert [lazy.word[: 2 + i] for i, lazy in enumerate(again)][:3] == ["w0", "w1x", "w2xx"]
    assert [int(lazy.array[0]) for lazy in again] == [len(lazy.word) // 2000 for lazy in again]


def test_a_network_of_objects_comes_back_whole() -> None:
    net = Net()

    again = round_trip(net)

    assert type(again) is Net
    assert all(np.array_equal(one.W, other.W) for one, other in zip(net.layers, again.layers, strict=True))
    assert (again.history, again.n_steps) == (net.history, net.n_steps)
    assert again.layers[0].W.flags.writeable


def test_buffers_of_other_types_are_rows() -> None:
    class Buffered:
        def __init__(self, data: bytearray) -> None:
            self.data = memoryview(data)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return Buffered, (pickle.PickleBuffer(self.data),)

    model = [Buffered(bytearray(range(256)) * 2), Buffered(bytearray(b"small")), Buffered(bytearray(range(250)) * 3)]

    rows = ADAPTER.extract(model)
    again = round_trip(model)

    assert list(rows) == ["__buffer__/0", "__buffer__/1", SKELETON]
    assert [bytes(part.data) for part in again] == [bytes(part.data) for part in model]


def test_a_missing_row_is_named() -> None:
    rows = read_back(ADAPTER.extract(Net()))
    del rows["layers.0.W"]

    with pytest.raises(AdapterError, match=r"'layers\.0\.W' is missing"):
        ADAPTER.reconstruct(rows)
    with pytest.raises(AdapterError, match=SKELETON):
        ADAPTER.reconstruct({})


def test_an_object_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(AdapterError, match="cannot be pickled"):
        ADAPTER.extract({"generator": (i for i in range(3))})


def test_generic_weights_are_the_arrays_by_name() -> None:
    table = np.asfortranarray(np.arange(200.0).reshape(10, 20))

    weights = ADAPTER.weights(read_back(ADAPTER.extract(OrderedDict(net=Net(), f=table))))

    assert SKELETON not in weights
    assert np.array_equal(weights["net.layers.1.W"], Net().layers[1].W)
    assert np.array_equal(weights["f"], table)


def test_every_generic_model_needs_its_pickle() -> None:
    assert ADAPTER.unpickles(ADAPTER.extract({"w": np.zeros(99)}))
    assert not ADAPTER.unpickles({"w": np.zeros(99)})


def test_requirements_are_pinned() -> None:
    assert [line.partition("==")[0] for line in ADAPTER.requirements(ADAPTER.extract([1]))] == ["cloudpickle", "numpy"]


# --- predictions


def test_predict_passes_the_parameters_that_the_method_takes() -> None:
    net = Net()
    data = np.ones((2, 40))

    assert np.array_equal(ADAPTER.predict(net, data), net.predict(data))
    params = {"scale": 3.0, "shift": 1.0, "unknown": 4}
    assert np.array_equal(ADAPTER.predict(net, data, params), net.predict(data, 3.0, shift=1.0))


def test_a_model_that_is_a_function_is_called() -> None:
    assert ADAPTER.predict(lambda data, **rest: (data, rest), 3, {"a": 1}) == (3, {"a": 1})


def test_predicting_with_a_model_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(AdapterError, match="a dict has no predict and cannot be called"):
        ADAPTER.predict({"w": 1}, 3)


def test_filling_parts_of_a_generic_object_is_refused() -> None:
    def read(names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        raise AssertionError(names)

    with pytest.raises(AdapterError, match="load all of it with into="):
        ADAPTER.fill_weights(Net(), {}, read)


@pytest.mark.parametrize("kind", ["tree", "forest", "neighbours", "dtype", "longlong"])
def test_an_equal_dtype_of_another_class_is_accepted(kind: str) -> None:
    X, y = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2
    made: dict[str, Any] = {
        "tree": lambda: DecisionTreeClassifier(max_depth=2).fit(X, y),
        "forest": lambda: RandomForestClassifier(2).fit(X, y),
        "neighbours": lambda: KNeighborsClassifier().fit(X, y),
        "dtype": lambda: np.dtype("longlong"),
        "longlong": lambda: np.arange(600, dtype=np.longlong),
    }
    rows = GenericAdapter().extract({"model": made[kind](), "epoch": 1})

    assert GenericAdapter().reconstruct({name: np.array(row) for name, row in rows.items()})["epoch"] == 1

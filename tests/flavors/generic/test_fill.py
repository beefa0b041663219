"""A live object is filled in place without its pickle, or is unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_flavors._facts import END, read_tail, with_tail
from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

ADAPTER = GenericAdapter()
HOSTILE = np.frombuffer(b"TCPK1\ncos\n_exit\n(I9\ntR.", dtype=np.uint8)


def make(seed: int = 0, text: str = "x" * 5000) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "layers": [{"W": rng.normal(size=(20, 20))}, {"W": np.asfortranarray(rng.normal(size=(20, 30)))}],
        "strided": rng.normal(size=(20, 20))[:, ::2],
        "backing": bytearray(rng.bytes(5000)),
        "times": rng.integers(0, 99, 99).astype("M8[s]"),
        "odd": rng.integers(0, 99, 99).astype(">m8[s]"),
        "text": text,
        "seed": seed,
    }


def stored(model: Any) -> dict[str, Array]:
    """The rows of a model as a store gives them back, with a skeleton whose pickle nobody may read."""
    rows = {name: np.array(row, order="C") for name, row in ADAPTER.extract(model).items()}
    facts = read_tail("test", rows[SKELETON])
    return rows | {SKELETON: with_tail(HOSTILE, facts)}


def arrays(model: dict[str, Any]) -> list[bytes]:
    parts = [*(layer["W"] for layer in model["layers"]), model["strided"], model["times"], model["odd"]]
    return [part.tobytes() for part in parts] + [bytes(model["backing"])]


def test_arrays_are_filled_in_place_without_unpickling() -> None:
    live = make(0)
    weights = live["layers"][0]["W"]

    filled = ADAPTER.reconstruct(stored(make(1)), live)

    assert filled is live
    assert live["layers"][0]["W"] is weights
    assert arrays(live) == arrays(make(1))


def test_plain_values_are_filled_in_place() -> None:
    live = make(0)
    ADAPTER.reconstruct(stored(make(1)), live)

    assert live["seed"] == 1


def drop_a_layer(model: dict[str, Any]) -> None:
    model["layers"].pop()


def widen(model: dict[str, Any]) -> None:
    model["layers"][1]["W"] = np.zeros((20, 31))


def narrow(model: dict[str, Any]) -> None:
    model["layers"][1]["W"] = np.zeros((20, 30), dtype=np.float32)


def freeze(model: dict[str, Any]) -> None:
    model["layers"][1]["W"].flags.writeable = False


def scatter(model: dict[str, Any]) -> None:
    model["odd"] = np.repeat(model["odd"], 2)[::2]  # its row is a copy of its bytes


@pytest.mark.parametrize("change", [drop_a_layer, widen, narrow, freeze, scatter])
def test_an_object_of_another_structure_is_refused_and_unchanged(change: Callable[[dict[str, Any]], None]) -> None:
    live = make(0)
    change(live)
    before = {name: row.tobytes() for name, row in ADAPTER.extract(live).items()}

    with pytest.raises(AdapterError, match="does not fit the original"):
        ADAPTER.reconstruct(stored(make(1)), live)

    assert {name: row.tobytes() for name, row in ADAPTER.extract(live).items()} == before


def test_a_text_that_differs_is_refused_because_it_cannot_be_filled() -> None:
    live = make(0)

    with pytest.raises(AdapterError, match="'text' differs, and cannot be changed in place"):
        ADAPTER.reconstruct(stored(make(1, text="y" * 5000)), live)

    assert arrays(live) == arrays(make(0))


def test_a_different_array_made_by_pickling_is_refused() -> None:
    class Copying:
        def __init__(self, value: float) -> None:
            self.w = np.full(99, value)

        def __getstate__(self) -> dict[str, Any]:
            return {"w": self.w.copy()}

    same = Copying(1)

    assert ADAPTER.reconstruct(stored(Copying(1)), same) is same
    with pytest.raises(AdapterError, match="cannot be changed in place"):
        ADAPTER.reconstruct(stored(Copying(2)), same)


def test_views_of_one_array_are_filled_if_the_stored_ones_agree() -> None:
    base, other = np.zeros(200), np.arange(200.0)
    live = {"base": base, "half": base[:100]}

    ADAPTER.reconstruct(stored({"base": other, "half": other[:100]}), live)

    assert np.array_equal(live["half"], other[:100])
    assert np.shares_memory(live["half"], base)


@pytest.mark.parametrize("half", [np.ones(100), np.zeros(100)])
def test_views_of_one_array_are_unchanged_if_the_stored_ones_disagree(half: Array) -> None:
    base = np.zeros(200)
    live = {"base": base, "half": base[:100]}

    with pytest.raises(AdapterError, match="share memory"):
        ADAPTER.reconstruct(stored({"base": np.arange(200.0), "half": half}), live)

    assert not base.any()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        [],
        {"values": 3, "rest": "", "sections": ""},
        {"values": [{"q": 1}]},
        {"values": [{"t": 5}]},
        {"values": [{"d": [[[]], [1]]}]},
        {"values": [{"v": ["numpy", "object", {"b": ""}]}]},
        {"values": [{"v": ["numpy", "float64", {"b": "AA=="}]}]},
        {"values": [{"v": ["os.system", "true"]}]},
        {"values": [{"v": []}]},
        {"values": [{"b": "?"}]},
        {"values": [{"i": "x", "f": "y"}]},
        {"values": []},
        {"rest": 7},
    ],
)
def test_forged_facts_are_refused_and_the_object_is_unchanged(facts: Any) -> None:
    rows = ADAPTER.extract({"w": np.ones(3), "n": 1})
    sound = read_tail("test", rows[SKELETON])
    hostile = {**sound, **facts} if facts and isinstance(facts, dict) else facts
    live = {"w": np.zeros(3), "n": 0}

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(rows | {SKELETON: with_tail(HOSTILE, hostile)}, live)
    assert (live["w"].tolist(), live["n"]) == ([0, 0, 0], 0)  # type: ignore[attr-defined]


def test_a_truncated_or_endlessly_nested_tail_is_refused() -> None:
    rows = ADAPTER.extract({"n": 1})
    for tail in (b"", END, b"\xff" * 8 + END, b"[" * 100_000 + (100_000).to_bytes(8, "little") + END):
        skeleton = np.frombuffer(HOSTILE.tobytes() + tail, dtype=np.uint8)

        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(rows | {SKELETON: skeleton}, {"n": 0})


def test_a_refusal_names_the_difference_and_the_remedy() -> None:
    live = {"w": np.zeros(3), "net": {"layers": [np.zeros(2), (np.zeros(2), Path("a"))]}}
    other = {"w": np.zeros(3), "net": {"layers": [np.zeros(2), (np.zeros(2), Path("b"))]}}

    with pytest.raises(AdapterError, match=r"'net' differs in more than .*: load a new one, without into="):
        ADAPTER.reconstruct(stored(other), live)


def test_filled_containers_keep_their_identity() -> None:
    inner: list[Any] = [1, {"a": 2}]
    live = {"inner": inner, "losses": (losses := [0.5])}

    ADAPTER.reconstruct(stored({"inner": [3, {"a": 4}], "losses": [0.5, 0.25]}), live)

    assert live["inner"] is inner
    assert live["losses"] is losses
    assert live == {"inner": [3, {"a": 4}], "losses": [0.5, 0.25]}


@pytest.mark.long
def test_facts_of_a_set_are_equal_in_every_process() -> None:
    program = (
        "import sys, numpy as np; from tensorcas_flavors.generic import GenericAdapter;"
        "rows = GenericAdapter().extract({'w': np.ones(3), 'k': ({'a', 'b', 'c', 'd'}, np.ones(2))});"
        "sys.stdout.buffer.write(rows['__skeleton__'].tobytes())"
    )
    tails = set()
    for seed in "123":
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        tails.add(str(read_tail("test", np.frombuffer(done.stdout, dtype=np.uint8))))

    assert len(tails) == 1


@pytest.mark.long
def test_facts_of_a_class_of_main_are_equal_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy as np\n"
        "from tensorcas_mlflow.tensorcas_store import TensorCasStore\n"
        "class Net:\n"
        "    rate = 0.5\n"
        "    def __init__(self, n): self.w, self.n = np.full(3, n), n\n"
        "    def twice(self): return 2 * self.w\n"
        "store, net = TensorCasStore(sys.argv[1], 'run'), Net(int(sys.argv[2]))\n"
        "if sys.argv[2] == '1': store.save(net, step=1)\n"
        "else: print(store.load(1, original=net).twice().tolist(), net.n)\n"
    )
    for n in "12":
        done = subprocess.run(
            [sys.executable, script, tmp_path / "store", n], capture_output=True, check=True, text=True
        )

    assert done.stdout == "[2, 2, 2] 1\n"

"""Tensors of every kind that ``torch.save`` stores come back to the bit, and share their parts with plain tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_flavors.pytorch import _in_place
from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.flavors.pytorch.kinds import (
    CLASSES,
    MADE,
    Copying,
    OwnParameter,
    Plain,
    Wrapper,
    bits,
    coo,
    numbers,
    per_tensor,
    wrapper,
)
from tests.flavors.pytorch.models import ADAPTER, stored
from tests.stored_bytes import bytes_below

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = MADE | CLASSES
PLACES = ("state", "parameter", "buffer", "buffer outside of state dicts", "attribute")
NOT_FILLED = {"quint4x2", "quint2x4"}
"""Kinds that torch cannot copy."""


class Holder(nn.Module):
    """A module with a tensor in some place."""

    def __init__(self, tensor: torch.Tensor, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if place == "parameter":
            self.held = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        elif place == "attribute":
            vars(self)["held"] = tensor
        else:
            self.register_buffer("held", tensor, persistent=place == "buffer")


def held_in(place: str, tensor: torch.Tensor) -> Any:
    return {"held": tensor, "plain": torch.ones(3)} if place == "state" else Holder(tensor, place)


def held_by(holder: Any) -> torch.Tensor:
    held: torch.Tensor = holder["held"] if isinstance(holder, dict) else holder.held
    return held


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_tensor_comes_back_to_the_bit(self, kind: str, place: str) -> None:
        holder = held_in(place, KINDS[kind](0))

        back = ADAPTER.reconstruct(stored(holder))

        assert bits(held_by(back)) == bits(held_by(holder))

    def test_live_tensor_is_filled_to_the_bit_or_refused(self, kind: str, place: str) -> None:
        holder, live = held_in(place, KINDS[kind](0)), held_in(place, KINDS[kind](1))
        before, was = held_by(live), bits(held_by(live))
        rows = stored(holder)
        is_replaced = kind in NOT_FILLED and place == "attribute"
        is_refused = (kind in NOT_FILLED and not is_replaced) or (kind == "nested" and place in ("parameter", "buffer"))

        if is_refused:
            with pytest.raises(AdapterError, match=r"(quint|nested).*load a new one"):
                ADAPTER.reconstruct(rows, live)
        else:
            ADAPTER.reconstruct(rows, live)

        assert is_replaced or held_by(live) is before
        assert bits(held_by(live)) == (was if is_refused else bits(held_by(holder)))


@pytest.mark.parametrize("kind", MADE)
def test_state_with_a_kind_of_torch_needs_no_pickle(kind: str) -> None:
    assert not ADAPTER.unpickles(stored({"held": MADE[kind](0)}))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_a_store_loads_and_fills_every_kind(kind: str, tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    state = {"held": KINDS[kind](0), "plain": torch.ones(3)}
    live = {"held": KINDS[kind](1), "plain": torch.zeros(3)}

    store.save(state, step=1)

    assert bits(store.load(step=1)["held"]) == bits(state["held"])
    if kind not in NOT_FILLED:
        store.load(step=1, into=live)
        assert bits(live["held"]) == bits(state["held"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "causal bias"])  # its memory is never written
def test_rows_of_a_kind_are_the_same_at_each_save(kind: str) -> None:
    first, second = (stored({"held": KINDS[kind](0)}) for _ in range(2))

    assert {name: row.tobytes() for name, row in first.items()} == {name: row.tobytes() for name, row in second.items()}


def test_parts_have_the_bytes_of_plain_tensors() -> None:
    values, words = numbers(0, 3), torch.arange(4, dtype=torch.int8)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (3,))

    rows = stored({"sparse": sparse, "wrapped": Wrapper(words, torch.ones(1)), "subclass": values.as_subclass(Plain)})

    contents = [row.tobytes() for name, row in rows.items() if name != SKELETON]
    assert contents.count(values.numpy().tobytes()) >= 1
    assert words.numpy().tobytes() in contents


def test_large_parts_share_chunks_with_the_plain_tensor(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    values = numbers(0, 200_000)
    store.save({"w": values}, step=1)
    before = bytes_below(tmp_path)

    store.save({"w": Wrapper(values, torch.ones(1)), "s": values.as_subclass(Plain), "c": values.clone()}, step=2)

    assert bytes_below(tmp_path) - before < 0.05 * values.nbytes


def test_conjugate_shares_memory_with_its_tensor_again() -> None:
    tensor = numbers(0, 3, dtype=torch.complex64)

    back = ADAPTER.reconstruct(stored({"z": tensor, "conj": tensor.conj(), "imag": tensor.conj().imag}))
    back["z"][:] = 1j

    assert back["conj"].tolist() == [-1j] * 3
    assert back["imag"].tolist() == [-1] * 3


def test_reader_by_name_never_sees_a_part_as_the_tensor() -> None:
    tensor = numbers(0, 3, dtype=torch.complex64)

    rows = stored({"z": tensor.conj(), "s": coo(0), "s.values": torch.ones(7)})

    assert "z" not in rows
    assert rows["s.values"].tolist() == [1] * 7


def test_tensor_held_twice_is_one_object_again() -> None:
    sparse, wrapped = coo(0), wrapper(0)

    back = ADAPTER.reconstruct(stored({"a": [sparse, sparse], "b": [wrapped, wrapped]}))

    assert back["a"][0] is back["a"][1]
    assert back["b"][0] is back["b"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_alone_is_a_state(kind: str, tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    tensor = KINDS[kind](0)

    store.save(tensor, step=1)

    assert bits(store.load(step=1)) == bits(tensor)


def test_plain_tensor_alone_is_a_row_and_is_filled() -> None:
    rows, live = stored(numbers(0, 3)), torch.zeros(3)

    assert list(rows) == ["tensor", SKELETON]
    assert ADAPTER.reconstruct(rows, live) is live
    assert bits(live) == bits(numbers(0, 3))


def test_class_of_parameters_is_kept() -> None:
    back = ADAPTER.reconstruct(stored({"w": OwnParameter(torch.ones(2), requires_grad=False)}))

    assert type(back["w"]) is OwnParameter
    assert not back["w"].requires_grad


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("live", "saved"),
        [
            (torch.zeros(2, 3), coo(0)),
            (coo(0), torch.zeros(2, 3)),
            (coo(0).coalesce().to_sparse_csr(), coo(0)),
            (torch.eye(3).to_sparse_csr(), torch.ones(3, 3).to_sparse_csr()),
            (torch.zeros(3, 4), per_tensor(0)),
            (per_tensor(0), per_tensor(0, torch.quint8)),
            (torch.zeros(4), wrapper(0)),
            (wrapper(0), torch.zeros(4)),
            (wrapper(0), torch.zeros(4).as_subclass(Plain)),
            (wrapper(0), Wrapper(torch.zeros(5, dtype=torch.int8), torch.ones(1))),
            (wrapper(0), coo(0)),
        ],
        ids=[
            *("sparse to dense", "dense to sparse", "coo to csr", "more values", "quantized to dense"),
            *("other quantized", "wrapper to dense", "dense to wrapper", "subclass to wrapper", "larger parts"),
            "sparse to wrapper",
        ],
    )
    @pytest.mark.parametrize("place", PLACES)
    def test_tensor_of_another_kind_is_refused_by_name_and_nothing_changes(
        self, live: torch.Tensor, saved: torch.Tensor, place: str
    ) -> None:
        live, saved = live.clone(), saved.clone()
        holder = held_in(place, live)
        was = bits(live)
        rows = stored(held_in(place, saved))

        if place == "attribute" and type(saved) is torch.Tensor:
            ADAPTER.reconstruct(rows, holder)  # an attribute gets another tensor
            assert bits(holder.held) == bits(saved)
            return
        with pytest.raises(AdapterError, match=r"held|parts"):
            ADAPTER.reconstruct(rows, holder)

        assert bits(live) == was

    def test_a_class_that_pickles_copies_is_filled_only_with_equal_values(self) -> None:
        live = {"w": wrapper(1, Copying)}
        ADAPTER.reconstruct(stored({"w": wrapper(1, Copying)}), live)

        with pytest.raises(AdapterError, match="'w' holds a Tensor that cannot be filled in place: load a new one"):
            ADAPTER.reconstruct(stored({"w": wrapper(2, Copying)}), live)

        assert live["w"].words.tolist() == [1, 2, 3, 4]

    @pytest.mark.parametrize("option", [{"dtype": "float16"}, {"device": "meta"}])
    def test_parts_of_a_wrapper_are_not_converted_one_by_one(self, option: dict[str, str]) -> None:
        rows = stored({"w": wrapper(0)})

        with pytest.raises(AdapterError, match=r"leave them out, and call to\(\)"):
            ADAPTER.reconstruct(rows, **option)
        assert bits(ADAPTER.reconstruct(rows, device="cpu")["w"]) == bits(wrapper(0))

    def test_made_tensors_are_converted_as_torch_converts_them(self) -> None:
        state = {"s": coo(0), "q": per_tensor(0), "z": numbers(0, 2, dtype=torch.complex64).conj()}

        back = ADAPTER.reconstruct(stored(state), dtype=torch.float64)

        assert bits(back["s"]) == bits(state["s"].double())
        assert bits(back["q"]) == bits(state["q"])


class TestDamage:
    @pytest.mark.parametrize(
        ("kind", "part", "value"),
        [
            ("coo", "indices", 9),
            ("coo", "indices", -1),
            ("csr", "crow", 7),
            ("csr", "col", 5),
            ("bsc", "row", 4),
            ("nested", "offsets", 8),
            ("nested", "sizes", 99),
            ("nested", "strides", -1),
        ],
    )
    def test_parts_that_lead_out_of_bounds_are_refused(self, kind: str, part: str, value: int) -> None:
        rows = stored({"w": MADE[kind](0)})
        rows[f"__tensor__/w.{part}"] = np.full_like(rows[f"__tensor__/w.{part}"], value)

        with pytest.raises(AdapterError, match="damaged"):
            ADAPTER.reconstruct(rows)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"made":"quantized"', '"made":"unheard of"'),
            ("[3,4]", "[30,4]"),
            ('"int8"', '"int16"'),
        ],
    )
    @pytest.mark.parametrize("kind", ["qint8", "quint8 by channel"])
    def test_changed_layouts_are_refused_or_change_nothing(self, kind: str, old: str, new: str) -> None:
        rows = stored({"w": MADE[kind](0)})
        text = rows[SKELETON].tobytes().decode().replace(old, new)
        is_changed = text.encode() != rows[SKELETON].tobytes()
        rows[SKELETON] = np.frombuffer(text.encode(), np.uint8)

        if is_changed:
            with pytest.raises(AdapterError):
                ADAPTER.reconstruct(rows)
        else:
            assert bits(ADAPTER.reconstruct(rows)["w"]) == bits(MADE[kind](0))


class InEightBits(torch.optim.Optimizer):
    """An optimizer whose state is tensors of a subclass, like the ones of torchao and bitsandbytes."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = Wrapper(torch.zeros_like(parameter, dtype=torch.int8), torch.ones(1))
            state["mean"].words += 1
            state["mean"].scale *= 1.5
            parameter -= self.param_groups[0]["lr"] * state["mean"].words * state["mean"].scale


class TestOptimizers:
    @staticmethod
    def after(n_steps: int) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = InEightBits(model.parameters())
        for _ in range(n_steps):
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    @pytest.mark.parametrize("n_steps", [0, 1])
    def test_fresh_optimizer_gets_states_of_a_subclass_without_a_pickle(
        self, n_steps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state, live = self.after(3), self.after(n_steps)
        rows = stored(state)
        monkeypatch.setattr("pickle.Unpickler", None)

        ADAPTER.reconstruct(rows, live)
        for each in (state, live):
            each["optimizer"].step()

        assert bits(live["model"].weight) == bits(state["model"].weight)

    def test_class_that_was_never_imported_is_refused_by_name(self) -> None:
        rows, live = stored(self.after(1)), self.after(0)
        text = rows[SKELETON].tobytes()
        at = text.index(b'"layout"')
        other = text[at:].replace(b'"Wrapper"', b'"Wropper"')
        rows[SKELETON] = np.frombuffer(text[:at] + other, np.uint8)

        with pytest.raises(AdapterError, match=r"Wropper is stored, and this process has no such class: import it"):
            ADAPTER.reconstruct(rows, live)


def test_large_parts_are_read_straight_into_the_live_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_in_place, "LEAST_BYTES", 0)
    store = TensorCasStore(tmp_path, "run")
    n = 20_000

    def state(seed: int) -> dict[str, Any]:
        values = numbers(seed, n)
        plain = numbers(seed + 5, n, dtype=torch.complex64)
        return {
            "wrapped": Wrapper(numbers(seed, n), torch.ones(1)),
            "sparse": torch.sparse_coo_tensor(torch.arange(n)[None], values, (n,)),
            "values": values,
            "conj": plain.conj(),
            "quantized": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            "module": Holder(Wrapper(numbers(seed, n), torch.ones(1)), "parameter"),
        }

    saved, live = state(0), state(1)
    store.save(saved, step=1)

    store.load(step=1, into=live)

    for name in saved:
        first, second = (each[name].held if name == "module" else each[name] for each in (saved, live))
        assert bits(first) == bits(second), name


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(2, device="meta"), "is on the meta device and has no values"),
    "lazy": (nn.UninitializedParameter, "is not initialized yet: run the model"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), "has the layout torch._mkldnn: make it dense with to_dense"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensor_without_values_is_refused_by_its_path(kind: str) -> None:
    make, reason = REFUSED[kind]

    with pytest.raises(AdapterError, match=f"tensor 'a.0.b' {reason}"):
        ADAPTER.extract({"a": [{"b": make()}]})


def test_layout_names_the_kind_and_its_parts() -> None:
    rows = stored({"w": coo(0)})

    node = json.loads(rows[SKELETON].tobytes())["tree"]["dict"][0][1]

    assert node["made"] == "sparse_coo"
    assert [key for key, _ in node["of"]["dict"]] == ["indices", "values", "shape", "coalesced"]

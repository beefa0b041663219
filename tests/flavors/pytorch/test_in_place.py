"""A load fills live tensors without a second copy of them, and finds damage before the first one changes."""

from __future__ import annotations

import copy
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcas_mlflow.adapter import SKELETON, STAGED_BYTES
from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptChunkError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import StoreReads, rebuild
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.flavors.pytorch.checkpoints import Checkpoint, read_into_live_tensors
from tests.flavors.pytorch.models import ADAPTER, raw, stored

SIDE = 512
BYTES = 6 * SIDE * SIDE * 4


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(6)))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in model.state_dict().items()}


def packs_of(root: Path) -> list[Path]:
    return sorted((root / ".tensorcas" / "packs").rglob("*.pack"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill models of this size as large ones are filled: while reading."""
    monkeypatch.setattr("tensorcas_mlflow.reader._rebuild.STAGED_BYTES", 0)


@pytest.fixture(params=["fast", "balanced"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TensorCasStore:
    made = TensorCasStore(tmp_path / "root", "run", chunk_bytes=64 << 10)
    made.save(net(0), step=1, policy=request.param)
    return TensorCasStore(tmp_path / "root", "run")


def test_live_model_is_filled_without_a_copy(store: TensorCasStore) -> None:
    model = net(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    store.load(1, into=net(2))
    tracemalloc.start()
    try:
        assert store.load(1, into=model) is model
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert bits(model) == bits(net(0))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    # The plan's memory is reserved and never touched, so it is no copy: the system provides none of it.
    assert peak < BYTES * 1.2


def test_memory_of_the_plan_is_never_touched(store: TensorCasStore) -> None:
    model = net(1)
    store.load(1, into=net(2))
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.0005)

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    store.load(1, into=model)
    is_over.set()
    watcher.join()

    assert peak[0] - before < BYTES


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trained(seed: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> dict[str, Any]:
    model = net(seed)
    optimizer = kind(model.parameters(), lr=0.1 / (1 + seed))  # type: ignore[call-arg]
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    return [
        value
        for of_parameter in state["optimizer"].state.values()
        for value in of_parameter.values()
        if value.nbytes >= SIDE * SIDE
    ]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_training_state_is_filled_with_its_optimizer(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    saved, live = trained(0, kind), trained(1, kind)
    places = [tensor.data_ptr() for tensor in moments(live)]
    TensorCasStore(tmp_path, "run").save(saved, step=1)
    TensorCasStore(tmp_path, "run").load(1, into=live)

    assert live["epoch"] == 0
    assert places
    assert [tensor.data_ptr() for tensor in moments(live)] == places
    for each in (saved, live):
        each["model"](torch.ones(1, SIDE)).sum().backward()
        each["optimizer"].step()
    assert bits(live["model"]) == bits(saved["model"])
    assert [raw(tensor) for tensor in moments(live)] == [raw(tensor) for tensor in moments(saved)]


@pytest.mark.long
def test_damaged_moment_leaves_the_optimizer_unchanged(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    store = TensorCasStore(tmp_path, "run", chunk_bytes=64 << 10)
    store.save(saved, step=1, policy="fast")
    before = [raw(tensor) for tensor in moments(live)]
    [pack] = packs_of(tmp_path)
    for share in (0.1, 0.4, 0.6, 0.9):
        at = int(pack.stat().st_size * share)
        flip(pack, at)
        with pytest.raises(CorruptChunkError):
            TensorCasStore(tmp_path, "run").load(1, into=live)
        flip(pack, at)

        assert [raw(tensor) for tensor in moments(live)] == before
    assert live["epoch"] == 1


def test_optimizer_with_a_hook_gets_new_tensors(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    seen = []

    def doubled(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append([tensor.data_ptr() for entries in state["state"].values() for tensor in entries.values()])
        return state

    live["optimizer"].register_load_state_dict_pre_hook(doubled)
    places = {tensor.data_ptr() for tensor in moments(live)}
    TensorCasStore(tmp_path, "run").save(saved, step=1)
    TensorCasStore(tmp_path, "run").load(1, into=live)

    assert places.isdisjoint(seen[0])
    assert [raw(tensor) for tensor in moments(live)] == [raw(tensor) for tensor in moments(saved)]


def test_moments_of_another_dtype_get_new_memory(tmp_path: Path) -> None:
    saved, live = trained(0), trained(1)
    for of_parameter in live["optimizer"].state.values():
        of_parameter["exp_avg"] = of_parameter["exp_avg"].double()
    TensorCasStore(tmp_path, "run").save(saved, step=1)
    TensorCasStore(tmp_path, "run").load(1, into=live)

    assert [raw(tensor) for tensor in moments(live)] == [raw(tensor) for tensor in moments(saved)]


def test_damage_is_found_before_the_live_model_changes(store: TensorCasStore, tmp_path: Path) -> None:
    model = net(1)
    before = bits(model)
    for pack in packs_of(tmp_path / "root"):
        for share in (0.1, 0.5, 0.7):
            at = int(pack.stat().st_size * share)
            flip(pack, at)
            with pytest.raises(CorruptChunkError) as raised:
                TensorCasStore(tmp_path / "root", "run").load(1, into=model)
            flip(pack, at)

            assert bits(model) == before
            assert not hasattr(raised.value, "__notes__")


def test_live_model_that_does_not_fit_is_unchanged(store: TensorCasStore) -> None:
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(5)), nn.Linear(SIDE, SIDE + 1))
    before = bits(model)

    with pytest.raises(TensorCasError, match="size mismatch"):
        store.load(1, into=model)
    assert bits(model) == before


def test_disk_that_fails_after_the_check_leaves_a_model_filled_in_part_and_says_so(
    store: TensorCasStore, tmp_path: Path
) -> None:
    model = net(1)
    old, new = bits(model), bits(net(0))
    manifest = store.store.manifest(store.store.checkpoints()[0])
    reads = StoreReads(store.store, manifest)
    pack = packs_of(tmp_path / "root")[0]

    def check(names: Sequence[str]) -> None:
        reads.check(names)
        flip(pack, pack.stat().st_size // 2)

    with pytest.raises(CorruptChunkError) as raised:
        ADAPTER.fill(model, {row.spec.name: row.spec for row in manifest.rows}, reads, check=check)

    assert "filled in part" in "".join(raised.value.__notes__)
    assert_old_or_new(bits(model), old, new)


def assert_old_or_new(found: dict[str, bytes], old: dict[str, bytes], new: dict[str, bytes]) -> None:
    """Assert that each chunk is the old or the new one, and never a damaged one."""
    size = 64 << 10
    for name, data in found.items():
        for at in range(0, len(data), size):
            assert data[at : at + size] in (old[name][at : at + size], new[name][at : at + size])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_without_a_check_damage_is_found_while_reading(store: TensorCasStore, tmp_path: Path, share: float) -> None:
    model = net(1)
    old, new = bits(model), bits(net(0))
    pack = packs_of(tmp_path / "root")[0]
    flip(pack, int(pack.stat().st_size * share))

    with pytest.raises(CorruptChunkError) as raised:
        store.load(1, into=model, precheck=False)

    assert "filled in part" in "".join(raised.value.__notes__)
    assert_old_or_new(bits(model), old, new)


def test_without_a_check_the_tensors_are_read_once(
    store: TensorCasStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(1)
    monkeypatch.setattr(StoreReads, "check", None)
    store.load(1, into=model, precheck=False)

    assert bits(model) == bits(net(0))


def test_a_small_model_is_unchanged_when_the_disk_fails(
    store: TensorCasStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._rebuild.STAGED_BYTES", STAGED_BYTES)
    model = net(1)
    before = bits(model)
    pack = packs_of(tmp_path / "root")[0]
    flip(pack, pack.stat().st_size // 2)

    with pytest.raises(CorruptChunkError) as raised:
        store.load(1, into=model, precheck=False)

    assert bits(model) == before
    assert not hasattr(raised.value, "__notes__")


class Noting(StoreReads):
    """Notes which tensors are read into given memory."""

    into: tuple[str, ...] = ()

    def __call__(self, names: Any = None, *, verify: bool = True, out: Any = None) -> dict[str, Any]:
        self.into += tuple(out or ())
        return super().__call__(names, verify=verify, out=out)


@pytest.mark.parametrize("precheck", [True, False])
def test_only_without_a_check_a_remote_store_is_read_into_the_live_tensors(precheck: bool) -> None:
    store = Store.init_backend(MemoryBackend(is_remote=True))
    with store.write_checkpoint(stored(net(0)), flavor="pytorch") as save:
        ref = save.commit(RefTarget(path="model"))
    manifest, model = store.manifest(ref), net(1)
    reads = Noting(store, manifest)
    rebuild(ADAPTER, manifest, reads, into=model, precheck=precheck)

    assert bits(model) == bits(net(0))
    assert len(reads.into) == (0 if precheck else 6)


class Swapping(nn.Module):
    """Takes each of two weights for the other when it loads a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(40, 40))
        self.other = nn.Parameter(torch.randn(40, 40))

    def _load_from_state_dict(self, state: Any, *arguments: Any) -> None:
        state["one"], state["other"] = state["other"], state["one"]
        super()._load_from_state_dict(state, *arguments)


def hooked() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(30, 30), "b": nn.Linear(30, 30)})

    def swap(_: nn.Module, state: Any, *arguments: Any) -> None:
        state["a.weight"], state["b.weight"] = state["b.weight"], state["a.weight"]

    model.register_load_state_dict_pre_hook(swap)
    return model


def with_a_post_hook() -> nn.Module:
    def increase(module: nn.Module, _: Any) -> None:
        module.get_parameter("bias").data.add_(1)

    model = nn.Linear(40, 60)
    model.register_load_state_dict_post_hook(increase)
    return model


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(50, 50, bias=False)
        self.other = nn.Linear(50, 50, bias=False)
        if is_tied:
            self.other.weight = self.one.weight


def transposed() -> nn.Linear:
    model = nn.Linear(40, 60)
    model.weight = nn.Parameter(torch.randn(40, 60).t())
    return model


def views() -> dict[str, torch.Tensor]:
    whole = torch.randn(100, 50)
    return {"first": whole[:60], "second": whole[60:]}


def twice() -> dict[str, Any]:
    inner = {"w": torch.randn(50, 50)}
    return {"a": inner, "b": inner}


def apart() -> dict[str, Any]:
    return {"a": {"w": torch.randn(50, 50)}, "b": {"w": torch.randn(50, 50)}}


CASES = {
    "a module that swaps": (Swapping, Swapping, 0),
    "a module with a hook": (hooked, hooked, 0),
    "tied, from tied": (lambda: Tied(is_tied=True), lambda: Tied(is_tied=True), 1),
    "untied, from tied": (lambda: Tied(is_tied=True), lambda: Tied(is_tied=False), 0),
    "untied, from untied": (lambda: Tied(is_tied=False), lambda: Tied(is_tied=False), 2),
    "not contiguous": (lambda: nn.Linear(40, 60), transposed, 1),
    "from not contiguous": (transposed, lambda: nn.Linear(40, 60), 1),
    "another dtype": (lambda: nn.Linear(40, 60), lambda: nn.Linear(40, 60).double(), 0),
    "views of one memory": (views, views, 2),
    "one mapping in two places": (twice, twice, 0),
    "two mappings, from one in two places": (twice, apart, 0),
    "one mapping in one of two places": (twice, lambda: {"a": {"w": torch.randn(50, 50)}, "b": 5}, 0),
    "a state dict": (lambda: nn.Linear(40, 60).state_dict(), lambda: nn.Linear(40, 60), 2),
    "a module with a hook afterwards": (lambda: nn.Linear(40, 60), with_a_post_hook, 2),
    "an expanded buffer": (lambda: {"w": torch.randn(50, 1)}, lambda: {"w": torch.randn(50, 1).clone()}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_live_tensors_get_the_same_values_either_way(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, make_live, n_into = CASES[case]
    rows = stored(make())
    live = make_live()
    expected = ADAPTER.reconstruct(rows, copy.deepcopy(live), strict=False)
    made = read_into_live_tensors(monkeypatch)
    found = ADAPTER.reconstruct(rows, live, strict=False)
    [checkpoint] = made

    assert found is live
    assert same_tensors(found, expected)
    assert len(checkpoint.into) == n_into


def same_tensors(one: Any, other: Any) -> bool:
    one, other = (stored(each) for each in (one, other))
    return list(one) == list(other) and all(
        one[name].tobytes() == other[name].tobytes() for name in one if name != SKELETON
    )


def test_check_covers_every_row_read_into_live_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    read_into_live_tensors(monkeypatch)
    checkpoint = Checkpoint(stored(Tied(is_tied=True)))
    checked: list[str] = []
    ADAPTER.fill(Tied(is_tied=True), checkpoint.specs, checkpoint.read, check=checked.extend)

    assert checkpoint.into == ["one.weight"]
    assert checked == ["one.weight", "other.weight"]


def test_graph_that_needs_the_old_values_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    read_into_live_tensors(monkeypatch)
    model = nn.Linear(40, 60)
    rows = stored(nn.Linear(40, 60))
    given = torch.ones(1, 40, requires_grad=True)
    loss = (model(given) ** 2).sum()
    ADAPTER.reconstruct(rows, model)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_values_of_a_state_are_those_of_the_step(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    first = {"weights": np.arange(300_000.0), "tensor": torch.arange(600_000.0), "step": 1}
    second = {"weights": np.arange(300_000.0) + 1, "tensor": torch.arange(600_000.0) + 1, "step": 2}
    store.save(first, step=1)
    store.save(second, step=2)
    live = copy.deepcopy(first)
    tensor = live["tensor"]
    store.load(2, into=live)

    assert live["tensor"] is tensor
    assert torch.equal(tensor, second["tensor"])
    assert np.array_equal(live["weights"], second["weights"])
    assert live["step"] == 2

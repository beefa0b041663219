"""A live module, or a part of it, filled from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorcas_mlflow.adapter import adapter_for, take_apart
from tensorcas_mlflow.errors import AdapterError, CorruptChunkError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, open_path, open_ref
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.python_calls import calls_of
from tests.stored_bytes import flip, flip_in_packs


def module(seed: int, device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(seed)
    with torch.device(device):
        return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 3))


def same(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names of tensors that are the same in both."""
    others = other.state_dict()
    return [name for name, tensor in one.state_dict().items() if torch.equal(tensor, others[name])]


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill models of this size as large ones are filled: while reading."""
    monkeypatch.setattr("tensorcas_flavors.pytorch._modules.STAGED_BYTES", -1)


@pytest.fixture
def store(tmp_path: Path) -> TensorCasStore:
    store = TensorCasStore(tmp_path, run_id="run")
    store.save(module(1), step=1)
    optimizer = torch.optim.AdamW(module(1).parameters())
    store.save({"model": module(1), "optimizer": optimizer, "epoch": 3}, step=2)
    return store


def test_load_fills_a_module(store: TensorCasStore) -> None:
    filled = module(2)

    left = store.open(1).load_into(filled)

    assert len(same(filled, module(1))) == len(filled.state_dict())
    assert left.missing == left.unexpected == ()


def test_load_fills_only_the_tensors_that_match_the_pattern(store: TensorCasStore) -> None:
    filled = module(2)

    store.open(1).load_into(filled, match="0.*")

    assert {"0.weight", "0.bias"} <= set(same(filled, module(1)))
    assert torch.equal(filled[2].weight, module(2)[2].weight)


def test_the_model_of_a_training_state_is_found_below_its_name(store: TensorCasStore) -> None:
    filled = module(2)

    store.open(2).load_into(filled, prefix="model")

    assert len(same(filled, module(1))) == len(filled.state_dict())


def test_a_module_without_memory_is_made(store: TensorCasStore) -> None:
    made = module(2, "meta")

    store.open(1).load_into(made)

    assert len(same(made, module(1))) == len(made.state_dict())
    assert isinstance(made[0].weight, torch.nn.Parameter)


def test_load_of_tensors_that_do_not_fit_changes_nothing(store: TensorCasStore) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 4))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}

    with pytest.raises(AdapterError, match=r"2\.weight"):
        store.open(1).load_into(other)

    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_load_into_an_object_that_is_no_module_is_refused(store: TensorCasStore) -> None:
    with pytest.raises(AdapterError):
        store.open(1).load_into({"a": 1})


@pytest.mark.parametrize("strict", [True, False])
def test_a_pattern_that_matches_no_name_is_refused(store: TensorCasStore, strict: bool) -> None:
    with pytest.raises(AdapterError, match="no tensor has a name that is asked for"):
        store.open(1).load_into(module(2), match="encoder.*", strict=strict)


def test_stored_tensors_that_are_in_no_state_dict_are_named(store: TensorCasStore) -> None:
    model = module(1)
    model.table = torch.arange(5000.0)
    store.save(model, step=3)

    left = store.open(3).load_into(module(2))

    assert (left.missing, left.unexpected, left.passed_over) == ((), (), ("__tensor__/table",))


@pytest.mark.usefixtures("store_of_files")
def test_a_load_into_a_model_finds_damage_before_it_changes_anything(store: TensorCasStore, tmp_path: Path) -> None:
    flip_in_packs(Store.open(tmp_path).backend)
    live = module(2)
    with pytest.raises(CorruptChunkError):
        store.load(1, original=live)

    assert len(same(live, module(2))) == len(live.state_dict())


@pytest.mark.parametrize("way", ["staged", "straight"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"match": "*.*"}, {"prefix": "model"}], ids=str)
@pytest.mark.usefixtures("store_of_files")
def test_load_into_finds_damage_before_the_module_changes(
    tmp_path: Path, options: dict[str, Any], device: str, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "straight":
        request.getfixturevalue("straight")
    store = TensorCasStore(tmp_path, run_id="run")
    store.save({"model": module(1)} if "prefix" in options else module(1), step=1)
    for share in (0.1, 0.5, 0.8):
        damage(store.store, share)
        live = module(2, device)
        with pytest.raises(CorruptChunkError) as raised:
            TensorCasStore(tmp_path, run_id="run").open(1).load_into(live, **options)
        damage(store.store, share)

        assert not hasattr(raised.value, "__notes__")
        assert is_untouched(live)


@pytest.mark.usefixtures("straight")
def test_load_into_finds_damage_in_a_file_before_the_module_changes(tmp_path: Path) -> None:
    file = tmp_path / PAYLOAD_FILE
    write_payload(tmp_path, take_apart(adapter_for(module(1)), module(1)), flavor="pytorch")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    live = module(2)
    with pytest.raises(CorruptChunkError):
        open_path(file).load_into(live)

    assert is_untouched(live)


@pytest.mark.usefixtures("store_of_files")
def test_load_into_finds_damage_in_a_logged_file_before_the_module_changes(tmp_path: Path) -> None:
    saved, live = (torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    save_file(saved.state_dict(), tmp_path / "m.safetensors")
    store = Store.open(tmp_path / "store", create=True)
    with store.write_file(tmp_path / "m.safetensors") as save:
        ref = save.commit(RefTarget(path="m.safetensors"))
    damage(store, 0.9)
    with pytest.raises(CorruptChunkError):
        open_ref(Store.open(tmp_path / "store"), ref).load_into(live)

    assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())


def read_bytes_of(reader: CheckpointReader, live: torch.nn.Module, **options: Any) -> int:
    before = reader.stats.read_bytes
    reader.load_into(live, **options)
    assert len(same(live, module(1))) == len(live.state_dict())
    return reader.stats.read_bytes - before


@pytest.mark.usefixtures("store_of_files", "straight")
def test_only_the_check_before_a_change_reads_the_tensors_twice(store: TensorCasStore) -> None:
    twice = read_bytes_of(store.open(1), module(2))
    once = [
        read_bytes_of(store.open(1, verify=False), module(2)),
        read_bytes_of(store.open(1), module(2), precheck=False),
        read_bytes_of(store.open(1), module(2, "meta")),
    ]

    assert len(set(once)) == 1
    assert twice - once[0] > 40 * 50 * 3


@pytest.mark.usefixtures("store_of_files")
def test_load_into_a_small_model_reads_the_tensors_once(store: TensorCasStore) -> None:
    both = [read_bytes_of(store.open(1), module(2), precheck=precheck) for precheck in (True, False)]

    assert both[0] == both[1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.usefixtures("store_of_files", "straight")
def test_load_into_without_a_check_says_that_the_module_is_filled_in_part(tmp_path: Path, share: float) -> None:
    saved, live = (torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(20))) for _ in range(2))
    old = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    store = TensorCasStore(tmp_path, run_id="run", chunk_bytes=64 << 10)
    store.save(saved, step=1, policy="fast")
    damage(store.store, share)
    with pytest.raises(CorruptChunkError) as raised:
        TensorCasStore(tmp_path, run_id="run").open(1).load_into(live, precheck=False)

    assert "filled in part" in "".join(raised.value.__notes__)
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, old[name]) or torch.equal(tensor, saved.state_dict()[name])


@pytest.mark.usefixtures("store_of_files", "straight")
def test_damage_leaves_a_module_without_memory_unchanged_without_a_check(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, run_id="run")
    store.save(module(1), step=1)
    damage(store.store, 0.5)
    live = module(2, "meta")
    with pytest.raises(CorruptChunkError) as raised:
        store.open(1).load_into(live, precheck=False)

    assert is_untouched(live)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.long
def test_filling_a_thousand_tensors_takes_few_python_calls(tmp_path: Path) -> None:
    def many(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(500)))

    store, live = TensorCasStore(tmp_path, run_id="run"), many(2)
    store.save(many(1), step=1)
    n_calls = []
    for load in (lambda: store.open(1).load_into(live), lambda: store.load(1, into=live)):
        load()
        with calls_of() as calls:
            load()
        n_calls.append(len(calls))

    assert len(same(live, many(1))) == 1000
    # With several objects a tensor and load_state_dict() they took 64,000 and 127,000.
    assert n_calls[0] < 11_000
    assert n_calls[1] < 21_000


def damage(store: Store, share: float) -> None:
    """Flip a byte at a share of the only pack; a second call undoes it."""
    (pack,) = store.backend.list("packs")
    flip(store.backend, pack.key, int(pack.size * share))


def is_untouched(live: torch.nn.Module) -> bool:
    if all(tensor.is_meta for tensor in live.state_dict().values()):
        return True
    return len(same(live, module(2))) == len(live.state_dict())

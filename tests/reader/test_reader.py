"""Parts of a checkpoint, read alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptChunkError, PartNotFoundError, TensorNotFoundError
from tensorcas_mlflow.reader import CheckpointReader, open_path, open_ref
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.reader.checkpoints import N_EXPERTS, N_LAYERS, moe, opened, same, save
from tests.stored_bytes import flip

MOE = moe()
CHUNK = 4096


def a_local_store(tmp_path: Path) -> CheckpointReader:
    return opened(Store.init(tmp_path, chunk_bytes=CHUNK), MOE)


def a_store_far_away(tmp_path: Path) -> CheckpointReader:
    return opened(Store.init_backend(MemoryBackend(is_remote=True), chunk_bytes=CHUNK), MOE)


def a_store_of_deltas(tmp_path: Path) -> CheckpointReader:
    store = Store.init(tmp_path)
    before = {name: (array.view(np.uint32) ^ 1).view(array.dtype) for name, array in MOE.items()}
    with store.write_checkpoint(before, series="s") as pending:
        pending.abandon()
    save(store, before, 0, series="s")
    return open_ref(store, save(store, MOE, 1, series="s"))


def a_file_of_its_own(tmp_path: Path) -> CheckpointReader:
    write_payload(tmp_path, MOE, flavor="pytorch")
    return open_path(tmp_path / PAYLOAD_FILE)


@pytest.fixture(params=[a_local_store, a_store_far_away, a_store_of_deltas, a_file_of_its_own])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointReader:
    found: CheckpointReader = request.param(tmp_path)
    return found


def test_reader_gives_back_every_tensor(reader: CheckpointReader) -> None:
    assert same(reader.full(), MOE)
    assert list(reader) == list(reader.keys()) == list(MOE)
    assert len(reader) == len(MOE)
    assert "model.embed_tokens.weight" in reader
    assert "model.embed_tokens" not in reader


def test_reader_is_a_mapping_of_names_to_arrays(reader: CheckpointReader) -> None:
    name = "model.embed_tokens.weight"

    assert isinstance(reader, Mapping)
    assert same({name: reader[name]}, {name: MOE[name]})
    assert same(dict(reader.items()), MOE)
    assert same(dict(zip(reader.keys(), reader.values(), strict=True)), MOE)
    assert reader.get("absent") is None
    assert len(reader.items()) == len(MOE)
    with pytest.raises(KeyError, match="the checkpoint has no tensor named 'absent'"):
        reader["absent"]
    with pytest.raises(TensorNotFoundError):
        reader["absent"]


def test_readers_compare_by_identity_and_read_nothing_for_it(reader: CheckpointReader, tmp_path: Path) -> None:
    before = reader.stats

    assert reader == reader
    assert len({reader, reader}) == 1
    assert reader != dict.fromkeys(MOE)
    assert reader.stats.read_bytes == before.read_bytes


def test_reader_iterates_over_all_tensors(reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._reader.BATCH_BYTES", 50_000)

    assert same(dict(reader.items()), MOE)


def test_reader_reads_tensors_into_given_arrays(reader: CheckpointReader) -> None:
    outs = {at: np.empty_like(array) for at, array in enumerate(MOE.values()) if at % 2}

    found = reader._contents.arrays(np.arange(len(MOE)), outs)

    assert all(found[at] is out for at, out in outs.items())
    assert same(dict(zip(MOE, found, strict=True)), MOE)


def test_reader_gives_one_tensor_alone(reader: CheckpointReader) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    assert same({name: reader.tensor(name)}, {name: MOE[name]})
    assert (reader.spec(name).dtype, reader.spec(name).shape) == ("float32", (128, 64))


def test_tensors_come_in_the_order_in_which_they_are_named(reader: CheckpointReader) -> None:
    names = list(MOE)[::-3]

    assert same(reader.tensors(names), {name: MOE[name] for name in names})


def test_reader_gives_one_layer_and_one_expert_alone(reader: CheckpointReader) -> None:
    assert reader.layers() == list(range(N_LAYERS))
    assert reader.experts(1) == list(range(N_EXPERTS))
    assert same(reader.layer(1), {name: array for name, array in MOE.items() if ".layers.1." in name})
    assert same(reader.expert(2, 3), {name: array for name, array in MOE.items() if ".2.mlp.experts.3." in name})
    with pytest.raises(PartNotFoundError, match=r"there are layers 0\.\.2"):
        reader.layer(3)


def test_a_pattern_chooses_as_of_files(reader: CheckpointReader) -> None:
    found = reader.match("model.layers.*.self_attn.*")

    assert list(found) == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(N_LAYERS)]
    with pytest.raises(PartNotFoundError, match=r"no tensor with a name like 'nothing\.\*'"):
        reader.match("nothing.*")


@pytest.mark.parametrize(
    "index", [slice(3, 700), 5, -1, slice(None, None, 300), (slice(10, 20), slice(5, 9)), [900, 3, 3], (..., 7), ()]
)
def test_a_slice_is_what_numpy_makes_of_the_whole(reader: CheckpointReader, index: Any) -> None:
    name = "model.embed_tokens.weight"
    found = reader.get_slice(name)[index]

    assert found.tobytes() == MOE[name][index].tobytes()
    assert found.shape == MOE[name][index].shape


def test_slices_are_those_of_each_tensor_in_their_order(
    reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.SPARSE_BYTES", 100_000)  # so that some wait for others
    name = "model.embed_tokens.weight"
    indices: list[Any] = [slice(3, 700), (slice(None), 7), slice(0, 0), [900, 3, 3], -1, slice(3, 700), ()]
    wanted = [(name, index) for index in indices] + [(other, ...) for other in reversed(MOE)]
    found = reader.slices(iter(wanted))

    assert [part.tobytes() for part in found] == [MOE[which][index].tobytes() for which, index in wanted]
    assert [part.shape for part in found] == [MOE[which][index].shape for which, index in wanted]
    assert reader.slices([]) == []
    with pytest.raises(TensorNotFoundError):
        reader.slices([(name, 0), ("absent", 0)])
    with pytest.raises(IndexError):
        reader.slices([(name, 0), (name, 10_000)])


def test_damage_in_one_of_several_slices_is_reported_by_its_tensor(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    rng = np.random.default_rng(0)
    reader = opened(store, {name: rng.integers(0, 256, 300_000, dtype=np.uint8) for name in "abc"})
    good = reader.slices([(name, slice(299_990, None)) for name in "ac"])
    [pack] = store.backend.list("packs")
    place = store.catalog.find(reader._contents.manifest.digests)  # type: ignore[attr-defined]
    flip(store.backend, pack.key, int(place.entries["offset"][3]))  # the second chunk of b

    assert [part.tolist() for part in reader.slices([(name, slice(299_990, None)) for name in "ac"])] == [
        part.tolist() for part in good
    ]
    with pytest.raises(CorruptChunkError) as caught:
        reader.slices([(name, slice(299_990, None)) for name in "abc"])
    assert caught.value.tensors == ("b",)


def test_writing_into_a_tensor_that_was_read_changes_nothing_stored(reader: CheckpointReader) -> None:
    name = "model.embed_tokens.weight"
    for array in (reader.tensor(name), reader.rows(name, slice(0, 10)), reader.tensor(name, copy=True)):
        array[:] = 0

    assert same({name: reader.tensor(name)}, {name: MOE[name]})


def test_pieces_come_in_the_order_in_which_they_are_named(
    reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.reader._contents.BATCH_BYTES", 50_000)
    names = list(MOE)[::-1]
    found: dict[str, bytes] = {}
    for name, data in reader.stream(names):
        found[name] = found.get(name, b"") + bytes(data)

    assert list(found) == names
    assert all(data == MOE[name].tobytes() for name, data in found.items())


def test_reader_raises_for_a_name_that_does_not_exist(reader: CheckpointReader) -> None:
    for read in (reader.tensor, reader.spec, reader.get_slice, reader.digest, lambda name: reader.tensors([name])):
        with pytest.raises(TensorNotFoundError, match="no tensor named 'nothing'"):
            read("nothing")


def test_part_that_does_not_exist_is_refused(reader: CheckpointReader) -> None:
    for expert in (-1, -2, N_EXPERTS):
        with pytest.raises(PartNotFoundError, match=rf"no expert {expert} in layer 1: there are experts 0\.\.3"):
            reader.expert(1, expert)
    for layer in (-1, N_LAYERS):
        with pytest.raises(PartNotFoundError, match=rf"no layer {layer}"):
            reader.layer(layer)
    for prefix in ("", ".", "model.layer", "model.layers.1.norm.weight"):
        with pytest.raises(PartNotFoundError, match="no tensor below"):
            reader.below(prefix)


def test_part_named_by_a_wrong_type_is_refused(tmp_path: Path) -> None:
    reader: Any = opened(Store.init(tmp_path), MOE | {"a": np.ones(3), "b": np.ones(3)})
    calls = (
        lambda: reader.layer("1"),
        lambda: reader.layer(1.0),
        lambda: reader.expert(1, "1"),
        lambda: reader.tensors("ab"),
        lambda: reader.rows("model.embed_tokens.weight", (1, 3)),
        lambda: reader.tensors([1]),
        lambda: reader.tensor(None),
    )
    for call in calls:
        with pytest.raises(TypeError):
            call()


def test_reader_rows_equal_numpys_rows(reader: CheckpointReader) -> None:
    name = "model.embed_tokens.weight"
    for rows in (slice(990, 1010), slice(2000, 3000), slice(-3, None), slice(10, 2, -3), slice(5, 3), [3, -1]):
        assert reader.rows(name, rows).tobytes() == MOE[name][rows].tobytes()  # type: ignore[arg-type]
    for wrong in (1000, -1001, [0, 1000]):
        with pytest.raises(IndexError, match="out of bounds"):
            reader.rows(name, wrong)  # type: ignore[arg-type]


def test_reader_gives_torch_tensors_for_torch(tmp_path: Path) -> None:
    reader = opened(Store.init(tmp_path), MOE, framework="pt")
    name = "model.embed_tokens.weight"

    assert isinstance(reader.tensor(name), torch.Tensor)
    assert all(isinstance(each, torch.Tensor) for each in reader.expert(0, 0).values())
    assert reader.get_slice(name)[5:7].numpy().tobytes() == MOE[name][5:7].tobytes()


def test_a_framework_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    with pytest.raises(ValueError, match="'np', 'pt' or 'flax'"):
        opened(store, MOE, framework="nothing")
    with pytest.raises(ValueError, match="framework='pt'"):
        opened(store, MOE, device="cuda")
    with pytest.raises(ValueError, match=r"not on 'cuda:0': leave device out, and use jax\.device_put"):
        opened(store, MOE, framework="flax", device="cuda:0")


# --- experts in one tensor


def test_one_of_many_experts_in_one_tensor_comes_alone(tmp_path: Path) -> None:
    fused = {
        "model.layers.0.mlp.gate.weight": np.ones((4, 16), "f4"),
        "model.layers.0.mlp.experts.gate_up_proj": np.arange(4 * 16 * 32, dtype="f4").reshape(4, 16, 32),
        "model.layers.0.mlp.experts.down_proj_bias": np.arange(8, dtype="f4").reshape(4, 2),
    }
    reader = opened(Store.init(tmp_path), fused)

    found = reader.expert(0, 2)

    assert same(found, {name: array[2] for name, array in fused.items() if "experts" in name})


# --- identity


def test_equal_tensors_have_one_digest_wherever_they_are_kept(tmp_path: Path) -> None:
    places = (a_local_store, a_store_far_away, a_store_of_deltas, a_file_of_its_own)
    readers = [place(tmp_path / str(n)) if place is not a_file_of_its_own else None for n, place in enumerate(places)]
    (tmp_path / "file").mkdir()
    readers[-1] = a_file_of_its_own(tmp_path / "file")

    assert len({reader.tensors_digest() for reader in readers if reader is not None}) == 1
    for name in MOE:
        assert len({reader.digest(name) for reader in readers if reader is not None}) == 1


def test_a_digest_tells_names_dtypes_shapes_and_bytes_apart_and_no_order(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    base = {"a": np.arange(6, dtype="i4"), "b": np.zeros(3)}
    others = [
        {"a": base["a"].reshape(2, 3), "b": base["b"]},
        {"a": base["a"].view("u4"), "b": base["b"]},
        {"a": base["a"] + 1, "b": base["b"]},
        {"A": base["a"], "b": base["b"]},
        {"a": base["a"]},
    ]
    first = opened(store, base)
    readers = [opened(store, other, step) for step, other in enumerate(others, 3)]

    assert opened(store, {"b": base["b"], "a": base["a"]}, 2).tensors_digest() == first.tensors_digest()
    assert first.tensors_digest() not in {reader.tensors_digest() for reader in readers}
    assert first.digest() not in {reader.digest() for reader in readers}


def test_cuts_do_not_change_a_digest(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    name = "model.embed_tokens.weight"
    plain, cut = opened(store, MOE, 1), open_ref(store, save(store, MOE, 2, cuts={name: [10, 700, 1000]}))

    assert cut.tensors_digest() == plain.tensors_digest()
    assert cut.digest() == plain.digest()
    assert cut.digest(name) == plain.digest(name)
    assert cut.rows(name, slice(690, 710)).tobytes() == MOE[name][690:710].tobytes()


def test_digest_reads_nothing_in_a_store_of_the_default_chunk_size(tmp_path: Path) -> None:
    reader = opened(Store.init(tmp_path), MOE)
    before = reader.stats

    reader.digest()

    assert reader.stats.read_bytes == before.read_bytes
    assert reader.stats.mapped_bytes == before.mapped_bytes == 0


# --- safety


def test_a_skeleton_is_no_tensor(tmp_path: Path) -> None:
    reader = opened(Store.init(tmp_path), {"w": np.ones(3), SKELETON: np.frombuffer(b"pickle", np.uint8)})

    assert list(reader) == ["w"]
    assert SKELETON not in reader


@pytest.mark.parametrize("read", ["tensor", "rows", "layer", "full"])
def test_every_way_of_reading_finds_damage(tmp_path: Path, read: str) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK)
    name = "model.layers.0.x.weight"
    reader = opened(store, {name: MOE["model.embed_tokens.weight"], "model.layers.1.x.weight": np.ones(3)})
    (pack,) = store.backend.list("packs")
    flip(store.backend, pack.key, 10_000)

    with pytest.raises(CorruptChunkError):
        {"tensor": lambda: reader.tensor(name), "rows": lambda: reader.rows(name, slice(30, 50))}.get(
            read, lambda: reader.full() if read == "full" else reader.layer(0)
        )()
    assert reader.rows(name, slice(800, 810)).tobytes() == MOE["model.embed_tokens.weight"][800:810].tobytes()


# --- a run's own store


def test_a_step_of_a_run_is_opened(tmp_path: Path) -> None:

    with TensorCasStore(tmp_path, run_id="run-1") as store:
        for step in (1, 2):
            store.save({"w": torch.full((4,), float(step))}, step=step)

        assert store.open(1).tensor("w").tolist() == [1.0] * 4
        assert store.open().tensor("w").tolist() == [2.0] * 4
        assert store.open(framework="pt").tensor("w").sum().item() == 8.0

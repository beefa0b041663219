"""Readers, slices, comparisons, files and self-contained checkpoints with derived tensors."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.codecs import evaluate
from tensorcas_mlflow.errors import CorruptChunkError, FormatError
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.reader import CheckpointReader, diff, open_path, open_ref
from tensorcas_mlflow.reader import _contents as contents_module
from tensorcas_mlflow.store import Store, copy_payload, payload_bytes, payload_pieces, read_payload
from tests.derived.checkpoints import Made, save_derived
from tests.derived.test_reading import BF16, CHUNK_BYTES, MADE, TENSORS, V, W, same
from tests.reader.test_slices import some_index

KEY = RefTarget(run_id="r", step=1)


def new_store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def reader() -> CheckpointReader:
    store = new_store()
    return open_ref(store, save_derived(store, KEY, TENSORS, MADE, is_bytes=["q8"]))


def plain_reader(tensors: Any = TENSORS) -> CheckpointReader:
    store = new_store()
    with store.write_checkpoint({name: array for name, array in tensors.items() if name != "q8"}) as save:
        return open_ref(store, save.commit(KEY))


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("q8", "none")])
def test_any_slice_of_a_derived_tensor_is_that_of_the_tensor(
    reader: CheckpointReader, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "SPARSE_BYTES", 2000)
    rng, array = random.Random(name), TENSORS[name]
    for _ in range(20):
        index = some_index(rng, array.shape)
        try:
            expected = np.array(array[index], array.dtype)
        except IndexError:
            continue
        assert same(reader.get_slice(name)[index], expected)


def test_a_checkpoint_with_derived_tensors_has_the_digests_of_one_without(reader: CheckpointReader) -> None:
    plain = plain_reader()
    for name in TENSORS.keys() - {"q8"}:
        assert reader.digest(name) == plain.digest(name)
    assert diff(plain, reader).equal == tuple(plain)


def test_large_tensors_are_evaluated_once_for_all_their_pieces(
    reader: CheckpointReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(function: str, *rest: Any, **named: Any) -> Any:
        calls.append(function)
        return evaluate(function, *rest, **named)

    monkeypatch.setattr("tensorcas_mlflow.chunk_io._derive.evaluate", counted)
    monkeypatch.setattr(contents_module, "BATCH_BYTES", CHUNK_BYTES)
    contents = reader._contents
    names = contents.specs.names.to_list()
    row = names.index("transposed")
    data = b"".join(bytes(piece) for batch in contents.batches(np.array([row])) for _, piece in batch)

    assert data == TENSORS["transposed"].tobytes()
    assert calls == ["permute"]


def test_values_are_compared_across_derived_tensors(reader: CheckpointReader) -> None:
    changed = dict(TENSORS)
    changed["bf16"] = BF16 + BF16.dtype.type(1)
    found = diff(reader, plain_reader(changed), values=True)

    assert found.changed == ("bf16",)


@pytest.mark.parametrize("precheck", [True, False])
def test_a_module_is_filled_with_derived_tensors(tmp_path: Path, precheck: bool) -> None:
    import torch

    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
    tensors = {"weight": np.ascontiguousarray(W.T), "bias": V[0].copy()}
    made = {"weight": Made("permute", [W], {"axes": [1, 0]})}
    reader = open_ref(store, save_derived(store, KEY, tensors, made))
    model = torch.nn.Linear(96, 128)
    reader.load_into(model, precheck=precheck)

    assert same(model.weight.detach().numpy(), tensors["weight"])


def file_with_derived_rows(store: Store, path: Path) -> tuple[bytes, Ref]:
    """A safetensors file in which one tensor is derived of another one, stored with a model before."""
    data = safetensors.numpy.save({"a": W, "b": np.ascontiguousarray(W.T), "c": V})
    path.write_bytes(data)
    with store.write_file(path) as save:
        plain = save.commit(RefTarget(path="plain.safetensors"))
    manifest = store.manifest(plain)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    at, is_bytes, nameless, made = 0, [], [], {}
    for number, row in enumerate(manifest.rows):
        name = row.spec.name or f"stretch {number}"
        raw = data[at : at + row.spec.n_bytes]
        tensors[name] = np.frombuffer(raw, row.spec.numpy_dtype).reshape(row.spec.shape)
        at += row.spec.n_bytes
        if row.spec.dtype is None:
            is_bytes.append(name)
        if not row.spec.name:
            nameless.append(name)
        if tensors[name].tobytes() == W.T.tobytes():
            made[name] = Made("permute", [W], {"axes": [1, 0]})
        elif tensors[name].tobytes() == W.tobytes():
            made[name] = Made("cast", [W.astype(np.float64)])
    assert len(made) == 2
    ref = save_derived(
        store,
        RefTarget(path="models/m.safetensors"),
        tensors,
        made,
        is_bytes=is_bytes,
        nameless=nameless,
        kind="file",
    )
    return data, ref


@pytest.mark.parametrize("batch_bytes", [CHUNK_BYTES, 16 << 20])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_with_derived_rows_is_written_back_bit_for_bit(
    tmp_path: Path, verify: bool, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcas_mlflow.chunk_io import _read

    monkeypatch.setattr(_read, "_FILE_BATCH_BYTES", batch_bytes)
    store = new_store()
    data, ref = file_with_derived_rows(store, tmp_path / "m.safetensors")
    again = Store.open_backend(store.backend)
    out = io.BytesIO()
    out.writelines(again.iter_file(ref, verify=verify))

    assert again.manifest(ref).derived
    assert out.getvalue() == data


def test_tensors_of_a_file_with_derived_rows_are_read(tmp_path: Path) -> None:
    store = new_store()
    _, ref = file_with_derived_rows(store, tmp_path / "m.safetensors")
    reader, file = open_ref(store, ref), open_path(tmp_path / "m.safetensors")

    assert {name: same(array, file[name]) for name, array in reader.full().items()} == dict.fromkeys("abc", True)
    assert same(reader.get_slice("b")[3:70, 5], W.T[3:70, 5])
    assert reader.digest() == file.digest()
    assert diff(reader, file).equal == ("a", "b", "c")


def test_a_self_contained_file_has_every_tensor_in_full(reader: CheckpointReader, tmp_path: Path) -> None:
    store = new_store()
    ref = save_derived(store, KEY, TENSORS, MADE, is_bytes=["q8"])
    manifest = store.manifest(ref)
    bare = copy_payload(tmp_path, store, manifest)

    assert not bare.derived
    for name, array in read_payload(tmp_path).items():
        assert same(array, TENSORS[name]), name
    data = b"".join(map(bytes, payload_pieces(store, manifest)))
    assert len(data) == payload_bytes(store, ref)
    (tmp_path / "x.tensors").write_bytes(data)
    assert same(open_path(tmp_path / "x.tensors")["mean"], TENSORS["mean"])


def test_a_self_contained_file_with_derived_rows_is_refused(tmp_path: Path) -> None:
    from tensorcas_mlflow.layout.manifests import TensorsFileLayout

    store = new_store()
    manifest = store.manifest(save_derived(store, KEY, {"x": BF16}, {"x": Made("cast", [W])}))
    layout = TensorsFileLayout.of(manifest)
    (tmp_path / "x.tensors").write_bytes(layout.head() + BF16.tobytes())

    with pytest.raises(FormatError, match="derived rows"):
        open_path(tmp_path / "x.tensors")


def test_slice_of_a_derived_tensor_with_a_forged_function_is_refused() -> None:
    store = new_store()
    made = {"x": Made("mean", [W, W])}
    reader = open_ref(store, save_derived(store, KEY, {"x": (W + V) / 2}, made), verify=False)

    with pytest.raises(CorruptChunkError):
        reader.get_slice("x")[0:2]


def test_mlflow_downloads_a_file_with_derived_rows_bit_for_bit(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
    data, _ = file_with_derived_rows(store, tmp_path / "m.safetensors")
    repository = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/root")
    found = Path(repository.download_artifacts("models", str(tmp_path)))

    assert (found / "m.safetensors").read_bytes() == data

"""Stores of earlier releases, read by this one."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.file_formats import Tensor
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, Store, read_payload
from tests.file_formats.parts import take_apart
from tests.golden import golden_v1

HERE = Path(__file__).parent


@pytest.fixture
def store(tmp_path: Path) -> Store:
    shutil.copytree(HERE / "v1" / "root", tmp_path / "root")
    return Store.open(tmp_path / "root")


def assert_holds(store: Store, ref: Ref | None, wanted: dict[str, np.ndarray]) -> None:
    assert ref is not None
    loaded = store.read_tensors(store.manifest(ref))
    assert list(loaded) == list(wanted)
    for name, array in wanted.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape), name
        assert loaded[name].tobytes() == array.tobytes(), name


def assert_whole(store: Store) -> None:
    for step in (1, 2, 3, 4):
        assert_holds(store, store.ref(RefTarget(run_id="run one", step=step).key), golden_v1.tensors(step))
    assert_holds(store, store.artifact("models/m-1/artifacts/data/checkpoint.arrow"), golden_v1.tensors(2))
    [elsewhere] = [ref for ref in store.checkpoints() if ref.uri == "s3://bucket/elsewhere/checkpoint.arrow"]
    assert_holds(store, elsewhere, golden_v1.tensors(5))
    ref = store.artifact("plots/ä b%.bin")
    assert ref is not None
    out = io.BytesIO()
    out.writelines(store.iter_file(ref))
    assert out.getvalue() == golden_v1.FILE


def test_every_checkpoint_and_file_of_format_1_is_read(store: Store) -> None:
    assert store.chunk_bytes == 4096
    assert len(store.checkpoints()) == 7
    assert_whole(store)


def test_fields_of_refs_and_manifests_of_format_1_are_read(store: Store) -> None:
    ref = store.ref(RefTarget(run_id="run one", step=3).key)
    assert ref is not None
    manifest = store.manifest(ref)

    assert (ref.run_id, ref.step, ref.model_id, ref.flavor, ref.kind) == ("run one", 3, "m-1", "pytorch", "checkpoint")
    assert (manifest.flavor, manifest.store_id, manifest.metadata) == ("pytorch", store.id, golden_v1.METADATA)
    assert manifest.row("trees").cuts.tolist() == [1_200, 4_200, 12_000]


def test_a_store_of_format_1_holds_a_segment_and_loose_packs(store: Store) -> None:
    endings = [info.key.rpartition(".")[2] for info in store.backend.list("index")]

    assert "segment" in endings
    assert "loose" in endings


def test_a_store_of_format_1_is_written_to_as_to_any(store: Store) -> None:
    with store.write_checkpoint(golden_v1.tensors(3), flavor="pytorch", cuts=golden_v1.CUTS) as save:
        ref = save.commit(RefTarget(run_id="new", step=1))

    assert save.n_new_bytes == 0
    assert_holds(store, ref, golden_v1.tensors(3))


def test_a_collection_keeps_a_store_of_format_1_whole(store: Store) -> None:
    plan_gc(store, grace_s=0, max_waste=0).execute()

    assert_whole(Store.open(store.uri))


def test_a_payload_is_read() -> None:
    loaded = read_payload(HERE / "tensors_v1")
    manifest = Manifest.from_bytes((HERE / "tensors_v1" / MANIFEST_FILE).read_bytes())

    assert (manifest.flavor, manifest.metadata, manifest.store_id) == ("sklearn", golden_v1.METADATA, None)
    for name, array in golden_v1.payload_tensors().items():
        assert loaded[name].tobytes() == array.tobytes()


def test_a_self_contained_file_of_version_1_is_read_and_taken_apart() -> None:
    file = TensorsFile(HERE / "tensors_v1" / PAYLOAD_FILE)
    loaded = file.read()
    found = take_apart((HERE / "tensors_v1" / PAYLOAD_FILE).read_bytes())
    parts = {part.name: taken for part, taken in found if isinstance(part, Tensor)}

    assert (file.manifest.flavor, file.manifest.metadata, file.manifest.store_id) == (
        "sklearn",
        golden_v1.METADATA,
        None,
    )
    assert list(loaded) == list(golden_v1.payload_tensors())
    for name, array in golden_v1.payload_tensors().items():
        assert loaded[name].tobytes() == array.tobytes()
    assert {"layer.weight", "noise", "__skeleton__"} == parts.keys()
    assert parts["layer.weight"] == loaded["layer.weight"].tobytes()

"""More stores of earlier releases, read by this one.

What must come out is said in ``expected.json``, by hashes that none of our code has made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import PendingSavesError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import split_hints
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, parse_intent, read_condemned, read_pack_table
from tests.golden import golden_v1
from tests.golden.stores import copied

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "v1_more" / "expected.json").read_text())


def sha_of(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {
        name: hashlib.sha256(f"{a.dtype.str}{a.shape}".encode() + np.ascontiguousarray(a).tobytes()).hexdigest()
        for name, a in tensors.items()
    }


@pytest.fixture(params=["root", "carried", "objects"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Store:
    return copied("v1_more", kind, tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Store:
    """The one of files."""
    return copied("v1_more", "root", tmp_path)


def wrong(store: Store, expected: Mapping[str, Any]) -> list[str]:
    """Name what does not load bit for bit."""
    found: list[str] = []
    for key, said in expected.items():
        if not key.startswith("refs/"):
            continue
        ref = store.ref(key)
        assert ref is not None, key
        if ref.kind == "file":
            is_right = hashlib.sha256(b"".join(map(bytes, store.iter_file(ref)))).hexdigest() == said
        else:
            is_right = sha_of(store.read_tensors(store.manifest(ref))) == said
        found += [] if is_right else [key]
    return found


@contextlib.contextmanager
def unchanged(kind: str) -> Iterator[None]:
    def look() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (HERE / "v1_more" / kind).rglob("*") if path.is_file()}

    before = look()
    yield
    assert look() == before


def test_every_golden_store_is_read_bit_for_bit(store: Store, kind: str) -> None:
    assert wrong(store, EXPECTED[kind]) == []
    assert verify(store, full=True).problems == ()


def test_the_golden_store_is_read_where_it_lies_and_stays_as_it_is() -> None:
    with unchanged("root"):
        store = Store.open(HERE / "v1_more" / "root")
        assert wrong(store, EXPECTED["root"]) == []
        assert verify(store).problems == ()


def test_a_save_shares_all_with_what_is_there(store: Store) -> None:
    with store.write_checkpoint(golden_v1.tensors(1), flavor="pytorch", cuts=golden_v1.CUTS) as save:
        ref = save.commit(RefTarget(run_id="new", step=1))

    # What a condemned list names is not relied on, and is stored again.
    assert save.n_new_bytes == 0 or read_condemned(store.backend).packs
    assert store.read_tensors(store.manifest(ref))["noise"].tobytes() == golden_v1.tensors(1)["noise"].tobytes()


def test_a_collection_deletes_nothing_that_is_needed(store: Store, kind: str) -> None:
    if kind == "carried":
        with pytest.raises(PendingSavesError):
            plan_gc(store, grace_s=0)
    abandon = ["ca" * 16] if kind == "carried" else []
    report = plan_gc(store, grace_s=0, max_waste=0, abandon=abandon).execute()
    fresh = Store.open_backend(store.backend)

    assert wrong(fresh, {key: said for key, said in EXPECTED[kind].items() if "replacing" not in key}) == []
    assert report.n_withdrawn > 0
    assert list(fresh.backend.list("intents")) == []
    assert verify(fresh, full=True).problems == ()


def test_a_collection_with_a_grace_keeps_what_saves_under_way_rely_on(root: Store) -> None:
    plan_gc(root, grace_s=3600, max_waste=0).execute()
    plan_gc(root, grace_s=3600, max_waste=0).execute()
    root = Store.open(root.uri)
    under_way = {"pending": golden_v1.noise(1_500, 11), "half": golden_v1.noise(1_500, 12)}
    pack_of = {entry["digest"].tobytes() for name, _ in list_packs(root.backend) for entry in entries(root, name)}

    assert wrong(root, EXPECTED["root"]) == []
    for array in (*under_way.values(), golden_v1.noise(1_500, 13)):
        assert first_chunk(root, array) in pack_of


def entries(store: Store, name: str) -> Any:
    return read_pack_table(store.backend, name)


def first_chunk(store: Store, array: np.ndarray) -> bytes:
    return digest(array.tobytes()[: store.chunk_bytes])


def test_golden_store_holds_every_codec_and_both_kinds_of_manifest_and_index(root: Store) -> None:
    codecs = {int(entry["codec"]) for name, _ in list_packs(root.backend) for entry in entries(root, name)}
    starts = {root.backend.get(info.key)[:4] for info in root.backend.list("manifests")}
    endings = {info.key.rpartition(".")[2] for info in root.backend.list("index")}

    assert codecs == {0, 1, 2, 4}
    assert starts == {b"\xff\xff\xff\xff", b"\x28\xb5\x2f\xfd"}
    assert endings == {"loose", "segment"}


def test_golden_store_holds_files_of_every_container_and_full_refs(root: Store) -> None:
    refs = {ref.key: ref for ref in root.checkpoints()}
    files = {ref.path for ref in refs.values() if ref.kind == "file"}
    said = refs["refs/runs/run/ema/@2"]

    assert {"files/torch, state", "files/torch, before zip", "files/safetensors", "files/onnx", "files/gguf"} <= files
    assert {"files/npz", "files/joblib", "files/xgboost, trees", "files/skops", "files/self-contained"} <= files
    assert (said.name, said.step, said.parent_step, said.model_id, said.uri) == ("ema", 2, 1, "m-2", "x:/y")
    assert said.metrics is not None
    assert np.isnan(said.metrics["none"])
    assert (said.metrics["loss"], said.metrics["most"], said.metrics["least"]) == (0.5, np.inf, -np.inf)
    assert any(ref.copy_path is not None for ref in refs.values())
    assert any(ref.run_id == "long " * 60 and "/~" in ref.key for ref in refs.values())


def test_golden_store_holds_an_intent_of_every_kind_and_a_condemned_list(root: Store) -> None:
    found = [parse_intent(info, root.backend.get(info.key)) for info in root.backend.list("intents")]
    [condemned] = read_condemned(root.backend).lists

    assert sorted(intent.digests is None for intent in found) == [False, False, True]
    assert "ab" * 32 in {intent.manifest for intent in found}
    assert len(condemned.packs) > 1
    assert condemned.manifests


def test_the_store_of_objects_has_hints_voids_and_a_move() -> None:
    objects = HERE / "v1_more" / "objects" / ".tensorcas"
    blobs = [path.read_bytes() for path in objects.rglob("*") if path.is_file()]

    assert all(split_hints(path.read_bytes())[1] for path in (objects / "manifests").iterdir())
    assert any(blob.startswith(b"\0tensorcas: there is no blob here\0") for blob in blobs)
    assert any(b"\n\0tensorcas: on its way to\0" in blob for blob in blobs)
    assert (objects / "condemned" / "@generation").is_file()


def test_the_carried_store_has_a_save_that_nobody_can_fence() -> None:
    root = HERE / "v1_more" / "carried" / ".tensorcas"

    assert json.loads((root / "format").read_text())["carried"] is True
    assert b'"carrier": true' in (root / "intents" / ("ca" * 16)).read_bytes()

"""The check of stored bytes finds damage before anything is decoded, and reads what the database holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import CorruptChunkError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Policy, Store

CHUNK_BYTES = 64 * 1024


def noise(seed: int, n: int) -> Array:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def _same(manifest: Manifest | None) -> Manifest | None:
    return manifest


def saved(root: Path, steps: list[dict[str, Array]], *, policy: str = "balanced", database: bool = False) -> Store:
    store = Store.init(root, chunk_bytes=CHUNK_BYTES, database=database)
    before: Manifest | None = None
    for number, tensors in enumerate(steps):
        with store.write_checkpoint(
            tensors, series="s", earlier=partial(_same, before), policy=Policy.of(policy)
        ) as pending:
            ref = pending.commit(RefTarget(run_id="run", step=number))
        before = store.manifest(ref)
    return Store.open(root)


def history() -> list[dict[str, Array]]:
    first = {f"w{n}": noise(n, 50_000) for n in range(4)} | {f"small{n}": noise(100 + n, 40) for n in range(50)}
    second = {name: array + np.float32(1e-4) * noise(7, array.size) for name, array in first.items()}
    return [first, second]


def last(store: Store) -> Manifest:
    return store.manifest(store.checkpoints()[-1])


@pytest.fixture(params=["files", "direct"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "direct":
        monkeypatch.setenv("TENSORCAS_READ", "direct")


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_check_accepts_an_intact_store(tmp_path: Path, policy: str) -> None:
    store = saved(tmp_path, history(), policy=policy)

    store.chunks.check(last(store), np.arange(54))


@pytest.mark.usefixtures("_way", "store_of_files")
@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_check_finds_one_flipped_byte_of_any_payload(tmp_path: Path, policy: str) -> None:
    store = saved(tmp_path, history(), policy=policy)
    manifest = last(store)
    wanted = ["w2", "small7"]
    rng = np.random.default_rng(1)
    packs = sorted((tmp_path / ".tensorcas" / "packs").rglob("*.pack"))
    n_damaged = 0
    for pack in packs:
        whole = pack.read_bytes()
        for at in rng.integers(0, len(whole), 12).tolist():
            pack.chmod(0o644)
            pack.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                Store.open(tmp_path).read_tensors(manifest, wanted)
                is_damaged = False
            except CorruptChunkError:
                is_damaged = True
            try:
                Store.open(tmp_path).chunks.check(manifest, manifest.numbers(wanted))
                is_found = False
            except CorruptChunkError:
                is_found = True

            assert is_found == is_damaged
            n_damaged += is_damaged
        pack.write_bytes(whole)
    assert len(packs) == 2
    assert n_damaged > 0


def test_check_names_the_tensor_of_a_damaged_chunk(tmp_path: Path) -> None:
    store = saved(tmp_path, history()[:1], policy="fast")
    manifest = last(store)
    wanted = manifest.columns.digests[manifest.columns.chunks_of(manifest.numbers(["w2"]))][:1]
    store.catalog.refresh()
    places = store.catalog.find(wanted)
    pack = next((tmp_path / ".tensorcas" / "packs").rglob(f"{places.packs[int(places.pack[0])]}*"))
    data = bytearray(pack.read_bytes())
    data[int(places.entries["offset"][0])] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)

    with pytest.raises(CorruptChunkError) as raised:
        Store.open(tmp_path).chunks.check(manifest, np.arange(54))
    assert "w2" in str(raised.value)
    Store.open(tmp_path).chunks.check(manifest, manifest.numbers(["w1"]))


def test_check_uses_an_intact_copy_of_a_damaged_chunk(tmp_path: Path) -> None:
    [one, _] = history()
    for root in (tmp_path / "a", tmp_path / "b"):
        saved(root, [one], policy="fast")
    manifest = last(Store.open(tmp_path / "a"))
    packs = [next((tmp_path / name / ".tensorcas" / "packs").rglob("*.pack")) for name in ("a", "b")]
    intact = packs[0].read_bytes()
    # The second pack has the same chunks under another name.
    other = packs[0].with_name("f" * len(packs[0].stem) + ".pack")
    damaged = bytearray(intact)
    damaged[200] ^= 1
    packs[0].chmod(0o644)
    packs[0].write_bytes(damaged)
    with pytest.raises(CorruptChunkError):
        Store.open(tmp_path / "a").chunks.check(manifest, np.arange(54))
    other.write_bytes(intact)

    Store.open(tmp_path / "a").chunks.check(manifest, np.arange(54))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_check_reads_packs_in_a_database(tmp_path: Path, policy: str) -> None:
    small = [{name: array[:3_000] for name, array in step.items()} for step in history()]
    store = saved(tmp_path, small, policy=policy, database=True)

    store.chunks.check(last(store), np.arange(54))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("policy", ["fast", "balanced"])
def test_packs_in_a_database_return_their_tensors(tmp_path: Path, policy: str, verify: bool) -> None:
    small = [{name: array[:3_000] for name, array in step.items()} for step in history()]
    store = saved(tmp_path, small, policy=policy, database=True)

    found = store.read_tensors(last(store), verify=verify)
    assert all(np.array_equal(found[name], array) for name, array in small[-1].items())

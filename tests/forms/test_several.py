"""Readers of chunks that only some of several manifests and forms hold, of which each lacks others."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import as_keys
from tensorcas_mlflow.errors import CorruptChunkError
from tensorcas_mlflow.layout import Ref, form_key
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import pack_name
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Derived, Store, commit_form
from tensorcas_mlflow.store import protocol as p
from tests.derived.made import Tensors, save
from tests.derived.test_maintenance import flip_chunk
from tests.forms.made import Family, no_search
from tests.maintenance.repair.damaging import overwrite

NAME, OTHER = "embed.weight", "layers.0.q.weight"
CHUNK_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a cached chunk is read though its pack is damaged


@pytest.fixture(params=["memory", "objects", "files"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    is_local = request.param == "files"
    return Family(LocalBackend(tmp_path) if is_local else MemoryBackend(is_remote=request.param == "objects"))


@pytest.fixture
def pair() -> Family:
    return Family(MemoryBackend())


def read(store: Store, manifest: Manifest) -> Tensors:
    return store.read_tensors(manifest)


def read_views(store: Store, manifest: Manifest) -> Tensors:
    return store.read_tensors(manifest, copy=False)


def fill(store: Store, manifest: Manifest) -> Tensors:
    like = store.read_tensors(manifest)
    outs = {name: np.empty_like(array) for name, array in like.items()}
    store.read_tensors(manifest, out=outs)
    return outs


def check(store: Store, manifest: Manifest) -> Tensors:
    store.chunks.check(manifest, np.arange(len(manifest.columns)))
    return store.read_tensors(manifest)


def read_pieces(store: Store, manifest: Manifest) -> Tensors:
    """Read the bytes of all tensors in the order of the rows, as those of a file are read."""
    data = io.BytesIO(b"".join(store.chunks.pieces(manifest, verify=True)))
    return {row.spec.name: np.frombuffer(data.read(row.spec.n_bytes), np.uint8) for row in manifest.rows}


@pytest.mark.parametrize("how", [read, read_views, fill, check, read_pieces])
def test_each_tensor_is_read_from_packs_or_by_the_form(
    family: Family, how: Callable[[Store, Manifest], Tensors]
) -> None:
    """Packs hold one, whose input is damaged, and lack the others."""
    family.optimized()
    with no_search():
        save(family.store, {NAME: family.copy[NAME]}, run_id="again")
    flip_chunk(family.store, family.model[NAME].tobytes()[:CHUNK_BYTES])
    store = Store.open_backend(family.store.backend)

    for _ in range(2):
        found = how(store, store.manifest(family.of_copy))
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in family.copy.items()
        }


@pytest.mark.long
def test_damaged_tensor_in_a_pack_is_read_by_the_form(family: Family) -> None:
    family.optimized()
    with no_search():
        save(family.store, family.copy, run_id="again")
    flip_chunk(family.store, family.copy[NAME].tobytes()[:CHUNK_BYTES])
    store = Store.open_backend(family.store.backend)

    found = store.read_tensors(store.manifest(family.of_copy))

    assert found[NAME].tobytes() == family.copy[NAME].tobytes()


@pytest.mark.long
def test_tensor_that_nothing_holds_whole_is_named(family: Family) -> None:
    family.optimized()
    with no_search():
        save(family.store, {NAME: family.copy[NAME]}, run_id="again")
    flip_chunk(family.store, family.model[NAME].tobytes()[:CHUNK_BYTES])
    flip_chunk(family.store, family.model[OTHER].tobytes()[:CHUNK_BYTES])
    store = Store.open_backend(family.store.backend)

    with pytest.raises(CorruptChunkError, match=f"'{OTHER}'") as failed:
        store.read_tensors(store.manifest(family.of_copy))
    assert f"'{NAME}'" not in str(failed.value)


def derive_from(family: Family, source: Ref, of: str) -> Ref:
    """Write a form in which the copy is a cast of some checkpoint."""
    store = Store.open_backend(family.store.backend)
    manifest, inputs = store.manifest(family.of_copy), store.manifest(source)
    derived = {
        int(manifest.numbers([name])[0]): Derived(
            function="cast", params={}, inputs=[inputs.row(name)], row=manifest.row(name), made=lambda: memoryview(b"")
        )
        for name in family.copy
    }
    assert commit_form(store, manifest, derived, [of])
    form = store.ref(form_key(of))
    assert form is not None
    return form


def remove_manifest(family: Family, form: Ref) -> None:
    family.store.backend.delete(f"manifests/{form.manifest}")


def damage_manifest(family: Family, form: Ref) -> None:
    key = f"manifests/{form.manifest}"
    overwrite(family.store.backend, key, family.store.backend.get(key)[:-9])


def damage_ref(family: Family, form: Ref) -> None:
    overwrite(family.store.backend, form.key, family.store.backend.get(form.key)[:-9])


def damage_input(family: Family, form: Ref) -> None:
    for tensor in family.model.values():
        flip_chunk(family.store, tensor.tobytes()[:CHUNK_BYTES])


def two_forms(family: Family, end: str, damage: Callable[[Family, Ref], Any]) -> tuple[Store, Manifest]:
    """Return a store and a manifest with a damaged form, and a sound one under another name of its content."""
    wide = {name: array.astype(np.float64) for name, array in family.model.items()}
    with no_search():
        of_wide = save(family.store, wide, run_id="wide")
    sound = family.of_copy.manifest
    wrong = f"{sound.partition('.')[0]}.{end * 8}"
    form = derive_from(family, family.of_model, wrong)
    derive_from(family, of_wide, sound)
    store = Store.open_backend(family.store.backend)
    manifest = store.manifest(family.of_copy)
    for info in list(store.backend.list("packs")):  # as a collection leaves it
        table = p.read_pack_table(store.backend, pack_name(info.key))
        if np.isin(as_keys(table["digest"]), as_keys(manifest.digests)).any():
            store.backend.delete(info.key)
    damage(family, form)
    return Store.open_backend(store.backend), manifest


DAMAGES = pytest.mark.parametrize("damage", [remove_manifest, damage_manifest, damage_ref, damage_input])
ENDS = pytest.mark.parametrize("end", ["0", "f"])


@ENDS
@DAMAGES
def test_form_of_another_name_of_the_content_is_read(
    pair: Family, end: str, damage: Callable[[Family, Ref], Any]
) -> None:
    store, manifest = two_forms(pair, end, damage)

    found = store.read_tensors(manifest)

    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in pair.copy.items()
    }


@ENDS
@DAMAGES
def test_chunk_is_read_by_any_form_that_makes_it(pair: Family, end: str, damage: Callable[[Family, Ref], Any]) -> None:
    """The copy of a state takes the chunks that have not changed from the store."""
    store, manifest = two_forms(pair, end, damage)
    row = manifest.row(NAME)

    data = store._read_chunk(row.digests[:1], CHUNK_BYTES)

    assert data == pair.copy[NAME].tobytes()[:CHUNK_BYTES]


@ENDS
def test_verification_looks_at_the_form_of_each_name(pair: Family, end: str) -> None:
    """The other form has a damaged input, and nobody needs its name."""
    store, _ = two_forms(pair, end, damage_input)

    found = verify(store, full=True)

    assert not any(problem.checkpoint == pair.of_copy.label for problem in found.problems)

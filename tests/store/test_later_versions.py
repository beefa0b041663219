"""Blobs of a later release: every command refuses them and names the release, before it writes or deletes anything.

Each kind of blob is made one of version 9 in a store of this release, as a later release might leave it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow import __version__
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io import _catalog
from tensorcas_mlflow.errors import CorruptError, NewerFormatError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.layout.manifests import Manifest, hint_bytes
from tensorcas_mlflow.layout.packs import ENTRY
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES
from tensorcas_mlflow.maintenance import copy_all, end_of, open_destination, plan_gc, read_source, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import read_pack_table
from tensorcas_mlflow.tensorcas_store import TensorCasStore

pytestmark = pytest.mark.usefixtures("store_of_files")

NEEDS = f"needs a release of tensorcas-mlflow that reads format 9 or later, and this is {re.escape(__version__)}"
LONG_AGO = 1_000_000_000


def model(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).integers(0, 256, 9_000, dtype=np.uint8), "n": np.array(seed)}


def save(store: Store, seed: int, step: int) -> Ref:
    with store.write_checkpoint(model(seed)) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of version 1 with a segment, a loose pack, two steps and something to collect."""
    monkeypatch.setattr(_catalog, "_FOLD_AT", 2)
    store = Store.init(tmp_path / "root", chunk_bytes=4096)
    store.drop(save(store, 1, 1))
    for step in (2, 3):
        save(store, step, step)
    (tmp_path / "root" / "plain.txt").write_text("beside it")
    return tmp_path / "root"


def the_store(root: Path) -> Path:
    return root / ".tensorcas"


def later_record(path: Path) -> None:
    head, newline, tail = path.read_bytes().partition(b"\n")
    said = {**json.loads(head), "format": 9}
    del said["check"]
    path.write_bytes(record_bytes(said) + newline + tail)


def later_format(root: Path) -> None:
    # What else it says is not what this release looks for.
    (the_store(root) / "format").write_bytes(record_bytes({"format": 9, "digests": ["sha3"]}))


def later_ref(root: Path) -> None:
    later_record(the_store(root) / "refs" / "runs" / "run" / "@2")


def later_manifest(root: Path) -> None:
    path = the_store(root) / "refs" / "runs" / "run" / "@2"
    said = json.loads(path.read_bytes())
    old = the_store(root) / "manifests" / said["manifest"]
    stream = Manifest.stream_in(old.read_bytes())
    assert stream.count(b'"format":1') == 1
    stream = stream.replace(b'"format":1', b'"format":9')
    said["manifest"] = f"{digest(stream).hex()}.00000000"
    del said["check"]
    (the_store(root) / "manifests" / said["manifest"]).write_bytes(stream)
    old.unlink()
    path.write_bytes(record_bytes(said))


def later_intent(root: Path) -> None:
    folder = the_store(root) / "intents"
    folder.mkdir(exist_ok=True)
    (folder / ("a" * 32)).write_bytes(record_bytes({"format": 9, "manifests": []}) + b"\n")
    os.utime(folder / ("a" * 32), (LONG_AGO, LONG_AGO))


def later_list(root: Path) -> None:
    folder = the_store(root) / "condemned"
    folder.mkdir(exist_ok=True)
    (folder / ("a" * 32)).write_bytes(record_bytes({"format": 9, "packs": []}))
    os.utime(folder / ("a" * 32), (LONG_AGO, LONG_AGO))


def later_pack(root: Path) -> None:
    """Of the dropped step, so that nothing needs it."""
    store = Store.open(root)
    held = {row.tobytes() for ref in store.checkpoints() for row in store.manifest(ref).digests}
    for path in sorted((the_store(root) / "packs").iterdir()):
        data = path.read_bytes()
        if any(data.find(each) >= 0 for each in held):
            continue
        path.write_bytes(with_version(data, 9))
        # Nobody has folded it: it is listed by itself.
        for segment in (the_store(root) / "index").glob("*.segment"):
            segment.unlink()
        for pack in (the_store(root) / "packs").iterdir():
            (the_store(root) / "index" / f"{pack.stem}.loose").touch()
        # The oldest, so that a load of the latest steps does not look into it.
        os.utime(the_store(root) / "index" / f"{path.stem}.loose", (LONG_AGO, LONG_AGO))
        return
    raise AssertionError("every pack is needed")


def with_version(pack: bytes, version: int) -> bytes:
    """A pack whose table is of another version, and whole."""
    table_at = int.from_bytes(pack[-FOOTER_BYTES + 16 : -FOOTER_BYTES + 24], "little")
    table = pack[table_at:-FOOTER_BYTES]
    head = pack[-FOOTER_BYTES : -FOOTER_BYTES + 7] + bytes([version]) + pack[-FOOTER_BYTES + 8 : -FOOTER_BYTES + 32]
    return pack[:table_at] + table + head + digest(table + head)


def later_segment(root: Path) -> None:
    [path] = (the_store(root) / "index").glob("*.segment")
    data = path.read_bytes()
    head = data[-64:-56] + (9).to_bytes(4, "little") + data[-52:-32]
    path.write_bytes(data[:-64] + head + bytes(32))


KINDS: dict[str, Callable[[Path], None]] = {
    "format": later_format,
    "ref": later_ref,
    "manifest": later_manifest,
    "intent": later_intent,
    "condemned list": later_list,
    "pack": later_pack,
    "segment": later_segment,
}


def load(root: Path) -> None:
    store = Store.open(root)
    ref = store.ref(RefTarget(run_id="run", step=2).key)
    assert ref is not None
    store.read_tensors(store.manifest(ref))


def load_run(root: Path) -> None:
    TensorCasStore(root, "run").load_tensors(2)


def save_new(root: Path) -> None:
    save(Store.open(root), 7, 7)


def save_file(root: Path) -> None:
    store = Store.open(root)
    with store.write_file(root / "plain.txt") as pending:
        pending.commit(RefTarget(path="file.txt"))


def collect(root: Path) -> None:
    plan_gc(Store.open(root), grace_s=0, max_waste=0).execute()


def copy_from(root: Path) -> None:
    copy(Store.open(root), root.parent / "copy")


def copy_to(root: Path) -> None:
    other = Store.open(root.parent / "other", create=True, chunk_bytes=4096)
    save(other, 2, 2)
    (root.parent / "other" / "plain too.txt").write_text("beside the other")
    copy(other, root)


def copy(source: Store, destination: Path) -> None:
    refs, failed = read_source(source)
    for each in failed:
        raise NewerFormatError(each.what, 9, 1) if "format version 9" in each.reason else AssertionError(each)
    copied = copy_all(end_of(source), open_destination(destination, source), refs)
    for each in copied.refs.failed:
        assert "format version 9" in each.reason
        if "the manifest" in each.reason:
            raise NewerFormatError(each.what, 9, 1)


WAYS: dict[str, Callable[[Path], None]] = {
    "load": load,
    "load a step of a run": load_run,
    "save": save_new,
    "save a file": save_file,
    "collect": collect,
    "copy from": copy_from,
    "copy to": copy_to,
}

PASSES = {
    ("ref", "save"): "no save reads the refs of others",
    ("ref", "save a file"): "the same",
    ("ref", "copy to"): "it is told, and the others are copied",
    ("manifest", "save"): "a manifest is read by whoever loads it",
    ("manifest", "save a file"): "the same",
    ("manifest", "copy to"): "the ref that names it is another one, and is kept",
    ("pack", "load"): "a load looks into the latest packs first, and finds all it needs",
    ("pack", "load a step of a run"): "the same",
    ("intent", "load"): "intents are read by collectors",
    ("intent", "load a step of a run"): "the same",
    ("intent", "save"): "the same",
    ("intent", "save a file"): "the same",
    ("intent", "copy from"): "the same",
    ("intent", "copy to"): "the same",
    ("condemned list", "load"): "a load relies on its ref",
    ("condemned list", "load a step of a run"): "the same",
    ("condemned list", "copy from"): "the same",
    **dict.fromkeys((("segment", way) for way in WAYS if way != "collect"), "packs are asked instead"),
}


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_blob_of_a_later_release_is_refused_before_any_change(root: Path, kind: str, way: str) -> None:
    KINDS[kind](root)
    before = everything(root)
    if (kind, way) in PASSES:
        WAYS[way](root)
        # Whoever wrote it finds it as it was.
        assert before.items() <= everything(root).items()
        return
    with pytest.raises(NewerFormatError, match=NEEDS):
        WAYS[way](root)

    assert everything(root) == before


@pytest.mark.parametrize("load_step", [load, load_run])
def test_load_that_looks_into_a_pack_of_a_later_release_is_refused(
    root: Path, load_step: Callable[[Path], None]
) -> None:
    later_pack(root)
    for marker in (the_store(root) / "index").glob("*.loose"):
        if marker.stat().st_mtime == LONG_AGO:
            os.utime(marker)
        else:
            os.utime(marker, (LONG_AGO, LONG_AGO))

    with pytest.raises(NewerFormatError, match=NEEDS):
        load_step(root)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "format"])
def test_a_collection_refuses_even_if_it_is_to_abandon_what_is_later(root: Path, kind: str) -> None:
    KINDS[kind](root)
    before = everything(root)
    with pytest.raises(NewerFormatError):
        plan_gc(Store.open(root), grace_s=0, max_waste=0, abandon=["a" * 32, "refs/runs/run/@2"])

    assert everything(root) == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "format"])
def test_verify_tells_which_blob_is_of_a_later_release(root: Path, kind: str) -> None:
    KINDS[kind](root)
    before = everything(root)
    reasons = [problem.reason for problem in verify(Store.open(root)).problems]

    assert everything(root) == before
    [reason] = [reason for reason in reasons if "upgrade tensorcas-mlflow" in reason]
    assert "version 9" in reason
    assert "gc frees it" not in reason


def test_collection_keeps_blobs_that_a_later_release_writes_meanwhile(root: Path) -> None:
    plan = plan_gc(Store.open(root), grace_s=0, max_waste=0)
    later_segment(root)
    [segment] = (the_store(root) / "index").glob("*.segment")
    before = segment.read_bytes()
    plan.execute()

    assert segment.read_bytes() == before


def test_a_plan_made_before_a_later_release_came_deletes_nothing(root: Path) -> None:
    plan = plan_gc(Store.open(root), grace_s=0, max_waste=0)
    assert plan.packs
    later_ref(root)
    before = everything(root)
    with pytest.raises(NewerFormatError):
        plan.execute()

    assert everything(root) == before


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_version_of_a_pack_is_damage_and_no_later_release(root: Path, bit: int) -> None:
    path = next((the_store(root) / "packs").iterdir())
    data = bytearray(path.read_bytes())
    data[-FOOTER_BYTES + 7] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="does not end with a pack's footer"):
        read_pack_table(Store.open(root).backend, path.stem)


def test_hints_of_a_later_version_are_passed_over(root: Path) -> None:
    store = Store.open(root)
    ref = store.ref(RefTarget(run_id="run", step=2).key)
    assert ref is not None
    path = the_store(root) / "manifests" / ref.manifest
    hints = hint_bytes(["0" * 32], np.zeros(1, np.uint32), np.zeros(1, ENTRY))
    for blob in (path.read_bytes(), Manifest.stream_in(path.read_bytes())):
        path.write_bytes(blob + hints[:-1] + b"\x09")
        manifest = Store.open(root).manifest(ref)
        assert np.array_equal(store.read_tensors(manifest)["w"], model(2)["w"])


def test_a_save_as_a_step_that_a_later_release_saved_is_refused(root: Path) -> None:
    later_ref(root)
    before = everything(root)
    with pytest.raises(NewerFormatError, match=NEEDS):
        TensorCasStore(root, "run").save(np.arange(5), 2)

    assert everything(root) == before


def test_error_names_the_release_that_is_needed() -> None:
    sentence = str(NewerFormatError("the store", 3, 1))

    assert "reads format 3 or later" in sentence
    assert f"this is {__version__}, which reads up to 1" in sentence


def test_a_copy_of_the_whole_folder_is_refused_as_the_store_is(root: Path) -> None:
    later_format(root)
    shutil.copytree(root, root.parent / "moved")
    with pytest.raises(NewerFormatError, match=NEEDS):
        Store.open(root.parent / "moved")
    with pytest.raises(NewerFormatError, match=NEEDS):
        Store.open(root.parent / "moved", create=True)
    with pytest.raises(NewerFormatError, match=NEEDS):
        TensorCasStore(root.parent / "moved", "run")

    assert everything(root.parent / "moved") == everything(root)

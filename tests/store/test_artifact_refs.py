from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend, check_key
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import Ref, RefTarget, artifact_key
from tensorcas_mlflow.layout._keys import quote_segment
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.store import Store

PATHS = [
    "file",
    "dir/file",
    "dir/sub/file",
    "dir/sub/other",
    "with space/a b",
    "模型/重み",
    "per%cent/100%",
    "per%25cent/x",
    "@at/@",
    "~tilde/~",
    "...",
    "a+b=c&d?e#f",
    "long/" + "x" * 240,
    "long/" + "x" * 241,
    "é" * 60 + "/y",
    "dir.file/CON",
]


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    backend = MemoryBackend() if request.param == "memory" else LocalBackend(tmp_path / "store")
    return Store.init_backend(backend, chunk_bytes=4096)


def put(store: Store, path: str, n: int = 0) -> Ref:
    with store.write_checkpoint({"a": np.array([n])}) as save:
        return save.commit(RefTarget(path=path))


def test_every_path_is_kept_apart_and_found(store: Store) -> None:
    refs = {path: put(store, path, n) for n, path in enumerate(PATHS)}

    for n, path in enumerate(PATHS):
        found = store.artifact(path)
        assert found == refs[path]
        assert found.path == path
        assert store.read_tensors(store.manifest(found))["a"].tolist() == [n]
    assert [ref.path for ref in store.walk_artifacts()] == sorted(PATHS)


def test_a_directory_lists_its_files_and_directories_by_name(store: Store) -> None:
    for path in PATHS:
        put(store, path)

    refs, names = store.artifacts()
    assert sorted(ref.path or "" for ref in refs) == sorted(path for path in PATHS if "/" not in path)
    assert names == sorted({path.split("/")[0] for path in PATHS if "/" in path})

    refs, names = store.artifacts("dir")
    assert ([ref.path for ref in refs], names) == (["dir/file"], ["sub"])
    refs, names = store.artifacts("模型")
    assert ([ref.path for ref in refs], names) == (["模型/重み"], [])
    refs, names = store.artifacts("long")
    assert (len(refs), names) == (2, [])
    assert store.artifacts("absent") == ([], [])


def test_a_directory_is_no_artifact_and_a_file_no_directory(store: Store) -> None:
    put(store, "dir/file")

    assert store.artifact("dir") is None
    assert store.artifact("") is None
    assert store.artifact("dir/file/below") is None
    assert store.artifacts("dir/file") == ([], [])


def test_a_file_and_a_directory_may_have_one_name(store: Store) -> None:
    put(store, "x", 1)
    put(store, "x/y", 2)

    assert store.artifact("x") is not None
    assert store.artifact("x/y") is not None


def test_walk_lists_all_artifacts_below_a_path(store: Store) -> None:
    for path in PATHS:
        put(store, path)

    assert [ref.path for ref in store.walk_artifacts("dir")] == ["dir/file", "dir/sub/file", "dir/sub/other"]
    assert store.walk_artifacts("di") == []


def test_dropping_a_path_drops_it_and_all_below(store: Store) -> None:
    for path in PATHS:
        put(store, path)

    assert store.drop_artifacts("dir/sub") == 2
    assert store.drop_artifacts("dir/sub") == 0
    assert store.drop_artifacts("file") == 1
    assert store.artifact("dir/file") is not None
    assert store.drop_artifacts("") == len(PATHS) - 3
    assert store.walk_artifacts() == []


def test_dropping_all_artifacts_drops_no_step_of_a_run(store: Store) -> None:
    put(store, "x")
    with store.write_checkpoint({"a": np.array([1])}) as save:
        save.commit(RefTarget(run_id="r", step=1))
    store.drop_artifacts("")

    assert [ref.label for ref in store.checkpoints()] == ["run r step 1"]


def test_a_ref_says_what_it_was_told(store: Store) -> None:
    with store.write_checkpoint({"a": np.array([1])}, flavor="sklearn") as save:
        ref = save.commit(RefTarget(uri="s3://bucket/a b", run_id="r", step=3, model_id="m-1"))
    found = store.ref(ref.key)

    assert found == ref
    assert (found.uri, found.run_id, found.step, found.model_id) == ("s3://bucket/a b", "r", 3, "m-1")
    assert (found.kind, found.flavor, found.label) == ("checkpoint", "sklearn", "s3://bucket/a b")
    assert ref.key.startswith("refs/copies/")
    store.drop(ref)
    store.drop(ref)
    assert store.ref(ref.key) is None


def test_a_ref_that_could_not_be_found_again_is_refused(store: Store) -> None:
    with store.write_checkpoint({"a": np.array([1])}) as save, pytest.raises(ValueError, match="needs"):
        save.commit(RefTarget(run_id="r"))


@pytest.mark.parametrize("path", ["/abs", "a//b", "a/", "../up", "a/../b", ".", "a/./b", "nul\0"])
def test_invalid_artifact_path_is_refused(store: Store, path: str) -> None:
    for call in (store.artifact, store.artifacts, store.walk_artifacts, store.drop_artifacts):
        with pytest.raises(ValueError, match="not an artifact path"):
            call(path)


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_two_names_are_two_segments(one: str, other: str) -> None:
    first, second = quote_segment(one), quote_segment(other)

    assert (first == second) == (one == other)
    assert check_key(first) == first
    assert "@" not in first


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5))
def test_any_path_is_a_key_or_refused(segments: list[str]) -> None:
    path = "/".join(segments)
    try:
        key = artifact_key(path)
    except ValueError:
        return

    assert check_key(key).startswith("refs/artifacts/")


@pytest.mark.parametrize("path", ["", "file", "dir/other", None])
def test_a_ref_of_an_artifact_that_says_it_is_anothers_is_damaged(store: Store, path: str | None) -> None:
    ref = put(store, "dir/file")
    record = json.loads(store.backend.get(ref.key)) | {"path": path}
    del record["check"]
    store.backend.delete(ref.key)
    store.backend.put_new(ref.key, [record_bytes(record)])

    with pytest.raises(CorruptError, match=r"it is the ref of|not a ref"):
        store.artifact("dir/file")
    with pytest.raises(CorruptError):
        store.artifacts("dir")
    with pytest.raises(CorruptError):
        store.walk_artifacts()
    damaged: list[str] = []
    assert store.artifacts("dir", damaged=damaged) == ([], [])
    assert damaged == ["dir/file"]
    assert store.checkpoints() == []

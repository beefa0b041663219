"""Reads through io_uring; `liburing` is an extra, and kernels may forbid it, so most of this is skipped elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Ring, has_ring
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()
needs_ring = pytest.mark.skipif(not has_ring(), reason="io_uring cannot be had here")


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT)
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


def test_no_ring_exists_without_the_liburing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    has_ring.cache_clear()

    assert not has_ring()
    monkeypatch.undo()
    has_ring.cache_clear()


def test_a_forced_ring_that_cannot_be_had_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    has_ring.cache_clear()
    store = Store.init(tmp_path)
    wanted = np.frombuffer(CONTENT, np.uint8)
    with store.write_checkpoint({"w": wanted}) as pending:
        manifest = store.manifest(pending.commit(RefTarget(run_id="run", step=1)))

    assert np.array_equal(store.read_tensors(manifest, way="uring")["w"], wanted)
    assert "io_uring is not available" in str(store.explain(manifest, way="uring"))
    monkeypatch.undo()
    has_ring.cache_clear()


@needs_ring
def test_more_reads_than_the_ring_holds_all_come(descriptor: int) -> None:
    starts = range(0, 990_000, 9_973)
    with contextlib.closing(Ring[int]()) as ring:
        found: dict[int, Any] = {}
        for start, block in ring.read((start, descriptor, start, 7_000) for start in starts):
            assert block is not None
            found[start] = bytes(block)
            ring.give_back(block)

    assert found == {start: CONTENT[start : start + 7_000] for start in starts}


@needs_ring
def test_ring_returns_none_for_a_read_beyond_the_end_or_of_no_file(descriptor: int) -> None:
    wanted = [("end", descriptor, len(CONTENT) - 10, 11), ("none", 10_000, 0, 5), ("good", descriptor, 0, 5)]
    with contextlib.closing(Ring[str]()) as ring:
        found = dict(ring.read(wanted))

    assert found == {"end": None, "none": None, "good": bytearray(CONTENT[:5])}


@needs_ring
def test_a_ring_that_is_closed_early_waits_for_what_is_under_way(descriptor: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(Ring[int]()) as ring:
        next(ring.read((at, descriptor, 0, 100_000) for at in range(40)))

    assert len(os.listdir("/proc/self/fd")) == before

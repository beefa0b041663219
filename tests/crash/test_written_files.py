"""A power cut may come at any moment of a write: a file or folder is the old one or the new one, and never a part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.disk import Disk, Tree, fates
from tests.crash.recorder import Recorder
from tests.file_formats.arrays import ArrayTensors, write

ARRAYS = {f"w{at}": np.full(50, at) for at in range(4)}
KINDS: dict[str, dict[str, Any]] = {
    "a file": {"format": "safetensors"},
    "a file in the place of another": {"format": "bintensors", "overwrite": True},
    "shards": {"shard_bytes": 500},
    "partitions": {"partitions": 2},
}


def after_cuts(recorder: Recorder) -> Iterator[tuple[int, Tree]]:
    """Every state in which a cut may leave the disk, and after how many calls."""
    disk = Disk(folders=recorder.folders)
    for n, entry in enumerate(recorder.log, 1):
        disk.apply(entry)
        for fate in fates(disk, n_drawn=3, seed=n):
            yield n, disk.tree(fate)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_leaves_all_of_what_was_written_or_what_was_there(tmp_path: Path, kind: str) -> None:
    top = tmp_path / "disk"
    top.mkdir()
    if "overwrite" in KINDS[kind]:
        (top / "out").write_bytes(b"what was there")
    old = held(top)
    recorder = Recorder(top)
    with recorder.installed():
        write(ArrayTensors(ARRAYS), top / "out", **KINDS[kind])
    new = held(top)

    assert new != old
    seen = 0
    for n, tree in after_cuts(recorder):
        found = {path: data for path, (_, data) in tree.items() if path.partition("/")[0] == "out" and data is not None}
        seen += 1
        assert found in ((new,) if n == len(recorder.log) else (old, new)), f"cut after {n} calls"
    assert seen > 50


def held(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}

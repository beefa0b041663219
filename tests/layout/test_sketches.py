"""Sketches behind a manifest in its blob."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.base.sketch import _FRACTIONS, N_WORDS
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.layout.manifests import (
    Columns,
    Manifest,
    Row,
    hint_bytes,
    read_sketches,
    sketch_bytes,
    sketched_rows,
)
from tensorcas_mlflow.layout.manifests._hints import SKETCHES_MAGIC
from tensorcas_mlflow.layout.packs import ENTRY

PAGE = Path(__file__).parents[2] / "docs/design/caches.md"


def manifest(n_rows: int = 3, metadata: dict[str, str] | None = None) -> Manifest:
    rows = [
        Row(
            spec=Spec(name=f"t{row}", dtype="float32", shape=(8192,)),
            cuts=None,
            digests=np.full((1, 32), row, dtype=np.uint8),
        )
        for row in range(n_rows)
    ]
    small = Row(spec=Spec(name="small", dtype="float32", shape=(8,)), cuts=None, digests=np.zeros((1, 32), np.uint8))
    return Manifest(
        kind="checkpoint", chunk_bytes=1 << 18, store_id="s", flavor=None, rows=[small, *rows], metadata=metadata or {}
    )


def words(n_rows: int = 3) -> np.ndarray:
    return np.arange(n_rows * N_WORDS, dtype=np.uint16).reshape(n_rows, N_WORDS)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("metadata", [{}, {"text": "x" * 70_000}], ids=["small", "large"])
@pytest.mark.parametrize("has_hints", [True, False])
def test_sketches_come_back_from_the_blob(is_packed: bool, metadata: dict[str, str], has_hints: bool) -> None:
    whole = manifest(metadata=metadata).sketched(sketch_bytes(words()))
    blob = whole.to_blob(is_packed=is_packed)
    if has_hints:
        blob += hint_bytes([], np.empty(0, np.uint32), np.empty(0, ENTRY))
    back = Manifest.from_blob(blob, whole.digest)

    assert back.digest == manifest(metadata=metadata).digest
    found = read_sketches(back.sketches, back.columns)
    assert found is not None
    assert found[0].tolist() == [1, 2, 3]
    assert found[1].tobytes() == words().tobytes()


@pytest.mark.parametrize("at", [0, 100, -29])
def test_damaged_sketches_are_ignored_and_the_manifest_is_read(at: int) -> None:
    whole = manifest()
    sketches = bytearray(sketch_bytes(words()))
    sketches[at] ^= 1
    back = Manifest.from_blob(whole.to_blob() + sketches, whole.digest)

    assert read_sketches(back.sketches, back.columns) is None
    assert back.names() == whole.names()


def test_sketches_of_other_rows_are_ignored() -> None:
    assert read_sketches(sketch_bytes(words(2)), manifest().columns) is None
    assert read_sketches(b"", manifest().columns) is None


def test_sketches_of_a_later_version_are_ignored() -> None:
    later = sketch_bytes(words())[:-1] + b"\x02"
    back = Manifest.from_blob(manifest().to_blob() + later, manifest().digest)

    assert read_sketches(back.sketches, back.columns) is None


def test_only_large_tensors_of_numbers_are_sketched() -> None:
    specs = [
        Spec(name="a", dtype="float32", shape=(4096,)),
        Spec(name="b", dtype="float32", shape=(4095,)),
        Spec(name="c", dtype="complex64", shape=(4096,)),
        Spec(name="d", dtype=None, shape=(1 << 20,)),
        Spec(name="e", dtype="bfloat16", shape=(8192,)),
    ]
    columns = Columns.of_rows([Row(spec=spec, cuts=None, digests=np.zeros((1, 32), np.uint8)) for spec in specs])

    assert sketched_rows(columns).tolist() == [0, 4]


def test_page_of_caches_has_the_magic_and_the_fractions_of_sketches() -> None:
    section = PAGE.read_text().partition("## Sketches")[2].partition("\n## ")[0]
    magic = re.search(r"magic ((?:[0-9a-f]{2} ){8})", section)
    factor = re.search(r"\(k \+ 1\) . (0x[0-9a-f]{16})", section)

    assert magic is not None
    assert bytes.fromhex(magic[1]) == SKETCHES_MAGIC
    assert factor is not None
    assert [((k + 1) * int(factor[1], 16) % 2**64) >> 40 for k in range(N_WORDS)] == _FRACTIONS.tolist()

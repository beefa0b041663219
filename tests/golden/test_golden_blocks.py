"""Quantized blocks of GGUF that an earlier release derived are read by every later one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from tensorcas_mlflow.codecs import BLOCK_FORMATS
from tensorcas_mlflow.maintenance import verify
from tests.golden.stores import copied

EXPECTED = json.loads((Path(__file__).parent / "v1_blocks/expected.json").read_text())


def test_golden_blocks_of_every_format_are_read_bit_for_bit(tmp_path: Path) -> None:
    store, expected = copied("v1_blocks", "root", tmp_path), dict(EXPECTED)
    ref = store.ref(expected.pop("key"))
    assert ref is not None
    manifest = store.manifest(ref)
    found = store.read_tensors(manifest)

    assert {name: sha256(array.tobytes()).hexdigest() for name, array in found.items()} == expected
    assert {each.function for each in manifest.derived} == BLOCK_FORMATS.keys()
    assert verify(store, full=True).problems == ()

"""Manifests, what follows them in their blobs, and forms (``docs/format.md``, Manifests).

| module | holds |
|---|---|
| `_manifest`, `_rows` | manifests, and their rows as columns |
| `_manifest_stream` | Arrow streams of manifests, without pyarrow |
| `_derived`, `_forms` | rows that are functions of others; manifests that say how others are stored |
| `_hints` | places of a manifest's chunks at its write, and sketches of its tensors |
| `_tensors_file` | self-contained files |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.layout.manifests._derived import Derivation, kind_of
    from tensorcas_mlflow.layout.manifests._forms import each_form, forms_of, has_content_of, read_form
    from tensorcas_mlflow.layout.manifests._hints import (
        Hints,
        hint_bytes,
        pack_hint_bytes,
        read_hints,
        read_pack_hints,
        read_sketches,
        sketch_bytes,
        sketched_rows,
        split_hints,
    )
    from tensorcas_mlflow.layout.manifests._manifest import KEPT_HEADER, MAX_BYTES, Manifest
    from tensorcas_mlflow.layout.manifests._rows import Columns, Numbers, Row, Rows, Specs, row_cuts
    from tensorcas_mlflow.layout.manifests._tensors_file import (
        HEADER_BYTES,
        TENSORS_FILE_MAGIC,
        Fill,
        Header,
        TensorsFileLayout,
        file_pieces,
    )

_NAMES = {
    "_derived": "Derivation kind_of",
    "_forms": "each_form forms_of has_content_of read_form",
    "_hints": (
        "Hints hint_bytes pack_hint_bytes read_hints read_pack_hints read_sketches sketch_bytes sketched_rows "
        "split_hints"
    ),
    "_manifest": "KEPT_HEADER MAX_BYTES Manifest",
    "_rows": "Columns Numbers Row Rows Specs row_cuts",
    "_tensors_file": "HEADER_BYTES TENSORS_FILE_MAGIC Fill Header TensorsFileLayout file_pieces",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

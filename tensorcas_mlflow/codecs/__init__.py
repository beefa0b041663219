"""Encoding and decoding of chunks.

A chunk's bytes and the size of its elements come in; a codec's number and a payload go out, and the other way round.
This room knows no files, packs or manifests, and imports `errors` and `base` only. Numbers of codecs are on disk
and never change (``docs/format.md``). A chunk is named by its decoded bytes, so a pack can be rewritten with a better
codec.

| module | holds |
|---|---|
| `_codec` | the contract `Codec`, and codec 0, `RAW` |
| `_zstd` | codecs 1 `ZSTD` and 2 `SHUFFLE_ZSTD` |
| `_words` | words |
| `_planes` | codec 4, `PLANES` |
| `_delta` | codec 3, `DELTA` |
| `_deflate` | DEFLATE streams as zlib writes them |
| `_blocks` | quantized blocks of GGUF's Q8_0 |
| `_hdf5_chunks` | chunks of HDF5 files as they are stored |
| `_functions` | functions of derived tensors |
| `_choose` | `CODECS`, by number; choice of a codec, a coding and a transform |

The compiled core encodes and decodes; ``tests/reference`` does the same in Python, as the oracle of its tests. To add a
codec, write its loops (``native/src``), its `Codec` with the next free number and its oracle, list and choose it in
`_choose`, and add its row and its payload to ``docs/format.md``.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.codecs._blocks import BLOCK_BYTES, BLOCK_ELEMENTS, Q8_0, Bounds, bounds
    from tensorcas_mlflow.codecs._choose import (
        CODECS,
        can_shuffle,
        choose_codings,
        choose_transform,
        codec_numbered,
        encode_best,
        estimate_share,
        guess_itemsize,
        typesize_of,
    )
    from tensorcas_mlflow.codecs._codec import MOST_OVERHEAD_BYTES, RAW, Codec
    from tensorcas_mlflow.codecs._deflate import deflates_to
    from tensorcas_mlflow.codecs._delta import DELTA, Transform, is_sparse
    from tensorcas_mlflow.codecs._functions import (
        Kind,
        check,
        computes_exactly,
        evaluate,
        fills,
    )
    from tensorcas_mlflow.codecs._hdf5_chunks import ChunkedElements, Hdf5Chunks, fletcher32
    from tensorcas_mlflow.codecs._planes import PLANES, Effort, PlaneCoding
    from tensorcas_mlflow.codecs._words import WORD_BYTES
    from tensorcas_mlflow.codecs._zstd import SHUFFLE_ZSTD, ZSTD, check_zstd_has_memory

_NAMES = {
    "_blocks": "BLOCK_BYTES BLOCK_ELEMENTS Q8_0 Bounds bounds",
    "_choose": (
        "CODECS can_shuffle choose_codings choose_transform codec_numbered encode_best estimate_share "
        "guess_itemsize typesize_of"
    ),
    "_codec": "MOST_OVERHEAD_BYTES RAW Codec",
    "_delta": "DELTA Transform is_sparse",
    "_deflate": "deflates_to",
    "_functions": "Kind check computes_exactly evaluate fills",
    "_hdf5_chunks": "ChunkedElements Hdf5Chunks fletcher32",
    "_planes": "PLANES Effort PlaneCoding",
    "_words": "WORD_BYTES",
    "_zstd": "SHUFFLE_ZSTD ZSTD check_zstd_has_memory",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

"""Codecs: how a chunk's bytes are stored, and back. Their numbers are on disk and never change (``docs/format.md``).

A new codec is one `Codec` in `CODECS` and one row in the format page. Identity does not depend on the codec: chunks are
named by their decoded bytes, so packs may be rewritten with a better one.
"""

from tensorcas_mlflow.codecs._best import encode_best
from tensorcas_mlflow.codecs._codec import MOST_OVERHEAD_BYTES, Buffer, Codec
from tensorcas_mlflow.codecs._decay import DECAYED_BYTES
from tensorcas_mlflow.codecs._delta import DELTA, Transform
from tensorcas_mlflow.codecs._elements import MAX_TYPESIZE, guess_itemsize, typesize_of
from tensorcas_mlflow.codecs._estimate import choose_codings, choose_transform, estimate_share
from tensorcas_mlflow.codecs._planes import PLANES, Effort, PlaneCoding
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD, load_codecs, load_codecs_to_decode, load_codecs_to_encode
from tensorcas_mlflow.codecs._sizes import WORD_BYTES
from tensorcas_mlflow.codecs._table import CODECS, codec_numbered
from tensorcas_mlflow.codecs._zstd import ZSTD, check_zstd_has_memory

__all__ = [
    "CODECS",
    "DECAYED_BYTES",
    "DELTA",
    "MAX_TYPESIZE",
    "MOST_OVERHEAD_BYTES",
    "PLANES",
    "RAW",
    "SHUFFLE_ZSTD",
    "WORD_BYTES",
    "ZSTD",
    "Buffer",
    "Codec",
    "Effort",
    "PlaneCoding",
    "Transform",
    "check_zstd_has_memory",
    "choose_codings",
    "choose_transform",
    "codec_numbered",
    "encode_best",
    "estimate_share",
    "guess_itemsize",
    "load_codecs",
    "load_codecs_to_decode",
    "load_codecs_to_encode",
    "typesize_of",
]

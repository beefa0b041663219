"""Which codec fits a chunk of which only the size of its elements is known."""

from __future__ import annotations

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.codecs._elements import typesize_of
from tensorcas_mlflow.codecs._planes import PLANES
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD
from tensorcas_mlflow.codecs._sizes import WORDS
from tensorcas_mlflow.codecs._zstd import SMALL_BYTES, ZSTD

LEAST_GAIN = 0.97
"""What does not shrink to less than this share is stored raw, and can then be mapped."""
_LEAST_SHUFFLED_BYTES = 512
"""In fewer bytes than these shuffling gains less than its header takes (``docs/design/decisions.md``)."""
_MIXED_ITEMSIZE = 8
"""Elements of this size or more are often whole numbers or repeat, where plain zstd may be better."""


def encode_best(raw: Buffer, itemsize: int) -> tuple[Codec, int, Buffer]:
    """Encode one chunk with the codec that fits its elements, or leave it raw where that gains less than 3 %.

    Args:
        raw: The chunk.
        itemsize: Size of one element; 1 for text and skeletons.

    Returns:
        The codec, the typesize it was told, and the payload.
    """
    if len(raw) < 32:
        return RAW, 1, raw
    typesize = typesize_of(itemsize)
    is_shuffled = typesize > 1 and len(raw) >= max(_LEAST_SHUFFLED_BYTES, 8 * typesize)
    codec: Codec = ZSTD if not is_shuffled else PLANES if typesize in WORDS else SHUFFLE_ZSTD
    stored = codec.encode(raw, typesize)
    if is_shuffled and itemsize >= _MIXED_ITEMSIZE and len(raw) <= SMALL_BYTES:
        plain = ZSTD.encode(raw, typesize)
        if len(plain) < len(stored):
            codec, stored = ZSTD, plain
    if len(stored) > LEAST_GAIN * len(raw):
        return RAW, 1, raw
    return codec, typesize, stored

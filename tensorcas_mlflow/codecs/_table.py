"""The codecs by number; a new codec is listed here."""

from __future__ import annotations

from collections.abc import Mapping

from tensorcas_mlflow.codecs._codec import RAW, Codec
from tensorcas_mlflow.codecs._delta import DELTA
from tensorcas_mlflow.codecs._planes import PLANES
from tensorcas_mlflow.codecs._zstd import SHUFFLE_ZSTD, ZSTD
from tensorcas_mlflow.errors import FormatError

CODECS: Mapping[int, Codec] = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, DELTA, PLANES)}


def codec_numbered(number: int) -> Codec:
    """Return the codec of a number in a pack.

    Raises:
        FormatError: This release has no such codec.
    """
    codec = CODECS.get(number)
    if codec is None:
        raise FormatError(f"no codec has the number {number}: a later release of tensorcas-mlflow may read it")
    return codec

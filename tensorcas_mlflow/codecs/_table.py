"""The codecs by their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from tensorcas_mlflow.codecs._codec import Codec
from tensorcas_mlflow.codecs._delta import DELTA
from tensorcas_mlflow.codecs._planes import PLANES
from tensorcas_mlflow.codecs._raw import RAW
from tensorcas_mlflow.codecs._shuffle import SHUFFLE_ZSTD
from tensorcas_mlflow.codecs._zstd import ZSTD
from tensorcas_mlflow.errors import FormatError

CODECS: Mapping[int, Codec] = {codec.number: codec for codec in (RAW, ZSTD, SHUFFLE_ZSTD, DELTA, PLANES)}


def codec_numbered(number: int) -> Codec:
    """Find a codec by the number a pack gives.

    Raises:
        FormatError: This release has no such codec.
    """
    codec = CODECS.get(number)
    if codec is None:
        raise FormatError(f"no codec has the number {number}: a later release of tensorcas-mlflow may read it")
    return codec

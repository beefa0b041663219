"""Decoding by the compiled core and by the reference, which have to agree."""

from __future__ import annotations

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.codecs import Codec
from tensorcas_mlflow.errors import FormatError
from tests.reference.choose import CODECS


def decode(codec: Codec, stored: Buffer, n_bytes: int, base: Buffer | None = None) -> bytes:
    """Decode a payload.

    Raises:
        FormatError: Both refuse it.
    """
    out, other = bytearray(n_bytes), bytearray(n_bytes)
    try:
        codec.decode_into(stored, memoryview(out), base)
    except FormatError:
        try:
            CODECS[codec.number].decode_into(stored, memoryview(other), base)
        except FormatError:
            pass
        else:
            raise AssertionError("the core refuses what the reference decodes") from None
        raise
    CODECS[codec.number].decode_into(stored, memoryview(other), base)
    assert out == other
    return bytes(out)

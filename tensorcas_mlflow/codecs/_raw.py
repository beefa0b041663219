"""Codec 0: the bytes as they are."""

from __future__ import annotations

from tensorcas_mlflow.codecs._codec import Buffer, Codec
from tensorcas_mlflow.errors import FormatError


class _Raw(Codec):
    number = 0
    name = "raw"

    def encode(self, raw: Buffer, typesize: int, base: Buffer | None = None) -> Buffer:
        return raw

    def decode_into(self, stored: Buffer, out: memoryview, base: Buffer | None = None) -> None:
        if len(stored) != len(out):
            raise FormatError(f"a raw chunk of {len(out)} bytes is stored in {len(stored)}")
        out[:] = stored


RAW = _Raw()

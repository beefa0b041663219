"""Writing bintensors files, byte for byte as the library (0.2) does.

The format: https://github.com/GnosisFoundation/bintensors. 8 bytes are the header's length, then comes the header,
padded with spaces to a multiple of 8, then the tensors without holes. The header is bincode 2 in its standard
configuration (https://docs.rs/bincode/2/bincode/spec/index.html): an optional map of metadata, sorted by key, and a
list of (name, dtype, shape, (begin, end)). The library is not used: it copies all tensors into memory, and writes
headers that it refuses to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.formats._write_layout import FileLayout, FlatLayout, check_dtypes, pad, starts_of
from tensorcas_mlflow.formats._write_safetensors import check_header, texts_of
from tensorcas_mlflow.tensor import Spec

_CODES = {
    name: code
    for code, name in enumerate(
        [
            "bool",
            "uint8",
            "int8",
            "float8_e5m2",
            "float8_e4m3fn",
            "int16",
            "uint16",
            "float16",
            "bfloat16",
            "int32",
            "uint32",
            "float32",
            "float64",
            "int64",
            "uint64",
        ]
    )
}


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay one file out.

    Raises:
        ValueError: A tensor's dtype cannot be written, or the header gets too long.
    """
    check_dtypes(specs, _CODES, "bintensors")
    ordered = sorted(specs, key=lambda spec: (-_CODES[spec.dtype or ""], spec.name))
    texts = texts_of(metadata)
    header = bytearray([1 if texts else 0])
    if texts:
        header += _number(len(texts))
        for name, text in texts.items():
            header += _text(name) + _text(text)
    header += _number(len(ordered))
    for spec, start in zip(ordered, starts_of(ordered), strict=True):
        header += _text(spec.name) + bytes([_CODES[spec.dtype or ""]])
        for number in (len(spec.shape), *spec.shape, start, start + spec.n_bytes):
            header += _number(number)
    padded = pad(bytes(header), 8)
    check_header(padded, "bintensors")
    return [FlatLayout("", head=len(padded).to_bytes(8, "little") + padded, specs=ordered)]


def _number(number: int) -> bytes:
    """Write a whole number from 0 on: small ones in one byte, others in 2, 4 or 8 behind a byte that says so."""
    if number <= 250:
        return bytes([number])
    for mark, n_bytes in ((251, 2), (252, 4)):
        if number < 1 << (8 * n_bytes):
            return bytes([mark]) + number.to_bytes(n_bytes, "little")
    return b"\xfd" + number.to_bytes(8, "little")


def _text(text: str) -> bytes:
    data = text.encode()
    return _number(len(data)) + data

"""Hostile headers of safetensors files (``header.c``)."""

from __future__ import annotations

import json
from types import ModuleType

import numpy as np

KINDS, ITEM_BYTES = b"F32 F16 U8 ", bytes([4, 2, 1])
SPECIAL = b'"{}[]:,\\ \n0123456789-e.\x00\xffA'


def header(rng: np.random.Generator) -> bytes:
    """Return a header of some tensors, and sometimes of metadata."""
    entries: dict[str, object] = {}
    if rng.integers(0, 3) == 0:
        entries["__metadata__"] = {f"k{number}": 'a"b\\' for number in range(rng.integers(0, 3))}
    begin = 0
    for number in range(rng.integers(1, 200)):
        kind = int(rng.integers(0, 3))
        shape = [int(side) for side in rng.integers(0, 5, rng.integers(0, 5))]
        end = begin + int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[kind]
        entries[f"layer.{number}"] = {
            "dtype": KINDS.split()[kind].decode(),
            "shape": shape,
            "data_offsets": [begin, end],
        }
        begin = end
    separators = (",", ":") if rng.integers(0, 2) else (", ", ": ")
    return json.dumps(entries, separators=separators).encode() + b" " * int(rng.integers(0, 9))


def mutated(rng: np.random.Generator, text: bytes) -> bytes:
    """Change, remove, repeat or add some bytes."""
    for _ in range(rng.integers(0, 4)):
        at, n_bytes = int(rng.integers(0, len(text) + 1)), int(rng.integers(0, 40))
        piece = bytes(rng.choice(list(SPECIAL), rng.integers(0, 3)).astype(np.uint8))
        match rng.integers(0, 4):
            case 0:
                text = text[:at] + piece + text[at + len(piece) :]
            case 1:
                text = text[:at] + text[at + n_bytes :]
            case 2:
                text = text[:at] + text[at : at + n_bytes] + text[at:]
            case _:
                text = text[:at] + piece + text[at:]
    return text


def fuzz_list_header(core: ModuleType, rng: np.random.Generator) -> None:
    # A copy of exactly its size: a sanitizer sees each read behind it.
    found = core.list_header(bytearray(mutated(rng, header(rng))), KINDS, ITEM_BYTES)
    if found is not None:
        _, _, names, name_at, kind, side_at, sides, begin, end = found
        ends = np.frombuffer(name_at, np.int64)
        assert ends[-1] == len(names)
        assert len(ends) == len(kind) + 1 == len(begin) // 8 + 1 == len(end) // 8 + 1
        assert np.frombuffer(side_at, np.int64)[-1] == len(sides) // 8
    if rng.integers(0, 20) == 0:
        core.list_header(rng.bytes(30), rng.bytes(3), rng.bytes(2))

"""Taking files apart, for the tests of every format."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

from tensorcas_mlflow.file_formats import FilePart, Learned, More, Tape, Tensor, split


def take_apart(data: bytes) -> list[tuple[FilePart, bytes]]:
    """Split a file's bytes as the store does.

    Returns:
        The parts in file order, each with its bytes, which may be fewer than it announces where the file ends. `More`
        is joined to its tensor, whose size is then that of all its bytes. Other neighbours are not joined. What is
        `Learned` of a tensor stands in place of what was announced of it.
    """
    tape = Tape(io.BytesIO(data))
    parts: list[tuple[FilePart, bytes]] = []
    for part in split(tape):
        if isinstance(part, Learned):
            parts = [(_learned(each, part), taken) for each, taken in parts]
            continue
        assert part.n_bytes > 0
        taken = _take(tape, part.n_bytes)
        if isinstance(part, More):
            before, begun = parts.pop()
            assert isinstance(before, Tensor)
            parts.append((dataclasses.replace(before, n_bytes=before.n_bytes + part.n_bytes), begun + taken))
        else:
            parts.append((part, taken))
    return parts


def _learned(part: FilePart, learned: Learned) -> FilePart:
    if not isinstance(part, Tensor) or part.name not in learned.tensors:
        return part
    tensor = learned.tensors[part.name]
    return tensor if tensor.dtype is not None else dataclasses.replace(part, name=tensor.name)


def _take(tape: Tape, n_bytes: int) -> bytes:
    """Take piece by piece: what a part announces may be a lie, and is no reason to set memory aside."""
    pieces = []
    while n_bytes > 0 and (piece := tape.take(min(n_bytes, 1 << 20))):
        pieces.append(bytes(piece))
        n_bytes -= len(piece)
    return b"".join(pieces)


def tensors(data: bytes) -> dict[str, tuple[Tensor, bytes]]:
    """Split a file's bytes, and give its tensors by name, each with its bytes."""
    return {part.name: (part, taken) for part, taken in take_apart(data) if isinstance(part, Tensor)}


def kinds(data: bytes) -> list[type[FilePart]]:
    """Parts of a file, neighbours of one kind joined."""
    found: list[type[FilePart]] = []
    for part, _ in take_apart(data):
        if found[-1:] != [type(part)] or isinstance(part, Tensor):
            found.append(type(part))
    return found


def joined(parts: list[tuple[FilePart, bytes]]) -> bytes:
    """Put a file together again."""
    return b"".join(taken for _, taken in parts)


def damaged(data: bytes, *, n: int = 200) -> Iterator[bytes]:
    """A file cut off, and with a byte changed, at places spread over it, its beginning and end more than the middle."""
    edges = [*range(min(n, len(data))), *range(max(0, len(data) - n), len(data))]
    for at in sorted({*edges[:: max(1, len(edges) // n)], *range(0, len(data), max(1, len(data) // n))}):
        yield data[:at]
        yield data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

"""Our own files (``docs/format.md``, Self-contained files), taken apart into the rows any client would have stored."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.tensors_file import HEADER_BYTES, MAGIC, Header, Layout

_MAX_ROWS = 1 << 17
"""A file of more is plain bytes: its rows are in memory before a byte of its tensors has come."""


def is_checkpoint_file(head: memoryview) -> bool:
    """Tell from its first bytes whether a file is one of ours, of any version."""
    return head[: len(MAGIC) - 1] == MAGIC[:-1]


def split_checkpoint_file(tape: Tape) -> Iterator[Part]:
    """Take a self-contained file apart; raises `FormatError` unless its manifest is whole."""
    begin = tape.position
    header = Header.parse(tape.peek(HEADER_BYTES))
    stream = bytes(tape.peek(HEADER_BYTES + header.manifest_bytes)[HEADER_BYTES:])
    manifest = header.manifest(stream, max_rows=_MAX_ROWS)
    layout = Layout.of(manifest)
    for row, start in zip(manifest.rows, (begin + layout.starts).tolist(), strict=True):
        if row.spec.n_bytes < MIN_TENSOR_BYTES:
            continue
        if start > tape.position:
            yield Skeleton(n_bytes=start - tape.position)
        if tape.is_at_end():
            return
        yield Tensor(
            n_bytes=row.spec.n_bytes, name=row.spec.name, dtype=row.spec.dtype, shape=row.spec.shape, cuts=row.cuts
        )
    rest = begin + layout.n_bytes - tape.position
    if rest and not tape.is_at_end():
        yield Skeleton(n_bytes=rest)

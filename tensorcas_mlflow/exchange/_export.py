"""Exporting: tensors of a checkpoint, or of a file, as a file of another format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tensorcas_mlflow.exchange._import import check_left_out
from tensorcas_mlflow.file_formats import Listing, Tensors, WritePlan, Written, plan_write
from tensorcas_mlflow.tensor import Spec

Progress = Callable[[int, int], None]


def plan_export(
    checkpoint: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    match: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
    allow_left_out: bool = False,
) -> WritePlan:
    """Say what `export_checkpoint` would write; takes its arguments, and reads no tensor.

    Raises:
        ValueError: As `formats.plan_write`, or no tensor is named so, or tensors would be left out, and that was not
            allowed.
        ConflictError: Something is there that may not be replaced.
    """
    chosen = checkpoint if match is None else _Matching(checkpoint, match)
    check_left_out(chosen, allow_left_out=allow_left_out)
    return plan_write(chosen, out, format=format, shard_bytes=shard_bytes, partitions=partitions, overwrite=overwrite)


def export_checkpoint(
    checkpoint: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    match: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
    allow_left_out: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the tensors of an open checkpoint into a file or folder of another format.

    Each chunk is checked against its digest as it is read. What is not a tensor (the skeleton of a model) is left out.

    Args:
        checkpoint: What to write.
        out: The file or folder; see `formats.write`.
        format: See `formats.write`.
        match: Write only tensors whose names this pattern matches, as in `fnmatch`: ``*`` stands for any characters,
            dots too.
        shard_bytes: See `formats.write`.
        partitions: See `formats.write`.
        overwrite: See `formats.write`.
        allow_left_out: Whether to write a file of which some tensors cannot be read, without them.
        progress: See `formats.write`.

    Raises:
        ValueError: As `plan_export`; nothing is written.
        TensorCasError: As `plan_export` and `formats.WritePlan.execute`.
    """
    plan = plan_export(
        checkpoint,
        out,
        format=format,
        match=match,
        shard_bytes=shard_bytes,
        partitions=partitions,
        overwrite=overwrite,
        allow_left_out=allow_left_out,
    )
    return plan.execute(progress=progress)


def plan_convert(
    source: Listing, out: str | os.PathLike[str], *, allow_left_out: bool = False, **options: Any
) -> WritePlan:
    """Say what `convert` would write; takes its arguments, and reads no tensor.

    Raises:
        ValueError: As `plan_export`, or tensors would be left out, and that was not allowed.
        ConflictError: Something is there that may not be replaced.
    """
    return plan_export(source, out, allow_left_out=allow_left_out, **options)


def convert(
    source: Listing,
    out: str | os.PathLike[str],
    *,
    allow_left_out: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Written:
    """Write the tensors of a file into one of another format, without a store.

    Args:
        source: The file, from `formats.open_listing`.
        out: The file or folder; see `formats.write`.
        allow_left_out: Whether to convert a file of which some tensors cannot be read, without them.
        progress: See `formats.write`.
        options: ``format``, ``match``, ``shard_bytes``, ``partitions`` and ``overwrite``, as `export_checkpoint` takes
            them.

    Raises:
        ValueError: As `plan_convert`; nothing is written.
        TensorCasError: As `plan_convert` and `formats.WritePlan.execute`.
    """
    return plan_convert(source, out, allow_left_out=allow_left_out, **options).execute(progress=progress)


class _Matching:
    """Those of some tensors whose names match a pattern."""

    def __init__(self, tensors: Tensors, pattern: str) -> None:
        self.metadata: Mapping[str, Any] = tensors.metadata
        self.left_out = {name: kind for name, kind in tensors.left_out.items() if fnmatchcase(name, pattern)}
        self._tensors = tensors
        self._specs = [spec for spec in tensors.specs() if fnmatchcase(spec.name, pattern)]
        if not self._specs:
            raise ValueError(f"no tensor has a name like {pattern!r}")

    def specs(self) -> Sequence[Spec]:
        return self._specs

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        return self._tensors.stream(names)

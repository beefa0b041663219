"""Writing tensors into files of foreign formats: first a plan, which says what there will be, then the files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorcas_mlflow._texts import check_path, count_text, size_text
from tensorcas_mlflow.formats import (
    _write_bintensors,
    _write_npz,
    _write_safetensors,
    _write_serverlessllm,
    _write_torch,
)
from tensorcas_mlflow.formats._listing import Tensors
from tensorcas_mlflow.formats._write_layout import Feed, FileLayout, Progress
from tensorcas_mlflow.formats._write_place import appearing_at, check_free
from tensorcas_mlflow.tensor import Spec

FORMATS_OUT: Mapping[str, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "npz": (".npz",),
    "bintensors": (".bt",),
    "serverlessllm": (),
}
"""The formats that can be written, and how the names of their files end; of the last one there are only folders."""

_ANY_FILE = re.compile("")
_FILE: Mapping[str, Callable[[Sequence[Spec], Mapping[str, Any]], list[FileLayout]]] = {
    "safetensors": _write_safetensors.lay_out_file,
    "torch": _write_torch.lay_out,
    "npz": _write_npz.lay_out,
    "bintensors": _write_bintensors.lay_out,
}
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file that was written, or is to be."""

    path: Path
    n_bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written."""

    format: str
    files: tuple[WrittenFile, ...]
    n_tensors: int
    n_bytes: int
    """Size of all files."""

    @property
    def what(self) -> str:
        """What it is, in words."""
        return f"{count_text(self.n_tensors, 'tensor')}, {size_text(self.n_bytes)}, as {self.format}"

    def __str__(self) -> str:
        where = os.fspath(self.files[0].path) if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{self.what}: {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What is going to be written; nothing has been yet, and all tensors and names were found to fit the format."""

    out: Path
    """The file, or the folder of the files."""
    is_folder: bool
    result: Written
    """What `execute` will return."""
    _layouts: tuple[FileLayout, ...] = field(repr=False)
    _tensors: Tensors = field(repr=False)
    _overwrite: re.Pattern[str] | None = field(repr=False)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tensors that cannot be read and are not written, by name, with what their file calls their type."""
        return self._tensors.left_out

    def __str__(self) -> str:
        return "\n".join(
            [self.result.what, *(f"  {file.path}  {size_text(file.n_bytes)}" for file in self.result.files)]
        )

    def execute(self, *, progress: Progress | None = None) -> Written:
        """Write the files, reading each tensor once and holding some 16 MiB.

        The file, or the folder with all its files, appears when it is complete and durable, or not at all.

        Args:
            progress: Called with the bytes of tensors that are written, and of all.

        Raises:
            ConflictError: Something has come to be there that may not be replaced.
            BackendError: It cannot be written.
            CorruptError: A tensor's bytes were not given.
            TensorCasError: Whatever reading the tensors raises.
        """
        specs = [spec for layout in self._layouts for spec in layout.specs]
        feed = Feed(self._tensors, specs, progress)
        with appearing_at(self.out, overwrite=self._overwrite, is_folder=self.is_folder) as folder:
            for layout in self._layouts:
                with open(folder / (layout.name or self.out.name), "xb", buffering=_BUFFER_BYTES) as file:
                    layout.write(file, feed)
                    file.flush()
                    os.fsync(file.fileno())
                    assert os.fstat(file.fileno()).st_size == layout.n_bytes
        return self.result


def plan_write(
    tensors: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
) -> WritePlan:
    """Say what `write` would write; takes its arguments, and reads no tensor.

    Raises:
        ValueError: There is no such format or the name tells of none, an option is not one of its, or tensors are of
            dtypes that it does not have; the message names them all.
        ConflictError: Something is there that may not be replaced.
    """
    check_path(os.fspath(out))
    place = Path(os.path.abspath(out))
    kind = format_of(place, format, shard_bytes=shard_bytes, partitions=partitions)
    specs, metadata = list(tensors.specs()), tensors.metadata
    names: re.Pattern[str] | None = None
    if kind == "serverlessllm":
        names = _write_serverlessllm.FILES
        layouts = _write_serverlessllm.lay_out(specs, metadata, partitions=1 if partitions is None else partitions)
    elif shard_bytes is not None:
        names = _write_safetensors.FILES
        layouts = _write_safetensors.lay_out_shards(specs, metadata, shard_bytes=shard_bytes)
    else:
        layouts = _FILE[kind](specs, metadata)
    replaceable = (names or _ANY_FILE) if overwrite else None
    check_free(place, overwrite=replaceable, is_folder=names is not None)
    files = tuple(
        WrittenFile(path=place / layout.name if names else place, n_bytes=layout.n_bytes) for layout in layouts
    )
    n_bytes = sum(file.n_bytes for file in files)
    return WritePlan(
        out=place,
        is_folder=names is not None,
        result=Written(format=kind, files=files, n_tensors=len(specs), n_bytes=n_bytes),
        _layouts=tuple(layouts),
        _tensors=tensors,
        _overwrite=replaceable,
    )


def write(
    tensors: Tensors,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write tensors into a file or folder of another format, bit for bit, in one pass and with bounded memory.

    Equal tensors and metadata make equal files. Metadata are written where the format has a place for them:
    safetensors and bintensors, as texts.

    Args:
        tensors: What to write: a listing, an open checkpoint, or arrays (`ArrayTensors`).
        out: The file, or the folder for shards and partitions. It appears whole or not at all.
        format: One of `FORMATS_OUT`; unless given, as the name ends.
        shard_bytes: For safetensors: write a folder of shards of so many bytes of tensors at most, and the index that
            transformers reads.
        partitions: For serverlessllm: how many files to spread the tensors over; one unless given.
        overwrite: Whether a file there is replaced, or a folder that holds nothing but what such a write makes. Who
            has the old one open or mapped keeps it.
        progress: Called with the bytes of tensors that are written, and of all.

    Raises:
        ValueError: As `plan_write`; nothing is written.
        TensorCasError: As `plan_write` and `WritePlan.execute`.
    """
    plan = plan_write(tensors, out, format=format, shard_bytes=shard_bytes, partitions=partitions, overwrite=overwrite)
    return plan.execute(progress=progress)


def format_of(out: Path, format: str | None, *, shard_bytes: int | None = None, partitions: int | None = None) -> str:
    """Say which format is to be written, and see that its options are its own.

    Raises:
        ValueError: As `plan_write`.
    """
    if format is None:
        suffix = out.suffix.lower()
        format = next((name for name, suffixes in FORMATS_OUT.items() if suffix in suffixes), None)
    if format is None:
        format = "safetensors" if shard_bytes is not None else "serverlessllm" if partitions is not None else None
    if format is None:
        raise ValueError(f"the name {out.name!r} tells of no format: say which, one of {', '.join(FORMATS_OUT)}")
    if format not in FORMATS_OUT:
        raise ValueError(f"there is no format {format!r} to write: there are {', '.join(FORMATS_OUT)}")
    for option, owner, value in (("shards", "safetensors", shard_bytes), ("partitions", "serverlessllm", partitions)):
        if value is not None and format != owner:
            raise ValueError(f"{format} has no {option}, {owner} does")
        if value is not None and value < 1:
            raise ValueError(f"{option} are counted from 1, not {value}")
    return format

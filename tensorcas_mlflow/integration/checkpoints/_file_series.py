"""Checkpoints on a server with a store of its own: one self-contained file a step.

The server takes each file apart and stores only its new chunks. So nothing is carried here, and no store lies within a
store.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.errors import BlobNotFoundError, CheckpointExistsError
from tensorcas_mlflow.integration.checkpoints._series import Checkpoint, RunRoot, Saving, Series, step_named
from tensorcas_mlflow.integration.checkpoints._uris import FOLDER
from tensorcas_mlflow.integration.server_store import Shelf, shelf_at
from tensorcas_mlflow.layout.manifests import HEADER_BYTES, TENSORS_FILE_MAGIC, Manifest
from tensorcas_mlflow.reader import ReadArrays
from tensorcas_mlflow.store import PAYLOAD_FILE, Policy, write_payload

if TYPE_CHECKING:
    from tensorcas_mlflow.reader import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeries(Series):
    """The checkpoints of one name in one run, as files among its artifacts.

    If two processes log the same step at the same moment, both may succeed; the later checkpoint stays. A user's own
    files beside them are never replaced or deleted, even under the name of a step.
    """

    suffix = ".tensors"

    def steps(self) -> list[int]:
        return [step for step, size in self._files() if size >= HEADER_BYTES]

    def find(self, step: int) -> Checkpoint | None:
        return _FileCheckpoint(self, step) if self.has(step) and self.is_ours(step) else None

    def has(self, step: int) -> bool:
        return any(step == each for each, _ in self._files())

    def checkpoints(self) -> list[Checkpoint]:
        return [_FileCheckpoint(self, step) for step in self.steps()]

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Array],
        *,
        flavor: str,
        cuts: Mapping[str, Sequence[int]] | None,
        overwrite: bool,
        policy: Policy,
        metadata: Mapping[str, Any] | None = None,
        left_out: Mapping[str, str] | None = None,
        watch: Callable[[int], None] | None = None,
        later: bool = False,
    ) -> Saving:
        scratch = TemporaryDirectory(prefix="tensorcas-")
        try:
            manifest = write_payload(
                Path(scratch.name), tensors, flavor=flavor, cuts=cuts, metadata=metadata, left_out=left_out
            )
        except BaseException:
            scratch.cleanup()
            raise
        return _FileSaving(self, step, manifest, scratch, overwrite=overwrite)

    def is_ours(self, step: int) -> bool:
        """Tell whether the file named for a step is a self-contained file; False if there is no file."""
        try:
            head = self.shelf().head(self.file(step), HEADER_BYTES)
        except BlobNotFoundError:
            return False
        return head[: len(TENSORS_FILE_MAGIC) - 1] == TENSORS_FILE_MAGIC[:-1]  # the last byte is the version

    def _files(self) -> list[tuple[int, int]]:
        """List the steps with a file, ascending, and the files' sizes."""
        found: list[tuple[int, int]] = []
        for entry in self.shelf().entries(""):
            step = None if entry.size is None else step_named(entry.name, self.suffix)
            if step is not None and entry.name == self.file(step):
                found.append((step, entry.size or 0))
        return sorted(found)

    def shelf(self) -> Shelf:
        """The shelf for the files."""
        return shelf_at(self.run.artifact_uri, f"{FOLDER}/{self.name}")

    def file(self, step: int) -> str:
        """Name of the file of a step."""
        return posixpath.basename(self.artifact(step))


class _FileCheckpoint(Checkpoint):
    """A file on a server."""

    created = None
    flavor = None

    def __init__(self, series: FileSeries, step: int) -> None:
        self.step = step
        self._series = series

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, ReadArrays]]:
        with TemporaryDirectory(prefix="tensorcas-") as scratch:
            local = Path(scratch, PAYLOAD_FILE)
            self._series.shelf().fetch(self._series.file(self.step), local)
            file = TensorsFile(local)
            yield file.manifest, file.read

    def reader(self, **options: Any) -> CheckpointReader:
        from tensorcas_mlflow.reader import open_path  # a process that only saves need not wait for it

        kept = ExitStack()
        with ExitStack() as opened:
            local = Path(opened.enter_context(TemporaryDirectory(prefix="tensorcas-")), PAYLOAD_FILE)
            self._series.shelf().fetch(self._series.file(self.step), local)
            reader = open_path(local, label=self._series.uri(self.step), end=kept.close, **options)
            kept.push(opened.pop_all())  # a file that fails to open is not kept
            return reader

    def drop(self) -> None:
        self._series.shelf().delete(self._series.file(self.step))


class _FileSaving(Saving):
    """A self-contained file, written locally and not yet sent."""

    def __init__(
        self, series: FileSeries, step: int, manifest: Manifest, scratch: TemporaryDirectory[str], *, overwrite: bool
    ) -> None:
        self.n_bytes = manifest.n_bytes
        self.n_new_bytes = None
        self._series = series
        self._step = step
        self._scratch = scratch
        self._overwrite = overwrite

    def finish(self) -> None:
        try:
            series, file = self._series, Path(self._scratch.name, self._series.file(self._step))
            if series.has(self._step):
                if not self._overwrite:
                    raise CheckpointExistsError(f"{series.name!r} of run {series.run.run_id} at step {self._step}")
                if not series.is_ours(self._step):
                    raise series.in_the_way(self._step)
            os.replace(file.parent / PAYLOAD_FILE, file)
            series.shelf().put(file.name, file)
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._scratch.cleanup()


def names_on_server(run: RunRoot) -> list[str]:
    """List the names of a run's checkpoint series on a server."""
    return sorted(entry.name for entry in shelf_at(run.artifact_uri, FOLDER).entries("") if entry.size is None)

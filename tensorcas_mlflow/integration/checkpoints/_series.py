"""Checkpoint series of a run: one series per name, one checkpoint per step."""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import mlflow
from mlflow.entities import Run, RunInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import (
    CheckpointNotFoundError,
    ConflictError,
    CorruptError,
    NotFoundError,
    without_secrets,
)
from tensorcas_mlflow.integration.checkpoints._uris import FOLDER, is_artifact_root
from tensorcas_mlflow.layout import STEP_TEXT, as_step, step_of_text, step_text
from tensorcas_mlflow.layout.manifests import Manifest

if TYPE_CHECKING:
    from tensorcas_mlflow.reader import CheckpointReader, ReadArrays
    from tensorcas_mlflow.store import Policy


_MAX_KNOWN = 1024
_RUN_URI = re.compile(r"runs:/+(?P<run_id>[^/]+)/?")

_known: dict[tuple[str, str], RunRoot] = {}
"""Runs requested by id. A run's artifact root never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRoot:
    """A run and its artifact root."""

    run_id: str
    artifact_uri: str


def run_to_write(run_id: str | Run | None) -> RunRoot:
    """Find a run to log to: the one named, else the active one, else, as everywhere in MLflow, a new active one."""
    if run_id is not None:
        return _named(run_id)
    run = mlflow.active_run() or mlflow.start_run()
    return RunRoot(run_id=run.info.run_id, artifact_uri=run.info.artifact_uri)


def run_to_read(run_id: str | Run | None) -> RunRoot:
    """Find a run to read from: the one named, else the active one, else the last active one of this process.

    Raises:
        NotFoundError: There is none.
    """
    if run_id is not None:
        return _named(run_id)
    run = mlflow.active_run() or mlflow.last_active_run()
    if run is None:
        raise NotFoundError("no run is active: pass a run id")
    return RunRoot(run_id=run.info.run_id, artifact_uri=run.info.artifact_uri)


def run_id_of(run: object) -> str:
    """Return the id of a run: a `mlflow.entities.Run` or its info, ``runs:/<id>``, or the id itself.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(run, Run):
        run = run.info
    if isinstance(run, RunInfo):
        run = run.run_id
    if not isinstance(run, str):
        raise TypeError(f"a run id is a text, such as mlflow.active_run().info.run_id, not {run!r:.200}")
    uri = _RUN_URI.fullmatch(run)
    return run if uri is None else uri["run_id"]


def _named(run: object) -> RunRoot:
    run_id = run_id_of(run)
    if is_artifact_root(run_id):
        # Where our repository keeps artifacts, there is no such folder.
        is_folder = not os.path.isabs(run_id) or os.path.isdir(run_id)
        return RunRoot(
            run_id=run_id.split("/")[-2], artifact_uri=run_id if is_folder else f"tensorcas://{quote(run_id)}"
        )
    if "/" in run_id or ":" in run_id:
        raise NotFoundError(
            f"{without_secrets(run_id)!r} is no run and no checkpoint of one: open_checkpoint reads models and files, "
            "and load_model loads models"
        )
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        return RunRoot(run_id=run_id, artifact_uri=active.info.artifact_uri)
    key = (mlflow.get_tracking_uri(), run_id)
    if key not in _known:
        try:
            info = MlflowClient().get_run(run_id).info
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise NotFoundError(error.message) from error
            raise
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = RunRoot(run_id=info.run_id, artifact_uri=info.artifact_uri)
    return _known[key]


_log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 100
_NOT_IN_NAMES = re.compile(r"[/%?#]")
"""Separators of artifact paths, and characters lost or decoded when MLflow reads a URI."""


class Saving(ABC):
    """One pending checkpoint. `abandon` gives up an unfinished one, and does nothing to a finished one."""

    n_bytes: int
    """Size of the whole state."""
    n_new_bytes: int | None
    """Size of the chunks new to the store. None if another machine determines it, or until a later save is finished."""

    @abstractmethod
    def finish(self) -> int | None:
        """Write the new chunks, commit the checkpoint, and show it.

        Returns:
            Growth of the store in bytes, or None if unknown.

        Raises:
            CheckpointExistsError: There is one of this step, and ``overwrite`` is False.
            TensorCasError: It could not be saved; the earlier content is untouched.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Give it up if it is not finished."""


class Checkpoint(ABC):
    """One committed checkpoint."""

    step: int
    created: str | None
    """ISO 8601, UTC; None if unknown."""
    flavor: str | None
    """The adapter used for the save; None if only reading the file could tell."""
    is_cut = False
    """True if the save died on the way and nothing can be read. It may be dropped, and no listing shows it."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[tuple[Manifest, ReadArrays]]:
        """Open its manifest and a reader of its chunks for the duration of a block."""

    @abstractmethod
    def reader(self, **options: Any) -> CheckpointReader:
        """Open it for reading parts.

        Args:
            options: ``verify``, and those of `CheckpointReader`.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete it; a checkpoint already gone is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series(ABC):
    """The checkpoints of one name in one run."""

    run: RunRoot
    name: str

    suffix = ""
    """Ending of the artifacts of steps."""

    @abstractmethod
    def steps(self) -> list[int]:
        """List the steps, ascending, from names alone: `find` tells which are checkpoints."""

    @abstractmethod
    def find(self, step: int) -> Checkpoint | None:
        """Find a step, or return None. A user's plain file of such a name is no checkpoint."""

    @abstractmethod
    def has(self, step: int) -> bool:
        """Tell whether an artifact has the name of a step."""

    @abstractmethod
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
        """Begin to save a step; see `Store.begin_checkpoint`.

        Args:
            overwrite: Whether to replace an existing one.
            policy: The trade between time and size, for a series in a store.
            metadata: Plain JSON values to keep with it.
            left_out: Unsupported tensors by name, with their types.
            watch: Called with the bytes newly hashed, and with those newly stored, for a series in a store.
            later: Whether the caller may change the arrays before `Saving.finish`. Then the call copies them and does
                nothing else that can wait.
        """

    def artifact(self, step: int) -> str:
        """Return the artifact path of a step in its run; padded, so listings by name are in order of steps."""
        return f"{FOLDER}/{self.name}/step-{step_text(step)}{self.suffix}"

    def in_the_way(self, step: int) -> ConflictError:
        """Return the error for a save blocked by a user's own artifact with the name of the step."""
        return ConflictError(
            f"the artifact {self.artifact(step)!r} of run {self.run.run_id} is no checkpoint and stays as it is: "
            "save under another step or name, or delete it yourself"
        )

    def uri(self, step: int) -> str:
        """The URI of a step, in MLflow's form for artifacts of runs."""
        return f"runs:/{self.run.run_id}/{self.artifact(step)}"

    def checkpoints(self) -> list[Checkpoint]:
        """List the checkpoints, by step. One with a damaged ref is skipped, with a warning."""
        return [checkpoint for step in self.steps() for checkpoint in self._around_damage(step)]

    def _around_damage(self, step: int) -> list[Checkpoint]:
        """Find a step; return nothing, with a warning, if its ref is damaged."""
        try:
            checkpoint = self.find(step)
        except CorruptError as error:
            _log.warning("step %s of %r is left out of the list: %s", step, self.name, error)
            return []
        return [] if checkpoint is None or checkpoint.is_cut else [checkpoint]

    def get(self, step: int | None) -> Checkpoint:
        """Find a step, by default the latest.

        Raises:
            CheckpointNotFoundError: It does not exist; the message lists the existing ones.
        """
        what = f"{self.name!r} in run {self.run.run_id!r}"
        if step is not None:
            what += f" at step {step}"
            found = self.find(as_step(step))
        else:
            all_of_them = (self.find(each) for each in reversed(self.steps()))
            found = next((each for each in all_of_them if each is not None and not each.is_cut), None)
        if found is None:
            # A listed step may be a user's own file and no checkpoint.
            known = ", ".join(str(each) for each in self.steps()[-10:] if step is not None and each != step)
            raise CheckpointNotFoundError(what, known and f"steps {known}")
        return found


_STEP_FILE = re.compile(rf"(?:step-)?(?P<step>{STEP_TEXT})(?P<suffix>\.arrow|\.tensors)?")


def step_named(name: str, suffix: str) -> int | None:
    """Parse a step from the name of a file of a series, or from a ref's last segment; None for any other name."""
    match = _STEP_FILE.fullmatch(name)
    return step_of_text(match["step"]) if match is not None and match["suffix"] in (None, suffix) else None


def check_name(name: str) -> str:
    """Refuse an invalid name of a series: the name must be one segment of an artifact path."""
    if not isinstance(name, str):
        raise TypeError(f"a checkpoint's name is a text, not {name!r:.200}")
    is_short = name.isprintable() and 0 < len(name.encode()) <= _MAX_NAME_BYTES
    if not is_short or name in (".", "..") or _NOT_IN_NAMES.search(name):
        raise ValueError(
            f"a checkpoint's name has 1 to {_MAX_NAME_BYTES} printable bytes and no '/', '%', '?' or '#', "
            f"and is not {name[:120]!r}"
        )
    return name

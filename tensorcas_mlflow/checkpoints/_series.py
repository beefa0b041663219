"""Where the checkpoints of a run stand: one series a name, one ref a step."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass

from tensorcas_mlflow._home import Home, as_lookup, home_of
from tensorcas_mlflow._steps import as_step
from tensorcas_mlflow.checkpoints._runs import RunRoot
from tensorcas_mlflow.errors import CheckpointNotFoundError
from tensorcas_mlflow.store import Ref, RefTarget, Store

DEFAULT_NAME = "checkpoint"
"""What a series is called that nobody has given a name."""

FOLDER = "checkpoints"
"""Artifact folder of a run in which its checkpoints are shown."""

_FILE = re.compile(r"(?:step-)?(?P<step>-?\d+)(?:\.arrow)?")
_MAX_NAME_BYTES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The checkpoints of one name in one run.

    Where our artifact repository serves the run's artifacts, a checkpoint is the ref of an artifact, so that it is
    listed, downloaded and deleted with the others. Elsewhere it is a ref of the run, and MLflow is given a copy of the
    manifest to show.
    """

    run: RunRoot
    name: str
    home: Home

    @property
    def store(self) -> Store:
        """The store that keeps them."""
        return self.home.store

    def target(self, step: int) -> RefTarget:
        """What the ref of a step says, and by that where it stands."""
        path = None if self.home.path is None else posixpath.join(self.home.path, self.artifact(step))
        return RefTarget(
            path=path if self.home.is_ours else None,
            copy_path=None if self.home.is_ours else path,
            uri=posixpath.join(self.run.artifact_uri, self.artifact(step)) if path is None else None,
            run_id=self.run.run_id,
            step=step,
            name=self.name,
        )

    def artifact(self, step: int) -> str:
        """The artifact path of a step in its run. Padded, so that a listing by name is one by step."""
        return f"{FOLDER}/{self.name}/step-{step:08d}.arrow"

    def uri(self, step: int) -> str:
        """The URI of a step, as MLflow has it for artifacts of runs."""
        return f"runs:/{self.run.run_id}/{self.artifact(step)}"

    def steps(self) -> list[int]:
        """List the steps there are, ascending, going by names alone: `find` tells which are checkpoints."""
        blobs, _ = self.store.backend.list_dir(posixpath.dirname(self.target(0).key))
        matches = (_FILE.fullmatch(posixpath.basename(info.key).removeprefix("@")) for info in blobs)
        return sorted(int(match["step"]) for match in matches if match is not None)

    def find(self, step: int) -> Ref | None:
        """Find a step, or return None. A plain file that a user has logged under such a name is none."""
        ref = self.store.ref(self.target(step).key)
        return ref if ref is not None and ref.kind == "checkpoint" else None

    def ref(self, step: int | None) -> Ref:
        """Find a step, the latest one if none is said.

        Raises:
            CheckpointNotFoundError: It is not there; the message says which are.
        """
        what = f"{self.name!r} in run {self.run.run_id!r}"
        if step is not None:
            what += f" at step {step}"
            found = self.find(as_step(step))
        else:
            refs = (self.find(each) for each in reversed(self.steps()))
            found = next((ref for ref in refs if ref is not None), None)
        if found is None:
            known = ", ".join(map(str, self.steps()[-10:]))
            raise CheckpointNotFoundError(what, known and f"steps {known}")
        return found


def series_of(run: RunRoot, name: str, *, create: bool = False) -> Series:
    """Find the series of a name.

    Args:
        run: Whose.
        name: One segment of an artifact path.
        create: Whether to make a store if there is none.

    Raises:
        ValueError: The name cannot be a file's.
        StoreNotFoundError: There is no store, and none is to be made.
        MlflowException: MLflow keeps the run's artifacts where no store can be.
    """
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES or name in (".", "..") or not name.isprintable() or "/" in name:
        raise ValueError(
            f"a checkpoint's name has 1 to {_MAX_NAME_BYTES} printable bytes and no '/', and is not {name[:120]!r}"
        )
    return Series(run=run, name=name, home=home_of(run.artifact_uri, create=create))


def names_of(run: RunRoot, store_home: Home) -> list[str]:
    """List the names under which a run has checkpoints."""
    probe = Series(run=run, name="x", home=store_home)
    folder = posixpath.dirname(posixpath.dirname(probe.target(0).key))
    backend = store_home.store.backend
    names: set[str] = set()
    for segment in backend.list_dir(folder)[1]:
        # The segment is an encoding of the name; a ref says the name itself.
        for info in backend.list_dir(f"{folder}/{segment}")[0]:
            ref = store_home.store.ref(info.key)
            if ref is not None and ref.name is not None:
                names.add(ref.name)
                break
    return sorted(names)


def plain_folder(series: Series) -> str | None:
    """The folder in which MLflow keeps the copies of a series, if MLflow keeps them in a local one."""
    if series.home.is_ours:
        return None
    lookup = as_lookup(series.run.artifact_uri)
    return None if lookup is None else os.path.join(lookup, FOLDER, series.name)

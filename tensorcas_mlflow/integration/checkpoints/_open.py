"""Opening a checkpoint, model or file by its URI, to read parts of it.

Only runs, models and artifacts of other programs need MLflow. A path of this machine or a URI of a store does not wait
for its import.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.errors import without_secrets
from tensorcas_mlflow.integration._background import saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration.checkpoints._uris import parse_checkpoint_uri
from tensorcas_mlflow.integration.models import open_artifact
from tensorcas_mlflow.layout import DEFAULT_NAME
from tensorcas_mlflow.reader import CheckpointReader

if TYPE_CHECKING:
    from mlflow.entities import Run

    from tensorcas_mlflow.reader import CheckpointDiff, Lineage, Naming, SafeOpen

    CheckpointSource = str | bytes | os.PathLike[str] | Run
    """A thing to read: a run, a URI or a path; see `open_checkpoint`."""

_BACKENDS = ("mmap", "pread")
_RUN_URI = re.compile(r"(?:runs:/+)?(?P<run_id>[0-9a-f]{32})/?")


@translate_errors()
def open_checkpoint(
    source: CheckpointSource | None = None,
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
    framework: str = "np",
    device: Any = None,
    naming: Naming | None = None,
    verify: bool = True,
) -> CheckpointReader:
    """Open a checkpoint, model or file to read parts of it: a tensor, rows of one, a layer, an expert.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        source: A run (its id, ``runs:/<id>`` or a `mlflow.entities.Run`); one checkpoint (its URI
            ``runs:/<id>/checkpoints/…``, the URI or path of its artifact, or a copy of that); a model logged by this
            package (``models:/…``, ``runs:/…``); a file artifact with tensors, from any program
            (``runs:/<id>/model/data/model.pth``), or a folder with one such file; or a path of this machine: a file in
            any format of ``tensorcas import``, or a folder of them. By default the active run, else the last active run
            of this process.
        step: A step of the run; by default the highest. Other sources have no steps, and refuse one.
        name: The series of checkpoints of the run. Other sources have no series, and refuse another name.
        framework: ``np`` for arrays, ``pt`` for PyTorch's tensors, ``flax`` for arrays of JAX.
        device: For ``pt``, the device of the tensors; by default the CPU.
        naming: A rule for the names of layers and experts, for models unknown to the reader.
        verify: Check each chunk against its digest.

    Returns:
        A reader. It is a mapping of names to arrays, and a context manager.

    Raises:
        NotFoundError: There is no such source, or its store is gone. For a path of this machine the error is a
            `FileNotFoundError`, too.
        FormatError: It is damaged, holds no tensors, or belongs to another store.
        BackendError: The storage failed.
        ValueError: Several files of a folder hold tensors, or the source has no such option.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    options: dict[str, Any] = {"framework": framework, "device": device, "naming": naming, "verify": verify}
    saves.wait()
    if _is_run(source):
        from tensorcas_mlflow.integration.checkpoints._series import run_id_of

        source = run_id_of(source)
    if not isinstance(source, str | bytes | os.PathLike | None):
        raise TypeError(f"the source of a checkpoint is a run's id, a URI or a path, not {source!r:.200}")
    text = None if source is None else os.fsdecode(source)
    if text == "":
        raise ValueError("the source is empty: leave it out for the active run, or pass '.' for this folder")
    one = None if text is None else parse_checkpoint_uri(text, step=step, name=name)
    if one is not None:
        run_id, series, step = one
        return _open_step(run_id, series, step, options)
    of_run = None if text is None else _RUN_URI.fullmatch(text)
    if text is None or of_run is not None:
        return _open_step(None if of_run is None else of_run["run_id"], name, step, options)
    if step is not None:
        raise ValueError(f"only runs have steps, and {without_secrets(text)!r} is no run: leave step out")
    if name != DEFAULT_NAME:
        raise ValueError(f"only runs have series, and {without_secrets(text)!r} is no run: leave name out")
    return open_artifact(text, **options)


def _is_run(source: object) -> bool:
    """Tell whether an object is a run of MLflow; without MLflow there is none."""
    entities = sys.modules.get("mlflow.entities")
    return entities is not None and isinstance(source, entities.Run | entities.RunInfo)


def _open_step(run_id: str | None, name: str, step: int | None, options: dict[str, Any]) -> CheckpointReader:
    from tensorcas_mlflow.integration.checkpoints._find import series_of
    from tensorcas_mlflow.integration.checkpoints._series import run_to_read

    return series_of(run_to_read(run_id), name).get(step).reader(**options)


@translate_errors()
def safe_open(
    filename: CheckpointSource,
    framework: str = "np",
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    step: int | None = None,
) -> SafeOpen:
    """Open a checkpoint with the methods of `safetensors.safe_open`, for code written against that interface.

    Args:
        filename: The ``source`` of `open_checkpoint`.
        framework: ``pt``, ``np`` or ``flax``, or another name of these in safetensors; the others are refused.
        device: For ``pt``, the device of the tensors.
        backend: ``mmap`` or ``pread``, with the same effect: tensors are memory-mapped if possible.
        step: A step of the run; by default the highest.

    Returns:
        An object with the methods of `safetensors.safe_open`, over a `CheckpointReader`.

    Raises:
        FileNotFoundError: It is a path of this machine without a file.
        ValueError: There is no such backend or framework.
        TensorCasError: As `open_checkpoint`.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"there is no backend {backend!r}: it is {' or '.join(map(repr, _BACKENDS))}")
    from tensorcas_mlflow.reader import SafeOpen

    return SafeOpen(open_checkpoint(filename, step=step, framework=framework, device=device))


@translate_errors()
def diff(
    before: CheckpointSource | CheckpointReader | tuple[str | Run, int],
    after: CheckpointSource | CheckpointReader | tuple[str | Run, int],
    *,
    values: bool = False,
) -> CheckpointDiff:
    """Compare two checkpoints, steps, models or files, of any runs and stores.

    ```python
    found = tensorcas.diff((run_id, 10), (run_id, 20), values=True)
    found.changed, found.values["lm_head.weight"].relative_norm
    ```

    Tensors with equal digests are equal, so most comparisons read nothing. Only tensors cut into different chunks, and
    tensors of foreign files, are read and hashed. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        before: A reader, the ``source`` of `open_checkpoint`, or a run and a step.
        after: The same.
        values: Read the changed tensors, and measure the changes.

    Returns:
        Names of tensors by kind of change, in the order of the checkpoints; true if anything differs.

    Raises:
        TensorCasError: As `open_checkpoint`.
    """
    from tensorcas_mlflow.reader import diff as diff_readers

    with opened(before) as old, opened(after) as new:
        return diff_readers(old, new, values=values)


@translate_errors()
def lineage(
    source: CheckpointSource | CheckpointReader | None = None,
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
    most: int = 5,
) -> Lineage:
    """Find the relatives of a model among all checkpoints, models and files of its store.

    ```python
    found = tensorcas.lineage("models:/sentiment/3")
    print(found)
    found.parent.label, found.parent.kind
    ```

    Names, runs, experiments and dtypes may differ. The result is a guess from the values of the tensors: it is no
    record of what somebody did. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        source: A reader, or the ``source`` of `open_checkpoint`; it must lie in a store.
        step: A step of the run; by default the highest.
        name: The series of checkpoints of the run.
        most: Maximum number of relatives.

    Returns:
        The relatives, the nearest first; true if there is any.

    Raises:
        ValueError: The source lies in no store.
        TensorCasError: As `open_checkpoint`.
    """
    from tensorcas_mlflow.reader import lineage as lineage_of

    with open_checkpoint(step=step, name=name) if source is None else opened(source, step=step, name=name) as reader:
        return lineage_of(reader, most=most)


def opened(
    source: CheckpointSource | CheckpointReader | tuple[str | Run, int],
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
) -> AbstractContextManager[CheckpointReader]:
    """Open a source for the duration of a block; a given reader stays open.

    Raises:
        ValueError: The source is a reader, and a step or a series is given too.
    """
    if isinstance(source, tuple):
        source, step = source
    if not isinstance(source, CheckpointReader):
        return open_checkpoint(source, step=step, name=name)
    if step is not None or name != DEFAULT_NAME:
        raise ValueError("a reader already belongs to one checkpoint: leave step and name out")
    return nullcontext(source)

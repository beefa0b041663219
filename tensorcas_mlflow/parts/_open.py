"""Opening a checkpoint, model or file to read parts of it."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlflow.entities import Run, RunInfo

from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._steps import DEFAULT_NAME
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.checkpoints._background import saves
from tensorcas_mlflow.checkpoints._find import series_of
from tensorcas_mlflow.checkpoints._runs import run_id_of, run_to_read
from tensorcas_mlflow.checkpoints._series import parse_checkpoint_uri
from tensorcas_mlflow.flavor._open import open_artifact
from tensorcas_mlflow.reader import CheckpointDiff, CheckpointReader, Naming, SafeOpen
from tensorcas_mlflow.reader import diff as diff_readers

_BACKENDS = ("mmap", "pread")
_RUN_URI = re.compile(r"(?:runs:/+)?(?P<run_id>[0-9a-f]{32})/?")


@translate_errors()
def open_checkpoint(
    uri: str | bytes | os.PathLike[str] | Run | None = None,
    step: int | None = None,
    *,
    name: str = DEFAULT_NAME,
    framework: str = "np",
    device: Any = None,
    naming: Naming | None = None,
    verify: bool = True,
) -> CheckpointReader:
    """Open a checkpoint, of which any part can be read alone: a tensor, rows of one, a layer, an expert.

    Args:
        uri: A run (its id, ``runs:/<id>`` or a `mlflow.entities.Run`), of whose checkpoints ``step`` says which; the
            URI of one checkpoint; a model that this flavor has logged (``models:/…``, ``runs:/…``); a file artifact
            that holds tensors, whoever has logged it (``runs:/<id>/model/data/model.pth``), or a folder with one such
            file; or a path of this machine: a file of any format that ``tensorcas import`` reads, or a folder of them.
            The active run unless given, or else the last one that was active in this process.
        step: Of a run: the latest unless given.
        name: Of a run: which series of checkpoints. Anything else has no series, and refuses another name.
        framework: ``np`` for arrays, ``pt`` for PyTorch's tensors.
        device: For ``pt``, where tensors go; the CPU unless given.
        naming: How layers and experts are named, where that cannot be told; see `Naming`.
        verify: Whether to check each chunk against its digest.

    Returns:
        A reader, which is a context manager; its methods raise `TensorCasError`.

    Raises:
        mlflow.exceptions.MlflowException: There is no such thing, its store is gone or another one, it is damaged, or
            holds no tensors. Of a path of this machine that is not there it is a FileNotFoundError, too.
    """
    options: dict[str, Any] = {"framework": framework, "device": device, "naming": naming, "verify": verify}
    saves.wait()
    if isinstance(uri, Run | RunInfo):
        uri = run_id_of(uri)
    if not isinstance(uri, str | bytes | os.PathLike | None):
        raise TypeError(f"a checkpoint is opened by a run's id, a URI or a path, and not by {uri!r:.200}")
    text = None if uri is None else os.fsdecode(uri)
    if text == "":
        raise ValueError("an empty text names nothing: leave it out for the active run, or say '.' for this folder")
    one = None if text is None else parse_checkpoint_uri(text, step=step, name=name)
    if one is not None:
        run_id, series, step = one
        return series_of(run_to_read(run_id), series).get(step).reader(**options)
    of_run = None if text is None else _RUN_URI.fullmatch(text)
    if text is None or of_run is not None:
        run = run_to_read(None if of_run is None else of_run["run_id"])
        return series_of(run, name).get(step).reader(**options)
    if step is not None:
        raise ValueError(f"a step is one of a run, and {without_secrets(text)!r} is none: leave step out")
    if name != DEFAULT_NAME:
        raise ValueError(f"a series is one of a run, and {without_secrets(text)!r} is none: leave name out")
    return open_artifact(text, **options)


@translate_errors()
def safe_open(
    filename: str | bytes | os.PathLike[str],
    framework: str = "np",
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    step: int | None = None,
) -> SafeOpen:
    """Open a checkpoint with the methods of `safetensors.safe_open`, for code that was written for that.

    Args:
        filename: What `open_checkpoint` takes for its first argument.
        framework: ``pt`` or ``np``.
        device: For ``pt``, where tensors go.
        backend: ``mmap`` or ``pread``, which are the same here: what can be mapped is.
        step: Of a run: the latest unless given.

    Raises:
        mlflow.exceptions.MlflowException: See `open_checkpoint`.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"there is no backend {backend!r}: it is {' or '.join(map(repr, _BACKENDS))}")
    return SafeOpen(open_checkpoint(filename, step, framework=framework, device=device))


What = str | os.PathLike[str] | CheckpointReader | tuple[str, int]
"""A reader, what `open_checkpoint` takes for its first argument, or that and a step."""


@translate_errors()
def diff(before: What, after: What, *, values: bool = False) -> CheckpointDiff:
    """Compare two checkpoints, steps, models or files, of one run or of several, of one store or of several.

    ```python
    found = mlflow.tensorcas.diff((run_id, 10), (run_id, 20), values=True)
    found.changed, found.values["lm_head.weight"].relative_norm
    ```

    Tensors are equal if their digests are, which are known without reading them. They are read to tell only where the
    two are cut into different chunks, or one is a foreign file.

    Args:
        before: The first.
        after: The second.
        values: Whether to read what has changed, and say by how much.

    Raises:
        mlflow.exceptions.MlflowException: One of them is not there or damaged.
    """
    with opened(before) as old, opened(after) as new:
        return diff_readers(old, new, values=values)


def opened(what: What) -> AbstractContextManager[CheckpointReader]:
    """Open something for the time of a block; a reader stays open."""
    if isinstance(what, CheckpointReader):
        return nullcontext(what)
    return open_checkpoint(*what) if isinstance(what, tuple) else open_checkpoint(what)

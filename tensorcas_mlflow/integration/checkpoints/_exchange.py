"""Import and export of a run's checkpoints as files of foreign formats."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import mlflow
from mlflow.entities import Run

from tensorcas_mlflow import reader as reading
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.progress import ByteProgress
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.file_formats import Written, open_listing
from tensorcas_mlflow.integration._background import saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration.checkpoints._find import series_of
from tensorcas_mlflow.integration.checkpoints._log import CheckpointInfo, Finish
from tensorcas_mlflow.integration.checkpoints._open import opened
from tensorcas_mlflow.integration.checkpoints._series import run_to_write
from tensorcas_mlflow.layout import DEFAULT_NAME, as_step
from tensorcas_mlflow.reader import CheckpointReader
from tensorcas_mlflow.store import Policy

if TYPE_CHECKING:
    from tensorcas_mlflow.integration.checkpoints._open import CheckpointSource


@translate_errors()
def import_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int,
    name: str = DEFAULT_NAME,
    run_id: str | Run | None = None,
    format: str | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    policy: str | None = None,
    progress: ByteProgress | None = None,
) -> CheckpointInfo:
    """Log the tensors of a foreign file, or of a folder of files that belong together, as a step of a run.

    The tensors are read from the memory-mapped file, so memory stays bounded, and nothing is unpickled. Chunks already
    in the store are not stored again. The checkpoint has no model's structure: fill a live model with it
    (`load_checkpoint` with ``into=``, `CheckpointReader.load_into`), or load the weights only. Errors are also
    `mlflow.exceptions.MlflowException`.

    Args:
        path: A file, or a folder such as a Hugging Face snapshot; it must not change meanwhile.
        step: Any whole number of 64 bits.
        name: The series of checkpoints in the run.
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else a new one.
        format: The format of the file, such as ``safetensors`` or ``torch``; by default it is recognised.
        allow_left_out: Import the file without unsupported tensors, such as quantized ones.
        overwrite: Replace a checkpoint of this step, atomically.
        policy: As for `log_checkpoint`.
        progress: Called with the bytes done and the bytes in total. A byte counts once for each pass over it.

    Returns:
        The checkpoint's URI and figures.

    Raises:
        MalformedFileError: The file violates its format.
        CheckpointExistsError: The step is there and ``overwrite`` is False; it is untouched.
        ValueError: Some tensors cannot be stored, and ``allow_left_out`` is False.
        BackendError: The file cannot be read, or the storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    began = time.perf_counter()
    saves.wait()
    step = as_step(step)
    chosen = Policy.of(policy)
    series = series_of(run_to_write(run_id), name, create=True)
    if not overwrite and series.has(step):
        raise CheckpointExistsError(f"{name!r} of run {series.run.run_id} at step {step}")
    tracking_uri = mlflow.get_tracking_uri()
    prepared = reading.prepare_import(
        open_listing(path, format=format), allow_left_out=allow_left_out, progress=progress
    )
    saving = series.begin(
        step,
        prepared.arrays,
        flavor=prepared.flavor,
        cuts=None,
        overwrite=overwrite,
        policy=chosen,
        metadata=prepared.metadata,
        left_out=prepared.left_out,
        watch=prepared.watch,
    )
    prepared.hashed(saving.n_new_bytes or 0)
    info = Finish(
        series=series,
        saving=saving,
        step=step,
        n_tensors=len(prepared.arrays),
        keep=None,
        log_metrics=config.logs_metrics(),
        tracking_uri=tracking_uri,
        began=began,
    )()
    prepared.stored()
    return info


@translate_errors()
def export_checkpoint(
    source: CheckpointSource | CheckpointReader,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
    format: str | None = None,
    match: str | None = None,
    shard_bytes: int | None = None,
    n_partitions: int | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    progress: ByteProgress | None = None,
) -> Written:
    """Write the tensors of a checkpoint, model or file to a file or folder of another format.

    The tensors are written in one pass with some 16 MiB of memory, bit for bit, and each chunk is checked. The skeleton
    of a model is left out; `export_model` writes whole models. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        source: A reader, or the ``source`` of `open_checkpoint`.
        path: The file; or the folder, with ``shard_bytes`` and for ``serverlessllm``. It appears complete and durable,
            or not at all.
        step: A step of the run; by default the highest.
        name: The series of checkpoints of the run.
        format: ``safetensors``, ``torch``, ``npz``, ``bintensors`` or ``serverlessllm``; by default the ending of
            ``path`` tells.
        match: Write only tensors with names that match this pattern.
        shard_bytes: For ``safetensors``: the most bytes of tensors in one file. The index for `transformers` is written
            beside the files.
        n_partitions: For ``serverlessllm``: the number of files.
        allow_left_out: Write the file without unsupported tensors, such as quantized ones.
        overwrite: Replace an earlier export at this path.
        progress: Called with the bytes written and the bytes in total.

    Returns:
        A summary of the written files.

    Raises:
        NotFoundError: There is no such source.
        FormatError: The checkpoint is damaged.
        ConflictError: Something is there already.
        ValueError: The format has no such dtype, an option does not fit, or ``allow_left_out`` is False and tensors
            would be left out. Nothing is written.
        BackendError: The storage failed, or the file cannot be written.
    """
    with opened(source, step=step, name=name) as reader:
        plan = reading.plan_export(
            reader,
            path,
            format=format,
            match=match,
            shard_bytes=shard_bytes,
            partitions=n_partitions,
            allow_left_out=allow_left_out,
            overwrite=overwrite,
        )
        return plan.execute(progress=progress)

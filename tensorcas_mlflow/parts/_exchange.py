"""Checkpoints of runs from files of other formats, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import mlflow

from tensorcas_mlflow import config, exchange
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._steps import DEFAULT_NAME, as_step
from tensorcas_mlflow.checkpoints._background import saves
from tensorcas_mlflow.checkpoints._find import series_of
from tensorcas_mlflow.checkpoints._log import CheckpointInfo, finish_now
from tensorcas_mlflow.checkpoints._runs import run_to_write
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.file_formats import Written, open_listing
from tensorcas_mlflow.parts._open import What, opened
from tensorcas_mlflow.store import Policy

Progress = Callable[[int, int], None]


@translate_errors()
def import_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int,
    name: str = DEFAULT_NAME,
    run_id: str | None = None,
    format: str | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    policy: str | None = None,
    progress: Progress | None = None,
) -> CheckpointInfo:
    """Log the tensors of a file of another format, or of a folder of files that belong together, as a step of a run.

    They are read from the mapped file, so memory stays bounded, and nothing is unpickled. What the store holds already,
    from wherever, is not stored again. The checkpoint has no model's structure: fill a live model with it
    (`load_checkpoint` with ``into=``, `CheckpointReader.load_into`), or take the weights only.

    Args:
        path: A file, or a folder such as a snapshot from Hugging Face; it must not change meanwhile.
        step: Any whole number.
        name: What the series of checkpoints is called in the run.
        run_id: The run; the active one unless given, and if there is none a new one.
        format: One of `tensorcas_mlflow.file_formats.FORMATS_IN`, such as ``safetensors`` or ``torch``; any unless
            given.
        allow_left_out: Whether to import a file of which some tensors cannot be stored (quantized ones), without them.
        overwrite: Whether a checkpoint of this step may be replaced.
        policy: As for `log_checkpoint`.
        progress: Called now and then with how much is done, and how much there is to do, in bytes, each of which counts
            once for each time that it is gone through.

    Raises:
        mlflow.exceptions.MlflowException: The file is not what its format allows, some of its tensors cannot be stored,
            the step is there already, or the storage failed.
    """
    began = time.perf_counter()
    saves.wait()
    step = as_step(step)
    chosen = Policy.of(policy)
    series = series_of(run_to_write(run_id), name, create=True)
    if not overwrite and series.has(step):
        raise CheckpointExistsError(f"{name!r} of run {series.run.run_id} at step {step}")
    tracking_uri = mlflow.get_tracking_uri()
    prepared = exchange.prepare_import(
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
    info = finish_now(
        series,
        saving,
        step=step,
        n_tensors=len(prepared.arrays),
        log_metrics=config.logs_metrics(),
        tracking_uri=tracking_uri,
        began=began,
    )
    prepared.stored()
    return info


@translate_errors()
def export_checkpoint(
    checkpoint: What,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    match: str | None = None,
    shard_bytes: int | None = None,
    partitions: int | None = None,
    allow_left_out: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the tensors of a checkpoint, model or file into a file or folder of another format.

    They are written in one pass with some 16 MiB of memory, bit for bit, and each chunk is checked. ``out`` appears
    when it is complete and durable, or not at all. What is no tensor is left out; `export_model` takes whole models
    along.

    Args:
        checkpoint: A reader, what `open_checkpoint` takes for its first argument, or that and a step.
        out: The file; or the folder, with ``shard_bytes`` and for ``serverlessllm``.
        format: ``safetensors``, ``torch``, ``npz``, ``bintensors`` or ``serverlessllm``; unless given, as ``out`` ends.
        match: Write only tensors whose names match this pattern.
        shard_bytes: For ``safetensors``: write files of so many bytes of tensors at most, and the index that
            `transformers` reads.
        partitions: For ``serverlessllm``: how many files.
        allow_left_out: Whether to write a file of which some tensors cannot be read (quantized ones), without them.
        overwrite: Whether what is there is replaced, if such a call has written it.
        progress: Called now and then with the bytes that are written, and those there are to write.

    Raises:
        mlflow.exceptions.MlflowException: There is no such checkpoint, it is damaged, some of its tensors cannot be
            read, the format has no such dtype, something is there already, or it cannot be written.
    """
    with opened(checkpoint) as reader:
        return exchange.export_checkpoint(
            reader,
            out,
            format=format,
            match=match,
            shard_bytes=shard_bytes,
            partitions=partitions,
            allow_left_out=allow_left_out,
            overwrite=overwrite,
            progress=progress,
        )

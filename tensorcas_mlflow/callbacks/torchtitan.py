"""Checkpoints of torchtitan in the store, through a mixin for its ``CheckpointManager``.

```python
from torchtitan.components.checkpoint import CheckpointManager
from tensorcas_mlflow.callbacks.torchtitan import TensorCasCheckpoints

class Manager(TensorCasCheckpoints, CheckpointManager):
    tensorcas = {"run_id": run_id, "keep": Keep(last=3)}

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # torchtitan builds the class that declares its configuration
        pass
```

The manager calls ``dcp_save`` and ``dcp_load`` with a folder for each step. The mixin replaces both: the state becomes
a step of the run, and the folder gets one small file that names it. So the manager finds, loads and purges its folders
as before. The module imports torch, and no torchtitan.
"""

from __future__ import annotations

import gc
import json
import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter
from tensorcas_mlflow.errors import FormatError

__all__ = ["TensorCasCheckpoints"]

_MARK = ".metadata"
"""Name of the file by which the manager knows a finished checkpoint."""
_MOST_MARK_BYTES = 1 << 16
_KIND = "tensorcas checkpoint"


class TensorCasCheckpoints:
    """Mixin for ``CheckpointManager`` of torchtitan, before that class: ``dcp_save`` and ``dcp_load`` use the store.

    All modes of saving work: ``disabled``, ``async`` and ``async_with_pinned_mem``. Checkpoints in the format of
    Hugging Face are written and read as before.
    """

    tensorcas: Mapping[str, Any] = {}
    """Arguments for `TensorCasStorageWriter` besides the step, such as ``run_id``, ``name`` and ``keep``."""

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
        **others: Any,
    ) -> Any:
        """Save a state as the step that the folder's name ends with.

        Args:
            state_dict: The state.
            checkpoint_id: The folder of the step, such as ``outputs/checkpoint/step-100``.
            async_mode: The mode of saving, an enumeration with texts as values.
            enable_garbage_collection: Whether to collect Python's garbage afterwards: torchtitan switches the automatic
                collection off.
            to_hf: Whether to write the format of Hugging Face, without the store.
            others: Passed on with ``to_hf``.

        Returns:
            A future, or what `torch.distributed.checkpoint.async_save` returns; None if the step is saved.

        Raises:
            ValueError: The folder's name has no step.
        """
        manager: Any = super()
        if to_hf:
            return manager.dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf, **others)
        writer = _Writer(checkpoint_id, self.tensorcas)
        mode = str(getattr(async_mode, "value", async_mode))
        with torch.no_grad():
            if mode == "disabled":
                save(state_dict, storage_writer=writer)
                if enable_garbage_collection:
                    gc.collect(1)
                return None
            group = getattr(self, "pg", None) or getattr(self, "async_save_pg", None)
            if mode == "async":
                return async_save(state_dict, storage_writer=writer, process_group=group)
            return async_save(
                state_dict,
                storage_writer=writer,
                process_group=group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=getattr(self, "stager", None),
            )

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool = False, *others: Any, **named: Any
    ) -> None:
        """Load the step that the folder's file names; any other folder is loaded as before.

        Raises:
            FormatError: The file is malformed.
            NotFoundError: The step is gone.
        """
        said = None if from_hf else _read_mark(checkpoint_id)
        if said is None:
            manager: Any = super()
            manager.dcp_load(state_dict, checkpoint_id, from_hf, *others, **named)
            return
        load(state_dict, storage_reader=TensorCasStorageReader(**said))
        # Tensors that a hook of the model made for its state dict are copies, and `load` has filled the copies.
        model = getattr(self, "states", {}).get("model")
        if model is not None:
            model.load_state_dict(state_dict)


class _Writer(TensorCasStorageWriter):
    """Writer that leaves a file with the name of the step in the manager's folder."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        found = re.fullmatch(r".*?(\d+)", os.path.basename(os.path.normpath(folder)))
        if found is None:
            raise ValueError(f"the name of the folder {folder!r} does not end with a step, as in step-100")
        super().__init__(step=int(found[1]), **options)
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        assert self.info is not None
        said = {"kind": _KIND, "run_id": self.info.run_id, "name": self.info.name, "step": self.info.step}
        _write_mark(self._folder, json.dumps(said))


def _is_remote(folder: str) -> bool:
    """Tell whether torchtitan takes a folder for one of a remote file system, which it reads by fsspec."""
    return "://" in folder


def _write_mark(folder: str, said: str) -> None:
    if _is_remote(folder):
        from fsspec.core import url_to_fs  # torch needs it, too

        files, path = url_to_fs(folder)
        files.makedirs(path, exist_ok=True)
        files.pipe_file(posixpath.join(path, _MARK), said.encode())
        return
    os.makedirs(folder, exist_ok=True)
    draft = Path(folder, f"{_MARK}.draft")
    draft.write_text(said, encoding="utf-8")
    draft.replace(Path(folder, _MARK))


def _read_mark(folder: str) -> dict[str, Any] | None:
    """Return the arguments for a reader; None for a folder that the store has no part in.

    Raises:
        FormatError: The file is cut short, or names no step.
    """
    path = posixpath.join(folder, _MARK)
    try:
        if _is_remote(folder):
            from fsspec.core import url_to_fs

            files, inner = url_to_fs(path)
            data = files.cat_file(inner, start=0, end=_MOST_MARK_BYTES)
        else:
            with open(path, "rb") as file:
                data = file.read(_MOST_MARK_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not data.startswith(b"{"):  # the manager's own file is a pickle
        return None
    try:
        said = json.loads(data)
    except ValueError:
        raise FormatError(f"{path} is cut short: the step was not saved whole, or the file is damaged") from None
    if said.get("kind") != _KIND:
        return None
    wanted = {"run_id": str, "name": str, "step": int}
    if any(type(said.get(key)) is not kind for key, kind in wanted.items()):
        raise FormatError(f"{path} does not name a run, a series and a step")
    return {key: said[key] for key in wanted}

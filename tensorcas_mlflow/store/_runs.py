"""The store of one run: steps in, steps out, without MLflow."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from tensorcas_mlflow.adapter import Array, ModelAdapter
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError, CheckpointNotFoundError
from tensorcas_mlflow.store._records import Ref, RefTarget
from tensorcas_mlflow.store._store import Store


class TensorCasStore:
    """Checkpoints of one run, by step, in a store that any number of runs and processes share.

    ```python
    with TensorCasStore("checkpoints", run_id="run-1", adapter=PyTorchAdapter()) as store:
        store.save(model, step=1)
        model = store.load(step=1)
    ```
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run_id: str,
        adapter: ModelAdapter,
        *,
        chunk_size: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Open the store at a root, or make one.

        Args:
            root: A path or a store URI.
            run_id: Any text but the empty one; it is never used as a path.
            adapter: Takes the run's models apart and puts them together.
            chunk_size: Chunk size in bytes of a store that is made; an existing store keeps its own.

        Raises:
            NewerFormatError: A later release made the store.
            ConflictError: There is none at the root, and none can be made because one lies above or below.
            ValueError: The run id is empty or the root is of a kind no store can be kept at.
        """
        if not run_id:
            raise ValueError("a run id must not be empty")
        self.run_id = run_id
        self.adapter = adapter
        self.store = Store.open(root, create=True, chunk_bytes=chunk_size)

    def __enter__(self) -> TensorCasStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open between calls, so there is nothing to close."""

    def save(self, model: Any, step: int) -> Ref:
        """Save a model as a step of this run. When this returns it is on disk.

        Args:
            model: What the adapter takes.
            step: Any whole number.

        Raises:
            CheckpointExistsError: The step is saved already; it is untouched.
            AdapterError: The model cannot be taken apart.
            BackendError: The storage failed; no step is lost.
        """
        target = self._target(step)
        if self.store.ref(target.key) is not None:
            raise CheckpointExistsError(f"step {step} of run {self.run_id!r}")
        tensors = self.adapter.extract(model)
        cuts = getattr(self.adapter, "cuts", None)
        with self.store.write_checkpoint(
            tensors, flavor=getattr(self.adapter, "name", None), cuts=cuts(tensors) if cuts else None
        ) as save:
            return save.commit(target, replace=False)

    def load(self, step: int, original: Any = None) -> Any:
        """Load a step.

        Args:
            step: Of this run.
            original: A live model to fill; see `Adapter.reconstruct`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            CorruptChunkError: What is stored is damaged.
            AdapterError: It does not fit ``original``, or needs code that is not here.
        """
        manifest = self.store.manifest(self._ref(step))
        name = getattr(self.adapter, "name", manifest.flavor)
        if name != manifest.flavor:
            raise AdapterError(
                str(name), f"step {step} of run {self.run_id!r} was saved by the adapter {manifest.flavor}"
            )
        return self.adapter.reconstruct(self.store.read_tensors(manifest), original)

    def load_tensors(self, step: int) -> dict[str, Array]:
        """Load a step as arrays by name, the skeleton among them; raises as `load` does."""
        return self.store.read_tensors(self.store.manifest(self._ref(step)))

    def list_checkpoints(self) -> list[int]:
        """List the steps of this run, ascending."""
        prefix = self._target(0).key.rpartition("/")[0]
        blobs, _ = self.store.backend.list_dir(prefix)
        return sorted(int(info.key.rpartition("@")[2]) for info in blobs)

    def delete_checkpoint(self, step: int) -> None:
        """Drop a step; none there is no error. The next collection removes what only it needed."""
        self.store.backend.delete(self._target(step).key)

    def _ref(self, step: int) -> Ref:
        ref = self.store.ref(self._target(step).key)
        if ref is None:
            known = ", ".join(map(str, self.list_checkpoints()[-10:]))
            raise CheckpointNotFoundError(f"for step {step} of run {self.run_id!r}", known and f"steps {known}")
        return ref

    def _target(self, step: int) -> RefTarget:
        if type(step) is not int and not hasattr(step, "__index__"):
            raise ValueError(f"a step is a whole number, not {step!r}")
        return RefTarget(run_id=self.run_id, step=int(step))

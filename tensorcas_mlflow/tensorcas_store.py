"""Checkpoints of one run in a store, without MLflow.

A method imports what it needs itself: a program that opens a step does not wait for savers and collectors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tensorcas_mlflow.adapter import Adapter, Array, ModelAdapter, adapter_for, adapter_named, take_apart
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.base.text import is_unicode
from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError, CheckpointNotFoundError, TensorNotFoundError
from tensorcas_mlflow.layout import Ref, RefTarget, as_step
from tensorcas_mlflow.maintenance import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE
from tensorcas_mlflow.store import Store

if TYPE_CHECKING:
    from tensorcas_mlflow.base.progress import ByteProgress
    from tensorcas_mlflow.file_formats import Written
    from tensorcas_mlflow.maintenance import GcReport, RunStats, StoreStats
    from tensorcas_mlflow.reader import CheckpointReader, Naming


class TensorCasStore:
    """Checkpoints of one run, by step, in a store shared by any number of runs and processes.

    ```python
    with TensorCasStore("checkpoints", run_id="run-1") as store:
        store.save(model, step=1, metrics={"loss": 0.3})
        model = store.load(step=1)
        store.load(step=1, into=model)
    ```

    The environment variable TENSORCAS_THREADS limits the threads of the whole process.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run_id: str,
        adapter: ModelAdapter | None = None,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Open the store at a root, or create one.

        Args:
            root: A path or a store URI.
            run_id: Any text but the empty one; the store never uses it as a path.
            adapter: The adapter for the run's models. By default an installed adapter is chosen: for a save by the
                model, for a load by the adapter of the save.
            chunk_bytes: Chunk size for a new store; an existing store keeps its own.

        Raises:
            NewerFormatError: A later release created the store.
            ConflictError: There is no store at the root, and one above or below prevents a new one.
            ValueError: The run id is empty or cannot be encoded, or no store can be kept at such a root.
            TypeError: The run id is no text.
        """
        if not isinstance(run_id, str):
            raise TypeError(f"a run id is a text, not {run_id!r:.200}")
        if not run_id or not is_unicode(run_id, "surrogateescape"):
            raise ValueError(f"a run id must not be empty, and be Unicode or the name of a file: {run_id!r:.200}")
        self.run_id = run_id
        self.adapter = adapter
        self.store = Store.open(root, create=True, chunk_bytes=chunk_bytes)
        self._last: int | None = None
        """Greatest step that this object saved."""

    def __enter__(self) -> TensorCasStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the use of the store. Nothing stays open between calls, so this frees nothing and may be repeated."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TensorCasStore has a store open and cannot be pickled: send its root and run id, and make it anew there"
        )

    def __repr__(self) -> str:
        return f"TensorCasStore({self.store.uri!r}, {self.run_id!r})"

    # --- steps in

    def save(
        self,
        model: Any,
        step: int,
        *,
        parent_step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        policy: str | None = None,
    ) -> Ref:
        """Save a model as a step of this run. The step is durable when this returns.

        Args:
            model: A model supported by the adapter.
            step: Any whole number of 64 bits.
            parent_step: The step before this training began; it is only recorded.
            metrics: Figures to keep with the step, for `best`.
            overwrite: Replace an existing step. The replacement is atomic: a reader has the old or the new one.
            policy: ``fast`` stores tensors as they are, ``balanced`` compresses at the speed of a disk, ``small``
                spends more time on fewer bytes. The loaded values are the same. None takes TENSORCAS_POLICY, by default
                ``balanced``.

        Returns:
            The ref of the checkpoint.

        Raises:
            CheckpointExistsError: The step is there and ``overwrite`` is False; it is untouched.
            AdapterError: The model cannot be taken apart.
            BackendError: The storage failed; no step is lost.
            ValueError: There is no such policy, or the step or a metric is no number.
        """
        from tensorcas_mlflow.store import Policy

        chosen = Policy.of(policy)
        target = self._target(step, parent_step=parent_step, metrics=metrics)
        steps = self._refuse_step(step) if not overwrite else None
        adapter = adapter_for(model) if self.adapter is None else self.adapter
        tensors = take_apart(adapter, model)
        cuts, left_out = getattr(adapter, "cuts", None), getattr(adapter, "left_out", None)
        with self.store.write_checkpoint(
            tensors,
            flavor=getattr(adapter, "name", None),
            cuts=cuts(tensors) if cuts else None,
            left_out=left_out(tensors) if left_out else None,
            series=target.key.rpartition("/")[0],
            earlier=partial(self.store.manifest_before, target, steps),
            policy=chosen,
        ) as save:
            ref = save.commit(target, replace=overwrite)
        self._last = as_step(step) if self._last is None else max(self._last, as_step(step))
        return ref

    def import_file(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        format: str | None = None,
        allow_left_out: bool = False,
        overwrite: bool = False,
        policy: str | None = None,
        progress: ByteProgress | None = None,
    ) -> Ref:
        """Save the tensors of a foreign file, or of a folder of files that belong together, as a step.

        Args:
            path: A file such as ``model.safetensors``, or a folder: shards, a Hugging Face snapshot, DCP,
                ServerlessLLM. It must not change meanwhile. Nothing is unpickled.
            step: Any whole number of 64 bits.
            format: The format of the file, such as ``safetensors`` or ``torch``; by default it is recognised.
            allow_left_out: Import the file without unsupported tensors, such as quantized ones.
            overwrite: Replace an existing step.
            policy: As for `save`.
            progress: Called with the bytes done and the bytes in total. A byte counts once for each pass over it.

        Returns:
            The ref of the checkpoint.

        Raises:
            MalformedFileError: The file violates its format.
            CheckpointExistsError: The step is there and ``overwrite`` is False; it is untouched.
            ValueError: Some tensors cannot be stored, and ``allow_left_out`` is False; or there is no such policy.
            BackendError: The file cannot be read, or the store cannot be written.
        """
        from tensorcas_mlflow.file_formats import open_listing
        from tensorcas_mlflow.reader import import_checkpoint
        from tensorcas_mlflow.store import Policy

        return import_checkpoint(
            self.store,
            open_listing(path, format=format),
            self._target(step),
            allow_left_out=allow_left_out,
            overwrite=overwrite,
            policy=Policy.of(policy),
            progress=progress,
        )

    # --- steps out

    def export_file(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        format: str | None = None,
        match: str | None = None,
        shard_bytes: int | None = None,
        n_partitions: int | None = None,
        allow_left_out: bool = False,
        overwrite: bool = False,
        progress: ByteProgress | None = None,
    ) -> Written:
        """Write the tensors of a step to a file or folder of another format, bit for bit, in one pass.

        Args:
            path: The file; or the folder, with ``shard_bytes`` and for ``serverlessllm``. It appears complete and
                durable, or not at all.
            step: A step of this run; by default the highest.
            format: ``safetensors``, ``torch``, ``npz``, ``bintensors`` or ``serverlessllm``; by default the ending of
                ``path`` tells.
            match: Write only tensors with names that match this pattern.
            shard_bytes: For ``safetensors``: the most bytes of tensors in one file.
            n_partitions: For ``serverlessllm``: the number of files.
            allow_left_out: Write the file without unsupported tensors, such as quantized ones.
            overwrite: Replace an earlier export at this path.
            progress: Called with the bytes written and the bytes in total.

        Returns:
            A summary of the written files.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ValueError: The format has no such dtype, or an option does not fit; nothing is written.
            ConflictError: Something is there already.
            TensorCasError: The checkpoint is damaged, or the file cannot be written.
        """
        from tensorcas_mlflow.reader import plan_export

        plan = plan_export(
            self.open(step),
            path,
            format=format,
            match=match,
            shard_bytes=shard_bytes,
            partitions=n_partitions,
            allow_left_out=allow_left_out,
            overwrite=overwrite,
        )
        return plan.execute(progress=progress)

    def load(
        self,
        step: int | None = None,
        original: Any = None,
        *,
        into: Any = None,
        precheck: bool = True,
        **options: Any,
    ) -> Any:
        """Load a step as a new model, or into a live one.

        Args:
            step: A step of this run; by default the highest.
            original: The same as ``into``.
            into: A live model to fill in place, without unpickling. Everything is checked before the model changes:
                names, dtypes, shapes, and the stored bytes of all tensors. A load of at most 32 MiB reads the tensors
                into new memory first. A larger one reads most tensors of a PyTorch model straight into its memory; if
                the disk fails after the check, the model is filled in part, and a note of the error says so. A module
                on the meta device is refused.
            precheck: With ``into``, check the stored bytes of all tensors before the model changes. False reads them
                once, and checks each chunk as it is read: damage then leaves a model of more than 32 MiB filled in
                part, and a note of the error says so.
            options: Options of the adapter's framework, such as ``device``; see `Adapter.options`.

        Returns:
            The model; ``into``, if it was given.

        Raises:
            CheckpointNotFoundError: There is no such step.
            CorruptChunkError: A chunk is damaged.
            AdapterError: The tensors do not fit the live model, another adapter saved them, code of the model is not
                here, or the model needs a pickle and MLFLOW_ALLOW_MODEL_CODE_EXECUTION or
                MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids it.
            ValueError: The adapter has no such option, or ``into`` and ``original`` are two objects.
        """
        if original is None:
            original = into
        elif into is not None and into is not original:
            raise ValueError("into and original are two names of one argument, and two objects were given: pass one")
        from tensorcas_mlflow.reader import StoreReads, given, rebuild

        ref = self._ref(step)
        manifest = self.store.manifest(ref)
        adapter = self._adapter_of(ref)
        read = StoreReads(self.store, manifest)
        wanted = given(**options)
        if isinstance(adapter, Adapter):
            return rebuild(adapter, manifest, read, into=original, precheck=precheck, options=wanted)
        unknown = wanted.keys() - getattr(adapter, "options", frozenset())
        if unknown:
            raise ValueError(f"the adapter {ref.flavor} has no option {', '.join(sorted(unknown))}")
        return adapter.reconstruct(read(), original, **wanted)

    def load_tensors(self, step: int | None = None) -> dict[str, Array]:
        """Load a step as arrays by name, in order, the skeleton among them; raises as `load`. Nothing is unpickled.

        Raises:
            TensorNotFoundError: Numpy has no dtype for a tensor; `load` returns it.
        """
        manifest = self.store.manifest(self._ref(step))
        for name, kind in manifest.left_out.items():
            if name in manifest.by_name:
                raise TensorNotFoundError(name, kind)
        return self.store.read_tensors(manifest)

    def open(
        self,
        step: int | None = None,
        *,
        framework: str = "np",
        device: Any = None,
        naming: Naming | None = None,
        verify: bool = True,
    ) -> CheckpointReader:
        """Open a step to read parts of it: a tensor, rows of one, a layer, an expert.

        Args:
            step: A step of this run; by default the highest.
            framework: ``np`` for arrays, ``pt`` for PyTorch's tensors.
            device: For ``pt``, the device of the tensors; by default the CPU.
            naming: A rule for the names of layers and experts, for models unknown to the reader.
            verify: Check each chunk against its digest.

        Returns:
            A reader. It is a mapping of names to arrays, and a context manager.

        Raises:
            CheckpointNotFoundError: There is no such step.
            CorruptError: The step's manifest is damaged.
        """
        from tensorcas_mlflow.reader import open_ref

        return open_ref(self.store, self._ref(step), framework=framework, device=device, naming=naming, verify=verify)

    def _refuse_step(self, step: int) -> list[int] | None:
        """Refuse to save a step that exists; return all steps if they were listed."""
        steps = None
        if not self.store.backend.is_remote:
            exists = self.store.ref(self._target(step).key) is not None
        elif self._last is not None and as_step(step) > self._last:
            exists = False  # the next step is hardly there, a look is a request, and the commit would refuse it as well
        else:
            steps = self._steps()  # the search for the step before needs them too
            exists = as_step(step) in steps
        if exists:
            raise CheckpointExistsError(f"step {step} of run {self.run_id!r}")
        return steps

    def list_checkpoints(self) -> list[int]:
        """List the steps of this run, ascending.

        Raises:
            StoreNotFoundError: The store is gone.
            ConflictError: Another store is in its place.
        """
        self.store.check_identity()
        return self._steps()

    def _steps(self) -> list[int]:
        return self.store.steps_beside(self._target(0))

    def list_checkpoints_with_metrics(self) -> list[dict[str, Any]]:
        """List the steps of this run, ascending, with their metrics.

        Returns:
            ``{"step": 3, "metrics": {"loss": 0.3}}`` for each step; ``metrics`` is None for a step saved without any.
        """
        steps = self.list_checkpoints()
        refs = [self.store.ref(self._target(step).key) for step in steps]
        return [
            {"step": ref.step, "metrics": None if ref.metrics is None else dict(ref.metrics)}
            for ref in refs
            if ref is not None
        ]

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Find the step with the best value of a metric.

        Args:
            metric: A name from the ``metrics`` of `save`.
            mode: Whether the smallest or the largest value is the best.

        Returns:
            The step; the lowest of several with equal values; None if no step has the metric. NaN is never the best.

        Raises:
            ValueError: There is no such mode.
        """
        if mode not in ("min", "max"):
            raise ValueError(f"mode is 'min' or 'max', not {mode!r}")
        sign = 1 if mode == "min" else -1
        values = [
            (sign * value, entry["step"])
            for entry in self.list_checkpoints_with_metrics()
            if (value := (entry["metrics"] or {}).get(metric)) is not None and value == value
        ]
        return min(values)[1] if values else None

    # --- keeping the store small

    def delete_checkpoint(self, step: int) -> bool:
        """Delete a step. The next `gc` frees the bytes used by this step alone, unless other steps are deltas of it.

        Returns:
            True if there was such a step.

        Raises:
            StoreNotFoundError: The store is gone.
            ConflictError: Another store is in its place.
        """
        self.store.check_identity()
        key = self._target(step).key
        is_there = self.store.backend.stat(key) is not None
        self.store.backend.delete(key)
        return is_there

    def gc(self, *, grace_s: float = DEFAULT_GRACE_S, max_waste: float = DEFAULT_MAX_WASTE) -> GcReport:
        """Delete the chunks not needed by any checkpoint of any run of the store.

        An unneeded chunk is deleted at once, unless a save under way relies on it.

        Args:
            grace_s: Treat a save as dead when its intent is this many seconds old, or when its process has ended.
            max_waste: Rewrite packs with a larger unneeded share than this.

        Raises:
            CorruptError: A blob needed to determine the garbage cannot be read; nothing is deleted.
            ValueError: A figure is negative, too large or NaN.
            TypeError: A figure is no number.
        """
        from tensorcas_mlflow.maintenance import plan_gc

        for name, figure in (("grace_s", grace_s), ("max_waste", max_waste)):
            if not isinstance(figure, Real) or isinstance(figure, bool):
                raise TypeError(f"{name} is a number, not {figure!r:.200}")
        return plan_gc(self.store, grace_s=grace_s, max_waste=max_waste).execute()

    def stats(self) -> RunStats:
        """Count this run's content, and the disk space of the shared store."""
        from tensorcas_mlflow.maintenance import run_stats

        self.store.check_identity()
        return run_stats(self.store, self.run_id)

    @classmethod
    def store_stats(cls, root: str | os.PathLike[str]) -> StoreStats:
        """Count the content of all runs of the store at a root, and the store's disk space.

        Raises:
            StoreNotFoundError: There is no store.
        """
        from tensorcas_mlflow.maintenance import store_stats

        return store_stats(Store.open(root))

    # --- inside

    def _adapter_of(self, ref: Ref) -> ModelAdapter:
        if self.adapter is None:
            if ref.flavor is None:
                raise AdapterError("tensorcas", f"{ref.label} was saved by an adapter without a name: give it again")
            return adapter_named(ref.flavor)
        name = getattr(self.adapter, "name", ref.flavor)
        if name != ref.flavor:
            raise AdapterError(str(name), f"{ref.label} was saved by the adapter {ref.flavor}")
        return self.adapter

    def _ref(self, step: int | None) -> Ref:
        if step is None:
            step = max(self.list_checkpoints(), default=None)
            if step is None:
                raise CheckpointNotFoundError(f"of run {self.run_id!r}")
        ref = self.store.ref(self._target(step).key)
        if ref is None:
            known = ", ".join(map(str, self.list_checkpoints()[-10:]))
            raise CheckpointNotFoundError(f"for step {step} of run {self.run_id!r}", known and f"steps {known}")
        return ref

    def _target(
        self, step: int, *, parent_step: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> RefTarget:
        return RefTarget(
            run_id=self.run_id,
            step=as_step(step),
            parent_step=None if parent_step is None else as_step(parent_step),
            metrics=None if metrics is None else _figures(metrics),
        )


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Convert metrics to plain numbers. They may be scalars of numpy or of a framework."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics are a mapping of names to numbers, such as {{'loss': 0.3}}, not {metrics!r:.200}")
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"a metric's name is a text, not {name!r}")
        if isinstance(value, str | bytes):
            raise ValueError(f"the metric {name!r} is a text, not a number: {value!r:.200}")
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"the metric {name!r} is no number: {error}") from error
    return figures

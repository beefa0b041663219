"""The store of one run: steps in, steps out, without MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tensorcas_mlflow._rebuild import given, rebuild
from tensorcas_mlflow._steps import as_step
from tensorcas_mlflow.adapter import Adapter, Array, ModelAdapter
from tensorcas_mlflow.adapters import adapter_for, adapter_named, take_apart
from tensorcas_mlflow.blob_names import list_dir
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError, CheckpointNotFoundError, TensorNotFoundError
from tensorcas_mlflow.maintenance import (
    DEFAULT_GRACE_S,
    DEFAULT_MAX_WASTE,
    GcReport,
    RunStats,
    StoreStats,
    plan_gc,
    run_stats,
    store_stats,
)
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import Ref, RefTarget, Store

if TYPE_CHECKING:
    from tensorcas_mlflow.file_formats import Written
    from tensorcas_mlflow.reader import CheckpointReader

_STEP = re.compile(r"@(-?[0-9]+)")


class TensorCasStore:
    """Checkpoints of one run, by step, in a store that any number of runs and processes share.

    ```python
    with TensorCasStore("checkpoints", run_id="run-1") as store:
        store.save(model, step=1, metrics={"loss": 0.3})
        model = store.load(step=1)
    ```

    How many threads work for it is said for the whole process, by the environment variable TENSORCAS_THREADS.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run_id: str,
        adapter: ModelAdapter | None = None,
        *,
        chunk_size: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Open the store at a root, or make one.

        Args:
            root: A path or a store URI.
            run_id: Any text but the empty one; it is never used as a path.
            adapter: Takes the run's models apart and puts them together. Without one, each model is given to the
                installed adapter that takes it, and loaded by the one it was saved by.
            chunk_size: Chunk size in bytes of a store that is made; an existing store keeps its own.

        Raises:
            NewerFormatError: A later release made the store.
            ConflictError: There is none at the root, and none can be made because one lies above or below.
            ValueError: The run id is empty or cannot be encoded, or the root is of a kind no store can be kept at.
            TypeError: The run id is no text.
        """
        if not isinstance(run_id, str):
            raise TypeError(f"a run id is a text, not {run_id!r:.200}")
        if not run_id or not _is_encodable(run_id):
            raise ValueError(f"a run id must not be empty, and be Unicode or the name of a file: {run_id!r:.200}")
        self.run_id = run_id
        self.adapter = adapter
        self.store = Store.open(root, create=True, chunk_bytes=chunk_size)

    def __enter__(self) -> TensorCasStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open between calls, so there is nothing to close."""

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
    ) -> Ref:
        """Save a model as a step of this run. When this returns it is on disk.

        Args:
            model: What the adapter takes.
            step: Any whole number.
            parent_step: The step that training went on from; recorded, and nothing depends on it.
            metrics: Figures to keep with the step; `best` looks for them.
            overwrite: Whether a step that is saved already is replaced. It is, in one moment: whoever loads it, or
                dies meanwhile, has the old one or the new one.

        Raises:
            CheckpointExistsError: The step is saved already and ``overwrite`` is False; it is untouched.
            AdapterError: The model cannot be taken apart.
            BackendError: The storage failed; no step is lost.
        """
        target = self._target(step, parent_step=parent_step, metrics=metrics)
        if not overwrite and self.store.ref(target.key) is not None:
            raise CheckpointExistsError(f"step {step} of run {self.run_id!r}")
        adapter = adapter_for(model) if self.adapter is None else self.adapter
        tensors = take_apart(adapter, model)
        cuts, left_out = getattr(adapter, "cuts", None), getattr(adapter, "left_out", None)
        with self.store.write_checkpoint(
            tensors,
            flavor=getattr(adapter, "name", None),
            cuts=cuts(tensors) if cuts else None,
            left_out=left_out(tensors) if left_out else None,
            series=target.key.rpartition("/")[0],
            earlier=partial(self._before, step),
        ) as save:
            return save.commit(target, replace=overwrite)

    def import_file(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        format: str | None = None,
        allow_left_out: bool = False,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Ref:
        """Save the tensors of a file of another format, or of a folder of files that belong together, as a step.

        Args:
            path: A file of a format of `formats.FORMATS_IN`; or a folder: shards, a snapshot from Hugging Face, DCP,
                ServerlessLLM. It must not change meanwhile. Nothing is unpickled.
            step: Any whole number.
            format: Which format it must be in; see `formats.open_listing`.
            allow_left_out: Whether to import a file of which some tensors cannot be stored, without them.
            overwrite: Whether a step that is saved already is replaced.
            progress: See `exchange.import_checkpoint`.

        Raises:
            MalformedFileError: It is not what its format allows.
            CheckpointExistsError: The step is saved already and ``overwrite`` is False.
            ValueError: Tensors would be left out, and that was not allowed.
            BackendError: It cannot be read, or the store not be written.
        """
        from tensorcas_mlflow.exchange import import_checkpoint
        from tensorcas_mlflow.file_formats import open_listing

        return import_checkpoint(
            self.store,
            open_listing(path, format=format),
            self._target(step),
            allow_left_out=allow_left_out,
            overwrite=overwrite,
            progress=progress,
        )

    # --- steps out

    def export_file(self, out: str | os.PathLike[str], step: int | None = None, **options: Any) -> Written:
        """Write the tensors of a step into a file or folder of another format, bit for bit, in one pass.

        Args:
            out: The file, or the folder.
            step: Of this run; the last one if None.
            options: ``format``, ``match``, ``shard_bytes``, ``partitions``, ``overwrite`` and ``progress``; see
                `exchange.export_checkpoint`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ValueError: The format has no such dtype, or an option does not fit; nothing is written.
            TensorCasError: What is stored is damaged, something is there already, or it cannot be written.
        """
        from tensorcas_mlflow.exchange import export_checkpoint

        return export_checkpoint(self.open(step), out, **options)

    def load(self, step: int | None = None, original: Any = None, **options: Any) -> Any:
        """Load a step.

        Args:
            step: Of this run; the last one if None.
            original: A live model to fill; see `Adapter.reconstruct`. All tensors are read and checked before it is
                changed, into new memory of their size; `CheckpointReader.load_into` reads into a module's own memory.
            options: What the adapter's framework takes besides (``device``, …); see `Adapter.options`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            CorruptChunkError: What is stored is damaged.
            AdapterError: It does not fit ``original``, was saved by another adapter, needs code that is not here, or a
                pickle where MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids it.
            ValueError: The adapter has no such option.
        """
        ref = self._ref(step)
        manifest = self.store.manifest(ref)
        adapter = self._adapter_of(ref)
        read = partial(self.store.read_tensors, manifest)
        wanted = given(**options)
        if isinstance(adapter, Adapter):
            return rebuild(adapter, manifest, read, into=original, options=wanted)
        unknown = wanted.keys() - getattr(adapter, "options", frozenset())
        if unknown:
            raise ValueError(f"the adapter {ref.flavor} has no option {', '.join(sorted(unknown))}")
        return adapter.reconstruct(read(), original, **wanted)

    def load_tensors(self, step: int | None = None) -> dict[str, Array]:
        """Load a step as arrays by name, the skeleton among them; raises as `load` does. No pickle is read.

        Raises:
            TensorNotFoundError: Numpy lacks the dtype of a tensor, which `load` gives.
        """
        manifest = self.store.manifest(self._ref(step))
        for name, kind in manifest.left_out.items():
            if name in manifest.by_name:
                raise TensorNotFoundError(name, kind)
        return self.store.read_tensors(manifest)

    def open(self, step: int | None = None, *, verify: bool = True, **options: Any) -> CheckpointReader:
        """Open a step, of which any part can be read alone: a tensor, rows of one, a layer, an expert.

        Args:
            step: Of this run; the last one if None.
            verify: Whether to check each chunk against its digest.
            options: ``framework`` (``np`` or ``pt``), ``device`` and ``naming``; see `CheckpointReader`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            CorruptError: Its manifest is damaged.
        """
        from tensorcas_mlflow.reader import open_ref  # who only saves and loads need not wait for it

        return open_ref(self.store, self._ref(step), verify=verify, **options)

    def _before(self, step: int) -> Manifest | None:
        before = max((each for each in self.list_checkpoints() if each < step), default=None)
        ref = None if before is None else self.store.ref(self._target(before).key)
        return None if ref is None else self.store.manifest(ref)

    def list_checkpoints(self) -> list[int]:
        """List the steps of this run, ascending.

        Raises:
            StoreNotFoundError: The store is gone.
            ConflictError: Another store is in its place.
        """
        self.store.check_identity()
        prefix = self._target(0).key.rpartition("/")[0]
        blobs, _ = list_dir(self.store.backend, prefix)
        found = (_STEP.fullmatch(info.key.rpartition("/")[2]) for info in blobs)
        return sorted(int(match[1]) for match in found if match)

    def list_checkpoints_with_metrics(self) -> list[dict[str, Any]]:
        """List the steps of this run, ascending, with their metrics.

        Returns:
            ``{"step": 3, "metrics": {"loss": 0.3}}`` a step; None in place of metrics where none were given.
        """
        refs = (self.store.ref(self._target(step).key) for step in self.list_checkpoints())
        return [
            {"step": ref.step, "metrics": None if ref.metrics is None else dict(ref.metrics)}
            for ref in refs
            if ref is not None
        ]

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Find the step with the best value of a metric.

        Args:
            metric: Its name, as `save` was told.
            mode: Whether the smallest or the largest value is best.

        Returns:
            The step, the first one of several that are equally good; None if no step has the metric. A value that is
            no number (NaN) is never the best.
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

    def delete_checkpoint(self, step: int) -> None:
        """Drop a step; none there is no error. The next `gc` removes what only it needed."""
        self.store.check_identity()
        self.store.backend.delete(self._target(step).key)

    def gc(
        self, grace_period_hours: float = DEFAULT_GRACE_S / 3600, *, max_waste: float = DEFAULT_MAX_WASTE
    ) -> GcReport:
        """Delete what no checkpoint of any run of the store needs any more.

        Args:
            grace_period_hours: Take a save that has been silent for so long for dead. What no step needs any more is
                deleted at once, and never what a save under way relies on.
            max_waste: Rewrite packs of which more than this part is unneeded.

        Raises:
            CorruptError: What is needed cannot be known, because something cannot be read; nothing is deleted.
            ValueError: A figure is negative, too large or NaN.
            TypeError: A figure is no number.
        """
        for name, figure in (("grace_period_hours", grace_period_hours), ("max_waste", max_waste)):
            if not isinstance(figure, Real) or isinstance(figure, bool):
                raise TypeError(f"{name} is a number, not {figure!r:.200}")
        return plan_gc(self.store, grace_s=grace_period_hours * 3600, max_waste=max_waste).execute()

    def stats(self) -> RunStats:
        """Say what this run keeps, and what the store it shares with others takes on disk."""
        self.store.check_identity()
        return run_stats(self.store, self.run_id)

    @classmethod
    def store_stats(cls, root: str | os.PathLike[str]) -> StoreStats:
        """Say what all runs of the store at a root keep, and what it takes on disk.

        Raises:
            StoreNotFoundError: There is none.
        """
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


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Take metrics as plain numbers: they may be numpy's, or a framework's own of no dimension."""
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

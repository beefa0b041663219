"""Checkpoints of Orbax in the store: `orbax.checkpoint.CheckpointManager` saves and restores steps of an MLflow run.

```python
import orbax.checkpoint as ocp
from tensorcas_mlflow.orbax import TensorCasHandler, TensorCasRestore, TensorCasSave

with ocp.CheckpointManager(folder, item_handlers=TensorCasHandler(run_id=run_id)) as manager:
    manager.save(100, args=TensorCasSave(state))
    state = manager.restore(100, args=TensorCasRestore(state))
```

States of JAX come in from Orbax, and become steps of a run; Orbax's own folder gets a small file that names the step.
The module imports Orbax, JAX and the integration.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, Unpack

import jax
import mlflow
from jax.sharding import NamedSharding
from orbax.checkpoint import AsyncCheckpointHandler
from orbax.checkpoint.args import CheckpointArgs, register_with_handler
from orbax.checkpoint.metadata import NamedShardingMetadata

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    SaveOptions,
    check_options,
    load_checkpoint,
    log_checkpoint,
    open_checkpoint,
)
from tensorcas_mlflow.jax_processes import log_state

__all__ = ["TensorCasHandler", "TensorCasRestore", "TensorCasSave"]

FILE = "tensorcas.json"
"""Name of the file in Orbax's folder that names the step, and has the shardings of its arrays."""
_MAX_FILE_BYTES = 1 << 24
_TEMPORARY = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?(\d{1,19})")


class TensorCasHandler(AsyncCheckpointHandler):  # type: ignore[misc]
    """Handler for Orbax: an item becomes a step of a run, an ordinary checkpoint.

    `mlflow.tensorcas.load_checkpoint`, `open_checkpoint`, `diff` and the UI read the step like any other, and it shares
    its chunks with all others. Orbax's folder has a small file (`FILE`) that names the step. A restore needs this file,
    the same tracking URI, and the step.

    Unlike Orbax's own handler this one never casts, cuts or pads an array, neither in a save nor in a restore: dtypes
    and shapes of an item must be those of the step. It takes no ``SaveArgs`` and no metadata of users.

    Orbax commits its folder after the step is committed. A failed save may leave the step without a folder. When Orbax
    deletes a folder, the step stays: give ``keep`` the rule that Orbax has, or delete it with `delete_checkpoint`.

    With the asynchronous checkpointers, which a `CheckpointManager` uses by default, a save returns once the changed
    chunks are copied, and a thread stores them. The arrays may then be donated. With several processes, all of which
    make the calls, a save stores the shards of each process before it returns.
    """

    def __init__(self, **options: Unpack[SaveOptions]) -> None:
        """Describe the series; nothing is written or looked up yet.

        Args:
            options: ``run_id``, ``name``, ``overwrite``, ``keep``, ``log_metrics`` and ``policy``, as for
                `log_checkpoint`. By default the run is the one that is active now, or at the save; a restore does not
                need it. Two items of one manager need two names. ``overwrite`` replaces a step that a failed save has
                left, too.

        Raises:
            TypeError: There is no option of a name.
            ValueError: There is no such policy.
        """
        check_options(options)
        active = mlflow.active_run()
        if options.get("run_id") is None and active is not None:
            options["run_id"] = active.info.run_id
        self._options = options
        self.info: CheckpointInfo | None = None
        """The result of the last save; its figures are final once Orbax has finished the save."""

    def save(self, directory: Any, item: Any = None, args: TensorCasSave | None = None) -> None:
        """Save an item, and return when it is durable; see `log_checkpoint` for the errors."""
        for saved in self._begin(directory, _saved_args(item, args), blocking=True):
            saved.result()

    async def async_save(self, directory: Any, item: Any = None, args: TensorCasSave | None = None) -> list[Any]:
        """Begin to save an item.

        Returns:
            What Orbax waits for in its thread; its ``result()`` raises the error of a save that failed.
        """
        return [*self._begin(directory, _saved_args(item, args), blocking=False)]

    def _begin(self, directory: Any, args: TensorCasSave, *, blocking: bool) -> list[_Saved]:
        step, options = _step_of(directory) if args.step is None else args.step, self._options
        if jax.process_count() > 1:
            self.info = log_state(args.item, step=step, **options)
            return [_Saved(directory, self, self.info, _shardings(args.item))] if jax.process_index() == 0 else []
        if options.get("run_id") is None and mlflow.active_run() is None:
            raise ValueError("there is no active run to save to: pass TensorCasHandler(run_id=...), or start a run")
        shardings = _shardings(args.item)
        self.info = log_checkpoint(args.item, step=step, blocking=blocking, **options)
        return [_Saved(directory, self, self.info, shardings)]

    def restore(self, directory: Any, item: Any = None, args: TensorCasRestore | None = None) -> Any:
        """Restore an item.

        Args:
            directory: Orbax's folder of the item.
            item: The same as ``TensorCasRestore(item)``.
            args: The state to fill; without one a new state is made, as by `load_checkpoint`.

        Returns:
            The state. Arrays have the shardings of those of the item; without an item, and where it has a shape without
            a sharding, those that they were saved with. Objects of nnx in the item are filled in place.

        Raises:
            NotFoundError: There is no such step any more.
            MalformedFileError: The folder's file is missing, or names no step.
            AdapterError: The item does not fit.
            ValueError: A sharding comes from the save, and this process lacks its devices.
        """
        wanted = args if args is not None else TensorCasRestore(item)
        into = wanted.item
        facts = _facts_in(directory)
        if into is None:
            state = load_checkpoint(facts["uri"], strict=wanted.strict)
            return _placed(directory, state, facts["shardings"], jax.Array, jax.device_put)
        if any(_is_bare_shape(leaf) for leaf in jax.tree_util.tree_leaves(into)):
            into = _placed(directory, into, facts["shardings"], jax.ShapeDtypeStruct, _with_sharding)
        if type(into) is dict or type(into) is list:
            into = into.copy()  # `load_checkpoint` fills it, and Orbax's users keep theirs as it is
        return load_checkpoint(facts["uri"], into=into, strict=wanted.strict)

    def metadata(self, directory: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype of each tensor by its name in the checkpoint, without reading the tensors.

        Random keys are arrays of uint32 there.
        """
        with open_checkpoint(_facts_in(directory)["uri"]) as reader:
            specs = reader.specs()
        return {
            spec.name: jax.ShapeDtypeStruct(tuple(spec.shape), parse_dtype(spec.dtype))
            for spec in specs
            if spec.dtype is not None
        }


@register_with_handler(TensorCasHandler, for_save=True)
@dataclasses.dataclass
class TensorCasSave(CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save: the state, and its step."""

    item: Any
    """The state, as for `log_checkpoint`."""
    step: int | None = None
    """The step. A `CheckpointManager` needs none: it is the manager's."""


@register_with_handler(TensorCasHandler, for_restore=True)
@dataclasses.dataclass
class TensorCasRestore(CheckpointArgs):  # type: ignore[misc]
    """Arguments of a restore: the state to fill, or its shapes."""

    item: Any = None
    """A state with arrays or `jax.ShapeDtypeStruct`, as for `load_checkpoint`; None makes a new state."""
    strict: bool | None = None
    """As for `load_checkpoint`. With False, parts of the item that are None or have no leaves, such as
    ``optax.MaskedNode()``, stay as they are."""


class _Saved:
    """A save in the background, as Orbax waits for it."""

    def __init__(
        self, directory: Any, handler: TensorCasHandler, info: CheckpointInfo, shardings: dict[str, list[str]]
    ) -> None:
        self._directory = directory
        self._handler = handler
        self._info = info
        self._shardings = shardings

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is committed, and name it in Orbax's folder."""
        del timeout  # a save is waited for: giving it up would leave it running
        info = self._info.wait()
        if self._handler.info is self._info:
            self._handler.info = info
        facts = {"uri": info.uri, "run_id": info.run_id, "name": info.name, "step": info.step}
        facts["shardings"] = self._shardings
        (self._directory / FILE).write_text(json.dumps(facts))

    def cancel(self) -> bool:
        """Refuse: the save goes on."""
        return False


def _saved_args(item: Any, args: TensorCasSave | None) -> TensorCasSave:
    return args if args is not None else TensorCasSave(item)


def _step_of(directory: Any) -> int:
    """Return the step of a manager's folder, which is temporary while it saves."""
    name, mark, _ = directory.parent.name.partition(_TEMPORARY)
    found = _STEP.fullmatch(name) if mark else None
    if found is None:
        raise ValueError(f"Orbax's folder {directory} does not tell the step: pass TensorCasSave(state, step=...)")
    return int(found[1])


def _shardings(item: Any) -> dict[str, list[str]]:
    """Return the paths of arrays that lie on more than one device, by their sharding, as text of Orbax."""
    found: dict[str, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(item):
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
            text = NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
            found.setdefault(text, []).append(jax.tree_util.keystr(path))
    return found


def _is_bare_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def _with_sharding(shape: Any, sharding: Any) -> Any:
    return shape.update(sharding=sharding) if shape.sharding is None else shape


def _placed(
    directory: Any, state: Any, saved: dict[str, list[str]], kind: type, place: Callable[[Any, Any], Any]
) -> Any:
    """Return a state with leaves of a kind placed by the shardings that they were saved with.

    Args:
        directory: Orbax's folder, for errors.
        state: The state, of the same tree as the saved one.
        saved: The result of `_shardings`.
        kind: The class of the leaves to place.
        place: Function from a leaf and a sharding to the placed leaf.

    Raises:
        ValueError: This process lacks devices of a sharding.
    """
    shardings: dict[str, Any] = {}
    for text, paths in saved.items():
        try:
            facts = json.loads(text)
            facts["partition_spec"] = [tuple(axes) if type(axes) is list else axes for axes in facts["partition_spec"]]
            sharding = NamedShardingMetadata.from_deserialized_dict(facts).to_jax_sharding()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{paths[0]} in {directory} was saved with a sharding that this process cannot make ({error}): pass "
                "TensorCasRestore(item), where item has the arrays, or their shapes, with shardings of this process"
            ) from error
        shardings |= dict.fromkeys(paths, sharding)

    def placed(path: Any, leaf: Any) -> Any:
        sharding = shardings.get(jax.tree_util.keystr(path)) if isinstance(leaf, kind) else None
        return leaf if sharding is None else place(leaf, sharding)

    return jax.tree_util.tree_map_with_path(placed, state) if shardings else state


def _facts_in(directory: Any) -> dict[str, Any]:
    """Return what a folder of Orbax says of its step: its URI, and the shardings of `_shardings`.

    Raises:
        MalformedFileError: It names none.
    """
    file = directory / FILE
    if not file.exists():
        raise MalformedFileError(str(file), "checkpoint", "it is missing: another handler has written this folder")
    text = file.read_text()
    facts: Any
    try:
        facts = json.loads(text) if len(text) <= _MAX_FILE_BYTES else None
        is_sound = facts["uri"].startswith("runs:/") and all(
            isinstance(path, str) for paths in facts["shardings"].values() for path in [*paths, paths[0]]
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        is_sound = False
    if not is_sound:
        raise MalformedFileError(str(file), "checkpoint", "it names no checkpoint of a run")
    return dict(facts)

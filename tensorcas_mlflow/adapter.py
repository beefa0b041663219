"""The adapter contract: a framework's side of a save and a load.

An adapter takes a model apart into named arrays and puts it together again. It knows its framework and nothing of
stores, chunks or MLflow. So a new framework is one module and one line of packaging metadata (the entry-point group
``tensorcas.flavors``; see ``docs/design/flavors.md``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from tensorcas_mlflow.errors import AdapterError, TensorCasError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Array = np.ndarray[Any, np.dtype[Any]]

SKELETON = "__skeleton__"
"""Name under which `extract` returns the skeleton: the rest of a model without its tensors, as 1-d uint8."""

STAGED_BYTES = 32 << 20
"""Bound on the tensors that a load reads into new memory before a live model changes. A larger load reads straight into
the model, so it checks the stored bytes first."""


class StoredTensor(Protocol):
    """Description of one tensor of a checkpoint; `tensorcas_mlflow.base.tensors.Spec` is one."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def dtype(self) -> str | None:
        """Its dtype's name, or None for plain bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


class ReadTensors(Protocol):
    """Reader of tensors of one checkpoint."""

    def __call__(self, names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Read tensors by their names in the checkpoint.

        Args:
            names: The names, each once.
            out: For each name, the array to fill: writable, in C order, of the stored dtype and shape.
                No two of them share memory.

        Returns:
            ``out``, or new arrays, by name.
        """
        ...


class CheckTensors(Protocol):
    """Check of tensors of one checkpoint, before a model changes."""

    def __call__(self, names: Sequence[str]) -> None:
        """Check that the storage holds tensors intact, without keeping them in memory.

        Args:
            names: Their names in the checkpoint.

        Raises:
            TensorCasError: Some tensor is damaged or gone.
        """
        ...


class NotFilled(NamedTuple):
    """Tensors `Adapter.fill_weights` did not fill, by the model's names, in the model's order."""

    missing: tuple[str, ...] = ()
    """Tensors of the model that should be stored and are not."""
    unexpected: tuple[str, ...] = ()
    """Stored tensors the model does not have."""
    without_memory: tuple[str, ...] = ()
    """Tensors of the model without memory (PyTorch's meta device) and not stored: missing ones, and such as
    belong to no checkpoint. The model is not complete until something else creates them."""
    passed_over: tuple[str, ...] = ()
    """Stored tensors only a load of the whole checkpoint restores (plain attributes of a PyTorch module, absent
    from state dicts), by their names in the checkpoint. They are no error."""


@runtime_checkable
class ModelAdapter(Protocol):
    """The minimum a `TensorCasStore` asks of an adapter."""

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model apart into named arrays; see `Adapter.extract`."""
        ...

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None) -> Any:
        """Put a model together again; see `Adapter.reconstruct`."""
        ...


class Adapter(ABC):
    """A framework's side of a save and a load. Stateless: one instance serves any number of models and threads."""

    name: ClassVar[str]
    """Short name of the framework (``pytorch``, ``sklearn``, …). Manifests contain it: never rename it."""

    options: ClassVar[frozenset[str]] = frozenset()
    """Names of the additional keyword arguments of `reconstruct` and `weights` (``device``, …). Callers refuse all
    others, and leave out those nobody gave."""

    fills_others: ClassVar[bool] = False
    """Whether `fill` and `reconstruct` fill a live model also with tensors that another adapter has stored, by their
    names. They then get no skeleton."""

    @classmethod
    @abstractmethod
    def accepts(cls, model: object) -> bool:
        """Tell whether this adapter takes a model, without importing the framework.

        Callers ask about objects of every framework. So the adapter looks at the names of the model's classes and their
        modules, and imports nothing the model's own process has not imported.
        """

    @abstractmethod
    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model apart into named arrays, copying as little as the framework allows.

        Args:
            model: A model accepted by `accepts`. It is not changed.

        Returns:
            Arrays by name, in a stable order. Names are non-empty and hold neither NUL nor newline. Arrays may be
            read-only, non-contiguous, 0-d, empty, or views of the live model: the caller finishes with them before the
            model is trained on. Everything else goes, encoded, into one 1-d ``uint8`` array named `SKELETON`.
            Equal parts of two models give equal arrays under equal names: deduplication relies on it.

        Raises:
            AdapterError: Some part of the model cannot be stored exactly.
        """

    @abstractmethod
    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Put a model together again, bit for bit.

        Args:
            tensors: The result of `extract`, read back: C-contiguous, writable, owned by the callee.
            original: A live model of the same structure to fill in place. With it no pickle is read, ever. A stored
                part that only a pickle can restore must be equal in ``original``; otherwise the call is refused and
                ``original`` is unchanged. An adapter documents the parts it leaves alone.
            options: Some of `options`, in the framework's own meaning of each.

        Returns:
            ``original``, filled, or a new model.

        Raises:
            AdapterError: The arrays do not come from such a model, or do not fit ``original``.
        """

    def fill(
        self,
        original: Any,
        stored: Mapping[str, StoredTensor],
        read: ReadTensors,
        *,
        check: CheckTensors | None,
        **options: Any,
    ) -> Any:
        """Fill a live model in place like `reconstruct`, with tensors read on demand.

        The default reads all tensors into new memory. An adapter that reads some straight into the live model first
        checks everything else that can fail, then calls ``check``, if given, with their names, then reads.

        Args:
            original: The live model.
            stored: The result of `extract` without its values, in its order.
            read: Reader of these tensors.
            check: Check of these tensors; None to find damage by the read alone.
            options: As for `reconstruct`.

        Raises:
            AdapterError: As for `reconstruct`.
        """
        return self.reconstruct(read(list(stored)), original=original, **options)

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Return chunk ends for some tensors, for families that grow at the end (trees of an ensemble).

        Args:
            tensors: The result of `extract`.

        Returns:
            For some tensor names, ascending row numbers of axis 0 at which a chunk ends, the last one the number of
            rows. The store cuts other tensors at its fixed chunk size, and cuts pieces longer than its chunk size
            further.
        """
        return {}

    def left_out(self, tensors: Mapping[str, Array]) -> Mapping[str, str]:
        """Name the tensors whose dtype numpy lacks, with the framework's name of the dtype.

        Their arrays hold the same bytes as elements of another dtype. `reconstruct` and `weights` return the tensors in
        their original dtype. Readers of arrays name them as left out, and do not return the arrays.

        Args:
            tensors: The result of `extract`.
        """
        return {}

    def module_for_ranks(self, model: Any) -> str | None:
        """Name the module that saves and fills a model with tensors spread over the ranks of a process group.

        The module has ``log_state``, with the arguments of `log_checkpoint`, and ``fill_state``, with some of those of
        `load_checkpoint`. All ranks call them together, with their parts of the model.

        Args:
            model: A model accepted by `accepts`.

        Returns:
            The name; None if this process has the whole model.
        """
        return None

    def weights(self, tensors: Mapping[str, Array], **options: Any) -> dict[str, Any]:
        """Return a model's tensors by name, in the framework's own type if it has one; no pickle is read.

        Args:
            tensors: The result of `extract`, read back, or some of it. Without the skeleton, they may come from any
                checkpoint, another adapter's or an imported file's. They may be read-only, like views of a
                memory-mapped file: the result may share their memory, and may then be read-only too.
            options: Some of `options`.

        Raises:
            AdapterError: The framework has no type for some of them; the message names them.
        """
        return {name: array for name, array in tensors.items() if name != SKELETON}

    def fill_weights(
        self,
        model: Any,
        stored: Mapping[str, StoredTensor],
        read: ReadTensors,
        *,
        check: CheckTensors | None = None,
        wanted: Callable[[str], bool] | None = None,
        strict: bool = True,
        device: Any = None,
    ) -> NotFilled:
        """Fill a live model, or a part of it, in place with tensors read on demand; no skeleton is needed.

        Args:
            model: The model to fill.
            stored: The available tensors, by the model's names for them; each has its own name in the
                checkpoint.
            read: Reader of these tensors. If it raises, a part of the model may be filled.
            check: Check of the tensors to fill, called before the model changes; None if only a read finds damage.
            wanted: Filter by the model's name of a tensor: others are neither filled nor missed. The default is all.
                A filter must choose one tensor at least.
            strict: Whether missing or unexpected tensors are an error.
            device: Device for tensors without memory.

        Returns:
            The tensors not filled.

        Raises:
            AdapterError: The framework does not support it, or stored tensors do not fit. The message lists every
                mismatch, and nothing is changed.
        """
        raise AdapterError(self.name, "a part of such a model cannot be filled: load all of it with into=")

    @abstractmethod
    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Tell whether `reconstruct` without ``original`` would read a pickle, looking only at the skeleton."""

    @abstractmethod
    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Answer a `mlflow.pyfunc` request with the native model's own predictions.

        Args:
            model: The result of `reconstruct`.
            data: A pandas DataFrame, numpy array, or any other input of MLflow's own flavor of this framework.
            params: Inference parameters of the request.
        """

    @abstractmethod
    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """Name the pip requirements of a model, pinned to the installed versions; no pickle is read, no model loaded.

        Args:
            tensors: The result of `extract`.
        """


GROUP = "tensorcas.flavors"
GENERIC = "generic"
"""The adapter for every model no other adapter accepts."""


def adapter_for(model: object) -> Adapter:
    """Find the adapter for a model.

    Raises:
        AdapterError: No adapter accepts it; the message names the model's type and the available adapters.
    """
    from logging import getLogger

    broken: list[str] = []
    for point in _entry_points():
        try:
            adapter = _load(point)
        except AdapterError as error:
            broken.append(str(error))
            continue
        if adapter.accepts(model):
            if broken and point.name == GENERIC:
                getLogger(__name__).warning(
                    "a model goes to the generic adapter, since no other accepts it; %s", "; ".join(broken)
                )
            return adapter
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    reason = f"no adapter takes a {kind}: pass a model, or a mapping of names to arrays; there are {_known()}"
    raise AdapterError("tensorcas", "; ".join([reason, *broken]))


def adapter_named(name: str) -> Adapter:
    """Find the adapter a model was stored with.

    Raises:
        AdapterError: No adapter has this name, or it cannot be imported here.
    """
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise AdapterError("tensorcas", f"the model was stored by the adapter {name!r}, and there are only {_known()}")


def take_apart(adapter: ModelAdapter, model: object) -> dict[str, Array]:
    """Take a model apart with an adapter.

    Raises:
        AdapterError: The adapter or the model's own code raised an error.
    """
    try:
        return adapter.extract(model)
    except TensorCasError:
        raise
    except Exception as error:
        reason = f"a {type(model).__name__} cannot be taken apart: {type(error).__name__}: {error}"
        raise AdapterError(getattr(adapter, "name", type(adapter).__name__), reason) from error


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    """List the adapters: other people's first, since theirs may be for a class derived from one ours accepts.

    The generic one comes last.
    """
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    return tuple(sorted(found, key=lambda point: (point.name == GENERIC, _is_ours(point), point.name)))


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("tensorcas_flavors.")


@cache
def _load(point: EntryPoint) -> Adapter:
    from pkgutil import resolve_name

    try:
        # `EntryPoint.load` may hold one lock for all points (importlib_metadata), which a fork would leave locked.
        adapter = resolve_name(point.value.partition("[")[0].strip())()
    except Exception as error:
        # Another package's module may raise anything on import: its adapter is broken, ours still work.
        raise AdapterError(point.name, f"the adapter {point.value} cannot be imported: {error}") from error
    if not isinstance(adapter, Adapter):
        raise AdapterError(point.name, f"{point.value} is not an Adapter of tensorcas_mlflow.adapter")
    return adapter


def _known() -> str:
    names = sorted(point.name for point in _entry_points())
    return ", ".join(names) or f"none (is tensorcas-mlflow installed? They are the entry points {GROUP!r})"

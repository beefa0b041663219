"""What a framework must tell the store about its models: the adapter contract.

An adapter takes a model apart into named arrays and puts it together again. It knows its framework and nothing of
stores, chunks or MLflow, so a new framework is one module and one line of packaging metadata (the entry-point group
``tensorcas.flavors``; see ``docs/design/flavors.md``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from tensorcas_mlflow.errors import AdapterError

Array = np.ndarray[Any, np.dtype[Any]]

SKELETON = "__skeleton__"
"""Name under which `extract` returns the skeleton: what is left of a model without its tensors, as 1-d uint8."""


class StoredTensor(Protocol):
    """What a checkpoint says of one tensor; `tensorcas_mlflow.tensor.Spec` is one."""

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
    """Reads tensors of one checkpoint."""

    def __call__(self, names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Read tensors by their names in the checkpoint.

        Args:
            names: Which, each once.
            out: For each of them, where its elements go: a writable array in C order, of the stored dtype and shape.
                No two of them share memory.

        Returns:
            ``out``, or new arrays, by name.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFilled:
    """What `Adapter.fill_weights` left as it was, by the model's names, in the model's order."""

    missing: tuple[str, ...] = ()
    """Tensors of the model that should have been stored and are not."""
    unexpected: tuple[str, ...] = ()
    """Stored tensors that the model does not have."""
    without_memory: tuple[str, ...] = ()
    """Tensors of the model that have no memory (PyTorch's meta device) and were not stored: missing ones, and such as
    belong to no checkpoint. The model is not complete until something else makes them."""
    passed_over: tuple[str, ...] = ()
    """Stored tensors that only a load of the whole checkpoint restores (plain attributes of a PyTorch module, which are
    in no state dict), by their names in the checkpoint. They are no error."""


@runtime_checkable
class ModelAdapter(Protocol):
    """The least a `TensorCasStore` asks of an adapter."""

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model apart into named arrays; see `Adapter.extract`."""
        ...

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None) -> Any:
        """Put a model together again; see `Adapter.reconstruct`."""
        ...


class Adapter(ABC):
    """A framework's side of a save and a load. Stateless: one instance serves any number of models and threads."""

    name: ClassVar[str]
    """Short name of the framework (``pytorch``, ``sklearn``, …). It is written into manifests: never rename it."""

    options: ClassVar[frozenset[str]] = frozenset()
    """Names of the keyword arguments that `reconstruct` and `weights` take besides (``device``, …). Callers refuse all
    others, and leave out those that nobody gave."""

    @classmethod
    @abstractmethod
    def accepts(cls, model: object) -> bool:
        """Tell whether this adapter takes a model, without importing the framework.

        It is asked about objects of every framework, so it looks at the names of the model's classes and their
        modules and imports nothing that the model's own process has not imported.
        """

    @abstractmethod
    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model apart into named arrays, copying as little as the framework allows.

        Args:
            model: A model `accepts` is true for. It is not changed.

        Returns:
            Arrays by name, in a stable order. Names are non-empty and hold neither NUL nor newline. Arrays may be
            read-only, non-contiguous, 0-d, empty, or views of the live model: the caller is done with them before the
            model is trained on. What is not an array goes, encoded, into one 1-d ``uint8`` array named `SKELETON`.
            Equal parts of two models give equal arrays under equal names: that is what deduplicates.

        Raises:
            AdapterError: The model holds something that cannot be stored exactly.
        """

    @abstractmethod
    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Put a model together again, bit for bit.

        Args:
            tensors: What `extract` returned, read back: C-contiguous, writable, owned by the callee.
            original: A live model of the same structure to fill in place. With it no pickle is read, ever. What was
                stored and cannot be filled in without one must be equal in ``original``, or the call is refused and
                ``original`` is as it was; an adapter documents what else stays as it is.
            options: Some of `options`, in the framework's own meaning of each.

        Returns:
            ``original``, filled, or a new model.

        Raises:
            AdapterError: The arrays are not those of such a model, or do not fit ``original``.
        """

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Say where chunks of a tensor should end, for families that grow at the end (trees of an ensemble).

        Args:
            tensors: What `extract` returned.

        Returns:
            For some tensor names, ascending row numbers of axis 0 at which a chunk ends, the last one the number of
            rows. A tensor that is not named is cut at the store's fixed chunk size. A piece longer than the store's
            chunk size is cut further.
        """
        return {}

    def left_out(self, tensors: Mapping[str, Array]) -> Mapping[str, str]:
        """Name the tensors whose dtype numpy lacks, with the framework's name of the dtype.

        Their arrays hold the same bytes as elements of another dtype. `reconstruct` and `weights` give the tensors as
        they were. Readers of arrays name them as left out, and do not give the arrays.

        Args:
            tensors: What `extract` returned.
        """
        return {}

    def weights(self, tensors: Mapping[str, Array], **options: Any) -> dict[str, Any]:
        """Give a model's tensors by name, in the framework's own type where it has one; no pickle is read.

        Args:
            tensors: What `extract` returned, read back, or some of it. Without the skeleton, they may be of any
                checkpoint, another adapter's or an imported file's; and read-only, as views of a mapped file are: what
                is returned may share their memory, and may then not be written to.
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
        wanted: Callable[[str], bool] | None = None,
        strict: bool = True,
        device: Any = None,
    ) -> NotFilled:
        """Fill a live model, or a part of it, in place with tensors that are read only now; no skeleton is needed.

        Args:
            model: What to fill.
            stored: What there is to fill it with, by the names that the model has for it; each says its own name in
                the checkpoint.
            read: Reads it. If it raises, a part of the model may be filled, and that part may hold damaged values.
            wanted: Tells by the model's name whether a tensor is to be filled, or missed; all are if it is not given.
                If it is given, it must choose one tensor at least.
            strict: Whether tensors that are missing or unexpected are an error.
            device: Where tensors go that have no memory yet.

        Returns:
            What was not filled.

        Raises:
            AdapterError: The framework's models cannot be filled so, or what is stored does not fit. All that does not
                fit is said at once, and nothing is changed.
        """
        raise AdapterError(self.name, "a part of such a model cannot be filled: load all of it with into=")

    @abstractmethod
    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Tell whether `reconstruct` without ``original`` would read a pickle, looking only at the skeleton."""

    @abstractmethod
    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Answer a `mlflow.pyfunc` request with the native model's own predictions.

        Args:
            model: What `reconstruct` returned.
            data: A pandas DataFrame, numpy array, or what else MLflow's own flavor of this framework takes.
            params: Inference parameters of the request.
        """

    @abstractmethod
    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """Name the pip requirements of a model, pinned to the installed versions; no pickle is read, no model loaded.

        Args:
            tensors: What `extract` returned.
        """

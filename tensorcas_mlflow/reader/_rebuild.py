"""Rebuilding a model from stored tensors, under MLflow's rule for pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tensorcas_mlflow.adapter import SKELETON, STAGED_BYTES, Adapter, Array, adapter_for
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import PickleForbiddenError
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store

ReadArrays = Callable[..., dict[str, Array]]
"""Reader of tensors: called with ``names`` (None for all) and ``verify``."""


class StoreReads:
    """Reader of the tensors of one manifest in a store, and their check."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest

    def __call__(
        self, names: Iterable[str] | None = None, *, verify: bool = True, out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Read tensors; see `Store.read_tensors`."""
        return self._store.read_tensors(self._manifest, names, verify=verify, out=out)

    @property
    def can_check(self) -> bool:
        """True if the store is on this machine, so that `check` costs a second read of memory and none of a network."""
        return self._store.chunks.can_check

    def check(self, names: Sequence[str]) -> None:
        """Check that the store holds tensors intact; see `ChunkReader.check`."""
        self._store.chunks.check(self._manifest, self._manifest.numbers(names))


def given(**options: Any) -> dict[str, Any]:
    """Return the options set by a caller: those other than None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_pickle(
    adapter: Adapter,
    manifest: Manifest,
    read: ReadArrays,
    *,
    verify: bool = True,
    forbidden_by: Callable[[], str | None] = config.pickle_forbidden_by,
) -> None:
    """Refuse a model that `Adapter.reconstruct` would unpickle, where pickles are forbidden.

    Args:
        adapter: The adapter of the save.
        manifest: Manifest of the tensors.
        read: Reader of the tensors.
        verify: Check each chunk against its digest.
        forbidden_by: Returns the switch that forbids pickles; None if they are allowed.

    Raises:
        PickleForbiddenError: The model needs a pickle, and a switch forbids it.
    """
    switch = forbidden_by()
    names = [SKELETON] if SKELETON in manifest.by_name else []
    if switch is not None and adapter.unpickles(read(names, verify=verify)):
        raise PickleForbiddenError(adapter.name, switch)


def check_call(*, into: Any, weights_only: bool) -> None:
    """Refuse contradictory arguments of `rebuild`, before anything is read.

    Raises:
        ValueError: ``into`` and ``weights_only`` are both given.
    """
    if into is not None and weights_only:
        raise ValueError("into fills a model and weights_only makes none: give one of the two")


def rebuild(
    adapter: Adapter,
    manifest: Manifest,
    read: ReadArrays,
    *,
    into: Any = None,
    weights_only: bool = False,
    verify: bool = True,
    precheck: bool = True,
    options: Mapping[str, Any] | None = None,
    forbidden_by: Callable[[], str | None] = config.pickle_forbidden_by,
) -> Any:
    """Read tensors and rebuild their model.

    Args:
        adapter: The adapter of the save.
        manifest: Manifest of the tensors.
        read: Reader of the tensors.
        into: A live model to fill; nothing is unpickled. An adapter may read more than `STAGED_BYTES` of a store
            straight into its memory. Its own adapter may fill it with tensors that another one has stored.
        weights_only: Return the tensors by name; nothing is unpickled.
        verify: Check each chunk against its digest.
        precheck: Check the stored bytes of all tensors to read straight into ``into`` before it changes. A store on
            another machine would be read twice: its tensors are read into new memory. False reads the bytes once.
        options: Options for the adapter; see `Adapter.options`.
        forbidden_by: Returns the switch that forbids pickles; None if they are allowed.

    Raises:
        ValueError: The adapter has no such option.
        AdapterError: The tensors do not fit together, or do not fit ``into``.
        PickleForbiddenError: The model needs a pickle, and a switch forbids it.
    """
    options = options or {}
    names = None
    own = adapter if into is None else adapter_for(into)
    if own.name != adapter.name and own.fills_others:
        adapter = own
        names = [name for name in manifest.by_name if name != SKELETON]
    unknown = sorted(options.keys() - adapter.options)
    if unknown:
        raise ValueError(
            f"this model was stored by the adapter {adapter.name!r}, and that has no option {unknown[0]!r}"
        )
    if weights_only:
        return adapter.weights(read(verify=verify), **options)
    may_fill = into is not None and isinstance(read, StoreReads) and (read.can_check or not precheck)
    if may_fill and int(manifest.columns.n_bytes.sum()) > STAGED_BYTES:
        assert isinstance(read, StoreReads)
        stored = {facts.name: facts for facts in manifest.columns.facts() if names is None or facts.name != SKELETON}
        check = read.check if verify and precheck else None
        return adapter.fill(into, stored, partial(read, verify=verify), check=check, **options)
    if into is not None:
        return adapter.reconstruct(read(names, verify=verify), original=into, **options)
    refuse_pickle(adapter, manifest, read, verify=verify, forbidden_by=forbidden_by)
    return adapter.reconstruct(read(verify=verify), **options)

"""Whether the store at a place is still the one that was opened there."""

from __future__ import annotations

from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.errors import BlobNotFoundError, ConflictError, StoreNotFoundError
from tensorcas_mlflow.store._condemned import GENERATION, Generation
from tensorcas_mlflow.store._format import FORMAT, parse_format
from tensorcas_mlflow.store._records import MAX_REF_BYTES


class Identity:
    """The id of an open store, compared with what its place says now.

    Somebody may delete a store and make another in its place while a training runs. What is saved there belongs to a
    store that is gone, and could not be loaded.
    """

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._id = store_id
        self._info: BlobInfo | None = None
        """What a look at the ``format`` file has shown when it was last read."""
        self._generation: Generation | None = None
        """In a remote store, what condemned lists there were when ``format`` was last read."""

    def note(self, generation: Generation) -> None:
        """Take note that a remote store is the one that was opened as long as its lists are these."""
        self._generation = generation

    def check(self, generation: Generation | None) -> None:
        """See that the store is the one that was opened.

        A saver calls it when its intent is there. Whoever deletes the store deletes the intent, and without that the
        commit fails. On this machine the check is one look at a file, and through a carrier one small request. In a
        remote store it costs no request while the lists are the same: each store has a generation of its own from the
        beginning.

        Args:
            generation: Of a remote store, as it was listed after the intent was there; None for others, and where
                one more request does not matter.

        Raises:
            StoreNotFoundError: There is no store any more.
            ConflictError: There is another one.
        """
        info: BlobInfo | None = None
        if self._backend.is_carrier:
            pass  # a server tells no times, so `format` is read each time
        elif generation is None:
            info = self._backend.stat(FORMAT)
            if info is None:
                raise StoreNotFoundError(self._backend.uri)
            if info == self._info:
                return
        elif generation == self._generation and any(key == GENERATION for key, _ in generation):
            return
        self._read()
        self._info = info
        if generation is not None:
            self._generation = generation

    def _read(self) -> None:
        try:
            now, _ = parse_format(self._backend.get(FORMAT, max_bytes=MAX_REF_BYTES))
        except BlobNotFoundError:
            raise StoreNotFoundError(self._backend.uri) from None
        if now != self._id:
            raise ConflictError(
                f"{self._backend.uri!r} is store {now} by now, and no longer {self._id}: nothing was committed; "
                "open the store anew"
            )

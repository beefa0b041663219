"""Check that a store is still the one opened at its place."""

from __future__ import annotations

from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.errors import BlobNotFoundError, ConflictError, StoreNotFoundError
from tensorcas_mlflow.store._condemned import GENERATION, Generation
from tensorcas_mlflow.store._format import FORMAT, parse_format
from tensorcas_mlflow.store._records import MAX_REF_BYTES


class Identity:
    """The id of an open store, compared with the current id at its place.

    A user may delete a store and create another in its place while a training runs. Data saved there would belong to
    a deleted store and could not be loaded.
    """

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._id = store_id
        self._info: BlobInfo | None = None
        """Description of the ``format`` file at its last reading."""
        self._generation: Generation | None = None
        """In a remote store, the condemned lists at the last reading of ``format``."""

    def note(self, generation: Generation) -> None:
        """Record that a remote store is the opened one as long as its lists are these."""
        self._generation = generation

    def check(self, generation: Generation | None) -> None:
        """Check that the store is the opened one.

        A saver calls it after creating its intent. Deleting the store deletes the intent, and without the intent the
        commit fails. On this machine the check is one `stat` of a file, and through a carrier one small request. In a
        remote store it costs no request while the lists are unchanged: each store has a generation of its own from the
        beginning.

        Args:
            generation: For a remote store, its listing after the intent was created; None for others, and for callers
                that can afford one more request.

        Raises:
            StoreNotFoundError: There is no store any more.
            ConflictError: There is another one.
        """
        info: BlobInfo | None = None
        if self._backend.is_carrier:
            pass  # a server reports no times, so `format` is read each time
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

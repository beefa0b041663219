"""Checkpoints far back in a store whose tensors may be bases, found by sketches."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from contextlib import suppress

from tensorcas_mlflow.errors import FormatError, NotFoundError
from tensorcas_mlflow.layout import Manifest, Ref
from tensorcas_mlflow.maintenance._inventory import manifest_of
from tensorcas_mlflow.store import Sketched, Sketches, Store, compute_sketches

_MOST_READ_BYTES = 8 << 20
"""Bound of the chunks read for the sketches of one checkpoint that was saved without any; the largest tensors count."""
_MOST_UNREAD = 256
"""Bound of such checkpoints, the latest ones, for which a search reads chunks."""


def series_of(ref: Ref) -> Hashable:
    """Return the series of a ref: the steps of one name in one run are in one, and any other ref is alone."""
    return (ref.run_id, ref.name) if ref.run_id is not None and ref.step is not None else ref.key


def _compute_sketched(store: Store, name: str, manifest: Manifest) -> Sketched | None:
    """Return the sketches of a checkpoint, which are computed if it was saved without any; None if it gives none."""
    found = Sketched.stored(name, manifest)
    if found is None:
        with suppress(NotFoundError, FormatError):
            found = compute_sketches(store, name, manifest, most_bytes=_MOST_READ_BYTES)
    return found


class FarRelatives:
    """Last checkpoint of each series that an optimization has passed, by its sketches.

    A wrong guess costs time: the trees of versions are chosen by the sizes of deltas.
    """

    def __init__(self, store: Store) -> None:
        """Begin without checkpoints.

        Args:
            store: Store to optimize.
        """
        self._store = store
        self._known = Sketches()
        self._refs: dict[str, Ref] = {}
        """A ref of each manifest that is known, by digest."""
        self._unread: dict[Hashable, Ref] = {}
        """Refs of the last checkpoints without sketches; they are made when a search needs them."""

    def note(self, ref: Ref, manifest: Manifest) -> None:
        """Add a checkpoint in the place of the one before it in its series.

        Args:
            ref: Its ref.
            manifest: Its manifest.
        """
        series = series_of(ref)
        found = Sketched.stored(ref.manifest, manifest)
        self._unread.pop(series, None)
        if found is None:
            self._unread[series] = ref
            if len(self._unread) > _MOST_UNREAD:
                del self._unread[next(iter(self._unread))]
        else:
            self._known.note(repr(series), found)
            self._refs[manifest.digest] = ref

    def find(self, manifests: Iterable[Manifest], near: Collection[Manifest], *, most: int) -> list[Manifest]:
        """Find the nearest checkpoint of each of some others, unless it is at hand.

        Args:
            manifests: Checkpoints with chunks to encode.
            near: Checkpoints that are compared with them anyway.
            most: Maximum number of results.

        Raises:
            BackendError: The storage failed.
        """
        found: dict[str, Manifest] = {each.digest: each for each in near}
        n_near = len(found)
        for manifest in manifests:
            if len(found) - n_near >= most:
                break
            query = _compute_sketched(self._store, "", manifest)
            if query is None:
                continue
            self._read()
            match = self._known.nearest(query)
            ref = None if match is None else self._refs.get(match.sketched.manifest.partition(".")[0])
            if ref is not None and ref.manifest.partition(".")[0] not in found:
                relative = manifest_of(self._store, [ref])
                if relative is not None:
                    found[relative.digest] = relative
        return list(found.values())[n_near:]

    def _read(self) -> None:
        """Sketch the checkpoints that were saved without sketches."""
        for series, ref in self._unread.items():
            manifest = manifest_of(self._store, [ref])
            each = None if manifest is None else _compute_sketched(self._store, ref.manifest, manifest)
            if manifest is not None and each is not None:
                self._known.note(repr(series), each)
                self._refs[manifest.digest] = ref
        self._unread = {}

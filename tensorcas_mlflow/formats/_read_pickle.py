"""Pickles and what ``joblib.dump`` writes, read without running them: the arrays and tensors in them."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.containers import (
    ArrayView,
    Blob,
    LegacyTorchFile,
    Machine,
    Persistent,
    SkippingTape,
    Tape,
    TensorView,
    storage_of,
    views_of,
    walk_pickles,
)
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._pickle_places import PicklePlaces
from tensorcas_mlflow.formats._source import ByteSource, PartSource, SourceStream
from tensorcas_mlflow.formats._zip_directory import Member

ONLY = "array"
"""What an array is called that is all of a pickle."""
_BLOCK_BYTES = 256 << 10
_COUNT_BYTES = 8


def walk(source: ByteSource) -> list[Machine]:
    """Walk the pickles of a file.

    Raises:
        FormatError: It is not sound, or too long to be looked through, or something follows the last pickle.
    """
    return walk_pickles(SkippingTape(SourceStream(source), block_bytes=_BLOCK_BYTES), source.size)


def list_pickles(source: ByteSource, machines: list[Machine]) -> Listing | None:
    """List the arrays and tensors of a file of pickles, where there are several of the second one as ``1.…``.

    A name is the keys, attributes and positions that lead to an array, with dots between. Left out are arrays of
    objects, those of subclasses that keep more than an array does, large bytes that are no array, and those whose bytes
    are not in the file (the buffers of protocol 5).

    Args:
        source: The file.
        machines: What has walked it.

    Returns:
        None for pickles in which there are none of these.

    Raises:
        FormatError: An array or a tensor is not as numpy or torch makes them, or things are in each other too often.
    """
    found = PicklePlaces(source)
    storages = _Storages(source)
    for nth, machine in enumerate(machines):
        prefix = f"{nth}" if len(machines) > 1 else ""
        found.add(_below(prefix, views_of(machine, storages.storage_in)), storages.at, only=ONLY)
    if not found.places and not found.places.left_out:
        return None
    return Listing(format="pickle", sources=found.sources, places=found.places, left_out=found.places.left_out)


def _below(prefix: str, views: Iterator[TensorView | ArrayView]) -> Iterator[TensorView | ArrayView]:
    for view in views:
        yield view._replace(name=".".join(filter(None, (prefix, view.name)))) if prefix else view


class _Storages:
    """The storages of tensors that were pickled by themselves: each is a whole torch file of one storage."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._found: dict[str, Member] = {}

    def storage_in(self, blob: Blob) -> Persistent:
        """Read such a file; see `views_of`."""
        part = PartSource(self._source, blob.at, blob.n_bytes, self._source.name)
        tape = Tape(SourceStream(part), block_bytes=_COUNT_BYTES << 10)
        file = LegacyTorchFile(tape)
        root = file.object.stack[-1] if file.object.stack else None
        if type(root) is not Persistent or storage_of(root.id) is None or file.keys != [root.id[2]]:
            raise FormatError("a tensor's storage is no storage")
        fact, start = file.storages[file.keys[0]], tape.position
        n_bytes = start + _COUNT_BYTES + fact.n_bytes
        if n_bytes != part.size or int.from_bytes(part.read(start, _COUNT_BYTES), "little") != fact.n_elements:
            raise FormatError("a tensor's storage does not have the size that it says")
        key = f"{blob.at}"
        self._found[key] = Member(key, blob.at + start + _COUNT_BYTES, fact.n_bytes, fact.n_bytes, False, 0)
        return Persistent((*root.id[:2], key, *root.id[3:]))

    def at(self, view: TensorView) -> Member:
        """Find the storage of a tensor."""
        return self._found[view.key]

"""The arrays of a listing that cannot be viewed where they lie, put where they can be."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.file_formats import Listing, TensorLocation
from tensorcas_mlflow.tensor import ALIGNMENT, Spec


def arrays_of(listing: Listing, *, watch: Callable[[int], None] | None = None) -> dict[str, Array]:
    """Give all arrays of a listing, holding some 16 MiB of them in memory at most.

    Those that lie in a mapped file as they are, are views of it. All others (deflated, in another order, or in a file
    that is not on this machine) are put into a temporary file without a name, and are views of that.

    Args:
        listing: Of a file or several.
        watch: Told of the bytes that are put there.

    Returns:
        Read-only arrays by name, in the listing's order. A view keeps alive what it views.

    Raises:
        CorruptError: The file is damaged, where that shows.
        BackendError: It cannot be read, or there is no room for a temporary file.
    """
    spilled = {name: place.spec for name, place in listing.locations.items() if not _is_mapped(listing, place)}
    views = _spill(listing, spilled, watch)
    return {name: views[name] if name in views else listing.array(name) for name in listing.locations}


def _is_mapped(listing: Listing, place: TensorLocation) -> bool:
    return place.is_plain and (
        place.n_bytes == 0 or listing.sources[place.source].view(place.start, place.n_bytes) is not None
    )


def _spill(listing: Listing, specs: dict[str, Spec], watch: Callable[[int], None] | None) -> dict[str, Array]:
    if not specs:
        return {}
    starts: dict[str, int] = {}
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            end = 0
            for name in specs:
                end += -end % ALIGNMENT
                starts[name] = end
                for _, piece in listing.stream([name]):
                    end += _put(piece, file, end)
                    if watch is not None:
                        watch(len(piece))
            is_empty = os.fstat(file.fileno()).st_size == 0
            mapped = memoryview(b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise BackendError("write", tempfile.gettempdir(), f"{type(error).__name__}: {error}") from error
    views = {}
    for name, spec in specs.items():
        start = starts[name]
        data = mapped[start : start + spec.n_bytes]
        views[name] = np.frombuffer(data, np.uint8).view(spec.numpy_dtype).reshape(spec.shape)
    return views


def _put(data: memoryview, file: BinaryIO, start: int) -> int:
    """Write bytes at a place, and return their number."""
    at = 0
    # Not through the map: where no room is left, writing to one kills the process.
    while at < len(data):
        at += os.pwrite(file.fileno(), data[at:], start + at)
    return len(data)

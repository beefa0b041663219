"""The bytes of a file of another format that are no bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorcas_mlflow.file_formats import TensorLocation


def stretches_between(places: Iterable[TensorLocation], size: int) -> Iterator[tuple[int, int]]:
    """Find the stretches of a file that no tensor lies in: headers, checksums, and what a reader cannot give.

    Args:
        places: The tensors of the file, in any order.
        size: Of the file.

    Yields:
        Where each stretch begins and ends, ascending; two of them do not touch.
    """
    end = 0
    for start, stop in sorted((place.start, place.start + place.n_bytes) for place in places if _has_each_byte(place)):
        if start > end:
            yield end, start
        end = max(end, stop)
    if end < size:
        yield end, size


def _has_each_byte(place: TensorLocation) -> bool:
    """Tell whether each byte of the stretch of a tensor belongs to one of its elements."""
    if place.strides is None:
        return place.n_bytes > 0
    n_elements = 1
    for stride, side in sorted(zip(place.strides, place.spec.shape, strict=True)):
        if side > 1 and stride:
            if stride != n_elements:
                return False
            n_elements *= side
    return 0 < place.n_bytes == n_elements * place.spec.numpy_dtype.itemsize

"""Models to save and load: real ones, trained here, and ones of any size made from trained weights."""

from benchmarks.data._case import Array, Case, Specs, bytes_of, same_bytes
from benchmarks.data._histories import HISTORIES, History, histories
from benchmarks.data._sizes import mixture, mlp, tiny_tensors, transformer
from benchmarks.data._trees import boosters, gradient_boosting

__all__ = [
    "HISTORIES",
    "Array",
    "Case",
    "History",
    "Specs",
    "boosters",
    "bytes_of",
    "gradient_boosting",
    "histories",
    "mixture",
    "mlp",
    "same_bytes",
    "tiny_tensors",
    "transformer",
]

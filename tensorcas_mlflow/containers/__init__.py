"""File formats that hold tensors, taken apart as they pass by: from bytes to parts, and never the other way.

A file comes back as the parts put one after the other, so a splitter that is wrong about a file costs deduplication
and never a byte. No splitter trusts a file: what it says is checked before memory or time is spent on it.
"""

from tensorcas_mlflow.containers._parts import More, Part, Plain, Skeleton, Tensor
from tensorcas_mlflow.containers._safetensors import SAFETENSORS_DTYPES
from tensorcas_mlflow.containers._split import split
from tensorcas_mlflow.containers._tape import Readable, Tape

__all__ = ["SAFETENSORS_DTYPES", "More", "Part", "Plain", "Readable", "Skeleton", "Tape", "Tensor", "split"]

"""File formats that tensors are exchanged in: read at any place and written in one pass, without the frameworks.

`tensorcas_mlflow.containers` takes files apart as they pass by, to store them as they are; here a file's tensors are
what matters, and a file that its specification forbids is refused.
"""

from tensorcas_mlflow.formats._listing import EXAMPLE_INPUT, OTHER_FILE, Listing, Place, Tensors, left_out_parts
from tensorcas_mlflow.formats._open import FORMATS_IN, list_source, open_listing
from tensorcas_mlflow.formats._source import Beside, ByteSource, LocalFile
from tensorcas_mlflow.formats._write import FORMATS_OUT, WritePlan, Written, WrittenFile, plan_write, write
from tensorcas_mlflow.formats._write_arrays import ArrayTensors

__all__ = [
    "EXAMPLE_INPUT",
    "FORMATS_IN",
    "FORMATS_OUT",
    "OTHER_FILE",
    "ArrayTensors",
    "Beside",
    "ByteSource",
    "Listing",
    "LocalFile",
    "Place",
    "Tensors",
    "WritePlan",
    "Written",
    "WrittenFile",
    "left_out_parts",
    "list_source",
    "open_listing",
    "plan_write",
    "write",
]

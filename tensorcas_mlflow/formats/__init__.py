"""File formats that tensors are exchanged in: read at any place and written in one pass, without the frameworks.

`tensorcas_mlflow.containers` takes files apart as they pass by, to store them as they are; here a file's tensors are
what matters, and a file that its specification forbids is refused.
"""

from tensorcas_mlflow.formats._listing import Listing, Place, Tensors
from tensorcas_mlflow.formats._source import ByteSource, LocalFile

__all__ = ["ByteSource", "Listing", "LocalFile", "Place", "Tensors"]


def list_source(source: ByteSource) -> Listing | None:  # TEMP
    """Stand-in."""
    return None


def open_listing(path: object) -> Listing:  # TEMP
    """Stand-in."""
    raise NotImplementedError

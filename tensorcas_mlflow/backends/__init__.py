"""Backends: what moves blobs by key.

The contract is in `Backend`; a new kind of storage is one subclass that passes
`tensorcas_mlflow.testing.BackendConformance` and one line in `_open.py`.
"""

from tensorcas_mlflow.backends._contract import Backend, BlobInfo, Buffer, Children, Token, check_key
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._memory import MemoryBackend
from tensorcas_mlflow.backends._open import SCHEME, STORE_FOLDER, local_path, open_backend, root_uri

__all__ = [
    "SCHEME",
    "STORE_FOLDER",
    "Backend",
    "BlobInfo",
    "Buffer",
    "Children",
    "LocalBackend",
    "MemoryBackend",
    "Token",
    "check_key",
    "local_path",
    "open_backend",
    "root_uri",
]

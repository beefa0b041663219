"""Backends: storage of blobs by key.

`Backend` is the contract. A new kind of storage is one subclass passing
`tensorcas_mlflow.testing.BackendConformance` and one line in `_open.py`.
"""

from tensorcas_mlflow.backends._buckets import Bucket
from tensorcas_mlflow.backends._contract import Backend, BlobInfo, Buffer, Children, Token, check_key
from tensorcas_mlflow.backends._credentials import open_bucket
from tensorcas_mlflow.backends._file import PAGE_BYTES, BlobFile, MappedStretch, aligned_buffer
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._memory import MemoryBackend
from tensorcas_mlflow.backends._meter import MeteredBackend
from tensorcas_mlflow.backends._names import artifact_path, is_readable_name, object_path
from tensorcas_mlflow.backends._object_info import ObjectInfo
from tensorcas_mlflow.backends._objects import ObjectBackend
from tensorcas_mlflow.backends._open import STORE_FOLDER, open_backend
from tensorcas_mlflow.backends._ring import Ring, has_ring
from tensorcas_mlflow.backends._root import REMOTE_SCHEMES, SCHEME, SCHEMES, Root, is_ours
from tensorcas_mlflow.backends._scratch import SCRATCH_BYTES, Scratch
from tensorcas_mlflow.backends._tally import Tally
from tensorcas_mlflow.backends._voids import is_void, is_void_object, new_void

__all__ = [
    "PAGE_BYTES",
    "REMOTE_SCHEMES",
    "SCHEME",
    "SCHEMES",
    "SCRATCH_BYTES",
    "STORE_FOLDER",
    "Backend",
    "BlobFile",
    "BlobInfo",
    "Bucket",
    "Buffer",
    "Children",
    "LocalBackend",
    "MappedStretch",
    "MemoryBackend",
    "MeteredBackend",
    "ObjectBackend",
    "ObjectInfo",
    "Ring",
    "Root",
    "Scratch",
    "Tally",
    "Token",
    "aligned_buffer",
    "artifact_path",
    "check_key",
    "has_ring",
    "is_ours",
    "is_readable_name",
    "is_void",
    "is_void_object",
    "new_void",
    "object_path",
    "open_backend",
    "open_bucket",
]

"""Backends: blobs by key, in folders, buckets and memory.

A root, keys and bytes come in; bytes, sizes and tokens go out, or a `BackendError`. The room knows no chunk, pack or
manifest, and imports `base` and `errors` only. `Backend` is the contract, written for object stores as much as for
files; every backend passes `tensorcas_mlflow.testing.BackendConformance`.

| module | holds |
|---|---|
| `_contract` | `Backend`, `BlobInfo`, and the grammar of keys |
| `_root` | `Root`, the one value for places |
| `_open` | the backend of a root, with its credentials |
| `_local`, `_file` | folders, and the ways to read one file |
| `_folder`, `_database` | folders with a database: the backend, and connections, transactions and checkpoints |
| `_rows`, `_records` | the tables of the database, and the bytes in them |
| `_checks`, `_mend`, `_salvage` | checking and rebuilding a database, and reading a damaged one page by page |
| `_objects`, `_buckets` | object stores, and all use of obstore |
| `_plain_files` | plain files beside a store, in a folder or a bucket |
| `_memory`, `_metered` | memory, and a backend that counts reads |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.backends._buckets import Bucket
    from tensorcas_mlflow.backends._checks import Damage
    from tensorcas_mlflow.backends._contract import (
        MOST_SHARED_BYTES,
        Backend,
        BlobInfo,
        Children,
        FoundFile,
        Token,
        check_key,
        is_key,
        map_requests,
    )
    from tensorcas_mlflow.backends._database import DATABASE_FILES
    from tensorcas_mlflow.backends._file import (
        PAGE_BYTES,
        SCRATCH_BYTES,
        BlobFile,
        MappedStretch,
        ReadCounter,
        Scratch,
        aligned_buffer,
    )
    from tensorcas_mlflow.backends._folder import FolderBackend
    from tensorcas_mlflow.backends._local import LocalBackend
    from tensorcas_mlflow.backends._memory import MemoryBackend
    from tensorcas_mlflow.backends._mend import damages_of, rebuild
    from tensorcas_mlflow.backends._metered import MeteredBackend
    from tensorcas_mlflow.backends._objects import ObjectBackend, is_void, new_void
    from tensorcas_mlflow.backends._open import open_backend, open_bucket
    from tensorcas_mlflow.backends._plain_files import (
        LocalPlainFiles,
        NewText,
        ObjectPlainFiles,
        PlainFile,
        PlainFiles,
        open_plain_files,
        settle_tree,
        write_whole,
    )
    from tensorcas_mlflow.backends._root import (
        SCHEME,
        STORE_FOLDER,
        UPLOADING,
        Root,
        artifact_path,
        is_ours,
        is_store,
        is_visible,
        is_visible_path,
    )
    from tensorcas_mlflow.backends._rows import DamagedError

_NAMES = {
    "_buckets": "Bucket",
    "_checks": "Damage",
    "_contract": "MOST_SHARED_BYTES Backend BlobInfo Children FoundFile Token check_key is_key map_requests",
    "_file": "PAGE_BYTES SCRATCH_BYTES BlobFile MappedStretch ReadCounter Scratch aligned_buffer",
    "_database": "DATABASE_FILES",
    "_local": "LocalBackend",
    "_folder": "FolderBackend",
    "_mend": "damages_of rebuild",
    "_memory": "MemoryBackend",
    "_metered": "MeteredBackend",
    "_objects": "ObjectBackend is_void new_void",
    "_open": "open_backend open_bucket",
    "_plain_files": (
        "LocalPlainFiles NewText ObjectPlainFiles PlainFile PlainFiles open_plain_files settle_tree write_whole"
    ),
    "_root": ("SCHEME STORE_FOLDER UPLOADING Root artifact_path is_ours is_store is_visible is_visible_path"),
    "_rows": "DamagedError",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

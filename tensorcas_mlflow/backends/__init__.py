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
| `_logged`, `_logs` | folders with logs: the backend, and the blobs in the logs of one store |
| `_log_view`, `_log_skipped` | all live blobs in logs, and the records that are not read yet |
| `_log_writer`, `_log_rewriter` | the log of this process, and the rewriting of logs |
| `_log_folder`, `_log_records`, `_log_reader`, `_log_index`, `_log_digests` | the files of logs, and their bytes |
| `_objects`, `_buckets` | object stores, and all use of obstore |
| `_plain_files` | plain files beside a store, in a folder or a bucket |
| `_memory`, `_metered` | memory, and a backend that counts reads |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.backends._buckets import Bucket, ObjectInfo
    from tensorcas_mlflow.backends._contract import (
        MOST_SHARED_BYTES,
        Backend,
        BlobInfo,
        Children,
        Freed,
        LogDamage,
        PossibleChildren,
        Token,
        check_key,
        is_key,
    )
    from tensorcas_mlflow.backends._file import (
        PAGE_BYTES,
        SCRATCH_BYTES,
        BlobFile,
        MappedStretch,
        ReadCounter,
        Scratch,
        aligned_buffer,
    )
    from tensorcas_mlflow.backends._local import LocalBackend
    from tensorcas_mlflow.backends._logged import LoggedBackend
    from tensorcas_mlflow.backends._memory import MemoryBackend
    from tensorcas_mlflow.backends._metered import MeteredBackend
    from tensorcas_mlflow.backends._objects import ObjectBackend, is_void, is_void_object, new_void
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
        is_readable_name,
        is_store,
        is_visible,
        is_visible_path,
        object_path,
    )

_NAMES = {
    "_buckets": "Bucket ObjectInfo",
    "_contract": "MOST_SHARED_BYTES Backend BlobInfo Children Freed LogDamage PossibleChildren Token check_key is_key",
    "_file": "PAGE_BYTES SCRATCH_BYTES BlobFile MappedStretch ReadCounter Scratch aligned_buffer",
    "_local": "LocalBackend",
    "_logged": "LoggedBackend",
    "_memory": "MemoryBackend",
    "_metered": "MeteredBackend",
    "_objects": "ObjectBackend is_void is_void_object new_void",
    "_open": "open_backend open_bucket",
    "_plain_files": (
        "LocalPlainFiles NewText ObjectPlainFiles PlainFile PlainFiles open_plain_files settle_tree write_whole"
    ),
    "_root": (
        "SCHEME STORE_FOLDER UPLOADING Root artifact_path is_ours is_readable_name is_store is_visible is_visible_path "
        "object_path"
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

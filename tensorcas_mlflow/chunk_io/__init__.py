"""Chunk I/O: locate, read, decode and verify chunks.

Rows of a manifest come in; filled arrays go out, or an error that names the damaged chunk. The room only reads. It
imports `layout`, `codecs`, `backends` and rooms below them; it knows no store, no ref and no file format.

| module | holds |
|---|---|
| `_read` | `ChunkReader`: look-ups, and new attempts where packs move or copies are damaged |
| `_derive` | evaluation of derived rows |
| `_catalog` | what this process knows of the index and of packs' tables |
| `_places` | places of chunks, and their look-up in tables |
| `_recent_chunks` | chunks that this process has stored last |
| `_plan` | target memory of each chunk, and the reads of each way |
| `_ways` | choice of a way to read, as a printable `ReadPlan` |
| `_decode` | batches in columns; the call of the compiled core |
| `_stored` | stored chunks that the core's encoder decodes as bases |
| `_fetch` | one load: reads of packs and of the cache, and the damage found |
| `_screen` | verification of many stored chunks that nobody keeps |
| `_map` | memory-mapped tensors |
| `_cache`, `_cache_files` | the chunk cache on local disk |
| `_tensors_file` | self-contained files |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io._cache import CachedPack, CachedRead, CacheFill, CacheHits, ExtentCache
    from tensorcas_mlflow.chunk_io._catalog import Catalog
    from tensorcas_mlflow.chunk_io._decode import ChainLinks
    from tensorcas_mlflow.chunk_io._derive import LastRow
    from tensorcas_mlflow.chunk_io._places import Places, find_bases
    from tensorcas_mlflow.chunk_io._read import ChunkOwner, ChunkReader
    from tensorcas_mlflow.chunk_io._recent_chunks import MOST_SAVED_BYTES
    from tensorcas_mlflow.chunk_io._screen import BlockScreen, find_sound
    from tensorcas_mlflow.chunk_io._stored import OpenPacks, StoredChunks
    from tensorcas_mlflow.chunk_io._tensors_file import TensorsFile
    from tensorcas_mlflow.chunk_io._ways import (
        LEAST_ASKED_BYTES,
        MAX_GAP_BYTES,
        MAX_READ_BYTES,
        WAYS,
        Extent,
        PackRead,
        ReadPlan,
        Situation,
        Way,
        WayChoice,
        choose,
        plan_reads,
        way_named,
        way_of_environment,
    )

_NAMES = {
    "_cache": "CachedPack CachedRead CacheFill CacheHits ExtentCache",
    "_catalog": "Catalog",
    "_decode": "ChainLinks",
    "_derive": "LastRow",
    "_places": "Places find_bases",
    "_read": "ChunkOwner ChunkReader",
    "_recent_chunks": "MOST_SAVED_BYTES",
    "_screen": "BlockScreen find_sound",
    "_stored": "OpenPacks StoredChunks",
    "_tensors_file": "TensorsFile",
    "_ways": (
        "LEAST_ASKED_BYTES MAX_GAP_BYTES MAX_READ_BYTES WAYS Extent PackRead ReadPlan Situation Way WayChoice "
        "choose plan_reads way_named way_of_environment"
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

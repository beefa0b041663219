"""Packs of chunks, and the index that finds a chunk in them (``docs/format.md``, Packs, The index).

| module | holds |
|---|---|
| `_pack` | packs: their names, payloads and tables |
| `_index` | the index: tables in memory; segments, searched by ranges and merged |
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.layout.packs._index import (
        EMPTY,
        IN_FULL,
        MAX_SEGMENT_BYTES,
        NOWHERE,
        Mask,
        Positions,
        Segment,
        Table,
        as_names,
        base_rows,
        check_segment_version,
        list_segments,
        make_table,
        merge_segments,
        merge_tables,
        only_packs,
        open_segment,
        read_segment,
        segment_bytes,
        segment_key,
        segment_name,
        to_merge,
        with_bases,
    )
    from tensorcas_mlflow.layout.packs._pack import (
        DELTA,
        ENTRY,
        MAX_DEPTH,
        PACK_MAGIC,
        PACK_NAME_BYTES,
        RAW_ALIGNMENT,
        STORED_DIGEST_BYTES,
        TABLE_BASE_BYTES,
        TABLE_ENTRY,
        TARGET_BYTES,
        Base,
        Entries,
        Packed,
        PackWriter,
        Payload,
        PayloadGroup,
        as_rows,
        bases_of,
        decode_chunk,
        drawn_s,
        is_base_of,
        is_delta,
        is_possible,
        list_packs,
        mark_loose,
        new_pack_name,
        pack_key,
        pack_name,
        payload_of,
        read_pack_table,
        read_table,
        sizes_text,
    )

_NAMES = {
    "_index": (
        "EMPTY IN_FULL MAX_SEGMENT_BYTES NOWHERE Mask Positions Segment Table as_names base_rows "
        "check_segment_version list_segments make_table merge_segments merge_tables only_packs open_segment "
        "read_segment segment_bytes segment_key segment_name to_merge with_bases"
    ),
    "_pack": (
        "DELTA ENTRY MAX_DEPTH PACK_MAGIC PACK_NAME_BYTES RAW_ALIGNMENT STORED_DIGEST_BYTES TABLE_BASE_BYTES "
        "TABLE_ENTRY TARGET_BYTES Base Entries Packed PackWriter Payload PayloadGroup as_rows bases_of decode_chunk "
        "drawn_s is_base_of is_delta is_possible list_packs mark_loose new_pack_name pack_key pack_name payload_of "
        "read_pack_table read_table sizes_text"
    ),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

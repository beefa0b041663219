"""Layout: the bytes of a store on disk, as values (``docs/format.md``).

Bytes of a blob come in and a checked value goes out, or a `FormatError`; and the other way round. A function that needs
a blob takes a backend and reads it. The room decides nothing: savers and collectors do. It imports `backends`,
`codecs`, `base`, `adapter` and `errors`.

| module | holds |
|---|---|
| `_keys` | names of blobs, and the text form of steps |
| `_manifest`, `_rows` | manifests, and their rows as columns |
| `_derived`, `_forms` | rows of a manifest that are functions of others; manifests that say how others are stored |
| `_manifest_stream`, `_manifest_arrow` | Arrow streams of manifests, without pyarrow and with it |
| `_pack` | packs, payloads and their tables |
| `_index` | the index, from digests to places |
| `_segment` | segments of the index: written, searched by ranges, merged |
| `_records` | refs and intents |
| `_ref_table` | tables of many refs, for listings of object stores |
| `_format_blob` | ``format``, identity, condemned lists, generation |
| `_hints` | places of a manifest's chunks at its write |
| `_sketches` | sketches of a manifest's tensors |
| `_tensors_file` | self-contained files |

Change ``docs/format.md`` first, and keep the stores in ``tests/golden`` readable.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.layout._derived import Derivation, kind_of
    from tensorcas_mlflow.layout._format_blob import (
        FORMAT,
        GENERATION,
        Condemnation,
        Condemned,
        Generation,
        Identity,
        Stamp,
        begin_first_generation,
        begin_generation,
        check_database,
        condemned_bytes,
        is_carried,
        new_format,
        parse_format,
        read_condemned,
        read_list,
        stamp_of,
    )
    from tensorcas_mlflow.layout._forms import each_form, forms_of, has_content_of, read_form
    from tensorcas_mlflow.layout._hints import (
        Hints,
        hint_bytes,
        pack_hint_bytes,
        read_hints,
        read_pack_hints,
        split_hints,
    )
    from tensorcas_mlflow.layout._index import (
        EMPTY,
        IN_FULL,
        NOWHERE,
        Mask,
        Positions,
        Table,
        as_names,
        base_rows,
        drawn_s,
        list_packs,
        make_table,
        mark_loose,
        merge_tables,
        new_pack_name,
        only_packs,
        pack_key,
        pack_name,
        read_pack_table,
        with_bases,
    )
    from tensorcas_mlflow.layout._keys import (
        DEFAULT_NAME,
        FORMS,
        STAND_INS,
        STEP_TEXT,
        artifact_key,
        artifact_prefix,
        as_step,
        find_strangers,
        form_key,
        formed_by,
        is_blob_key,
        is_shown,
        label_of,
        list_blobs,
        list_dir,
        step_of_text,
        step_text,
        strangers_text,
        unquote_segment,
    )
    from tensorcas_mlflow.layout._manifest import KEPT_HEADER, MAX_BYTES, Manifest
    from tensorcas_mlflow.layout._pack import (
        DELTA,
        ENTRY,
        FOOTER_BYTES,
        MAX_DEPTH,
        PACK_MAGIC,
        PACK_NAME_BYTES,
        RAW_ALIGNMENT,
        STORED_DIGEST_BYTES,
        TABLE_BASE_BYTES,
        TABLE_ENTRY,
        TABLE_MAGIC,
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
        is_base_of,
        is_delta,
        is_possible,
        payload_of,
        read_table,
        sizes_text,
    )
    from tensorcas_mlflow.layout._records import (
        MAX_REF_BYTES,
        Intent,
        Ref,
        RefTarget,
        intent_bytes,
        load_record,
        manifest_of_damaged_ref,
        new_ref,
        parse_intent,
        read_ref,
        read_refs_around,
        record_bytes,
        ref_bytes,
        writer_facts,
        writer_is_dead,
    )
    from tensorcas_mlflow.layout._ref_table import (
        REF_TABLES,
        RefSeen,
        read_listed_refs,
        read_ref_table,
        read_ref_tables,
        ref_table_bytes,
        tidy_ref_tables,
    )
    from tensorcas_mlflow.layout._rows import Columns, Numbers, Row, Rows, Specs, row_cuts
    from tensorcas_mlflow.layout._segment import (
        MAX_SEGMENT_BYTES,
        SEGMENT_MAGIC,
        Segment,
        check_segment_version,
        list_segments,
        merge_segments,
        open_segment,
        read_segment,
        segment_bytes,
        segment_key,
        segment_name,
        to_merge,
    )
    from tensorcas_mlflow.layout._sketches import read_sketches, sketch_bytes, sketched_rows
    from tensorcas_mlflow.layout._tensors_file import (
        HEADER_BYTES,
        TENSORS_FILE_MAGIC,
        Fill,
        Header,
        TensorsFileLayout,
        file_pieces,
    )

_NAMES = {
    "_derived": "Derivation kind_of",
    "_format_blob": (
        "FORMAT GENERATION Condemnation Condemned Generation Identity Stamp begin_first_generation begin_generation "
        "check_database condemned_bytes is_carried new_format parse_format read_condemned read_list stamp_of"
    ),
    "_forms": "each_form forms_of has_content_of read_form",
    "_hints": "Hints hint_bytes pack_hint_bytes read_hints read_pack_hints split_hints",
    "_index": (
        "EMPTY IN_FULL NOWHERE Mask Positions Table as_names base_rows drawn_s list_packs make_table mark_loose "
        "merge_tables new_pack_name only_packs pack_key pack_name read_pack_table with_bases"
    ),
    "_keys": (
        "DEFAULT_NAME FORMS STAND_INS STEP_TEXT artifact_key artifact_prefix as_step find_strangers form_key formed_by "
        "is_blob_key is_shown label_of list_blobs list_dir step_of_text step_text strangers_text unquote_segment"
    ),
    "_manifest": "KEPT_HEADER MAX_BYTES Manifest",
    "_pack": (
        "DELTA ENTRY FOOTER_BYTES MAX_DEPTH PACK_MAGIC PACK_NAME_BYTES RAW_ALIGNMENT TABLE_BASE_BYTES "
        "STORED_DIGEST_BYTES TABLE_ENTRY TABLE_MAGIC TARGET_BYTES Base Entries Packed PackWriter Payload "
        "PayloadGroup as_rows bases_of decode_chunk is_base_of is_delta is_possible payload_of read_table "
        "sizes_text"
    ),
    "_records": (
        "MAX_REF_BYTES Intent Ref RefTarget intent_bytes load_record manifest_of_damaged_ref new_ref parse_intent "
        "read_ref read_refs_around record_bytes ref_bytes writer_facts writer_is_dead"
    ),
    "_ref_table": (
        "REF_TABLES RefSeen read_listed_refs read_ref_table read_ref_tables ref_table_bytes tidy_ref_tables"
    ),
    "_rows": "Columns Numbers Row Rows Specs row_cuts",
    "_segment": (
        "MAX_SEGMENT_BYTES SEGMENT_MAGIC Segment check_segment_version list_segments "
        "merge_segments open_segment read_segment segment_bytes segment_key segment_name to_merge"
    ),
    "_sketches": "read_sketches sketch_bytes sketched_rows",
    "_tensors_file": "HEADER_BYTES TENSORS_FILE_MAGIC Fill Header TensorsFileLayout file_pieces",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

"""Layout: the bytes of a store on disk, as values (``docs/format.md``).

Bytes of a blob come in and a checked value goes out, or a `FormatError`; and the other way round. A function that needs
a blob takes a backend and reads it. The room decides nothing: savers and collectors do. It imports `backends`,
`codecs`, `base`, `adapter` and `errors`.

| module | holds |
|---|---|
| `_keys` | names of blobs, and the text form of steps |
| `_records` | refs and intents |
| `_format_blob` | ``format``, identity, condemned lists, generation |
| `_ref_table` | tables of many refs, for listings of object stores |
| `packs` | a room of its own: packs, and the index from digests to places |
| `manifests` | a room of its own: manifests, what follows them in their blobs, and forms |

`manifests` imports `packs`, and both import the modules here. Change ``docs/format.md`` first, and keep the stores in
``tests/golden`` readable.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
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
        read_ref_tables,
        tidy_ref_tables,
    )

_NAMES = {
    "_format_blob": (
        "FORMAT GENERATION Condemnation Condemned Generation Identity Stamp begin_first_generation begin_generation "
        "check_database condemned_bytes is_carried new_format parse_format read_condemned read_list stamp_of"
    ),
    "_keys": (
        "DEFAULT_NAME FORMS STAND_INS STEP_TEXT artifact_key artifact_prefix as_step find_strangers form_key "
        "formed_by is_blob_key is_shown label_of list_blobs list_dir step_of_text step_text strangers_text "
        "unquote_segment"
    ),
    "_records": (
        "MAX_REF_BYTES Intent Ref RefTarget intent_bytes load_record manifest_of_damaged_ref new_ref parse_intent "
        "read_ref read_refs_around record_bytes ref_bytes writer_facts writer_is_dead"
    ),
    "_ref_table": "REF_TABLES RefSeen read_listed_refs read_ref_tables tidy_ref_tables",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

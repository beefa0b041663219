"""Foreign files that hold tensors: one module for each format, and one table of all formats.

The table is `FORMATS` in ``_formats.py``. A format is a module with up to four functions, and one line of the table:

- ``is_<format>(head)`` recognises a file by its first bytes;
- ``split_<format>(tape)`` takes a file apart as it passes by: bytes come in, parts go out, and the parts one after the
  other are the file. The store keeps each part. A splitter that is wrong costs deduplication, and never a byte;
- ``list_<format>(source)`` returns a `Listing`: the names, specs and byte ranges of the tensors of a file that can be
  read at any position. It refuses a file that the format's specification forbids;
- ``lay_out_<format>(specs, metadata)`` computes a file to the byte, before the first tensor is read.

Splitter and lister share one parser of the format's header. No function trusts a file: it checks every claim before it
spends memory or time on it. Nothing here imports a framework, and nothing unpickles.

The room imports `layout` (for self-contained files and columns of tensors), `native`, `base`, `adapter` and `errors`;
it knows no store.
A name is imported at its first use: a save of arrays needs the parts of a file, and no format.
"""

from typing import TYPE_CHECKING

from tensorcas_mlflow.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tensorcas_mlflow.file_formats._beside import Description, FilePlace, Folder
    from tensorcas_mlflow.file_formats._formats import FORMATS, FORMATS_IN, FileFormat, list_source, open_listing, split
    from tensorcas_mlflow.file_formats._listing import (
        EXAMPLE_INPUT,
        OTHER_FILE,
        FlatTable,
        Listing,
        TensorLocation,
        Tensors,
        left_out_parts,
    )
    from tensorcas_mlflow.file_formats._safetensors import SAFETENSORS_DTYPES
    from tensorcas_mlflow.file_formats._source import ByteSource, LocalFile, MemorySource, OpenSibling, spilled
    from tensorcas_mlflow.file_formats._tape import (
        DerivedBytes,
        FilePart,
        Learned,
        More,
        PlainBytes,
        Readable,
        Skeleton,
        Tape,
        Tensor,
    )
    from tensorcas_mlflow.file_formats._write import (
        FORMATS_OUT,
        FileHeader,
        WritePlan,
        Written,
        WrittenFile,
        appearing_at,
        metadata_to_keep,
        plan_write,
    )

_NAMES = {
    "_beside": "Description FilePlace Folder",
    "_formats": "FORMATS FORMATS_IN FileFormat list_source open_listing split",
    "_listing": "EXAMPLE_INPUT OTHER_FILE FlatTable Listing TensorLocation Tensors left_out_parts",
    "_safetensors": "SAFETENSORS_DTYPES",
    "_source": "ByteSource LocalFile MemorySource OpenSibling spilled",
    "_tape": "DerivedBytes FilePart Learned More PlainBytes Readable Skeleton Tape Tensor",
    "_write": "FORMATS_OUT FileHeader WritePlan Written WrittenFile appearing_at metadata_to_keep plan_write",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

"""Our own self-contained files (``docs/format.md``), where they lie in a store or are to be imported."""

from __future__ import annotations

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource
from tensorcas_mlflow.tensors_file import HEADER_BYTES, Header, Layout


def list_self_contained(source: ByteSource) -> Listing:
    """List the tensors of a self-contained file; what is left of a model without them is none.

    Raises:
        FormatError: Its header or its manifest is damaged, or the file is not as long as they say.
    """
    header = Header.parse(source.read(0, min(HEADER_BYTES, source.size)))
    if HEADER_BYTES + header.manifest_bytes > source.size:
        raise FormatError("it ends in its manifest")
    manifest = header.manifest(bytes(source.read(HEADER_BYTES, header.manifest_bytes)))
    layout = Layout.of(manifest)
    if layout.n_bytes != source.size:
        raise FormatError(f"it has {source.size} bytes, and its manifest says {layout.n_bytes}")
    places = Places()
    for row, start in zip(manifest.rows, layout.starts.tolist(), strict=True):
        spec = row.spec
        if spec.dtype is None or spec.name == SKELETON:
            continue
        places.add(spec.name, spec.dtype, spec.shape, start=start, n_bytes=spec.n_bytes, file_bytes=source.size)
    return Listing(format="self-contained", sources=[source], places=places, metadata=manifest.metadata)

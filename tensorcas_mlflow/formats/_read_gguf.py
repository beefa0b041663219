"""GGUF files; see `tensorcas_mlflow.containers._gguf`.

The library ``gguf`` is not used: it maps a file of this machine, and checks neither sizes nor places.
"""

from __future__ import annotations

from tensorcas_mlflow.containers import GgufHeader, Tape, aligned
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, SourceStream

_BLOCK_BYTES = 64 << 10
_MAX_NAME_BYTES = 64
_MAX_DIMENSIONS = 4


def list_gguf(source: ByteSource) -> Listing:
    """List a GGUF file; the metadata are those of its pairs that are numbers or texts.

    The format: ``docs/gguf.md`` of ggml, versions 2 and 3. Refused are, as there and in ``gguf.cpp``: keys and names
    that stand twice; names of more than 64 bytes; more than 4 dimensions; places that are no multiples of the
    alignment; and more or less than the padding between two tensors. Quantized tensors are left out.

    Raises:
        FormatError: It is not sound. So do a `ValueError` and a `struct.error` say.
    """
    tape = Tape(SourceStream(source), block_bytes=_BLOCK_BYTES)
    header = GgufHeader(tape, keep=True)
    for n_bytes in header.walk():
        tape.take(n_bytes)
    data_at = aligned(tape.position, header.alignment)
    places = Places()
    end: int | None = 0
    """Where the tensors so far end; None where the size of the last one is not known."""
    for tensor in sorted(header.tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes != 0)):
        if len(tensor.name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
            raise FormatError(f"a tensor's name has more than {_MAX_NAME_BYTES} bytes: {tensor.name[:80]!r}")
        if tensor.n_dimensions > _MAX_DIMENSIONS:
            raise FormatError(f"tensor {tensor.name!r} has {tensor.n_dimensions} dimensions")
        if tensor.offset % header.alignment or (end is not None and tensor.offset != aligned(end, header.alignment)):
            raise FormatError(f"tensor {tensor.name!r} does not begin where the one before it ends")
        end = None if tensor.n_bytes is None else tensor.offset + tensor.n_bytes
        if data_at + (end or tensor.offset) > source.size:
            raise FormatError(f"tensor {tensor.name!r} goes on behind the end of the file")
        if tensor.dtype is None or tensor.shape is None or end is None:
            places.leave_out(tensor.name, tensor.kind)
        else:
            places.add(
                tensor.name,
                tensor.dtype.removeprefix(">"),
                tensor.shape,
                start=data_at + tensor.offset,
                n_bytes=end - tensor.offset,
                file_bytes=source.size,
                swapped=tensor.dtype.startswith(">"),
            )
    if end is not None and source.size > data_at + aligned(end, header.alignment):
        raise FormatError(f"{source.size - data_at - end} bytes follow the last tensor")
    return Listing(format="gguf", sources=[source], places=places, metadata=header.metadata, left_out=places.left_out)

"""Files whose header names every tensor and its place: safetensors, bintensors and bhckpt.

Their own libraries are not used: none of them reads a file that lies in a store, safetensors' gives no place of a
tensor, and the other two let pass what is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.containers import (
    BINTENSORS_MAX_HEADER_BYTES,
    SAFETENSORS_MAX_HEADER_BYTES,
    SAFETENSORS_PACKED_BITS,
    Tape,
    TensorFact,
    bhckpt_header,
    bhckpt_header_bytes,
    bintensors_header,
    check_shape,
    in_order,
    safetensors_header,
    strict_json,
)
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, SourceStream

_LENGTH_BYTES = 8
_MAX_METADATA_BYTES = 16 << 20
_LOOK_BYTES = 4096


def list_safetensors(source: ByteSource) -> Listing:
    """List a safetensors file.

    The format: https://github.com/huggingface/safetensors#format. Refused are, as there: a header of more than
    100,000,000 bytes or that does not begin with ``{``; keys that stand twice; tensors with holes between them, with
    shared bytes, or of another size than their shape's; bytes behind the last one. Besides: more than 16 MiB of
    metadata, and dtypes that the library does not know.

    Raises:
        FormatError: It is not sound. So does a `ValueError` say.
    """
    header = _header_after_length(source, SAFETENSORS_MAX_HEADER_BYTES)
    facts: list[TensorFact] = []
    metadata: dict[str, str] = {}
    for found in safetensors_header(header):
        if isinstance(found, TensorFact):
            facts.append(found)
            continue
        if len(found) > _MAX_METADATA_BYTES:
            raise FormatError(f"it has {len(found)} bytes of metadata")
        metadata = strict_json(found)
        json.dumps(metadata, ensure_ascii=False).encode()  # halves of characters are no text
    for fact in facts:
        if fact.dtype is None and fact.kind not in SAFETENSORS_PACKED_BITS:
            raise FormatError(f"tensor {fact.name[:80]!r} has a dtype that does not exist: {fact.kind[:80]!r}")
        if fact.dtype is None:
            check_shape(fact.name, fact.shape, SAFETENSORS_PACKED_BITS[fact.kind], 8 * (fact.end - fact.begin))
    return _listing("safetensors", source, in_order(facts), _LENGTH_BYTES + len(header), metadata)


def list_bintensors(source: ByteSource) -> Listing:
    """List a bintensors file.

    The format: see `tensorcas_mlflow.containers._bintensors`. Refused are, as by its library, what is refused of
    safetensors; and bytes hidden behind the decoded header, numbers in more bytes than they need, and names that stand
    twice in the metadata.

    Raises:
        FormatError: It is not sound. So do a `ValueError` and an `IndexError` say.
    """
    header = _header_after_length(source, BINTENSORS_MAX_HEADER_BYTES)
    metadata, facts = bintensors_header(header)
    return _listing("bintensors", source, facts, _LENGTH_BYTES + len(header), metadata)


def list_bhckpt(source: ByteSource) -> Listing:
    """List a file of bhckpt, whose architecture is the metadatum ``arch``.

    The format: see `tensorcas_mlflow.containers._bhckpt`. Its library refuses nothing. Refused are here: holes, shared
    bytes, bytes behind the last tensor, sizes that are not those of shape and dtype, names that stand twice, and a
    first object that counts other tensors than the table. A tensor in a codec other than none is left out.

    Raises:
        FormatError: It is not sound. So does a `struct.error` say.
    """
    tape = Tape(SourceStream(source), block_bytes=_LOOK_BYTES)
    table, n_bytes = bhckpt_header_bytes(tape)
    if n_bytes > source.size:
        raise FormatError("it ends in its header")
    arch, facts = bhckpt_header(source.read(0, n_bytes), table)
    return _listing("bhckpt", source, facts, n_bytes, {"arch": arch})


def _header_after_length(source: ByteSource, max_bytes: int) -> memoryview:
    if source.size < _LENGTH_BYTES:
        raise FormatError(f"it has {source.size} bytes")
    n_bytes = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if n_bytes > max_bytes:
        raise FormatError(f"its header has {n_bytes} bytes, and may have {max_bytes}")
    if n_bytes > source.size - _LENGTH_BYTES:
        raise FormatError("it ends in its header")
    return source.read(_LENGTH_BYTES, n_bytes)


def _listing(
    format: str, source: ByteSource, facts: Sequence[TensorFact], data_at: int, metadata: Mapping[str, Any]
) -> Listing:
    """Make the listing of tensors that lie one after the other."""
    end = data_at + (facts[-1].end if facts else 0)
    if end != source.size:
        raise FormatError(f"its tensors end at byte {end}, and the file at byte {source.size}")
    places = Places()
    places.add_table(facts, data_at)
    return Listing(format=format, sources=[source], places=places, metadata=metadata, left_out=places.left_out)

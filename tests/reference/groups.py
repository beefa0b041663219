"""Encoding of one group of chunks, one chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.layout.packs import PayloadGroup
from tensorcas_mlflow.store import Policy
from tensorcas_mlflow.store._choose import EncodingChoice
from tensorcas_mlflow.store._encode import _SMALL_BYTES, ChunkEncodings, _Encoded, _laid_out, _name_bases
from tensorcas_mlflow.store._sources import Pieces
from tests.reference.choose import encode_best, encode_chosen, samples_alike

_SAMPLED = 32
"""One chunk in so many is a sample."""
_LEAST_GAIN = 1 / 8
"""Small chunks are encoded one by one only if this saves so much of the samples: each costs tens of microseconds."""


def encode_group(
    pieces: Pieces, encodings: ChunkEncodings | None, choices: Sequence[EncodingChoice], policy: Policy
) -> list[PayloadGroup]:
    """Encode a group of chunks; ``choices`` are those of the encodings."""
    sizes = np.array([len(each) for each in pieces.data])
    text = pieces.itemsizes == 1
    is_candidate = text if policy is Policy.FAST else np.ones(len(sizes), dtype=bool)
    is_sampled = is_candidate & (sizes < _SMALL_BYTES) & ~text
    if encodings is not None:
        is_sampled &= encodings.choice < 0
    encoded = _encoded(pieces, is_candidate, is_sampled, encodings, choices)
    groups, parts = _laid_out(encoded, sizes, pieces)
    for laid_out, part in zip(groups, parts, strict=True):
        if encodings is not None:
            _name_bases(laid_out.entries, encodings.named[part])
    return groups


def _encoded(
    pieces: Pieces,
    is_candidate: Any,
    is_sampled: Any,
    encodings: ChunkEncodings | None,
    choices: Sequence[EncodingChoice],
) -> list[_Encoded]:
    data, itemsizes = pieces.data, pieces.itemsizes.tolist()
    out: list[_Encoded] = [(RAW, 1, raw) for raw in data]
    small = np.flatnonzero(is_sampled)
    alike: Mapping[int, Any] = {}
    if len(small) > _SAMPLED:
        samples = small[::_SAMPLED].tolist()
        n_stored = sum(len(encode_best(data[at], itemsizes[at])[2]) for at in samples)
        if n_stored > (1 - _LEAST_GAIN) * sum(len(data[at]) for at in samples):
            is_candidate = is_candidate & ~is_sampled
        else:
            alike = samples_alike((data[at], itemsizes[at]) for at in samples)
    for at in np.flatnonzero(is_candidate).tolist():
        if encodings is None or encodings.choice[at] < 0:
            out[at] = encode_best(data[at], itemsizes[at], alike.get(itemsizes[at]) if is_sampled[at] else None)
        else:
            out[at] = encode_chosen(data[at], choices[encodings.choice[at]], encodings.bases[at])
    return out

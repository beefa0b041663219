from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.base import ubjson
from tests.file_formats.samples import ubj


@pytest.mark.parametrize("booster", ["gbtree", "gblinear"])
def test_a_tree_of_an_xgboost_model_is_written_as_the_same_bytes(booster: str) -> None:
    model = ubj(booster)

    assert ubjson.write(ubjson.parse(model)) == model


def test_values_of_every_type_are_read_as_they_were_written() -> None:
    written = {"flags": [None, True, False], "whole": [1, 127, -(2**40)], "text": "é", "byte": np.uint8(3)}
    read = ubjson.parse(ubjson.write({**written, "packed": np.arange(3, dtype=np.float32)}))

    assert {key: read[key] for key in written} == written
    assert read["packed"].dtype == ">f4"
    assert read["packed"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "too early"),
        (b"Zx", "bytes follow"),
        (b"[Z]", "without a count"),
        (b"[$x#L" + bytes(8), "unknown type"),
        (b"[$d#L" + bytes(7) + b"\x03" + bytes(8), "are claimed"),
        (b"SL" + bytes(7) + b"\x09", "is claimed"),
        (b"[#L" + bytes(7) + b"\x01", "is claimed"),
        ((b"[#L" + bytes(7) + b"\x01") * 40 + b"Z", "deeper than"),
        (b"{" + 2 * (b"L" + bytes(7) + b"\x01aZ") + b"}", "twice"),
        (b"?", "unknown marker"),
    ],
)
def test_a_document_outside_of_the_dialect_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ubjson.parse(data)

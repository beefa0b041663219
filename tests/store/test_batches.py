from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.store import _read

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([100 * MIB], [1]),
        ([MIB] * 32, [32]),
        ([MIB] * 33, [16, 17]),
        ([MIB] * 96, [32, 32, 32]),
        ([1, 80 * MIB, 1], [1, 2]),
    ],
)
def test_deltas_are_read_in_even_parts_of_a_bounded_size(
    sizes: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_read, "_BASES_BYTES", 32 * MIB)
    chunks = np.arange(len(sizes)) * 2
    batches = list(_read._batches(chunks, np.repeat(np.array(sizes, dtype=np.int64), 2)))

    assert [len(batch) for batch in batches] == parts
    assert [chunk for batch in batches for chunk in batch.tolist()] == chunks.tolist()

"""Keys of blobs are segments with slashes between."""

from __future__ import annotations

import itertools

import pytest

from tensorcas_mlflow.backends._contract import check_key

RIGHT = ["a", "@1", "%2e", ".a", "a.", "...", "x" * 200]
SEGMENTS = [*RIGHT, "", ".", "..", "x" * 201, "a\n", ".\n", "+a", "\u00e9"]


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_a_key_is_valid_if_each_segment_is(n_segments: int) -> None:
    for segments in itertools.product(SEGMENTS, repeat=n_segments):
        key = "/".join(segments)

        if set(segments) <= set(RIGHT):
            assert check_key(key) == key
        else:
            with pytest.raises(ValueError, match="not a key"):
                check_key(key)

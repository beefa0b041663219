"""Training text, available on every machine with the benchmark."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

MAX_BYTES = 4_000_000
HIDDEN = 0
"""The number in place of a hidden word."""
RARE = 1
"""The number of all words that have none of their own."""


@cache
def documentation() -> torch.Tensor:
    """Return the documentation of the packages beside torch: some megabytes of introductions and lists of changes."""
    # An environment may take its packages from another one, so its own site-packages may be empty.
    return _read(sorted(Path(torch.__file__).parents[1].glob("*.dist-info/METADATA")))


@cache
def sources() -> torch.Tensor:
    """Return the standard library's own code, a different text than the documentation."""
    return _read(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def _read(paths: Iterable[Path]) -> torch.Tensor:
    """Return the first bytes of some files, concatenated, each byte as a number from 0 to 255."""
    text = bytearray()
    for path in paths:
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8).long()


def words(n_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of the documentation and of the sources as numbers below `n_words`, the most frequent first."""
    texts = [
        re.findall(r"\w+|[^\w\s]", bytes(text.to(torch.uint8).tolist()).decode(errors="replace"))
        for text in (documentation(), sources())
    ]
    frequent = Counter(word for text in texts for word in text).most_common(n_words - 2)
    number_of = {word: number for number, (word, _) in enumerate(frequent, RARE + 1)}
    documented, programmed = (torch.tensor([number_of.get(word, RARE) for word in text]) for text in texts)
    return documented, programmed

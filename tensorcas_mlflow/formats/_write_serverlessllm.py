"""Writing the folders that ServerlessLLM and Tensora load: partitions, and an index.

``tensor_index.json`` gives of each tensor its offset, its size, its shape, its strides in elements, its dtype as torch
names it, and the number of the partition; partition N is the file ``tensor.data_N``.
See https://github.com/ServerlessLLM/ServerlessLLM (``sllm_store``), whose index has one partition, and
https://github.com/botirk38/tensora, which added the sixth field.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.formats._write_layout import FileLayout, FlatLayout, check_dtypes, starts_of, strides_of
from tensorcas_mlflow.formats._write_torch import DTYPES
from tensorcas_mlflow.tensor import ALIGNMENT, Spec

FILES = re.compile(r"tensor_index\.json|tensor\.data_\d+")
"""Names of the files in such a folder."""


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, Any], *, partitions: int = 1) -> list[FileLayout]:
    """Lay a folder out, the index last; the format has no place for metadata.

    The largest tensor goes first, each into the partition that holds least, and into the first one of several. Those
    that get none are not written.

    Raises:
        ValueError: A tensor's dtype cannot be written.
    """
    check_dtypes(specs, DTYPES, "ServerlessLLM")
    held: list[list[Spec]] = [[] for _ in range(min(partitions, max(1, len(specs))))]
    fill = [(0, number) for number in range(len(held))]
    for spec in sorted(specs, key=lambda spec: (-spec.n_bytes, spec.name)):
        n_bytes, number = fill[0]
        held[number].append(spec)
        heapq.heapreplace(fill, (n_bytes + spec.n_bytes + -spec.n_bytes % ALIGNMENT, number))
    index: dict[str, list[Any]] = {}
    for number, part in enumerate(held):
        for spec, start in zip(part, starts_of(part, ALIGNMENT), strict=True):
            index[spec.name] = [
                start,
                spec.n_bytes,
                list(spec.shape),
                strides_of(spec.shape),
                f"torch.{spec.dtype}",
                number,
            ]
    files: list[FileLayout] = [
        FlatLayout(f"tensor.data_{number}", specs=part, alignment=ALIGNMENT) for number, part in enumerate(held)
    ]
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False)
    return [*files, FlatLayout("tensor_index.json", head=text.encode())]

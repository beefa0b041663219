"""The tensors of a checkpoint as an Arrow table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow._arrow import array_of_numbers, array_of_texts
from tensorcas_mlflow.reader._contents import Contents
from tensorcas_mlflow.reader._outline import Outline


def table_of(contents: Contents, outline: Outline) -> pa.Table:
    """Describe tensors; see `CheckpointReader.table`."""
    specs, found = contents.specs, outline.assignment
    dtypes = [str(name) for name in specs.dtypes]
    offsets = array_of_numbers(specs.shape_at, pa.int32())
    return pa.table(
        {
            "name": specs.names,
            "dtype": array_of_texts([dtypes[code] for code in specs.dtype.tolist()]),
            "shape": pa.ListArray.from_arrays(offsets, array_of_numbers(specs.sides, pa.int64())),
            "n_bytes": array_of_numbers(specs.n_bytes, pa.int64()),
            "stack": array_of_texts([found.stacks[at] if at >= 0 else None for at in found.stack.tolist()]),
            "layer": _or_null(found.layer),
            "expert": _or_null(found.expert),
            "digest": array_of_texts([None if known is None else known.hex() for known in contents.known_identities()]),
        }
    )


def _or_null(numbers: Any) -> Any:
    return (
        pa.array(np.asarray(numbers).tolist(), pa.int64())
        if (numbers >= 0).all()
        else pa.array([number if number >= 0 else None for number in numbers.tolist()], pa.int64())
    )

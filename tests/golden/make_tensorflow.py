"""Write the sample of TensorFlow's variables: `python make_tensorflow.py FOLDER`, with TensorFlow 2.21.

``FOLDER/variables`` is ``tests/golden/tensorflow``. The tests run without TensorFlow.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

ARRAYS: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
    "kernel": np.arange(600, dtype=np.float32).reshape(20, 30),
    "half": np.arange(64).astype(ml_dtypes.bfloat16),
    "steps": np.array(7),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float16),
    **{f"many/{nth}": np.full((3, nth + 1), nth + 1.0) for nth in range(19)},
}
"""The variables. The sample also has a variable of texts, and TensorFlow's graph of objects."""


def main(folder: str) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.many = [tf.Variable(ARRAYS[f"many/{nth}"]) for nth in range(19)]
    for name in ("kernel", "half", "steps", "flags", "empty"):
        setattr(module, name, tf.Variable(ARRAYS[name]))
    module.names = tf.Variable(["a", "bcd"])
    tf.saved_model.save(module, folder)


if __name__ == "__main__":
    main(sys.argv[1])

"""Program that wrote the files of this folder, with Keras 3.15.1, its backend of torch, and h5py 3.16.

    KERAS_BACKEND=torch python make_keras.py

Keras is no requirement of the tests: its files are kept.
"""

from pathlib import Path

import keras
import numpy as np

HERE = Path(__file__).parent

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((6,)),
        keras.layers.Dense(10, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(10, dtype="bfloat16"),
        keras.layers.Dense(2, name="head"),
    ]
)
model.compile(optimizer="adam", loss="mse")
model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
model.save(HERE / "model.keras")
model.save_weights(HERE / "model.weights.h5")
model.save(HERE / "legacy.h5")
np.savez(
    HERE / "weights.npz",
    *[np.asarray(keras.ops.convert_to_numpy(each)) for each in model.weights if each.dtype != "bfloat16"],
)

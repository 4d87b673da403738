"""The second exercise of the course, made safe: a model in each file, and on from the newest.

Nothing of ours is in it: the recipe `keras` collects the files, each link takes the newest.

    hpc-ckpt run --link-time 60s -- python examples/keras_epochs.py 40
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

FILES = "training_2/{epoch}.keras"
EVERY = 5
"""Epochs between two files."""


def data() -> tuple[np.ndarray, np.ndarray]:
    """Points on two moons; the same in every link."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, 512)
    upper = rng.integers(0, 2, 512)
    x = np.stack([np.cos(angle) + upper, np.sin(angle) * (1 - 2 * upper)], axis=1)
    return (x + rng.normal(0, 0.1, x.shape)).astype("float32"), upper


def newest() -> tuple[int, Path] | None:
    """The epoch and the file of the newest model; an empty folder is no model."""
    folder, ending = Path(FILES).parent, Path(FILES).suffix
    named = {re.sub(r".*\D", "", p.stem): p for p in folder.glob(f"*{ending}")}
    found = {int(epoch): path for epoch, path in named.items() if epoch}
    return max(found.items()) if found else None


def fresh() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, "relu"),
                              keras.layers.Dense(2)])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


class EachEpochs(keras.callbacks.Callback):
    """The whole model with its optimizer, under its last name only once it is written."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        print(f"epoch {epoch + 1} loss {(logs or {})['loss']:.9f}", flush=True)
        if (epoch + 1) % EVERY == 0:
            path = Path(FILES.format(epoch=epoch + 1))
            path.parent.mkdir(exist_ok=True)
            draft = path.with_name(".writing.keras")
            self.model.save(draft)
            draft.replace(path)


def main() -> None:
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    x, y = data()
    found = newest()
    begin, model = (found[0], keras.saving.load_model(found[1])) if found else (0, fresh())
    print(f"goes on from epoch {begin}", flush=True)
    model.fit(x, y, epochs=epochs, initial_epoch=begin, batch_size=64, shuffle=False, verbose=0,
              callbacks=[EachEpochs()])  # fmt: skip
    loss, accuracy = model.evaluate(x, y, verbose=0)
    print(f"end: loss {loss:.9f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()

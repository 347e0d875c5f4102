"""A training on 8 devices that gathers in one byte; as a program, one that kills itself.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
    python tests/parallel/resumed_on_devices.py PRECISION FOLDER EPOCH STEP
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))

import resumable
from resumable import EPOCHS, STEPS

import keras_mp

__all__ = ["EPOCHS", "STEPS", "train"]


def train(precision, folder, *actions):
    """Trains, and returns all that a training changes, by name, and the logs of each epoch."""
    with keras_mp.parallel.distribute("fully_sharded", 8, gather_dtype="float8", reduce_dtype="bfloat16"):
        model, logs = resumable.train(precision, folder, *actions)
        return resumable.values(model), logs


if __name__ == "__main__":
    precision, folder, epoch, step = sys.argv[1:]
    train(precision, Path(folder), resumable.Act((int(epoch), int(step)), resumable.kill))
    sys.exit("it should have been killed")

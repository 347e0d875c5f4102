"""What plain Keras does with a task, line by line, where the kit fails: the first line that fails is shown."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from benchmarks.kerashub_tasks.task import Task, under

SHOWN = 300  # characters of a message

CALLED = "outputs = tf.function(task)(x)"
MADE = (
    "rebuilt = type(task).from_config(task.get_config())",
    "assert [a.compute_dtype for a in rebuilt.layers] == [a.compute_dtype for a in task.layers], 'other policies'",
)
REBUILT = (
    *MADE,
    CALLED,
    "rebuilt.set_weights(task.get_weights())",
    "task, again = rebuilt, tf.function(rebuilt)(x)",
    "keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), again, outputs)",
)
# As many steps as Keras's loss scale needs to come down from 2^15.
BEFORE = "before = task.get_weights()"
FITTED = "assert np.isfinite(task.fit(*data, epochs=20, verbose=0).history['loss']).all(), 'the loss is not finite'"
# Keras's own fit, for the tasks whose fit() raises NotImplementedError.
TRAINED = (
    "batches = tf.data.Dataset.from_tensors(batch)",
    "losses = keras.Model.fit(task, batches, epochs=20, verbose=0).history['loss']",
    "assert np.isfinite(losses).all(), 'the loss is not finite'",
)
MOVED = "assert any(np.any(new != old) for new, old in zip(task.get_weights(), before)), 'no weight has moved'"
# Of each step: the policies that a task is built under, each with its lines.
LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "build": {"mixed_float16": ()},
    "stabilize": {"mixed_float16": REBUILT},
    "fit": {"mixed_float16": ("COMPILE", BEFORE, FITTED, MOVED)},
    "find_nonfinite": {"mixed_float16": ("COMPILE", BEFORE, *TRAINED, MOVED)},
    "audit": {"mixed_float16": MADE, "float32": (*REBUILT, "COMPILE", BEFORE, *TRAINED, MOVED)},
    "export_float32": {
        "mixed_float16": MADE,
        "float32": (
            *REBUILT,
            "task.export(str(folder / 'plain'), verbose=False)",
            "module = tf.saved_model.load(str(folder / 'plain'))",
            "served = module.serve(keras.tree.map_structure(tf.constant, x))",
            "keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), served, again)",
        ),
    },
    "convert": {"mixed_float16": (*REBUILT, "COMPILE", BEFORE, *TRAINED, MOVED)},
    "save": {
        "mixed_float16": (
            # As if trained.
            "moved = [w + 0.01 * np.random.random(w.shape) if w.dtype.kind == 'f' else w for w in task.get_weights()]",
            "task.set_weights(moved)",
            "task.save(folder / 'plain.keras')",
            "loaded = tf.function(keras.saving.load_model(folder / 'plain.keras'))(x)",
            CALLED,
            "keras.tree.map_structure(np.testing.assert_array_equal, loaded, outputs)",
        ),
    },
}


class Failure(NamedTuple):
    """What plain Keras fails at: the policy, the line of Python that was run, and its error."""

    policy: str
    line: str
    error: str


def failure(step: str, config: Task, folder: Path) -> Failure | None:
    """Runs the lines of a step on a fresh task.

    Args:
        step: one of `LINES`.
        config: the task's.
        folder: the folder where lines may write.

    Returns:
        The first line that fails, or None where all work.
    """
    for policy, lines in LINES[step].items():
        found = _failure(policy, lines, config, folder)
        if found is not None:
            return found
    return None


def _failure(policy: str, lines: tuple[str, ...], config: Task, folder: Path) -> Failure | None:
    settings = "".join(f", {key}={value!r}" for key, value in config.compile.items())
    compiled = f"task.compile(keras.optimizers.Adam(1e-3){settings})"
    known: dict[str, Any] = {"keras": keras, "np": np, "tf": tf, "folder": folder, "build": config.build}
    line = "task = build()"
    try:
        with under(policy):
            exec(line, known)
            known["data"] = config.data(known["task"])
            known["batch"] = prepared(known["task"], known["data"])
            known["x"] = known["batch"][0]
            for line in lines:
                line = compiled if line == "COMPILE" else line
                exec(line, known)
    except Exception as error:
        return Failure(policy, line, one_line(error))
    return None


def prepared(task: Any, data: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the task itself takes of what fit() takes: (x, y) or (x, y, sample_weight)."""
    if task.preprocessor is None:
        return data
    return keras.tree.map_structure(keras.ops.convert_to_numpy, task.preprocess_samples(*data))


def one_line(error: BaseException) -> str:
    """An error's class and what it says, without Keras's list of arguments, its colours and its frames."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).partition("Arguments received by")[0]
    if text.startswith("in user code:"):  # of a tf.function: frames, and then the error itself
        text = re.split(r"^ *\w*(?:Error|Exception): ", text, flags=re.MULTILINE)[-1]
    text = re.sub(r"'\{\{node \S+\}\} = (\w+)\[[^\]]*\]\([^)]*\)'", r"\1", text)  # TensorFlow's name of an operation
    text = " ".join(text.split())
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."

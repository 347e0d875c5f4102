"""A sample of the tasks of KerasHub; `make tasks` takes them all through the kit."""

import inspect

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the tasks run on TensorFlow; what JAX adds is in the tests of each part", allow_module_level=True)
hub = pytest.importorskip("keras_hub.models", reason="the tasks are KerasHub's: pip install keras-hub")

from benchmarks import task_sweep
from benchmarks.kerashub_tasks import OUTSIDE, TASKS, steps
from benchmarks.kerashub_tasks.task import Task, classes, inputs_of, under

pytestmark = pytest.mark.slow


def public_tasks():
    """The task classes that keras_hub.models offers, each with its names: some have several."""
    names: dict[type, list[str]] = {}
    for name, value in vars(hub).items():
        if inspect.isclass(value) and issubclass(value, hub.Task):
            names.setdefault(value, []).append(name)
    return names


def test_each_public_task_is_built_or_listed_with_a_reason():
    for names in public_tasks().values():
        assert any(name in TASKS or name in OUTSIDE for name in names), names
    offered = {name for names in public_tasks().values() for name in names}
    assert TASKS.keys() <= offered and OUTSIDE.keys() <= offered and not TASKS.keys() & OUTSIDE.keys()
    assert all(OUTSIDE.values()) and len(TASKS) >= 40


def test_what_is_called_abstract_is():
    for name, reason in OUTSIDE.items():
        assert (getattr(hub, name).backbone_cls is None) == reason.startswith("abstract"), name


@keras.saving.register_keras_serializable("task_sweep")
class AddsInFloat32(keras.layers.Layer):
    """What plain Keras fails at in float16 on TensorFlow."""

    def call(self, inputs):
        import tensorflow as tf

        return inputs + tf.ones((1,), "float32")

    def compute_output_spec(self, inputs, **kwargs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


class Small(keras.Model):
    """A functional model with what the steps read of a task."""

    preprocessor = None


def small(*layers):
    def build():
        inputs = keras.Input((6,))
        outputs = inputs
        for layer in layers:
            outputs = layer()(outputs)
        return Small(inputs, outputs)

    return Task("small", build, classes, inputs_of(), {"loss": "sparse_categorical_crossentropy"})


def test_a_failure_of_plain_keras_is_named_with_the_line_that_shows_it(tmp_path):
    config = small(lambda: keras.layers.Dense(3), AddsInFloat32, lambda: keras.layers.Dense(3, activation="softmax"))
    subject = steps.Subject(config, tmp_path)
    with under("mixed_float16"):
        assert steps._cell("build", subject).status == "works"
        cell = steps._cell("fit", subject)
    assert cell.status == "keras" and cell.error
    assert cell.plain.policy == "mixed_float16" and "task.fit(*data, epochs=20, verbose=0)" in cell.plain.line
    assert "float" in cell.plain.error and "\n" not in cell.plain.error
    made = {"name": "Small", "family": "small", "state": "", "cells": {"fit": vars(cell)}}
    assert task_sweep.faults([made]) == []
    notes = task_sweep._Notes()
    assert task_sweep._cell(vars(cell), notes) == "plain Keras fails [1](#note-1)"
    assert cell.plain.line in notes.lines()[0]


def test_a_failure_where_plain_keras_works_is_a_fault(tmp_path, monkeypatch):
    def fails(subject):
        raise steps.Missed("the result is wrong")

    config = small(lambda: keras.layers.Dense(3, activation="softmax"))
    subject = steps.Subject(config, tmp_path)
    steps._cell("build", subject)
    monkeypatch.setitem(steps.STEPS, "fit", fails)
    cell = steps._cell("fit", subject)
    assert cell.status == "fault" and cell.plain is None
    made = {"name": "Small", "family": "small", "state": "", "cells": {"fit": vars(cell)}}
    assert task_sweep.faults([made]) == ["Small, fit: Missed: the result is wrong"]


def test_a_task_that_takes_too_long_does_not_end_the_table(tmp_path):
    made = task_sweep.row_in_own_process("BertTextClassifier", tmp_path / "row.json", "now", limit=0.5)
    (fault,) = task_sweep.faults([made])  # in whichever step it was
    assert fault.startswith("BertTextClassifier, ") and fault.endswith(": not done within 0.5 s")

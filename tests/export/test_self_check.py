"""An export is run on synthetic inputs of several sizes before it is called done."""

import itertools
import os

import keras
import numpy as np
import pytest
import zoo
from exported import needs_tensorflow, only_tensorflow, served
from keras import layers

import keras_mp
from keras_mp.export import self_check
from keras_mp.export.verification import ExportError

pytestmark = needs_tensorflow
CALLS = itertools.count()


def tagger(dtype="mixed_float16"):
    """As in many tutorials: padded tokens of any length, a tag for each."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(3, dtype=dtype))(x), name="tagger")


def test_time_distributed_over_an_open_length_is_exported_right(tmp_path):
    """`model.export` goes over as many steps as there are records: 3.6e-2 off in a batch of 1, failing in others."""
    model = tagger()
    report = keras_mp.export_float32(model, tmp_path / "out")
    assert report.notes == ()
    table, kernel, bias = (keras.ops.convert_to_numpy(w).astype("float64") for w in model.weights)
    for records, steps in ((1, 5), (4, 7), (7, 2)):
        tokens = zoo.rng().integers(0, 9, (records, steps)).astype("int32")
        np.testing.assert_allclose(served(report.path, tokens), table[tokens] @ kernel + bias, rtol=1e-5, atol=1e-6)


@only_tensorflow
def test_what_keras_exports_goes_over_the_records(tmp_path):
    """So that the one before means something; where this fails, Keras has mended it."""
    tagger("float32").export(tmp_path / "out", verbose=False)
    assert served(tmp_path / "out", np.ones((1, 5), "int32")).shape == (1, 1, 3)
    assert served(tmp_path / "out", np.ones((3, 5), "int32")).shape == (3, 3, 3)


@only_tensorflow
@pytest.mark.slow
def test_time_distributed_over_a_layer_that_takes_the_mask(tmp_path):
    tokens = keras.Input((None, 4), dtype="int32")
    x = layers.TimeDistributed(layers.GlobalAveragePooling1D())(layers.Embedding(5, 3, mask_zero=True)(tokens))
    model, batch = keras.Model(tokens, x), zoo.rng().integers(0, 5, (3, 5, 4)).astype("int32")
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch)
    assert report.max_difference <= 1e-5 and report.notes == () and "call" not in vars(model.layers[-1])


class TakesRecordsForSteps(layers.Layer):
    """As Keras's TimeDistributed: repeats the first record as often as there are records."""

    def call(self, inputs):
        return inputs[:, : keras.ops.shape(inputs)[0]] if inputs.shape[1] is None else inputs

    def compute_output_shape(self, input_shape):
        return input_shape


class OneRecord(layers.Layer):
    """Wrong where the batch is open, though the number of steps is known."""

    def call(self, inputs):
        return inputs / (inputs.shape[0] or 1)


class FailsInGraphs(layers.Layer):
    def call(self, inputs):
        import tensorflow as tf

        return inputs if inputs.shape[0] is not None else tf.ensure_shape(inputs, (2, 4))


@only_tensorflow
@pytest.mark.parametrize(
    ("layer", "shape", "told"),
    [
        (TakesRecordsForSteps, (None, 3), r"differs .* by inf on synthetic inputs of the shape \(1, 6, 3\)"),
        (OneRecord, (4,), r"differs .* on synthetic inputs of the shape \(3, 4\)"),
        (FailsInGraphs, (4,), r"fails on synthetic inputs of the shape \(1, 4\), which the model in float32 takes"),
    ],
)
def test_a_graph_that_is_wrong_for_other_sizes_is_not_kept(layer, shape, told, tmp_path):
    model = keras.Sequential([keras.Input(shape), layer()], name="wrong")
    with pytest.raises(ExportError, match=f"model 'wrong' was not kept: it {told}"):
        keras_mp.export_float32(model, tmp_path / "new" / "folder" / "out")
    assert os.listdir(tmp_path) == []


def shapes_tried(model, path, monkeypatch):
    """The shapes, and the largest values of integers, that an export ran on."""
    seen, original = [], self_check._compared

    def noting(serve, model, inputs, *rest):
        seen.append(keras.tree.map_structure(np.asarray, inputs))
        return original(serve, model, inputs, *rest)

    monkeypatch.setattr(self_check, "_compared", noting)
    report = keras_mp.export_float32(model, path)
    return report, seen


@only_tensorflow
def test_two_batch_sizes_and_two_lengths_of_several_inputs(tmp_path, monkeypatch):
    tokens, mask = (keras.Input((None,), dtype="int32", name=name) for name in ("tokens", "mask"))
    extra = keras.Input((2,), name="extra")
    x = layers.Embedding(5, 4)(tokens) * keras.ops.expand_dims(keras.ops.cast(mask, "float32"), -1)
    x = layers.Concatenate()([layers.GlobalMaxPooling1D()(x), extra])
    model = keras.Model({"tokens": tokens, "mask": mask, "extra": extra}, layers.Dense(2)(x))
    report, seen = shapes_tried(model, tmp_path / "out", monkeypatch)
    assert report.notes == ()
    shapes = [{name: x.shape for name, x in batch.items()} for batch in seen]
    assert shapes == [
        {"tokens": (1, 6), "mask": (1, 6), "extra": (1, 2)},
        {"tokens": (3, 9), "mask": (3, 9), "extra": (3, 2)},
    ]
    assert all(0 <= batch["tokens"].min() and batch["tokens"].max() < 5 for batch in seen)
    assert all(batch["tokens"].dtype == "int32" and np.ptp(batch["extra"]) > 0 for batch in seen)


@only_tensorflow
def test_an_image_as_large_as_the_model_needs(tmp_path, monkeypatch):
    block = [layer for _ in range(6) for layer in (layers.Conv2D(2, 3, padding="same"), layers.MaxPooling2D())]
    model = keras.Sequential([keras.Input((None, None, 3)), *block, layers.GlobalAveragePooling2D()])
    report, seen = shapes_tried(model, tmp_path / "out", monkeypatch)
    assert [x.shape for x in seen] == [(1, 96, 96, 3), (3, 64, 64, 3)] and report.notes == ()


class Table(layers.Embedding):
    """Takes nothing that it has no row for, where Keras's counts from the end."""

    def call(self, inputs):
        import tensorflow as tf

        with tf.control_dependencies([tf.debugging.assert_non_negative(inputs)]):
            return super().call(tf.identity(inputs))


@only_tensorflow
def test_tokens_in_an_input_of_floats(tmp_path, monkeypatch):
    """An Input without a dtype is one of floats."""
    model = keras.Sequential([keras.Input((7,)), Table(9, 4), layers.Flatten(), layers.Dense(2)])
    report, seen = shapes_tried(model, tmp_path / "out", monkeypatch)
    assert [x.shape for x in seen] == [(1, 7), (3, 7)] and report.notes == ()
    assert all(x.dtype == "float32" and x.max() < 9 and (x == np.floor(x)).all() for x in seen)


@only_tensorflow
def test_texts_that_a_lookup_knows_in_a_batch_of_a_fixed_size(tmp_path, monkeypatch):
    lookup = layers.StringLookup(vocabulary=["red", "green"], num_oov_indices=0)
    inputs = keras.Input((2,), dtype="string", batch_size=2)
    model = keras.Model(inputs, layers.Embedding(2, 4)(lookup(inputs)))
    report, seen = shapes_tried(model, tmp_path / "out", monkeypatch)
    assert [x.shape for x in seen] == [(2, 2)] and report.notes == ()
    assert {word for x in seen for word in x.ravel()} <= {b"red", b"green"}


class OnlyLarge(layers.Layer):
    """Takes no input that somebody would make up."""

    def call(self, inputs):
        import tensorflow as tf

        with tf.control_dependencies([tf.debugging.assert_greater(tf.reduce_min(inputs), 1e6, "too small to be one")]):
            return tf.identity(inputs)


@only_tensorflow
def test_where_plain_keras_fails_alike_it_is_said_and_kept(tmp_path):
    model = keras.Sequential([keras.Input((4,)), OnlyLarge()])
    report = keras_mp.export_float32(model, tmp_path / "out")
    assert len(report.notes) == 2 and os.listdir(tmp_path) == ["out"]
    assert "could not be run on synthetic inputs of the shape (1, 4): plain Keras fails, too:" in report.notes[0]
    assert "too small to be one" in report.notes[0] and " ".join(report.notes[0].split()) in " ".join(
        str(report).split()
    )


@only_tensorflow
def test_where_outputs_are_no_function_of_the_inputs_it_is_said_and_kept(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x + next(CALLS))])
    report = keras_mp.export_float32(model, tmp_path / "out")
    assert report.notes and "two runs of the model itself differ by" in report.notes[0]


@only_tensorflow
def test_a_deep_network_whose_weights_blow_rounding_up_is_kept(tmp_path):
    """Eager mode and a graph round differently: that is no fault of the export."""
    steep = [layers.Lambda(lambda x: keras.ops.sin(x * 900.0)) for _ in range(6)]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), *steep])
    assert keras_mp.export_float32(model, tmp_path / "out").low_precision_ops == 0

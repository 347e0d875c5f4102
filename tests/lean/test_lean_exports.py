"""Files that are exported from lean models are those of the plain models, operator for operator."""

import importlib.util

import keras
import numpy as np
import own_blocks
import pytest
from test_lean_families import recomputing

import keras_mp
from keras_mp.lean.lean_model import lean_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("tensorflow", "tf2onnx", "onnxruntime")),
        reason='an ONNX file is made by TensorFlow, tf2onnx and onnxruntime: pip install "keras-mp[export]"',
    ),
]
EXPORTS = {
    "onnx": keras_mp.export.export_onnx,
    "litert": keras_mp.export.export_litert,
    "saved_model": keras_mp.export_float32,
}


@pytest.mark.parametrize(
    ("build", "remat", "kind"),
    [
        (own_blocks.functional_gpt, False, "onnx"),
        (own_blocks.mini_gpt, True, "saved_model"),
        (own_blocks.vit, True, "litert"),
    ],
)
def test_an_export_holds_the_plain_operators(build, remat, kind, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = build(blocks=2)
    generator = np.random.default_rng()
    for weight in model.trainable_weights:
        weight.assign(weight + generator.normal(size=weight.shape) * 0.1)
    lean = recomputing(model, remat=remat)
    kinds = {row.kind for row in lean_rows(lean) if row.lean}
    assert "attention" in kinds and ("block" in kinds) == remat
    if build is own_blocks.vit:
        x = generator.normal(size=(3, 8, 8, 3)).astype("float32")
    else:
        x = generator.integers(0, own_blocks.VOCABULARY, (3, own_blocks.LENGTH)).astype("int32")
    ours, plain = (
        EXPORTS[kind](each, tmp_path / f"{name}.{kind}", verify=x)
        for name, each in (("lean", lean), ("plain", model))
    )  # fmt: skip
    assert ours.max_difference <= 1e-5
    if kind == "saved_model":
        assert ours.nodes == plain.nodes and ours.low_precision_ops == 0
        values = [served(tmp_path / f"{name}.{kind}", x) for name in ("lean", "plain")]
        np.testing.assert_array_equal(*values)
    else:
        assert ours.operators == plain.operators and ours.low_precision == 0


def served(path, x):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    return np.asarray(next(iter(keras.tree.flatten(loaded.serve(x)))))

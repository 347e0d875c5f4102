import pytest
from exported import needs_tensorflow

from keras_mp.export.low_precision import count_nodes, low_precision

pytestmark = needs_tensorflow


def saved(tmp_path, function, **attributes):
    import tensorflow as tf

    module = tf.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    signature = [tf.TensorSpec((None, 2), tf.float32, name="x")]
    module.serve = tf.function(function, input_signature=signature, autograph=False)
    tf.saved_model.save(module, str(tmp_path / "saved"), signatures=module.serve)
    return tmp_path / "saved"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cast_to_each_low_precision(dtype, tmp_path):
    import tensorflow as tf

    target = getattr(tf, dtype, None) or getattr(tf.dtypes.experimental, dtype)
    places = low_precision(saved(tmp_path, lambda x: tf.cast(tf.cast(x, target, name="down"), tf.float32)))
    assert any(place.op == "Cast" and place.node == "down" and dtype in place.what for place in places)


def test_inside_a_branch_and_a_loop(tmp_path):
    import tensorflow as tf

    def low(x):
        return tf.cast(tf.cast(x, tf.bfloat16, name="hidden"), tf.float32)

    def function(x):
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: low(x), lambda: x)
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, low(x)), [0, x])[1]

    assert sum(place.node.endswith("hidden") for place in low_precision(saved(tmp_path, function))) >= 2


def test_a_constant_and_a_variable(tmp_path):
    import tensorflow as tf

    variable = tf.Variable([1.0, 2.0], dtype=tf.float16, name="half")
    constant = tf.constant([1.0, 2.0], tf.bfloat16)
    path = saved(tmp_path, lambda x: x + tf.cast(variable, tf.float32) + tf.cast(constant, tf.float32), half=variable)
    places = low_precision(path)
    assert any(place.op == "variable" and "float16" in place.what for place in places)
    assert any(place.op == "Const" and "tensor.dtype" in place.what and "bfloat16" in place.what for place in places)


def test_integers_and_doubles_are_not_low_precision(tmp_path):
    import tensorflow as tf

    path = saved(tmp_path, lambda x: tf.cast(tf.cast(tf.cast(x, tf.int8), tf.float64), tf.float32))
    assert low_precision(path) == [] and count_nodes(path) > 0

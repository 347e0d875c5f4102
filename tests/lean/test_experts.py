"""The chosen experts of a mixture: values and gradients for every kind of choice, against NumPy in float64."""

import keras
import numpy as np
import pytest
from derivatives import directional, penalty_gradients
from gradients_of import MODES, value_and_gradients
from keras import ops

from keras_mp.lean.experts import chosen_experts
from keras_mp.rebuild.quantized_banks import QuantizedBank

pytestmark = pytest.mark.jax
WIDTH, INNER = 8, 6


def expert(rows, scale, up, down):
    return ops.matmul(ops.tanh(ops.matmul(rows, up)) * scale, down)


def choices(kind, tokens, k, experts, random):
    """Which experts each token chooses: any, the same for all, some never."""
    rows = np.array([random.permutation(experts)[:k] for _ in range(tokens)]).reshape(tokens, k)
    if kind == "collapsed":
        rows[:] = random.permutation(experts)[:k]
    if kind == "empty":
        rows = np.stack([random.permutation(experts // 2)[:k] for _ in range(tokens)])
    return rows.astype("int32")


def reference(x, chosen, weights, up, down, upstream):
    """The gradients of `sum(upstream y)`: of x, weights, both banks, and of upstream, which is y."""
    to = [np.zeros_like(array) for array in (x, weights, up, down, upstream)]
    for token, row in enumerate(chosen):
        for place, number in enumerate(row):
            hidden = np.tanh(x[token] @ up[number])
            to[4][token] += hidden * weights[token, place] @ down[number]
            to_product = down[number] @ upstream[token]
            to_hidden = weights[token, place] * to_product * (1 - hidden**2)
            to[0][token] += up[number] @ to_hidden
            to[1][token, place] += hidden @ to_product
            to[2][number] += np.outer(x[token], to_hidden)
            to[3][number] += np.outer(hidden * weights[token, place], upstream[token])
    return to


def drawn(tokens, k, experts, kind="any"):
    random = np.random.default_rng()
    shapes = (tokens, WIDTH), (tokens, k), (experts, WIDTH, INNER), (experts, INNER, WIDTH), (tokens, WIDTH)
    arrays = [random.normal(size=shape).astype("float32") for shape in shapes]
    return choices(kind, tokens, k, experts, random), arrays


def assert_close(got, wanted, tolerance):
    for number, (one, right) in enumerate(zip(got, wanted, strict=True)):
        assert np.max(np.abs(one - right), initial=0) <= tolerance * np.max(np.abs(right), initial=1e-3), number


@pytest.mark.parametrize(
    "kind, tokens, k, experts, mode",
    [
        ("any", 48, 2, 16, MODES[-1]),
        ("empty", 48, 2, 16, MODES[-1]),
        ("any", 37, 3, 8, "jit"),
        ("collapsed", 37, 3, 8, "jit"),
        ("collapsed", 5, 1, 8, MODES[-1]),
        ("any", 16, 4, 4, MODES[0]),
        ("any", 0, 2, 8, MODES[0]),  # of a short last batch a replica has no rows
    ],
)
def test_values_and_gradients_are_those_of_each_token_alone(kind, tokens, k, experts, mode):
    chosen, arrays = drawn(tokens, k, experts, kind)

    def total(x, weights, up, down, upstream):
        return ops.sum(chosen_experts(x, ops.convert_to_tensor(chosen), weights, [up, down], expert) * upstream)

    x, *others = (array.astype("float64") for array in arrays)
    assert_close(value_and_gradients(total, arrays, mode)[1:], reference(x, chosen, *others), 1e-5)


def integers(shape, bits):
    """A bank as integers, and the float64 numbers that they stand for."""
    random, (experts, _, columns) = np.random.default_rng(), shape
    codes = random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
    scale = random.uniform(0.5, 1.5, (experts, 1, columns)).astype("float32") / 2 ** (bits - 1)
    zero = random.integers(-3, 4, scale.shape).astype("int8")
    packed = codes if bits == 8 else codes[..., ::2] % 16 + 16 * codes[..., 1::2]
    floats = (codes - zero.astype("float64")) * scale
    return QuantizedBank(*map(ops.convert_to_tensor, (packed.astype("int8"), scale, zero))), floats


@pytest.mark.parametrize("bits, experts, kind", [(4, 16, "any"), (8, 12, "collapsed")])
def test_banks_of_integers_are_the_floats_that_they_stand_for(bits, experts, kind):
    chosen, (x, weights, _, down, upstream) = drawn(31, 2, experts, kind)
    bank, up = integers((experts, WIDTH, INNER), bits)

    def total(x, weights, down, upstream):
        given = ops.convert_to_tensor(chosen), weights, [bank, down], expert, (False, True)
        return ops.sum(chosen_experts(x, *given) * upstream)

    arrays = x, weights, down, upstream
    wanted = reference(*(x.astype("float64"), chosen, weights, up, down, upstream))
    got = value_and_gradients(total, arrays, MODES[-1])[1:]
    assert_close(got, [one for place, one in enumerate(wanted) if place != 2], 1e-5)


def of_all(x, chosen, weights, up, down):
    """The same by every expert for every token, in plain operations."""
    routing = ops.sum(ops.one_hot(chosen, up.shape[0], dtype=x.dtype) * weights[..., None], axis=1)
    hidden = ops.tanh(ops.einsum("th,ehm->etm", x, up))
    return ops.einsum("etm,emh,te->th", hidden, down, routing)


JIT = pytest.param("jit", marks=[pytest.mark.slow] * (keras.backend.backend() == "tensorflow"))  # which takes longer


@pytest.mark.parametrize("mode", ["eager", JIT][keras.backend.backend() == "jax" :])
def test_second_derivatives_and_forward_mode(mode):
    chosen, arrays = drawn(13, 1, 8, "collapsed")
    *inputs, upstream = arrays

    def penalized(function):
        return lambda *values: ops.sum(ops.tanh(function(*values)) * upstream)

    ours = penalized(lambda x, w, *banks: chosen_experts(x, ops.convert_to_tensor(chosen), w, banks, expert))
    plain = penalized(lambda x, w, *banks: of_all(x, chosen, w, *banks))
    pairs = zip(penalty_gradients(ours, inputs, mode), penalty_gradients(plain, inputs, mode), strict=True)
    for one, right in pairs:
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-4 * np.max(np.abs(right)))
    directions = [np.random.default_rng().normal(size=array.shape).astype("float32") for array in inputs]
    wanted = directional(plain, inputs, directions, mode)
    np.testing.assert_allclose(directional(ours, inputs, directions, mode), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained, products", [((True, True), 0), ((False, True), 1), ((False, False), 2)])
def test_what_does_not_train_has_no_gradient_and_no_product_for_one(trained, products):
    chosen, (x, weights, up, down, upstream) = drawn(24, 1, 8)

    def total(trained):
        def function(x, up, down):
            given = (ops.convert_to_tensor(chosen), ops.convert_to_tensor(weights), [up, down])
            return ops.sum(chosen_experts(x, *given, expert, trained) * upstream)

        return function

    counts = [products_of(total(which), [x, up, down]) for which in ((True, True), trained)]
    assert counts[0] - counts[1] == products


def products_of(function, arrays):
    """How many products of all experts a function and its gradients make."""
    if keras.backend.backend() == "jax":
        import jax

        gradients = jax.grad(function, argnums=tuple(range(len(arrays))))
        return str(jax.jit(gradients).lower(*arrays).as_text()).count("dot_general") // 2  # as many in the loop
    import tensorflow as tf

    @tf.function(autograph=False)
    def gradients(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            value = function(*arguments)
        return tape.gradient(value, arguments, unconnected_gradients="zero")

    function = gradients.get_concrete_function(*map(tf.constant, arrays))
    results = [result.op.name for result in function.outputs]
    used = tf.compat.v1.graph_util.extract_sub_graph(function.graph.as_graph_def(), results)
    return sum("MatMul" in node.op for node in used.node)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX knows all sizes")
def test_an_unknown_number_of_tokens():
    import tensorflow as tf

    chosen, arrays = drawn(29, 2, 16, "collapsed")
    down, (bank, up) = tf.constant(arrays[3]), integers((16, WIDTH, INNER), 4)
    shapes = [tf.TensorSpec((None, 2), "int32"), tf.TensorSpec((None, WIDTH)), tf.TensorSpec((None, 2))]

    @tf.function(input_signature=[*shapes, tf.TensorSpec((None, WIDTH))], jit_compile=True, autograph=False)
    def gradients(chosen, x, weights, upstream):
        with tf.GradientTape() as tape:
            tape.watch([x, weights, down, upstream])
            value = tf.reduce_sum(chosen_experts(x, chosen, weights, [bank, down], expert, (False, True)) * upstream)
        return tape.gradient(value, [x, weights, down, upstream])

    got = [np.asarray(array) for array in gradients(chosen, arrays[0], arrays[1], arrays[4])]
    x, weights, _, *others = (array.astype("float64") for array in arrays)
    wanted = reference(x, chosen, weights, up, *others)
    assert_close(got, [one for place, one in enumerate(wanted) if place != 2], 1e-5)

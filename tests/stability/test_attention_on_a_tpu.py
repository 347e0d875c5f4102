"""Attention where Keras finds a TPU, whose Splash kernel is interpreted here, against its definition in float64."""

import functools
import logging

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp
from keras_mp import backend
from keras_mp.rebuild.walk import treatments_of
from keras_mp.stability.attention import AttentionAsAsked

engine = backend.engine_of("keras_mp.stability.attention")

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow attends as it was asked on every chip"),
]

if keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

    from benchmarks.tpu_attention import WAYS, built, numbers, off, on_a_tpu, reference

ROWS = 384  # three blocks of 128
SCALE = 0.3  # of scores of a variance of about 1
ERRORS = {"float32": 2e-6, "bfloat16": 2e-2}


def _masks(padding, rows):
    """Masks as layers make them in a step, by name, with the mask that Splash is given for it."""
    first, second = jnp.arange(rows)[:, None], jnp.arange(rows)[None, :]
    keys, queries = (keras.ops.expand_dims(keras.ops.cast(padding, "bool"), axes) for axes in ((1, 2), (1, 3)))
    whole = keras.ops.broadcast_to((first >= second)[None], (2, rows, rows))
    return {
        "none": (None, "FullMask"),
        "padding": (keys, "FullMask"),
        "padding of queries": (keys & queries, "FullMask"),
        "causal": ((first >= second)[None, None], "LocalMask(None, 0)"),
        # As KerasHub's decoders merge them.
        "causal and padding": (
            keras.ops.expand_dims(keras.ops.minimum(padding[:, None], keras.ops.cast(whole, "int32")), 1) != 0,
            "LocalMask(None, 0)",
        ),
        "window": (((first >= second) & (first - second < 50))[None, None], "LocalMask(49, 0)"),
        "window and padding": ((abs(first - second) < 50)[None, None] & keys, "LocalMask(49, 49)"),
        "known": (((first + second) % 3 != 1)[None, None], "NumpyMask"),
        "known and padding": (((first + second) % 3 != 1)[None, None] & keys, None),
        "unknown": (jnp.sin(first * second + padding[:, None, :1, None]) > 0, None),
    }


def _exact(query, key, value, upstream, mask, cap):
    """Attention and its gradients, from the definition in float64."""

    def attend(query, key, value):
        group = query.shape[2] // key.shape[2]
        key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) * SCALE
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        scores = scores if mask is None else jnp.where(mask, scores, -1e30)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)

    with jax.enable_x64(True):
        operands = [jnp.asarray(np.asarray(x, "float64")) for x in (query, key, value)]
        output, pull = jax.vjp(attend, *operands)
        return [np.asarray(x) for x in (output, *pull(jnp.asarray(np.asarray(upstream, "float64"))))]


def _padding(rows, left):
    padding = np.ones((2, rows), "int32")
    padding[1, slice(0, 150) if left else slice(150, None)] = 0
    return padding


_NAMES = ("padding", "padding of queries", "causal", "window", "known", "known and padding", "unknown")


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "cap", "left"),
    [
        ("none", ROWS, "float32", None, False),
        ("causal and padding", ROWS, "float32", 1.5, True),
        ("window and padding", ROWS, "bfloat16", None, False),
        ("window", 200, "float32", None, True),
        *(
            pytest.param(
                name, 128, *(("float32", None, True), ("bfloat16", 1.5, False))[place % 2], marks=pytest.mark.slow
            )
            for place, name in enumerate(_NAMES)
        ),
    ],
)
def test_the_operation_is_what_was_asked(name, rows, dtype, cap, left):
    generator = np.random.default_rng()
    shapes = [(2, rows, 2, 16), (2, rows, 1, 16), (2, rows, 1, 16), (2, rows, 2, 16)]
    query, key, value, upstream = (jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes)
    padding = _padding(rows, left)

    @jax.jit
    def attended(query, key, value, upstream, padding):
        def attend(*operands):
            mask = _masks(padding, rows)[name][0]
            return keras.ops.dot_product_attention(*operands, mask=mask, scale=SCALE, attn_logits_soft_cap=cap)

        output, pull = jax.vjp(attend, query, key, value)
        return [output, *pull(upstream)]

    with on_a_tpu() as given, engine.attention_as_asked():
        found = attended(query, key, value, upstream, padding)
    mask, by = _masks(padding, rows)[name]
    assert given == ([by] if by and rows % 128 == 0 else [])
    exact = _exact(query, key, value, upstream, None if mask is None else np.asarray(mask), cap)
    for one, other in zip(found, exact, strict=True):
        assert np.linalg.norm(np.asarray(one, "float64") - other) < ERRORS[dtype] * np.linalg.norm(other)


def test_a_mask_with_values_is_read_too():
    """Eagerly, where each mask has values: windows and padding alone, as the kernel is compiled for each other."""
    generator = np.random.default_rng()
    query, key, value = (jnp.asarray(generator.normal(size=(2, 128, 1, 8)), "float32") for _ in range(3))
    for name, by in (("causal and padding", "LocalMask(None, 0)"), ("unknown", None)):
        mask = _masks(_padding(128, left=False), 128)[name][0]
        with on_a_tpu() as given, engine.attention_as_asked():
            found = keras.ops.dot_product_attention(query, key, value, mask=mask, scale=SCALE)
        assert given == ([by] if by else [])
        exact = _exact(query, key, value, query, np.asarray(mask), None)[0]
        assert np.linalg.norm(found - exact) < 2e-6 * np.linalg.norm(exact)


def _errors(case, length, policy, way, exact, **how):
    model, x = built(case, length, policy)
    WAYS[way](model)
    with on_a_tpu() as given:
        return off(numbers(model, x, **how), exact), given


def test_layers_are_right_and_those_of_plain_keras_are_not():
    case = "MultiHeadAttention"
    exact = reference(case, 128)
    plain, _ = _errors(case, 128, "float32", "plain", exact)
    assert min(plain) > 0.03
    for way in ("stabilized", "lean"):
        errors, given = _errors(case, 128, "float32", way, exact)
        assert max(errors) < 1e-5 and given


def _small(length):
    x = inputs = keras.Input((length, 16))
    x = layers.MultiHeadAttention(2, 8)(x, x)
    return keras.Model(inputs, layers.Dense(2)(x))


@pytest.mark.usefixtures("float32_policy")
def test_fit_is_that_of_a_cpu_also_when_loaded(tmp_path, caplog):
    generator, length = np.random.default_rng(), 128
    x, y = (generator.normal(size=(6, length, width)).astype("float32") for width in (16, 2))
    plain = _small(length)
    models = [keras_mp.prepare(keras.models.clone_model(plain), keras.optimizers.SGD(0.1), "mse") for _ in range(2)]
    models[0].save(tmp_path / "saved.keras")
    models.append(keras.saving.load_model(tmp_path / "saved.keras"))
    for model in models:
        model.set_weights(plain.get_weights())
    models[0].fit(x, y, batch_size=2, shuffle=False, verbose=0)
    with caplog.at_level(logging.WARNING), on_a_tpu() as given:
        for model in models[1:]:
            model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
            for one, other in zip(model.get_weights(), models[0].get_weights(), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert given and not caplog.records


@pytest.mark.usefixtures("float32_policy")
def test_reports_say_what_attends(capsys):
    model, other = _small(128), _small(120)
    with on_a_tpu():
        assert "Keras's attention, which on a TPU is causal" in str(keras_mp.report(model))
        for one, words in ((model, "Splash"), (other, "the kit's own form: 120 x 120 is no multiple of 128")):
            keras_mp.prepare(one, "sgd", "mse", verbose=True)
            assert f"attention  {words}" in capsys.readouterr().out
            assert keras_mp.report(one).attention[0][1].startswith(words)
            assert f"Attends by: {words}" in str(keras_mp.report(one))
    assert "Attends by" not in str(keras_mp.report(model))


@pytest.mark.usefixtures("float32_policy")
@pytest.mark.parametrize(("rows", "jit"), [(2, True), (3, True), (2, False)])
def test_on_several_devices_the_kernel_wants_jit_and_rows_for_each(rows, jit):
    model = keras_mp.stabilize(_small(128))
    mesh = keras.distribution.DeviceMesh((2,), ["batch"], ["cpu:0", "cpu:0"])
    with on_a_tpu() as given, keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False).scope():
        called = functools.partial(model.stateless_call, [v.value for v in model.trainable_variables], [])
        if jit:
            jax.eval_shape(called, jax.ShapeDtypeStruct((rows, 128, 16), "float32"))
        else:
            called(jnp.zeros((rows, 128, 16)))
    assert bool(given) == (rows == 2 and jit)


@pytest.mark.usefixtures("float32_policy")
def test_the_treatment_is_there_on_every_machine_and_revert_takes_it_away():
    model = keras_mp.stabilize(_small(8))
    assert [name for layer in model.layers for name in treatments_of(layer)] == ["attention"]
    assert not [part for part in keras_mp.report(model).parts if part.change == "stabilize"]
    keras_mp.revert(keras_mp.lean.make_lean(model), "stabilize")  # lean layers are for TPUs as well
    assert isinstance(model.layers[1], AttentionAsAsked)
    assert not any(map(treatments_of, keras_mp.revert(model).layers))

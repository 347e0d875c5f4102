"""Layers of the four classes that Keras quantizes, of random sizes and with weights that are hard to quantize."""

import keras

CLASSES = ("Dense", "EinsumDense", "Embedding", "ReversibleEmbedding")
# Equations with the shapes of an input's row and of the result, by two random sizes.
EQUATIONS = {
    "abc,cd->abd": lambda n, m: ((n,), (3, m)),
    "abc,cde->abde": lambda n, m: ((n,), (3, 5, m)),
    "abcd,cde->abe": lambda n, m: ((n, 4), (3, m)),
}


def config_of(mode, block=None):
    """Keras's config of a quantization; blocks of None are one scale a channel."""
    if mode == "int8":
        return keras.quantizers.Int8QuantizationConfig()
    return keras.quantizers.Int4QuantizationConfig(block_size=block)


def random_layer(kind, generator, activations=(None, "relu", "gelu")):
    """A layer, and a function of one input that calls it, with the input's shape and dtype."""
    size = lambda: int(generator.choice([1, 2, 3, 7, 16, 33, 130]))  # noqa: E731
    rows, activation = (2, 3), activations[generator.integers(len(activations))]
    if kind == "Dense":
        layer = keras.layers.Dense(size(), activation, use_bias=bool(generator.integers(2)))
        return layer, layer, (*rows, size()), "float32"
    if kind == "EinsumDense":
        equation = str(generator.choice(list(EQUATIONS)))
        row, out = EQUATIONS[equation](size(), size())
        bias = equation[-1] if generator.integers(2) else None
        layer = keras.layers.EinsumDense(equation, out, activation, bias_axes=bias)
        return layer, layer, (*rows, *row), "float32"
    vocabulary, width = size() + 1, size()
    if kind == "Embedding":
        layer = keras.layers.Embedding(vocabulary, width)
        return layer, layer, rows, "int32"
    cap = [None, 3.0][generator.integers(2)]
    tied = bool(generator.integers(2))
    layer = keras.layers.ReversibleEmbedding(vocabulary, width, tie_weights=tied, logit_soft_cap=cap)
    layer.build()
    return layer, lambda x: layer(x, reverse=True), (*rows, width), "float32"


def hard_weights(shape, generator):
    """Random weights, of which some columns are 0, subnormal, 65504, or one number throughout."""
    weights = generator.normal(size=shape) * 10.0 ** generator.uniform(-6, 3)
    hard = generator.choice(["", "zeros", "subnormal", "largest", "alike", "one zero row"])
    column = weights[..., 0]
    if hard == "zeros":
        column[...] = 0
    elif hard == "subnormal":
        column[...] = generator.normal(size=column.shape) * 1e-40
    elif hard == "largest":
        column[...] = 65504
    elif hard == "alike":
        weights[...] = generator.normal()
    elif hard == "one zero row":
        weights[0] = 0
    return weights.astype("float32")


def model_of(count, generator, policy):
    """Layers, a model that has an input and an output for each, and a batch of them."""
    keras.config.set_dtype_policy(policy)
    inputs, outputs, batch, layers = [], [], [], []
    for index in range(count):
        layer, call, shape, dtype = random_layer(CLASSES[index % len(CLASSES)], generator)
        x = keras.Input(shape[1:], batch_size=shape[0], dtype=dtype)
        outputs.append(keras.ops.cast(call(x), "float32"))
        inputs.append(x)
        layers.append(layer)
        highest = layer.input_dim if dtype == "int32" else 1
        batch.append(generator.integers(0, highest, shape) if dtype == "int32" else generator.normal(size=shape))
        for variable in layer.trainable_variables:
            variable.assign(hard_weights(variable.shape, generator))
    return layers, keras.Model(inputs, outputs), [x.astype(i.dtype) for x, i in zip(batch, inputs, strict=True)]

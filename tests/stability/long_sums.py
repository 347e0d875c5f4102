"""Layers of keras.layers that add up, with 4,096 terms and more along the axis, in 16 bits and in float64."""

import contextlib

import keras
import numpy as np
import zoo
from arrays import DTYPES as NUMPY
from keras import layers

import keras_mp

N = 4096
SIDE = 64  # of an image of N pixels
EDGE = 16  # of a volume of N voxels

STEPS, CHANNELS_FIRST, VECTOR = (N, 2), (2, N), (N,)
IMAGE, VOLUME = (SIDE, SIDE, 3), (EDGE, EDGE, EDGE, 2)
SPACES = {1: STEPS, 2: IMAGE, 3: VOLUME}
SIZES = {1: N, 2: SIDE, 3: EDGE}
FILTER = {1: (N,), 2: (SIDE, SIDE), 3: (EDGE, EDGE, EDGE)}


def _cases():
    """(class, variant, arguments, shapes of the inputs), which are masked where the variant says so."""
    for n, shape in SPACES.items():
        space, channels = shape[:-1], shape[-1:]
        for kind in ("Average", "Max"):
            if kind == "Average":  # TensorFlow ends the process at one maximum over all, in every precision
                yield f"AdaptiveAveragePooling{n}D", "", {"output_size": 1}, [shape]
            yield f"Global{kind}Pooling{n}D", "", {}, [shape]
            yield f"Global{kind}Pooling{n}D", "channels first", {"data_format": "channels_first"}, [channels + space]
            yield f"{kind}Pooling{n}D", "", {"pool_size": SIZES[n]}, [shape]
            yield f"{kind}Pooling{n}D", "same", {"pool_size": SIZES[n], "padding": "same"}, [shape]
            yield f"Adaptive{kind}Pooling{n}D", "two", {"output_size": 2}, [tuple(2 * s for s in space) + channels]
        yield f"Conv{n}D", "window", {"filters": 3, "kernel_size": FILTER[n]}, [shape]
        yield f"Conv{n}D", "channels", {"filters": 3, "kernel_size": 1}, [(2,) * n + (N,)]
        yield f"Conv{n}DTranspose", "channels", {"filters": 3, "kernel_size": 1}, [(2,) * n + (N,)]
        yield f"Conv{n}DTranspose", "window", {"filters": 1, "kernel_size": FILTER[n], "padding": "same"}, [(*space, 1)]
    for n in (1, 2):
        yield f"DepthwiseConv{n}D", "", {"kernel_size": FILTER[n]}, [SPACES[n]]
        yield f"SeparableConv{n}D", "window", {"filters": 3, "kernel_size": FILTER[n]}, [SPACES[n]]
        yield f"SeparableConv{n}D", "channels", {"filters": 3, "kernel_size": 1}, [(2,) * n + (N,)]
    for n, shape in ((1, (1, 2, N)), (2, (1, 2, 2, N)), (3, (1, 2, 2, 2, N))):
        yield f"ConvLSTM{n}D", "", {"filters": 2, "kernel_size": 1}, [shape]
    yield "GlobalAveragePooling1D", "masked", {}, [STEPS]
    yield "GlobalAveragePooling1D", "masked, channels first", {"data_format": "channels_first"}, [CHANNELS_FIRST]
    # One after the other they take minutes to compile: 512 are more than bfloat16 counts.
    yield "Add", "512 inputs", {}, [(2,)] * 512
    yield "Average", "512 inputs", {}, [(2,)] * 512
    yield "Dot", "", {"axes": -1}, [VECTOR, VECTOR]
    yield "Dot", "steps", {"axes": 1}, [STEPS, STEPS]
    yield "Dot", "normalize", {"axes": -1, "normalize": True}, [VECTOR, VECTOR]
    for name in ("Attention", "AdditiveAttention"):
        yield name, "keys", {}, [(2, 2), (N, 2)]
        yield name, "keys, masked", {}, [(2, 2), (N, 2)]
        yield name, "size", {}, [(2, N), (3, N)]
    yield "Attention", "concat", {"score_mode": "concat"}, [(2, N), (3, N)]
    heads = {"MultiHeadAttention": {"num_heads": 2, "key_dim": 4},
             "GroupQueryAttention": {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2}}  # fmt: skip
    for name, arguments in heads.items():
        yield name, "keys", arguments, [(2, 8), (N, 8)]
        yield name, "keys, dropout", {**arguments, "dropout": 1e-7}, [(2, 8), (N, 8)]
        yield name, "size", arguments, [(2, N), (3, N)]
    yield "ActivityRegularization", "", {"l2": 1e-3}, [VECTOR]
    for function in ("softmax", "log_softmax", "sparsemax"):
        yield "Activation", function, {"activation": function}, [VECTOR]
    for name in ("BatchNormalization", "LayerNormalization", "RMSNormalization", "Softmax", "UnitNormalization"):
        yield name, "", {}, [VECTOR]
    yield "BatchNormalization", "steps", {}, [STEPS]
    yield "BatchNormalization", "steps, masked", {}, [STEPS]
    yield "BatchNormalization", "image", {}, [IMAGE]
    yield "GroupNormalization", "", {"groups": 2}, [STEPS]
    yield "LayerNormalization", "all axes", {"axis": [1, 2]}, [STEPS]
    yield "Softmax", "masked", {}, [VECTOR]
    yield "SpectralNormalization", "", {"layer": lambda: layers.Dense(3)}, [VECTOR]
    yield "Dense", "", {"units": 3}, [VECTOR]
    yield "Dense", "softmax", {"units": N, "activation": "softmax"}, [(4,)]
    yield "Dense", "rows", {"units": 3}, [(N, 3)]
    yield "EinsumDense", "", {"equation": "ab,bc->ac", "output_shape": (3,), "bias_axes": "c"}, [VECTOR]
    yield "EinsumDense", "two axes", {"equation": "abc,bcd->ad", "output_shape": (3,)}, [STEPS]
    yield "EinsumDense", "summed before", {"equation": "abc,cd->ad", "output_shape": (3,)}, [STEPS]
    yield "Embedding", "", {"input_dim": 9, "output_dim": 4}, ["tokens"]
    yield "ReversibleEmbedding", "", {"input_dim": 9, "output_dim": 4}, ["tokens"]
    yield "ReversibleEmbedding", "reverse", {"input_dim": 9, "output_dim": N}, [(2, N)]
    for name in ("GRU", "LSTM", "SimpleRNN"):
        yield name, "", {"units": 3}, [(2, N)]
    yield "RNN", "", {"cell": lambda: layers.LSTMCell(3)}, [(2, N)]
    yield "Bidirectional", "sum", {"layer": lambda: layers.LSTM(3), "merge_mode": "sum"}, [(2, N)]
    yield "TimeDistributed", "", {"layer": lambda: layers.Dense(3)}, [(2, N)]
    for how in ("bilinear", "nearest", "bicubic", "lanczos3", "lanczos5"):
        yield "Resizing", how, {"height": 1, "width": 1, "interpolation": how, "antialias": True}, [IMAGE]


CASES = {f"{name} {variant}".strip(): (name, *rest) for name, variant, *rest in _cases() if hasattr(layers, name)}
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3e38}
# Units in the last place by which a result may be off: it is rounded, and so are a few numbers on the way to it.
ALLOWED = 4.0
# At 20 a sum of 4,096 is more than float16 holds, and its mean is not.
SCALES = (1.0, 20.0)


def made(case, dtype):
    name, arguments, _ = CASES[case]
    return getattr(layers, name)(
        **{key: value() if callable(value) else value for key, value in arguments.items()}, dtype=dtype
    )


def error(case, low, scale, stabilized=False):
    """How far a layer in 16 bits is from the same one in float64, in units in the last place of the largest result.

    None where the result is more than the dtype holds, and "no kernel" where the framework has none for it.

    Args:
        case: a key of CASES.
        low: "float16" or "bfloat16".
        scale: the scale of the inputs, which are drawn from half to one and a half times as much.
        stabilized: whether the layer is that of a stabilized model.
    """
    rng = zoo.rng()
    drawn = [_drawn(rng, shape, low, scale) for shape in CASES[case][2]]
    layer = made(case, f"mixed_{low}")
    there = _has_kernel(layer, case, drawn, low)
    if stabilized:
        layer = _stabilized(layer, case)
        there = _has_kernel(layer, case, drawn, low)
    return _error_of(layer, case, low, drawn) if there else "no kernel"


def _stabilized(layer, case):
    symbols = [keras.Input((N,), dtype="int32") if s == "tokens" else keras.Input(s) for s in CASES[case][2]]
    result = _called(layer, case, symbols, masked=False)
    model = keras.Model(symbols, layers.Dense(1, dtype="float32")(result))
    return keras_mp.stabilize(model).get_layer(layer.name)


def _has_kernel(layer, case, drawn, low):
    try:
        _called(layer, case, _tensors(drawn, low))
    except Exception as error:  # of a kind of TensorFlow's
        if "Could not find device" not in str(error):
            raise
        return False
    return True


def _error_of(layer, case, low, drawn):
    for weight in layer.weights:
        if "seed" not in weight.name:
            value = keras.ops.convert_to_numpy(weight).astype("float64")
            # All of one sign, so that no sum is small by chance; and such that 16 bits hold it.
            weight.assign((np.abs(value) if "kernel" in weight.name else value).astype(NUMPY[low]).astype("float32"))
    weights = [keras.ops.convert_to_numpy(weight) for weight in layer.weights]
    actual = [_wide(x) for x in keras.tree.flatten(_called(layer, case, _tensors(drawn, low)))]
    expected = _reference(case, drawn, weights)
    if max(np.abs(x).max() for x in expected) > LARGEST[low]:
        return None
    return max(_distance(*pair) for pair in zip(actual, expected, strict=True)) / ROUNDING[low]


def _reference(case, drawn, weights):
    for dtype in ("float64", "float32"):  # TensorFlow pools no volume in float64
        with float64():
            layer = made(case, dtype)
            try:
                _called(layer, case, _tensors(drawn, dtype))
            except Exception:
                if dtype == "float32":
                    raise
                continue
            for weight, value in zip(layer.weights, weights, strict=True):
                weight.assign(value)
            return [_wide(x) for x in keras.tree.flatten(_called(layer, case, _tensors(drawn, dtype)))]


def _called(layer, case, inputs, masked=True):
    name = CASES[case][0]
    keywords = {"reverse": True} if case.endswith("reverse") else {}
    if name == "BatchNormalization":
        keywords["training"] = True  # otherwise it adds nothing up
    if masked and "masked" in case:
        axis = 2 if case.endswith("channels first") else 1
        masks = [
            keras.ops.convert_to_tensor(np.arange(x.shape[axis])[None] < [[x.shape[axis]], [x.shape[axis] - 1]])
            for x in inputs
        ]
        keywords["mask"] = masks if len(masks) > 1 else masks[0]
    if name in ("MultiHeadAttention", "GroupQueryAttention"):
        return layer(*inputs, **keywords)
    return layer(inputs if len(inputs) > 1 else inputs[0], **keywords)


def _drawn(rng, shape, low, scale):
    if shape == "tokens":
        return rng.integers(0, 2, (2, N))
    return (rng.uniform(0.5, 1.5, (2, *shape)) * scale).astype(NUMPY[low]).astype("float64")


def _tensors(drawn, dtype):
    return [keras.ops.convert_to_tensor(x, "int32" if x.dtype.kind == "i" else dtype) for x in drawn]


def _wide(x):
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x).astype("float64")


def _distance(actual, expected):
    if not np.isfinite(actual).all():
        return np.inf
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)


def float64():
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)

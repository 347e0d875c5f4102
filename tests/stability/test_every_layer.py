"""Every layer in keras.layers, found by walking the module: stabilized low precision against float32.

Tolerances, of max(1, the largest magnitude): outputs 5e-3 in mixed_float16 (11 bits) and 4e-2 in mixed_bfloat16 (8
bits); weights after three steps of SGD at rate 0.01 half of that.
"""

import inspect
import warnings

import keras
import numpy as np
import pytest
import zoo
from keras import layers
from thirds import thirds

import keras_mp
from keras_mp.conversion.to_float32 import to_float32
from keras_mp.export.verification import relative_difference
from keras_mp.rebuild.model import rebuild
from keras_mp.stability.sensitive import sensitive_layers

TENSORFLOW = keras.backend.backend() == "tensorflow"
TOLERANCE = {"mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}

VECTOR, SEQUENCE, IMAGE, VOLUME, MOVIE = (8,), (6, 4), (8, 8, 3), (5, 5, 5, 2), (3, 6, 6, 2)

# What stays outside, and why.
OUTSIDE = {
    "InputLayer": "computes nothing",
    "Lambda": "computes what its user writes",
    "Layer": "abstract",
    "Wrapper": "abstract",
    "FlaxLayer": "computes what another library's module does",
    "JaxLayer": "computes what another library's function does",
    "TFSMLayer": "computes what a SavedModel does",
    "TorchModuleWrapper": "computes what another library's module does",
    "GRUCell": "runs inside RNN, tested there",
    "LSTMCell": "runs inside RNN, tested there",
    "SimpleRNNCell": "runs inside RNN, tested there",
    "StackedRNNCells": "runs inside RNN, tested there",
    "CutMix": "mixes labelled batches: takes a dict with labels, has no weights and no place in a model",
    "MixUp": "mixes labelled batches: takes a dict with labels, has no weights and no place in a model",
    "RandomCrop": "crops while training alone: a model after it has no one shape",
    "RandomShear": "Keras rejects the config that it writes itself: the lower end of a factor is negative",
    "Equalization": "ranks each pixel in a histogram: a rounded one moves to another bin",
    "MaxNumBoundingBoxes": "takes a dict of boxes, and pads",
    "CategoryEncoding": "integers in, counts out: computes in no float",
    "Discretization": "floats in, integers out: computes in float32 whatever the policy",
    "HashedCrossing": "integers or strings in, integers out",
    "Hashing": "integers or strings in, integers out",
    "IntegerLookup": "integers in, integers out",
    "StringLookup": "strings in, integers out",
    "TextVectorization": "strings in, integers out",
    "MelSpectrogram": "its Fourier transform exists in float32 and up alone",
    "STFTSpectrogram": "its Fourier transform exists in float32 and up alone",
}

# Draw random numbers while training, in the compute dtype: others in each precision.
RANDOM = {"AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "SpatialDropout1D", "SpatialDropout2D",
          "SpatialDropout3D"}  # fmt: skip
# Augment images: no weights; at inference most pass the image on. While training they give values up to 255, from
# which SGD diverges in float32 too, so they are not trained through.
AUGMENTATION = {
    "AugMix", "AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization", "RandAugment",
    "RandomBrightness", "RandomColorDegeneration", "RandomColorJitter", "RandomContrast", "RandomElasticTransform",
    "RandomErasing", "RandomFlip", "RandomGaussianBlur", "RandomGrayscale", "RandomHue", "RandomInvert",
    "RandomPerspective", "RandomPosterization", "RandomRotation", "RandomSaturation", "RandomSharpness",
    "RandomTranslation", "RandomZoom", "Solarization",
}  # fmt: skip
# Of them, those that always compute, on integers from 0 to 255: on other values they jump.
ON_INTEGERS = {"AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization", "Solarization"}


def adapted():
    layer = layers.Normalization()
    layer.adapt(zoo.normal(64, 8) * 2 + 1)
    return layer


def spectral():
    return layers.SpectralNormalization(layers.Dense(8))


# Arguments, and the shape of the input; a list of shapes for layers of several inputs.
BUILT = {
    "Activation": (lambda: layers.Activation("softmax"), VECTOR),
    "ActivityRegularization": (lambda: layers.ActivityRegularization(l2=1e-3), VECTOR),
    **{f"Adaptive{kind}Pooling{n}D": (lambda kind=kind, n=n: getattr(layers, f"Adaptive{kind}Pooling{n}D")(2), shape)
       for kind in ("Average", "Max") for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{name: (getattr(layers, name), [VECTOR, VECTOR])
       for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")},
    "Dot": (lambda: layers.Dot(axes=-1), [SEQUENCE, SEQUENCE]),
    "Attention": (layers.Attention, [SEQUENCE, SEQUENCE]),
    "AdditiveAttention": (layers.AdditiveAttention, [SEQUENCE, SEQUENCE]),
    "MultiHeadAttention": (lambda: layers.MultiHeadAttention(2, 4), [SEQUENCE, SEQUENCE]),
    "GroupQueryAttention": (lambda: layers.GroupQueryAttention(4, 4, 2), [SEQUENCE, SEQUENCE]),
    **{f"{kind}Pooling{n}D": (lambda kind=kind, n=n: getattr(layers, f"{kind}Pooling{n}D")(2), shape)
       for kind in ("Average", "Max") for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{f"Global{kind}Pooling{n}D": (getattr(layers, f"Global{kind}Pooling{n}D"), shape)
       for kind in ("Average", "Max") for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{f"Conv{n}D{kind}": (lambda n=n, kind=kind: getattr(layers, f"Conv{n}D{kind}")(3, 2), shape)
       for kind in ("", "Transpose") for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{f"DepthwiseConv{n}D": (lambda n=n: getattr(layers, f"DepthwiseConv{n}D")(2), shape)
       for n, shape in ((1, SEQUENCE), (2, IMAGE))},
    **{f"SeparableConv{n}D": (lambda n=n: getattr(layers, f"SeparableConv{n}D")(3, 2), shape)
       for n, shape in ((1, SEQUENCE), (2, IMAGE))},
    "ConvLSTM1D": (lambda: layers.ConvLSTM1D(2, 2), (3, 6, 2)),
    "ConvLSTM2D": (lambda: layers.ConvLSTM2D(2, 2), MOVIE),
    "ConvLSTM3D": (lambda: layers.ConvLSTM3D(2, 2), (2, 4, 4, 4, 1)),
    **{f"{kind}{n}D": (getattr(layers, f"{kind}{n}D"), shape) for kind in ("Cropping", "UpSampling", "ZeroPadding")
       for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{f"SpatialDropout{n}D": (lambda n=n: getattr(layers, f"SpatialDropout{n}D")(0.3), shape)
       for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))},
    **{name: (lambda name=name: getattr(layers, name)(0.3), VECTOR)
       for name in ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise")},
    **{name: (getattr(layers, name), VECTOR)
       for name in ("BatchNormalization", "ELU", "Flatten", "Identity", "LayerNormalization", "LeakyReLU", "Masking",
                    "PReLU", "RMSNormalization", "ReLU", "Softmax", "UnitNormalization")},
    "GroupNormalization": (lambda: layers.GroupNormalization(2), VECTOR),
    "Normalization": (adapted, VECTOR),
    "SpectralNormalization": (spectral, VECTOR),
    "Dense": (lambda: layers.Dense(5, "softmax"), VECTOR),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (6, 5), bias_axes="d"), SEQUENCE),
    "Embedding": (lambda: layers.Embedding(9, 4), "tokens"),
    "ReversibleEmbedding": (lambda: layers.ReversibleEmbedding(9, 4), "tokens"),
    "GRU": (lambda: layers.GRU(4), SEQUENCE),
    "LSTM": (lambda: layers.LSTM(4), SEQUENCE),
    "SimpleRNN": (lambda: layers.SimpleRNN(4), SEQUENCE),
    "Bidirectional": (lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
    "RNN": (lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(3), layers.SimpleRNNCell(3)]), SEQUENCE),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.LayerNormalization()), SEQUENCE),
    "Permute": (lambda: layers.Permute((2, 1)), SEQUENCE),
    "RepeatVector": (lambda: layers.RepeatVector(3), VECTOR),
    "Reshape": (lambda: layers.Reshape((4, 2)), VECTOR),
    "Rescaling": (lambda: layers.Rescaling(0.5, 1.0), VECTOR),
    "CenterCrop": (lambda: layers.CenterCrop(4, 4), IMAGE),
    "Resizing": (lambda: layers.Resizing(5, 5), IMAGE),
    "Pipeline": (lambda: layers.Pipeline([layers.Rescaling(2.0), layers.CenterCrop(4, 4)]), IMAGE),
    **{name: (lambda name=name: getattr(layers, name)(0.2), IMAGE)
       for name in ("RandomBrightness", "RandomColorDegeneration", "RandomContrast", "RandomElasticTransform",
                    "RandomErasing", "RandomGrayscale", "RandomHue", "RandomInvert", "RandomPerspective",
                    "RandomRotation", "RandomSaturation", "RandomSharpness", "RandomZoom")
       if hasattr(layers, name)},
    "RandomColorJitter": (lambda: layers.RandomColorJitter(brightness_factor=0.2), IMAGE),
    "RandomTranslation": (lambda: layers.RandomTranslation(0.2, 0.2), IMAGE),
    "RandomPosterization": (lambda: layers.RandomPosterization(4), IMAGE),
    **{name: (getattr(layers, name), IMAGE)
       for name in ("AugMix", "AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization",
                    "RandAugment", "RandomFlip", "RandomGaussianBlur", "Solarization") if hasattr(layers, name)},
}  # fmt: skip


def walked():
    """Names in keras.layers, each class once."""
    seen = {}
    for name, value in sorted(vars(layers).items()):
        if inspect.isclass(value) and issubclass(value, layers.Layer) and value.__name__ == name:
            seen[value] = name
    return sorted(seen.values())


def test_the_table_is_complete():
    assert set(walked()) - set(BUILT) - set(OUTSIDE) == set(), "a layer of this Keras without a row above"
    assert set(walked()) >= OF_EACH_KIND


def batch_of(shape, scale=1.0, size=4):
    if shape == "tokens":
        return zoo.rng().integers(0, 9, (size, 5)).astype("int32")
    if isinstance(shape, list):
        return [batch_of(each, scale, size) for each in shape]
    return zoo.normal(size, *shape) * np.float32(scale)


def models(name, policy):
    """The layer between input and a Dense layer, under a policy: plain, in float32, and stabilized."""
    build, shape = BUILT[name]
    keras.config.set_dtype_policy(policy)
    layer = build()
    if shape == "tokens":
        inputs = keras.Input((5,), dtype="int32")
        x = layer(inputs)
    elif isinstance(shape, list):
        inputs = [keras.Input(each) for each in shape]
        x = layer(*inputs) if "Query" in name or "MultiHead" in name else layer(inputs)
    else:
        inputs = keras.Input(shape)
        x = layer(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=TENSORFLOW, auto_scale_loss=False)
    keras.config.set_dtype_policy("float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, rebuild(model, to_float32, policy="float32").model, keras_mp.stabilize(model)


# Of each kind of layer one, for `make test`; and those that JAX computes by other code, or whose numbers are hard.
OF_EACH_KIND = {
    "BatchNormalization", "Conv2D", "Dense", "Embedding", "LayerNormalization", "MultiHeadAttention", "Softmax",
    "UnitNormalization", "UpSampling2D",
}  # fmt: skip
ON_JAX = {"BatchNormalization", "GRU", "GroupQueryAttention", "MultiHeadAttention", "RMSNormalization"}
INSIDE = set(walked()) - set(OUTSIDE)
SENSITIVE = ("Activation", "ActivityRegularization", "AdditiveAttention", "Attention", "BatchNormalization", "Dense",
             "GroupNormalization", "GroupQueryAttention", "LayerNormalization", "MultiHeadAttention", "Normalization",
             "RMSNormalization", "Softmax", "SpectralNormalization", "UnitNormalization")  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(
                name, marks=[pytest.mark.slow] * (name not in OF_EACH_KIND) + [pytest.mark.jax] * (name in ON_JAX)
            )
            for name in sorted(INSIDE & (OF_EACH_KIND | ON_JAX))
        ),
        *thirds(sorted(INSIDE - OF_EACH_KIND - ON_JAX)),
    ],
)
def test_forward_and_fit_against_float32(name):
    # TensorFlow has no float16 kernel for pooling over volumes on a CPU.
    in_float16 = TENSORFLOW and ("Pooling3D" not in name or "Global" in name)
    policy = "mixed_float16" if in_float16 else "mixed_bfloat16"
    _, float32, stabilized = models(name, policy)
    assert sensitive_layers(stabilized) == []
    tolerance = TOLERANCE[policy]
    batch = batch_of(BUILT[name][1])
    if name in ON_INTEGERS:
        batch = np.round(np.abs(batch) * 60)
    difference = relative_difference(stabilized.predict_on_batch(batch), float32.predict_on_batch(batch))
    assert difference <= tolerance
    if name not in SENSITIVE:  # which have a test of their own, below
        for scale in (0.0, 1e-6, 30.0):  # squares and sums over these shapes stay below 65,504
            extreme = batch_of(BUILT[name][1], scale)
            assert np.abs(float32.predict_on_batch(extreme)).max() < 65504
            assert np.isfinite(np.asarray(stabilized.predict_on_batch(extreme), "float32")).all()
    if name in AUGMENTATION:
        return
    y = zoo.normal(4, 2)
    for _ in range(3):
        losses = [model.train_on_batch(batch, y) for model in (float32, stabilized)]
    assert np.isfinite(losses).all()
    if name not in RANDOM:
        for expected, actual in zip(float32.trainable_weights, stabilized.trainable_weights, strict=True):
            assert relative_difference(actual, expected) <= tolerance / 2, actual.path


def extremes(shape):
    ones = batch_of(shape, 0.0)
    each = ones if isinstance(ones, list) else [ones]
    hot = [np.zeros_like(x) for x in each]
    for x in hot:
        x[..., 0] = 1.0
    made = [[np.sign(batch_of(x.shape[1:])) * scale for x in each] for scale in (1e-6, 1e-3, 1.0, 1e3, 6e4)]
    return [x if isinstance(ones, list) else x[0] for x in [each, hot, *made]]


@pytest.mark.parametrize("name", SENSITIVE)
def test_sensitive_layers_are_finite_from_1e_minus_6_to_6e4(name):
    _, _, stabilized = models(name, "mixed_float16")
    layer = next(layer for layer in stabilized.layers if isinstance(layer, getattr(layers, name)))
    for weight in layer.weights:  # products that stay in range, so that what is tested is the sensitive part
        if "kernel" in weight.name:
            weight.assign(np.eye(weight.shape[0], int(np.prod(weight.shape[1:]))).reshape(weight.shape))
    for batch in extremes(BUILT[name][1]):
        arguments = batch if "Query" in name or "MultiHead" in name else [batch]
        for training in (False, True):
            output = layer(*arguments, training=training) if layer._call_has_training_arg else layer(*arguments)
            finite = np.isfinite(keras.ops.convert_to_numpy(keras.ops.cast(output, "float32"))).all()
            assert finite, f"{name} at {np.max(np.abs(batch))}, training={training}"

"""Dense and EinsumDense layers that compute in 8 bits before they are in a model."""

from keras import layers

import keras_mp  # noqa: F401, as it registers the treatment
from keras_mp.fp8.convert import FLOAT8
from keras_mp.fp8.scaling import get_scalings
from keras_mp.treatment.treated import treat


def float8_dense(*args, scaling=None, **kwargs):
    return treat(layers.Dense(*args, **kwargs), {FLOAT8: get_scalings(scaling)})


def float8_einsum_dense(*args, scaling=None, **kwargs):
    return treat(layers.EinsumDense(*args, **kwargs), {FLOAT8: get_scalings(scaling)})

"""A scaling that is not the kit's: the example of CONTRIBUTING.md and docs/fp8.md."""

import keras

from keras_mp.fp8 import Scaling, Scalings


@keras.saving.register_keras_serializable("own_scaling")
def mean_magnitude(x, known):
    """What exceeds 16 times the mean magnitude saturates; of the updates before, the largest counts."""
    amax = 16 * keras.ops.mean(keras.ops.abs(keras.ops.cast(x, "float32")))
    return amax if known is None else keras.ops.maximum(amax, keras.ops.max(known))


narrow = Scaling("E4M3", source=mean_magnitude)
CLIPPED = Scalings((narrow, narrow), (Scaling("E5M2", source=mean_magnitude), narrow), kernel_gradient=None)

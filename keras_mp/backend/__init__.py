"""What differs between TensorFlow and JAX, and nothing else: both folders have the same public functions."""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_mp.backend.tensorflow import *
elif keras.backend.backend() == "jax":
    from keras_mp.backend.jax import *
else:
    raise ImportError(
        f"keras_mp runs on the backends 'tensorflow' and 'jax', and Keras runs on {keras.backend.backend()!r} here. "
        "Set the environment variable KERAS_BACKEND to one of the two before Keras is first imported."
    )

"""What differs between TensorFlow and JAX, and nothing else: each public function is in both files, under one name."""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_mp.backend.tensorflow import *
    from keras_mp.backend.tensorflow_lower import lower as lower
    from keras_mp.backend.tensorflow_observe import observed_step as observed_step
    from keras_mp.backend.tensorflow_observe import step_errors as step_errors
    from keras_mp.backend.tensorflow_parallel import HOW_TO_HAVE_MORE_DEVICES as HOW_TO_HAVE_MORE_DEVICES
    from keras_mp.backend.tensorflow_parallel import can_jit as can_jit
    from keras_mp.backend.tensorflow_parallel import is_spread as is_spread
    from keras_mp.backend.tensorflow_parallel import parallel_scope as parallel_scope
    from keras_mp.backend.tensorflow_parallel import reduce_dtype as reduce_dtype
    from keras_mp.backend.tensorflow_replicas import over_the_batch as over_the_batch
    from keras_mp.backend.tensorflow_replicas import share_of_batch as share_of_batch
    from keras_mp.backend.tensorflow_steps import timed_steps as timed_steps
    from keras_mp.backend.tensorflow_workers import COLLECTIVE_ERRORS as COLLECTIVE_ERRORS
    from keras_mp.backend.tensorflow_workers import assign_parts as assign_parts
    from keras_mp.backend.tensorflow_workers import connect as connect
    from keras_mp.backend.tensorflow_workers import parts_of as parts_of
    from keras_mp.backend.tensorflow_workers import reads_share as reads_share
    from keras_mp.backend.tensorflow_workers import steps_of as steps_of
    from keras_mp.backend.tensorflow_workers import to_numpy as to_numpy
elif keras.backend.backend() == "jax":
    from keras_mp.backend.jax import *
    from keras_mp.backend.jax_lower import lower as lower
    from keras_mp.backend.jax_observe import observed_step as observed_step
    from keras_mp.backend.jax_observe import step_errors as step_errors
    from keras_mp.backend.jax_parallel import HOW_TO_HAVE_MORE_DEVICES as HOW_TO_HAVE_MORE_DEVICES
    from keras_mp.backend.jax_parallel import can_jit as can_jit
    from keras_mp.backend.jax_parallel import is_spread as is_spread
    from keras_mp.backend.jax_parallel import over_the_batch as over_the_batch
    from keras_mp.backend.jax_parallel import parallel_scope as parallel_scope
    from keras_mp.backend.jax_parallel import reduce_dtype as reduce_dtype
    from keras_mp.backend.jax_parallel import share_of_batch as share_of_batch
    from keras_mp.backend.jax_steps import timed_steps as timed_steps
    from keras_mp.backend.jax_workers import COLLECTIVE_ERRORS as COLLECTIVE_ERRORS
    from keras_mp.backend.jax_workers import assign_parts as assign_parts
    from keras_mp.backend.jax_workers import connect as connect
    from keras_mp.backend.jax_workers import parts_of as parts_of
    from keras_mp.backend.jax_workers import reads_share as reads_share
    from keras_mp.backend.jax_workers import steps_of as steps_of
    from keras_mp.backend.jax_workers import to_numpy as to_numpy

    del jax  # type: ignore[name-defined]  # noqa: F821  JAX itself; the name is that of the file here
else:
    raise ImportError(
        f"keras_mp runs on the backends 'tensorflow' and 'jax', and Keras runs on {keras.backend.backend()!r} here. "
        "Set the environment variable KERAS_BACKEND to one of the two before Keras is first imported."
    )

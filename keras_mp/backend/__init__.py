"""What differs between TensorFlow and JAX, and nothing else: the names below come from the backend that runs Keras."""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_mp.backend.tensorflow import (
        any_replica,
        as_tensor,
        atomic_step,
        bitcast,
        conditional,
        dense,
        einsum_float32,
        fp8_dot,
        fused_attention_in_float32,
        local_devices,
        map_values,
        max_over_replicas,
        overwrite,
        peak_memory_bytes,
        replica_count,
        sum_over_replicas,
        sum_repeated_rows,
        values_of,
        version,
    )
elif keras.backend.backend() == "jax":
    from keras_mp.backend.jax import (
        any_replica,
        as_tensor,
        atomic_step,
        bitcast,
        conditional,
        dense,
        einsum_float32,
        fp8_dot,
        fused_attention_in_float32,
        local_devices,
        map_values,
        max_over_replicas,
        overwrite,
        peak_memory_bytes,
        replica_count,
        sum_over_replicas,
        sum_repeated_rows,
        values_of,
        version,
    )
else:
    raise ImportError(
        f"keras_mp runs on the backends 'tensorflow' and 'jax', and Keras runs on {keras.backend.backend()!r} here. "
        "Set the environment variable KERAS_BACKEND to one of the two before Keras is first imported."
    )

__all__ = [
    "fused_attention_in_float32",
    "any_replica",
    "as_tensor",
    "atomic_step",
    "bitcast",
    "conditional",
    "dense",
    "einsum_float32",
    "fp8_dot",
    "local_devices",
    "map_values",
    "max_over_replicas",
    "overwrite",
    "peak_memory_bytes",
    "replica_count",
    "sum_over_replicas",
    "sum_repeated_rows",
    "values_of",
    "version",
]

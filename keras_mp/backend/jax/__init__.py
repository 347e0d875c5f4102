"""JAX: the functions of `keras_mp.backend`."""

from keras_mp.backend.jax.block_scaled_dot import block_scaled_dot
from keras_mp.backend.jax.custom_gradient import (
    custom_gradient,
    in_forward_mode,
    in_gradient,
    refuse_derivatives,
    with_derivatives_of,
)
from keras_mp.backend.jax.devices import local_devices, peak_memory_bytes, version
from keras_mp.backend.jax.gradients import dense, linear_gradient, map_values, sum_repeated_rows, values_of
from keras_mp.backend.jax.islands import (
    activations_on_cpus,
    count_batch_sizes,
    gradients_on_cpus,
    has_islands,
    update_in_one_program,
    without_islands,
)
from keras_mp.backend.jax.lower import lower
from keras_mp.backend.jax.observe import observed_step, step_errors
from keras_mp.backend.jax.operations import nonfinite_operation
from keras_mp.backend.jax.parallel import (
    HOW_TO_HAVE_MORE_DEVICES,
    can_jit,
    global_mean,
    is_spread,
    parallel_scope,
    part_of,
    reduce_dtype,
    share_of_batch,
    tpu_coordinates,
)
from keras_mp.backend.jax.products import (
    einsum_float32,
    full_float32,
    fused_attention,
    fused_attention_in_float32,
    kept_by_dropout,
    keras_has_kernel,
)
from keras_mp.backend.jax.replicas import any_replica, max_over_replicas, replica_count, sum_over_replicas
from keras_mp.backend.jax.scaled_dot import scaled_dot
from keras_mp.backend.jax.sparse import HAS_SPARSE_GRADIENTS, sparse_gradients
from keras_mp.backend.jax.steps import timed_steps
from keras_mp.backend.jax.tensors import as_keras_variable, as_tensor, bitcast, is_variable, places
from keras_mp.backend.jax.transforms import (
    barrier,
    fused,
    gradient_scope,
    no_allocation,
    normalize_batch,
    normalize_rows,
    recompute,
    row_major,
    scan,
)
from keras_mp.backend.jax.update import all_finite, atomic_step, conditional, is_concrete, overwrite, update_if
from keras_mp.backend.jax.workers import (
    COLLECTIVE_ERRORS,
    assign_replica_values,
    connect,
    replica_values,
    shards_input,
    steps_of,
    to_numpy,
)

__all__ = [
    "COLLECTIVE_ERRORS",
    "HAS_SPARSE_GRADIENTS",
    "HOW_TO_HAVE_MORE_DEVICES",
    "all_finite",
    "any_replica",
    "as_keras_variable",
    "as_tensor",
    "assign_replica_values",
    "atomic_step",
    "barrier",
    "bitcast",
    "block_scaled_dot",
    "can_jit",
    "conditional",
    "count_batch_sizes",
    "connect",
    "custom_gradient",
    "dense",
    "einsum_float32",
    "scaled_dot",
    "full_float32",
    "fused",
    "fused_attention",
    "fused_attention_in_float32",
    "gradient_scope",
    "has_islands",
    "in_forward_mode",
    "in_gradient",
    "is_concrete",
    "is_variable",
    "is_spread",
    "kept_by_dropout",
    "keras_has_kernel",
    "linear_gradient",
    "local_devices",
    "lower",
    "map_values",
    "max_over_replicas",
    "no_allocation",
    "nonfinite_operation",
    "normalize_batch",
    "normalize_rows",
    "observed_step",
    "global_mean",
    "overwrite",
    "parallel_scope",
    "part_of",
    "tpu_coordinates",
    "replica_values",
    "row_major",
    "peak_memory_bytes",
    "places",
    "activations_on_cpus",
    "gradients_on_cpus",
    "shards_input",
    "recompute",
    "reduce_dtype",
    "refuse_derivatives",
    "replica_count",
    "scan",
    "share_of_batch",
    "sparse_gradients",
    "step_errors",
    "steps_of",
    "sum_over_replicas",
    "sum_repeated_rows",
    "timed_steps",
    "to_numpy",
    "update_if",
    "update_in_one_program",
    "values_of",
    "version",
    "without_islands",
    "with_derivatives_of",
]

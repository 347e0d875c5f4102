"""JAX: the functions of `keras_mp.backend`."""

from keras_mp.backend.jax.attention import attention_as_asked, trace_call
from keras_mp.backend.jax.devices import bfloat16_options, local_devices, peak_memory_bytes, traced_chip, traced_for
from keras_mp.backend.jax.gradients import (
    ACCUMULATING_COPIES,
    HAS_SPARSE_GRADIENTS,
    custom_gradient,
    dense,
    gradients_of,
    in_forward_mode,
    map_values,
    sparse_gradients,
    sum_repeated_rows,
    values_of,
)
from keras_mp.backend.jax.host_memory import check_host_memory, fetched, fetches_early, keep_on_host, stored
from keras_mp.backend.jax.islands import normalize_rows, update_in_one_program, without_islands
from keras_mp.backend.jax.parallel import (
    HOW_TO_HAVE_MORE_DEVICES,
    any_replica,
    can_jit,
    is_on_one_device,
    is_spread,
    max_over_replicas,
    parallel_scope,
    part_of,
    reduce_dtype,
    replica_count,
    share_of_batch,
    sum_over_replicas,
    tpu_coordinates,
)
from keras_mp.backend.jax.products import einsum_float32, full_float32, fused_attention_in_float32
from keras_mp.backend.jax.tensors import as_float4, as_keras_variable, as_tensor, bitcast, is_variable, places
from keras_mp.backend.jax.transforms import barrier, gradient_scope, lookups_wait, no_allocation, normalize_batch
from keras_mp.backend.jax.update import all_finite, atomic_step, conditional, is_concrete, overwrite, update_if
from keras_mp.backend.jax.workers import (
    ENGINE_ERRORS,
    assign_replica_values,
    connect,
    disconnect,
    is_engine_error,
    replica_values,
    shards_input,
    silent_processes,
    steps_of,
    stops_after,
    store_get,
    store_put,
    to_numpy,
)

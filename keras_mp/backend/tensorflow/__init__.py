"""TensorFlow: the functions of `keras_mp.backend`."""

from keras_mp.backend.tensorflow.devices import (
    bfloat16_options,
    local_devices,
    peak_memory_bytes,
    traced_chip,
    traced_for,
)
from keras_mp.backend.tensorflow.gradients import (
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
from keras_mp.backend.tensorflow.islands import normalize_rows, update_in_one_program, without_islands
from keras_mp.backend.tensorflow.parallel import (
    HOW_TO_HAVE_MORE_DEVICES,
    can_jit,
    is_on_one_device,
    is_spread,
    parallel_scope,
    part_of,
    reduce_dtype,
    tpu_coordinates,
)
from keras_mp.backend.tensorflow.products import (
    attention_as_asked,
    einsum_float32,
    full_float32,
    fused_attention_in_float32,
    trace_call,
)
from keras_mp.backend.tensorflow.replicas import (
    any_replica,
    max_over_replicas,
    replica_count,
    share_of_batch,
    sum_over_replicas,
)
from keras_mp.backend.tensorflow.tensors import (
    as_float4,
    as_keras_variable,
    as_tensor,
    bitcast,
    check_host_memory,
    fetched,
    fetches_early,
    is_variable,
    keep_on_host,
    places,
    stored,
)
from keras_mp.backend.tensorflow.transforms import barrier, gradient_scope, lookups_wait, no_allocation, normalize_batch
from keras_mp.backend.tensorflow.update import all_finite, atomic_step, conditional, is_concrete, overwrite, update_if
from keras_mp.backend.tensorflow.workers import (
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

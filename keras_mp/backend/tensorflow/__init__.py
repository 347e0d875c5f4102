"""TensorFlow: the functions of `keras_mp.backend`."""

from keras_mp.backend.tensorflow.devices import local_devices, peak_memory_bytes, traced_chip, traced_for, version
from keras_mp.backend.tensorflow.gradients import (
    ACCUMULATING_COPIES,
    HAS_SPARSE_GRADIENTS,
    add_at,
    custom_gradient,
    dense,
    gradients_of,
    in_forward_mode,
    linear_gradient,
    map_values,
    refuse_derivatives,
    sparse_gradients,
    sum_repeated_rows,
    values_of,
    with_derivatives_of,
)
from keras_mp.backend.tensorflow.islands import (
    computed_once,
    fused,
    normalize_rows,
    product_over_rows,
    rows_at_once,
    step_scopes,
    update_in_one_program,
    without_islands,
)
from keras_mp.backend.tensorflow.lower import lower
from keras_mp.backend.tensorflow.nonfinite_operation import nonfinite_operation
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
    fused_attention,
    fused_attention_in_float32,
    keras_has_kernel,
    trace_call,
)
from keras_mp.backend.tensorflow.replicas import (
    any_replica,
    global_mean,
    max_over_replicas,
    replica_count,
    share_of_batch,
    sum_over_replicas,
)
from keras_mp.backend.tensorflow.scaled_dot import as_float4, block_scaled_dot, scaled_dot
from keras_mp.backend.tensorflow.steps import (
    bfloat16_options,
    observed_step,
    step_errors,
    steps_compiled_with,
    timed_steps,
)
from keras_mp.backend.tensorflow.tensors import (
    as_keras_variable,
    as_tensor,
    bitcast,
    check_host_memory,
    fetched,
    fetches_early,
    is_variable,
    keep_on_host,
    loss_outside,
    places,
    stored,
)
from keras_mp.backend.tensorflow.transforms import (
    barrier,
    gradient_scope,
    lookups_wait,
    no_allocation,
    normalize_batch,
    recompute,
    row_major,
    scan,
    unmerged,
)
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

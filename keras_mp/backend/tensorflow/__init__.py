"""TensorFlow: the functions of `keras_mp.backend`."""

from keras_mp.backend.tensorflow.devices import (
    bfloat16_options,
    full_float32,
    local_devices,
    peak_memory_bytes,
    traced_chip,
    traced_for,
)
from keras_mp.backend.tensorflow.gradients import custom_gradient, gradients_of, in_forward_mode
from keras_mp.backend.tensorflow.tensors import (
    as_float4,
    as_tensor,
    barrier,
    bitcast,
    dense,
    gradient_scope,
    is_concrete,
    is_on_one_device,
    lookups_wait,
    map_values,
    no_allocation,
    part_of,
    places,
    to_numpy,
    values_of,
    without_islands,
)

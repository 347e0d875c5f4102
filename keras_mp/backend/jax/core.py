"""What is JAX's own: its devices, their memory, its version, its contraction of 16-bit operands."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mp.backend.common.device import DeviceInfo, best_first, platform_traced_for
from keras_mp.system.host import cpu_name, peak_process_bytes


def local_devices() -> list[DeviceInfo]:
    """Lists the devices that JAX may use in this process, the best kind first.

    Returns:
        One entry per device of JAX's default platform, and the host's CPU.

    Raises:
        RuntimeError: If JAX cannot start its devices.
    """
    devices = [_describe(device) for device in _start()]
    if all(device.kind != "cpu" for device in devices):
        devices.append(DeviceInfo("cpu", cpu_name(), ""))
    return best_first(devices)


def _start() -> list[jax.Device]:
    try:
        return jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        hint = f" JAX_PLATFORMS={platforms!r} allows no other device: unset it to use the CPU." if platforms else ""
        raise RuntimeError(f"JAX {jax.__version__} could not start its devices: {error}{hint}") from error


def _describe(device: jax.Device) -> DeviceInfo:
    if device.platform == "cpu":
        return DeviceInfo("cpu", cpu_name(), "")
    if device.platform == "tpu":
        return DeviceInfo("tpu", device.device_kind, "")
    return DeviceInfo("gpu", device.device_kind, getattr(device, "compute_capability", ""))


def peak_memory_bytes() -> int | None:
    """Measures the most memory in use so far: on the fullest accelerator or, without one, by this process.

    Returns:
        Bytes, or None where the runtime does not tell.
    """
    accelerators = [device for device in _start() if device.platform != "cpu"]
    if not accelerators:
        return peak_process_bytes()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in accelerators]
    return max((peak for peak in peaks if peak is not None), default=None)


def version() -> str:
    """Returns JAX's version."""
    return str(jax.__version__)


def fused_attention_in_float32(dtype: str) -> bool:
    """Whether Keras's fused attention adds up and normalizes scores in float32, as jax.nn.dot_product_attention does.

    On a CPU that function asks XLA for a product of float16 that it has not (jax 0.10): "F16_F16_F32 is not supported".
    """
    return not (dtype == "float16" and jax.default_backend() == "cpu")


def fused_attention(query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float) -> Any:
    """Attends with cuDNN's fused kernels, whose softmax is in float32, or returns None where they do not serve.

    Args:
        query: shape `(batch, rows, heads, features)`.
        key, value: shape `(batch, columns, key heads, features)`.
        mask: booleans, shape `(batch, columns)` or `(batch, rows or 1, columns)`, or None.
        causal: whether row i sees only the columns 0 to i.
        scale: of the scores.
    """
    # With a mask cuDNN reads it whole, as 16-bit numbers of size rows x columns a head.
    if mask is not None or jax.default_backend() != "gpu" or query.dtype not in (jnp.float16, jnp.bfloat16):
        return None
    # cuDNN's own limits: features up to 128, in steps of 8 (JAX's documentation of dot_product_attention).
    if query.shape[3] > 128 or query.shape[3] % 8 or (causal and query.shape[1] != key.shape[1]):
        return None
    capability = getattr(jax.devices("gpu")[0], "compute_capability", "0.0")
    if "NVIDIA" not in jax.devices("gpu")[0].device_kind or float(capability) < 8:
        return None
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, scale=scale, implementation="cudnn")


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors and returns the float32 sums; see `keras_mp.stability.accumulate`."""

    def product(left: Any, right: Any) -> Any:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)

    if jax.__version_info__ >= (0, 8):
        return product(left, right)

    # jax 0.7 compiles some of them for a CPU, and then cannot run them. The product of two 16-bit numbers is exact in
    # float32, so the operands can as well be float32.
    def product_on_cpu(left: Any, right: Any) -> Any:
        return product(left.astype(jnp.float32), right.astype(jnp.float32))

    return jax.lax.platform_dependent(left, right, cpu=product_on_cpu, default=product)


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the same tensors, with which the compiler may begin nothing before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    return list(jax.lax.optimization_barrier((*tensors, *others))[: len(tensors)])


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays as it is: whatever is jitted around it fuses it."""
    return function


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> None:
    """Returns None: whatever is jitted around it fuses what Keras's layer does."""
    del x, gamma, beta, epsilon


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that keeps its arguments for the backward pass, and there computes what else is needed.

    Args:
        function: from arrays to a tuple of arrays; it reads no variable and assigns to none.

    Returns:
        A function with the same results and gradients.
    """
    return jax.checkpoint(function)


def scan(step: Callable[..., Any], carry: list[Any], slices: list[Any], dtype: str | None) -> tuple[list[Any], Any]:
    """Calls `step(carry, slices at i) -> (carry, result)` for each i of the slices' first axis, in one loop.

    Args:
        step: keeps the shapes and dtypes of the carry; its result is of the shape of the first slice.
        carry: what the first step begins with.
        slices: arrays with the same first axis.
        dtype: of the result; None where there is none.

    Returns:
        The last carry, and the results stacked, or None.
    """
    return jax.lax.scan(step, carry, slices)


def gradient_scope() -> Callable[[], Any]:
    """Makes a scope that does nothing: JAX names a backward pass after its forward pass."""
    return nullcontext


@contextmanager
def no_allocation() -> Iterator[None]:
    """A scope in which variables that have an initializer get a shape and a dtype, and no value."""

    def without_value(variable: Any, initializer: Any) -> None:
        variable._value, variable._initializer = None, initializer

    # Private, and not keras.StatelessScope, in which optimizers cannot be made: they start from values.
    initialize = keras.Variable._initialize_with_initializer
    keras.Variable._initialize_with_initializer = without_value
    try:
        yield
    finally:
        keras.Variable._initialize_with_initializer = initialize


def full_float32() -> Any:
    """Within it, products of float32 operands are float32 products: by default a TPU makes one bfloat16 pass of one."""
    return jax.default_matmul_precision("highest")


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns an array as it is."""
    return keras.ops.convert_to_tensor(x)


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return jax.lax.bitcast_convert_type(x, dtype)


def fp8_dot(
    left: Any,
    right: Any,
    axes: tuple[list[int], list[int]],
    factor: Any,
    dtype: str,
    *,
    precise: bool,
    apart: bool,
    name: str,
) -> Any:
    """Multiplies two FP8 arrays, adds up in float32, and scales the sums.

    Args:
        left: FP8, of any shape.
        right: FP8, of any shape; one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: of the operation in the compiled program: the last of the scopes, which `/` separates. Keras has entered
            the others already, in the backward pass as well.

    Returns:
        An array: left's other axes, then right's.
    """
    precision = jax.lax.Precision.HIGHEST if precise else jax.lax.Precision.DEFAULT
    with jax.named_scope(name.rpartition("/")[2]):
        sums = jax.lax.dot_general(
            left, right, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
    result = (sums * factor).astype(dtype)
    return jax.lax.optimization_barrier(result) if apart else result


def replica_count() -> int:
    """Returns over how many devices the current Keras distribution splits a batch."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])


def any_replica(flag: Any) -> Any:
    """Returns the flag: a compiled JAX step sees the arrays of all devices and processes as one."""
    return flag


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether every value of some arrays is finite: a boolean array of shape ()."""
    return jnp.stack([jnp.all(jnp.isfinite(tensor)) for tensor in tensors]).all()


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None],
    argument: Any,
    variables: list[Any],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which may assign to variables.

    Args:
        condition: a boolean array of shape ().
        then: called with the argument where the condition is true.
        otherwise: the same, where it is false.
        argument: a structure of arrays.
        variables: the variables that either may change.
        prepare: what is done to the argument before `then` takes it. It is done within the branch: XLA makes it part of
            the loops there, and before the branch it would be a loop of its own, over all of memory.
    """

    def prepared(argument: Any) -> None:
        then(argument if prepare is None else prepare(argument))

    if not isinstance(condition, jax.core.Tracer):
        (prepared if condition else otherwise)(argument)  # eagerly, as without a condition
        return

    def values_after(function: Callable[[Any], None], argument: Any, before: list[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            function(argument)
        return [scope.get_current_value(variable) for variable in variables]

    branches = [partial(values_after, function) for function in (prepared, otherwise)]
    after = jax.lax.cond(condition, *branches, argument, [variable.value for variable in variables])
    for variable, value in zip(variables, after, strict=True):
        variable.assign(value)


def update_if(
    condition: Any,
    update: Callable[[Any], None],
    argument: Any,
    variables: list[Any],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls a function that assigns to variables, and where the condition is false leaves them as they were.

    In a step jitted for an accelerator the update is made in any case, and a variable takes its new value or its old
    one within the same kernel. Behind a condition all gradients would wait in memory in float32, and a GPU would stop
    to ask its host which branch to run. A clipping norm may then be rounded otherwise than without the condition, so a
    CPU, which gains nothing, has the condition.

    Args:
        condition: a boolean array of shape ().
        update: called with the argument.
        argument: a structure of arrays.
        variables: the variables that it may change.
        prepare: what is done to the argument before.
    """
    if (platform_traced_for() or jax.default_backend()) == "cpu" or not isinstance(condition, jax.core.Tracer):
        conditional(condition, update, lambda _: None, argument, variables, prepare)
        return
    with keras.StatelessScope(state_mapping=[(variable, variable.value) for variable in variables]) as scope:
        update(argument if prepare is None else prepare(argument))
    for variable in variables:
        old, new = variable.value, scope.get_current_value(variable)
        if new is not old:
            variable.assign(jnp.where(condition, new, old))


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Returns the tensors: JAX has added up the gradients of all devices in the backward pass."""
    return tensors


def max_over_replicas(tensor: Any) -> Any:
    """Returns the tensor: it is that of all devices."""
    return tensor


def overwrite(variables: list[Any], values: list[Any]) -> None:
    """Assigns to each variable a value, or that of another variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.value if isinstance(value, keras.Variable) else value)


def atomic_step(
    model: Any,
    train_step: Callable[..., Any],
    skips: Any,
    variables: list[Any],
    results: Callable[[], dict],
    state: tuple,
) -> Any:
    """Makes a training step, and if its optimizer skipped it, puts back what else it had changed.

    Args:
        model: a compiled Keras model.
        train_step: the step, from (state, batch) to (logs, state).
        skips: the optimizer's count of skips in a row.
        variables: what the forward pass changes.
        results: gives the values of the metrics by name.
        state: the arguments of the step: (values, batch), and of the values those of the model's trainable,
            non-trainable, optimizer's and metrics' variables.

    Returns:
        (logs, state), metrics in the logs as they are after the step.
    """
    logs, new = train_step(*state)
    _, passive, _, metrics = state[0]
    trainable, new_passive, optimizer, new_metrics = new
    place = next(i for i, variable in enumerate(model.optimizer.variables) if variable is skips)
    skipped = optimizer[place] > 0
    restored = {id(variable) for variable in variables}

    def choose(kind: list[Any], before: list[Any], after: list[Any]) -> list[Any]:
        return [
            jnp.where(skipped, old, new) if id(variable) in restored else new
            for variable, old, new in zip(kind, before, after, strict=True)
        ]

    passive = choose(model.non_trainable_variables, passive, new_passive)
    metrics = choose(model.metrics_variables, metrics, new_metrics)
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, metrics, strict=True))):
        logs = logs | {name: value for name, value in results().items() if name in logs}
    return logs, (trainable, passive, optimizer, metrics)


def sum_repeated_rows(gradient: Any) -> Any:
    """Returns the gradient: on JAX, Keras's gradients are dense."""
    return gradient


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values of a gradient."""
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the gradient: it is dense."""
    return gradient


def dense(gradient: Any) -> Any:
    """Returns the gradient: it is dense."""
    return gradient

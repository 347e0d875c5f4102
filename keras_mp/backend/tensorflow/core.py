"""What is TensorFlow's own: its devices, their memory, its version, its contraction of 16-bit operands."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

# Private, because the public tf.matmul takes an output dtype for integers alone.
from tensorflow.compiler.tf2xla.python import xla as tfxla
from tensorflow.compiler.xla import xla_data_pb2

from keras_mp.backend.common.device import DeviceInfo, best_first, platform_traced_for
from keras_mp.system.host import cpu_name, peak_process_bytes


def local_devices() -> list[DeviceInfo]:
    """Lists the devices that TensorFlow may use in this process, the best kind first.

    Returns:
        One entry per device. Devices hidden with `tf.config.set_visible_devices` are left out.

    Raises:
        RuntimeError: If TensorFlow cannot list its devices.
    """
    try:
        return best_first(_describe(device) for device in tf.config.get_visible_devices())
    except (RuntimeError, tf.errors.OpError) as error:
        raise RuntimeError(f"TensorFlow {tf.__version__} could not list its devices: {error}") from error


def _describe(device: tf.config.PhysicalDevice) -> DeviceInfo:
    if device.device_type == "CPU":
        return DeviceInfo("cpu", cpu_name(), "")
    if device.device_type == "TPU":
        # TensorFlow does not say which generation a TPU is of.
        return DeviceInfo("tpu", "TPU", "")
    details = tf.config.experimental.get_device_details(device)
    capability = details.get("compute_capability")
    architecture = ".".join(map(str, capability)) if capability else ""
    return DeviceInfo("gpu", details.get("device_name", device.name), architecture)


def peak_memory_bytes() -> int | None:
    """Measures the most memory in use so far: on the fullest accelerator or, without one, by this process.

    Returns:
        Bytes, or None where the runtime does not tell (TPUs, Metal).
    """
    accelerators = [device for device in tf.config.list_logical_devices() if device.device_type != "CPU"]
    if not accelerators:
        return peak_process_bytes()
    try:
        # TensorFlow 2.21 answers 0 for a device that keeps no count.
        return max(tf.config.experimental.get_memory_info(device.name)["peak"] for device in accelerators) or None
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None


def version() -> str:
    """Returns TensorFlow's version."""
    return str(tf.__version__)


def fused_attention_in_float32(dtype: str) -> bool:
    """Whether Keras's fused attention adds up and normalizes scores in float32: here it does so in their own dtype."""
    return False


def fused_attention(query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float) -> Any:
    """Returns None: TensorFlow has no fused attention."""
    return None


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors and returns the float32 sums; see `keras_mp.stability.accumulate`."""
    operands, out = equation.split("->")
    left_labels, right_labels = operands.split(",")
    batch = [label for label in left_labels if label in right_labels and label in out]
    summed = [label for label in left_labels if label in right_labels and label not in out]
    left_free = [label for label in left_labels if label not in right_labels]
    right_free = [label for label in right_labels if label not in left_labels]
    # XLA's compiler for CPUs has no bfloat16 kernel for every layout, but has one for rows times columns.
    left = _transposed(left, left_labels, [*batch, *left_free, *summed])
    right = _transposed(right, right_labels, [*batch, *summed, *right_free])
    first = range(len(batch))
    dimensions = xla_data_pb2.DotDimensionNumbers(
        lhs_batch_dimensions=first,
        rhs_batch_dimensions=first,
        lhs_contracting_dimensions=[len(batch) + len(left_free) + index for index in range(len(summed))],
        rhs_contracting_dimensions=[len(batch) + index for index in range(len(summed))],
    )
    result = tfxla.dot_general(left, right, dimensions, preferred_element_type=tf.float32)
    return _transposed(result, [*batch, *left_free, *right_free], out)


def barrier(tensors: list[Any], others: list[Any]) -> list[Any]:
    """Returns the same tensors, with which the compiler may begin nothing before the others are there.

    What is computed from them is not merged with the same computation elsewhere, so it is made anew.
    """
    # Without jit the operation copies, so of the others it is given one number.
    others = [tf.reshape(each, [-1])[:1] for each in others]
    return list(tfxla.optimization_barrier(*tensors, *others)[: len(tensors)])


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of tensors one kernel, also where the graph around it is not jitted."""
    return tf.function(function, jit_compile=True, autograph=False)


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[Any, Any, Any] | None:
    """Normalizes each feature over a batch in one kernel, which takes mean and variance in float32.

    Args:
        x: floats, shape `(..., features)`.
        gamma, beta: float32, shape `(features,)`, or None for 1 and 0.
        epsilon: added to the variance.

    Returns:
        (gamma * (x - mean) / sqrt(variance + epsilon) + beta in x's dtype, mean, variance), the variance that of the
        batch itself; or None where XLA fuses the same, and where TensorFlow has no such kernel.
    """
    features = x.shape[-1]
    if tf.__internal__.get_enclosing_xla_context() is not None or not features or x.dtype not in _NORMALIZED:
        return None
    count = tf.size(x) // features
    # Where it can be, the first axis stays what it is: cuDNN has limits for it.
    batch = tf.shape(x)[0] if len(x.shape) > 2 else count
    rows = x if len(x.shape) == 4 else tf.reshape(x, (batch, count // tf.maximum(batch, 1), 1, features))
    scale = tf.ones(features) if gamma is None else tf.cast(tf.convert_to_tensor(gamma), tf.float32)
    offset = tf.zeros(features) if beta is None else tf.cast(tf.convert_to_tensor(beta), tf.float32)
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=rows, scale=scale, offset=offset, mean=tf.zeros(0), variance=tf.zeros(0), epsilon=epsilon, is_training=True
    )
    # The kernel divides by one value less than there are, as moving averages of other frameworks want it. Of a single
    # value that is NaN on a GPU.
    number = tf.cast(count, tf.float32)
    variance = tf.where(tf.equal(count, 1), tf.zeros_like(variance), variance * ((number - 1) / number))
    return (y if rows is x else tf.reshape(y, tf.shape(x))), mean, variance


_NORMALIZED = (tf.float32, tf.bfloat16, tf.float16)


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that keeps its arguments for the backward pass, and there computes what else is needed.

    Args:
        function: from tensors to a tuple of tensors; it reads no variable and assigns to none.

    Returns:
        A function with the same results and gradients.
    """

    @tf.custom_gradient
    def call(*arguments: Any) -> Any:
        scope = gradient_scope()

        def gradient(*upstream: Any) -> Any:
            with scope():
                anew = barrier(list(arguments), [each for each in upstream if each is not None])
                watched = [each for each in anew if each.dtype.is_floating]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(watched)
                    results = function(*anew)
                pairs = zip(results, upstream, strict=True)
                used = [(result, each) for result, each in pairs if result.dtype.is_floating and each is not None]
                targets, seeds = zip(*used, strict=True)
                found = iter(tape.gradient(targets, watched, seeds, tf.UnconnectedGradients.ZERO))
                return [dense(next(found)) if each.dtype.is_floating else None for each in anew]

        return function(*arguments), gradient

    return call


def scan(step: Callable[..., Any], carry: list[Any], slices: list[Any], dtype: str | None) -> tuple[list[Any], Any]:
    """Calls `step(carry, slices at i) -> (carry, result)` for each i of the slices' first axis, in one loop.

    Args:
        step: keeps the shapes and dtypes of the carry; its result is of the shape of the first slice.
        carry: what the first step begins with.
        slices: tensors with the same first axis.
        dtype: of the result; None where there is none.

    Returns:
        The last carry, and the results stacked, or None.
    """
    count = tf.shape(slices[0])[0]
    results = [tf.TensorArray(dtype, count, element_shape=slices[0].shape[1:])] if dtype else []

    def body(index: Any, carry: Any, results: Any) -> Any:
        carry, result = step(carry, [each[index] for each in slices])
        return index + 1, carry, [array.write(index, result) for array in results]

    _, carry, results = tf.while_loop(
        lambda index, carry, results: index < count, body, (tf.constant(0), list(carry), results),
        maximum_iterations=count,
    )  # fmt: skip
    return carry, results[0].stack() if results else None


def gradient_scope() -> Callable[[], Any]:
    """Remembers where a custom gradient's forward pass is; the result makes the name scope of its backward pass."""
    name = tf.get_current_name_scope()
    return lambda: tf.name_scope(f"gradient_tape/{name}/")


def no_allocation() -> Any:
    """A scope that does nothing: TensorFlow's variables have values."""
    return nullcontext()


def _transposed(x: Any, labels: Sequence[str], order: Sequence[str]) -> Any:
    return x if list(labels) == list(order) else tf.transpose(x, [labels.index(label) for label in order])


@contextmanager
def full_float32() -> Iterator[None]:
    """Within it, products of float32 operands are float32 products: by default a GPU rounds them to TF32."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def as_tensor(x: Any) -> Any:
    """Reads a variable, or returns a tensor as it is."""
    # Keras alone hands TensorFlow's variable through, which a function with a gradient of its own refuses.
    return tf.convert_to_tensor(keras.ops.convert_to_tensor(x))


def bitcast(x: Any, dtype: str) -> Any:
    """Reads the bits of each element as another dtype of the same size."""
    return tf.bitcast(x, dtype)


_MLIR_TYPES = {
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}


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
    """Multiplies two FP8 tensors, adds up in float32, and scales the sums.

    TensorFlow's own products refuse FP8, so this one is written in StableHLO, which XLA compiles in eager and graph
    mode, too.

    Args:
        left: FP8, of any shape; sizes may be unknown.
        right: FP8, of any shape; one of the two in E4M3.
        axes: the axes of left and of right to sum over, in pairs.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        precise: whether a GPU must add up in full float32.
        apart: whether the compiler may not fuse what follows into the product.
        name: of the operation in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor: left's other axes, then right's.
    """
    shape = [
        size
        for operand, summed in zip((left, right), axes, strict=True)
        for axis, size in enumerate(operand.shape)
        if axis not in summed
    ]
    left_type, right_type = (_mlir_type(operand.shape, operand.dtype.name) for operand in (left, right))
    sums_type, result_type = (_mlir_type(shape, each) for each in ("float32", dtype))
    precision = "HIGHEST" if precise else "DEFAULT"
    location = f"{tf.get_current_name_scope()}/{name}".replace("\\", "\\\\").replace('"', '\\"')
    last = "apart" if apart else "result"
    # Shape polymorphism: what is unknown here is filled in when the program is compiled.
    module = f"""module @fp8_dot attributes {{jax.uses_shape_polymorphism = true}} {{
      func.func public @main(%left: {left_type}, %right: {right_type}, %factor: tensor<f32>) -> {result_type} {{
        %sums = stablehlo.dot_general %left, %right, contracting_dims = {axes[0]} x {axes[1]},
          precision = [{precision}, {precision}] : ({left_type}, {right_type}) -> {sums_type} loc("{location}")
        {_broadcast_factor(shape)}
        %scaled = stablehlo.multiply %sums, %factors : {sums_type}
        %result = stablehlo.convert %scaled : ({sums_type}) -> {result_type}
        {f"%apart = stablehlo.optimization_barrier %result : {result_type}" if apart else ""}
        return %{last} : {result_type}
      }}
    }}"""
    return tfxla.call_module(
        [left, right, factor],
        version=9,
        module=module.encode(),
        Tout=[tf.as_dtype(dtype)],
        Sout=[tf.TensorShape(shape)],
        platforms=["CPU"],
        disabled_checks=[tfxla.call_module_disable_check_platform()],  # nothing in it is a CPU's alone
    )[0]


def _broadcast_factor(shape: Sequence[int | None]) -> str:
    """StableHLO for %factors: %factor in the shape of %sums."""
    sums_type = _mlir_type(shape, "float32")
    if None not in shape:
        return f"%factors = stablehlo.broadcast_in_dim %factor, dims = [] : (tensor<f32>) -> {sums_type}"
    lines = []
    for axis in range(len(shape)):
        lines.append(
            f"%size{axis} = stablehlo.get_dimension_size %sums, dim = {axis} : ({sums_type}) -> tensor<i32>\n"
            f"%length{axis} = stablehlo.reshape %size{axis} : (tensor<i32>) -> tensor<1xi32>"
        )
    sizes = ", ".join(f"%length{axis}" for axis in range(len(shape)))
    types = ", ".join(["tensor<1xi32>"] * len(shape))
    lines.append(
        f"%shape = stablehlo.concatenate {sizes}, dim = 0 : ({types}) -> tensor<{len(shape)}xi32>\n"
        f"%factors = stablehlo.dynamic_broadcast_in_dim %factor, %shape, dims = [] : "
        f"(tensor<f32>, tensor<{len(shape)}xi32>) -> {sums_type}"
    )
    return "\n".join(lines)


def _mlir_type(shape: Sequence[int | None], dtype: str) -> str:
    sizes = ["?" if size is None else str(size) for size in shape]
    return f"tensor<{'x'.join([*sizes, _MLIR_TYPES[dtype]])}>"


def replica_count() -> int:
    """Returns how many replicas of a model the current distribution strategy trains."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def any_replica(flag: Any) -> Any:
    """Tells whether a flag is true on any replica; call it in a replica context.

    Args:
        flag: a boolean tensor of shape (), of this replica.

    Returns:
        A boolean tensor of shape (), the same on every replica.
    """
    if replica_count() == 1:
        return flag
    # tf.distribute reduces by sum and mean only.
    votes = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flag, tf.float32))
    return votes > 0


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether every value of some tensors is finite: a boolean tensor of shape ()."""

    def one_by_one() -> Any:
        return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]))

    if _is_jitted_for_an_accelerator():
        return one_by_one()  # one pass, too, and no condition: see update_if
    # One pass each: a value that is not finite makes the sum so. Finite ones can too, if they are huge, and only then
    # are they looked at one by one, which takes two passes.
    sums = [tf.cast(tf.reduce_sum(_at_least_float32(tensor)), tf.float32) for tensor in tensors]
    return tf.cond(tf.math.is_finite(tf.add_n(sums)), lambda: tf.constant(True), one_by_one)


def _is_jitted_for_an_accelerator() -> bool:
    if tf.__internal__.get_enclosing_xla_context() is None:
        return False
    return (platform_traced_for() or local_devices()[0].kind) != "cpu"


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None],
    argument: Any,
    variables: list[Any],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which may assign to variables and talk to the other replicas.

    Args:
        condition: a boolean tensor of shape (), the same on every replica.
        then: called with the argument, in a replica context, where the condition is true.
        otherwise: the same, where it is false.
        argument: a structure of tensors, of this replica.
        variables: the variables that either may change; JAX needs to know them.
        prepare: what is done to the argument before `then` takes it. It is done before the branch: within, XLA would
            make it part of a clipping norm, whose sum would then be rounded otherwise than without it.
    """
    del variables
    if prepare is not None:
        argument = prepare(argument)
    # Private: no public name tells whether replicas talk by leaving their context, which a branch does not allow.
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(condition, lambda: then(argument), lambda: otherwise(argument))
        return

    def outside(strategy: tf.distribute.Strategy, condition: Any, argument: Any) -> None:
        def on_each_replica(function: Callable[[Any], None]) -> None:
            strategy.extended.call_for_each_replica(function, args=(argument,))

        same = strategy.experimental_local_results(condition)[0]
        tf.cond(same, lambda: on_each_replica(then), lambda: on_each_replica(otherwise))

    tf.distribute.get_replica_context().merge_call(outside, args=(condition, argument))


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
        condition: a boolean tensor of shape (), the same on every replica.
        update: called with the argument, in a replica context.
        argument: a structure of tensors, of this replica.
        variables: the variables that it may change.
        prepare: what is done to the argument before.
    """
    if not _is_jitted_for_an_accelerator():
        conditional(condition, update, lambda _: None, argument, variables, prepare)
        return
    before = [tf.convert_to_tensor(variable.value) for variable in variables]
    update(argument if prepare is None else prepare(argument))
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(condition, variable.value, old))


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Adds up tensors of each replica, sparse ones too; call it in a replica context."""
    if replica_count() == 1 or not tensors:
        return tensors
    context = tf.distribute.get_replica_context()
    return [sum_repeated_rows(tensor) for tensor in context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)]


def max_over_replicas(tensor: Any) -> Any:
    """Takes the maximum of a tensor over the replicas; call it in a replica context."""
    if replica_count() == 1:
        return tensor
    return tf.reduce_max(tf.distribute.get_replica_context().all_gather(tensor[tf.newaxis], axis=0), axis=0)


def overwrite(variables: list[Any], values: list[Any]) -> None:
    """Assigns to each variable, on each replica, that replica's value; call it in a replica context.

    Args:
        variables: Keras variables.
        values: for each a tensor, or another Keras variable.
    """
    values = [value.value if isinstance(value, keras.Variable) else value for value in values]

    # Not variable.assign, which takes the mean over the replicas, and three times a third is not always the whole.
    def outside(strategy: tf.distribute.Strategy, values: list[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda to, new: to.assign(new), args=(value,), group=False)

    # Private: the public merge_call does not run in the branch of a conditional where there is one replica.
    tf.__internal__.distribute.interim.maybe_merge_call(outside, tf.distribute.get_strategy(), values)


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
        train_step: the step, from a batch to the logs.
        skips: the optimizer's count of skips in a row.
        variables: what the forward pass changes.
        results: gives the values of the metrics by name.
        state: the arguments of the step: (batch,).

    Returns:
        The logs, metrics in them as they are after the step.
    """
    del model
    before = [tf.identity(variable.value) for variable in variables]
    logs = train_step(*state)
    skipped = tf.convert_to_tensor(skips.value) > 0
    update_if(skipped, lambda before: overwrite(variables, before), before, variables)
    return logs | {name: value for name, value in results().items() if name in logs}


def sum_repeated_rows(gradient: Any) -> Any:
    """Gives each row of a sparse gradient once, as the sum of its occurrences; a dense one is returned as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the values of a dense or sparse gradient, as a dense tensor."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor of its variable's shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])

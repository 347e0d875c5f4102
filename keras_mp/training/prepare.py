"""One call from a model that is built to one that is ready for `fit` in its precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.convert import convert
from keras_mp.fp8.scaling_recipe import Recipe
from keras_mp.lean.gelu import gelu
from keras_mp.loss_scaling.atomic_skip import atomic_skip
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.wrap_optimizer import wrap_optimizer
from keras_mp.precision.hardware import Support
from keras_mp.precision.policy import choose_jit
from keras_mp.rebuild import layers_by_path
from keras_mp.stability.stabilized import stabilize
from keras_mp.training.prepared_lines import computes_in_fp8, prepared_lines


def prepare(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str,
    loss: Any,
    metrics: Sequence[Any] | Mapping[str, Any] | None = None,
    fp8: bool | str | Recipe | Mapping[str, Any] = False,
    verbose: bool = False,
    state_dtype: str | None = None,
    islands: bool = True,
    **compile_arguments: Any,
) -> keras.Model:
    """Makes a model ready for `fit` in the precision that it was built in.

    It stands for these calls, each of which can be used alone:

        model = keras_mp.stabilize(model)                          # in float32 what needs float32
        model = keras_mp.fp8.convert(model)                        # with fp8=True
        optimizer = keras_mp.wrap_optimizer(optimizer, model)      # scales the loss where a layer computes in float16
        model.compile(optimizer, loss, jit_compile=keras_mp.choose_policy().jit_compile)
        keras_mp.atomic_skip(model)                                # where the optimizer was wrapped

    Jit is left out, too, where a layer or the strategy of several replicas does not allow it, and used where only
    TensorFlow has no kernels for it, as of image augmentation on JAX. On TensorFlow, on a CPU, the step of the prepared
    model also sums the gradients of biases in bfloat16 in float32, and computes GELU and SiLU in float32, which
    TensorFlow's kernels do not.

    Args:
        model: a built Keras model, made under `keras_mp.set_global_policy(...)`.
        optimizer: as `compile` takes it; or a `keras_mp.LossScaleOptimizer` with settings of its own, which is used as
            it is.
        loss: as `compile` takes it.
        metrics: as `compile` takes them.
        fp8: whether matrix products run in FP8: True for those that gain, with current scaling; a scaling recipe or
            its name; or a dict of what `keras_mp.fp8.convert` takes, such as
            `{"recipe": "delayed", "target": "h100"}`. With False, layers that `keras_mp.fp8.convert` made FP8 layers
            before stay so.
        verbose: print five lines that say what was done, and why; a sixth says which layers are quantized, and how many
            weights train.
        state_dtype: what the optimizer's slots, such as Adam's moments, are stored in: "float32", the default;
            "bfloat16"; or "float8", as `LossScaleOptimizer` says. None leaves a `LossScaleOptimizer` as it is.
        islands: whether update, normalizations, GELU and SiLU of a step that is not jitted are jitted programs within
            it, each by itself, and gradients of convolutions' kernels are matrix products where that is faster. The
            programs are compiled for the first 16 batch sizes, and are kernels in later ones. It concerns TensorFlow
            on a CPU: accelerators and JAX jit the step as a whole.
        **compile_arguments: of `model.compile`; a `jit_compile` among them is used instead of the choice made here.

    Returns:
        A new model, compiled, with the weights of the old one, which is left alone. An optimizer's state is not carried
        over.

    Raises:
        RebuildError: the model is not built, or has a layer that cannot be rebuilt; the message names it.
        ValueError: the optimizer is Keras's LossScaleOptimizer, a scaling recipe or state_dtype is unknown, or
            state_dtype is not that of a LossScaleOptimizer.
        TypeError: fp8 is none of the above, or the dict has a name that `keras_mp.fp8.convert` does not.

    Warns:
        UserWarning: as `stabilize` and `fp8.convert`.
    """
    convert_arguments = _convert_arguments(fp8)
    prepared = stabilize(model)
    if convert_arguments is not None:
        prepared = convert(prepared, **convert_arguments)
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, LossScaleOptimizer):
        optimizer = wrap_optimizer(optimizer, prepared, state_dtype=state_dtype or "float32")
    elif state_dtype not in (None, optimizer.state_dtype):
        raise ValueError(
            f"state_dtype={state_dtype!r} and optimizer={optimizer.name!r}, a LossScaleOptimizer with "
            f"state_dtype={optimizer.state_dtype!r}: give it to the optimizer alone"
        )
    jit = _jit(prepared, compile_arguments)
    # Not "auto", by which Keras never jits on a CPU. Whether the layers support it, `_jit` has seen.
    arguments = {"jit_compile": jit.ok} | compile_arguments
    prepared.compile(optimizer, loss, metrics=list(metrics) if isinstance(metrics, tuple) else metrics, **arguments)
    prepared.train_step = partial(_step_on_a_cpu, islands, backend.count_batch_sizes(), prepared.train_step)
    if isinstance(optimizer, LossScaleOptimizer):
        atomic_skip(prepared)
    if verbose:
        print("\n".join(prepared_lines(model, prepared, jit)))
    return prepared


def _step_on_a_cpu(
    islands: bool,
    counted: Callable[[Any], AbstractContextManager[None]],
    train_step: Callable[..., Any],
    *arguments: Any,
) -> Any:
    # On JAX there is a state before the batch.
    scope = counted(arguments[-1]) if islands else backend.without_islands()
    with backend.gradients_on_cpus(), backend.activations_on_cpus(gelu), scope:
        return train_step(*arguments)


def _convert_arguments(fp8: Any) -> dict[str, Any] | None:
    if fp8 is False:
        return None
    if fp8 is True:
        return {}
    if isinstance(fp8, Mapping):
        return dict(fp8)
    if isinstance(fp8, (str, Recipe)):
        return {"recipe": fp8}
    raise TypeError(f"fp8={fp8!r} must be a bool, a scaling recipe or its name, or a dict of arguments of fp8.convert")


def _jit(model: keras.Model, compile_arguments: Mapping[str, Any]) -> Support:
    """Whether to jit the step, and why: the reason begins behind the colon."""
    if "jit_compile" in compile_arguments:
        return Support(compile_arguments["jit_compile"], f"Jit: jit_compile={compile_arguments['jit_compile']!r}.")
    if compile_arguments.get("run_eagerly"):
        return Support(False, "Jit: run_eagerly=True.")
    if not backend.can_jit():
        return Support(False, "Jit is off: XLA's program is for one device, and here are several replicas.")
    chosen = choose_jit("fp8" if computes_in_fp8(model) else "")
    if not chosen.ok:
        return chosen
    layers = layers_by_path(model)
    if keras.backend.backend() == "jax":
        # Keras rules out jit for augmentation because of TensorFlow's kernels. JAX would be 150 times slower without.
        for layer in layers.values():
            layer.supports_jit |= type(layer).__module__.startswith("keras.src.layers.preprocessing.image_")
    without = [path for path, layer in layers.items() if not layer.supports_jit]
    return Support(False, f"Jit is off: {without[0]} cannot be compiled by XLA.") if without else chosen

"""One call from a model that is built to one that is ready for `fit` in its precision."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.convert import checked_arguments, plan_products
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.scaling import Scaling, Scalings
from keras_mp.lean.frozen import plan_frozen
from keras_mp.lean.training_step import STEP_ON_A_CPU
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.undone_step import ATOMIC, atomic_skip
from keras_mp.loss_scaling.wrapping import wrap_optimizer
from keras_mp.optimizer.inner_optimizer import check_states, check_unscaled
from keras_mp.precision.hardware import Support, choose_jit
from keras_mp.rebuild.optimizers import compile_arguments as arguments_of
from keras_mp.rebuild.optimizers import held_optimizers, unwrapped, without_default
from keras_mp.rebuild.walk import LOW_PRECISION, Walk, check_is_model, is_narrow, original_class
from keras_mp.stability.stabilized import attended_by, plan_float32
from keras_mp.system.argument_checks import takes
from keras_mp.treatment.change import ChangePlan, Planned
from keras_mp.treatment.waiting import forget, register_calls, waits

updates = backend.engine_of("keras_mp.optimizer")


def prepare(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str | None,
    loss: Any = None,
    *,
    metrics: Sequence[Any] | Mapping[str, Any] | None = None,
    fp8: bool | str | Scaling | Scalings | Mapping[str, Any] = False,
    verbose: bool = False,
    state_dtype: str | None = None,
    narrow_frozen: bool = False,
    release_gradients: bool = False,
    state_memory: str | None = None,
    **compile_arguments: Any,
) -> keras.Model:
    """Makes a model ready for `fit` in its precision.

    That is the one in which it was built. It is changed in place, by these calls, each of which can be used alone:

        keras_mp.stabilize(model)  # in float32 what needs float32
        keras_mp.convert(model)  # with fp8=True
        keras_mp.lean.narrow_frozen(model)  # with narrow_frozen=True
        optimizer = keras_mp.loss_scaling.wrap_optimizer(optimizer, model)  # scales the loss for layers in float16
        model.compile(optimizer, loss, jit_compile=keras_mp.set_global_policy().jit_compile)
        keras_mp.loss_scaling.atomic_skip(model)  # where the optimizer was wrapped

    Jit is left out, too, where a layer or the strategy of several replicas does not allow it, and used where only
    TensorFlow has no kernels for it, as of image augmentation on JAX. On TensorFlow, on a CPU, the step of the prepared
    model also sums the gradients of biases in bfloat16 in float32, and computes GELU and SiLU in float32, which
    TensorFlow's kernels do not. There it is not jitted, but has islands: update, normalizations, GELU and SiLU are
    jitted programs within it, each by itself, compiled for the first 16 batch sizes, and gradients of convolutions'
    kernels are matrix products where that is faster. A step that is traced in `keras_mp.backend.without_islands()` has
    none.

    Args:
        model: a Keras model, made under `keras_mp.set_global_policy(...)`. One that is not built is compiled now, and
            prepared once it is built: by `fit` or another call on its first batch.
        optimizer: an optimizer as `compile` takes it; or a `keras_mp.LossScaleOptimizer` with settings of its own,
            which is used as it is. None for a model whose own `compile` takes its optimizers by other names, as a GAN's
            does: each optimizer among compile_arguments is wrapped alike, and `train_step` must call its `scale_loss`.
        loss: a loss as `compile` takes it.
        metrics: metrics as `compile` takes them.
        fp8: whether matrix products run in FP8: True for those that gain, with current scaling; a scaling or
            its name; or a dict of what `keras_mp.convert` takes, such as
            `{"scaling": "delayed", "target": "h100"}`. With False, layers that `keras_mp.convert` made FP8 layers
            before stay so.
        verbose: whether to print five lines that say what was done, and why; a sixth says which layers are quantized,
            and how many weights train, and one more how many of those that do not are stored in bfloat16; on a TPU one
            says what computes attention.
        state_dtype: the dtype that the optimizer's slots, such as Adam's moments, are stored in: "float32", the
            default; "bfloat16"; or "float8", as `LossScaleOptimizer` says. None leaves a `LossScaleOptimizer` as it is.
        narrow_frozen: whether weights that do not train are stored in the 16 bits in which they are read, as
            `keras_mp.lean.narrow_frozen` does.
        release_gradients: Whether each weight is updated as soon as its own gradient is there, so that gradients need
            not lie in memory together, as `keras_mp.LossScale.none` says.
        state_memory: the place of the optimizer's slots: "device", the default; or "host", with release_gradients, as
            `LossScaleOptimizer` says. None leaves a `LossScaleOptimizer` as it is.
        **compile_arguments: arguments of `model.compile`, also of one that the model's class defines; a `jit_compile`
            among them is used instead of the choice made here.

    Returns:
        The model, compiled. Saved and loaded it is still what this made of it.

    Raises:
        ValueError: an optimizer is Keras's LossScaleOptimizer, a scaling or state_dtype
            is unknown; state_dtype, state_memory or release_gradients is not that of a LossScaleOptimizer, or cannot be
            had, with the reason; a layer computes in float16, and the model or a layer of it made an optimizer itself,
            which does not scale the loss.
        TypeError: the model is not a keras.Model; fp8 is none of the above, or the dict has a name that
            `keras_mp.convert` does not; the model's class has a `compile` that does not take these arguments.

    Warns:
        UserWarning: as `stabilize` and `convert`.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> choice = keras_mp.set_global_policy("mixed_float16")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4, "softmax")])
        >>> model = keras_mp.prepare(model, "adam", "sparse_categorical_crossentropy")
        >>> type(model.optimizer).__name__, model.layers[-1].compute_dtype
        ('LossScaleOptimizer', 'float32')
        >>> history = model.fit(np.ones((32, 8)), np.zeros(32), verbose=0)
    """
    check_is_model(model)
    convert_arguments = _convert_arguments(fp8)
    optimizer = keras.optimizers.get(optimizer)
    flat = [optimizer, *keras.tree.flatten(compile_arguments)]
    given = [held for held in flat if isinstance(held, keras.optimizers.Optimizer)]
    if not given:
        raise TypeError("optimizer=None is for a compile() that takes its optimizers by other names: pass one of these")
    for held in given:
        if isinstance(held, LossScaleOptimizer):
            _check_settings(held, state_dtype, state_memory, release_gradients)
        else:
            check_unscaled("optimizer", held)
    check_states(state_dtype or "float32", state_memory or "device", release_gradients)
    metrics = list(metrics) if isinstance(metrics, tuple) else metrics
    arguments = _arguments(model, {"optimizer": optimizer, "loss": loss, "metrics": metrics, **compile_arguments})
    how: dict[str, Any] = {
        "convert_arguments": convert_arguments,
        "narrow_frozen": narrow_frozen,
        "verbose": verbose,
        "state_dtype": state_dtype or "float32",
        "state_memory": state_memory or "device",
        "release_gradients": release_gradients,
    }
    if not waits(model, "prepare", jit_compile=arguments.get("jit_compile"), **how):
        return _prepare(model, arguments, **how)
    model.compile(**arguments)
    if arguments_of(model) is None:
        forget(model)
        raise TypeError(
            f"compile() of {original_class(model).__name__} does not keep every argument as it was given, and prepare "
            "would call it again when the model is built: build the model before"
        )
    return model


def _prepare_compiled(model: keras.Model, jit_compile: bool | str | None, **how: Any) -> keras.Model:
    """Prepares a model that has waited, with the arguments that it is compiled with by now."""
    arguments = arguments_of(model) if model.compiled else None
    if arguments is not None:
        arguments.pop("jit_compile", None)  # Keras's choice
        arguments |= {} if jit_compile is None else {"jit_compile": jit_compile}
    return _prepare(model, arguments, **how)


register_calls({"prepare": _prepare_compiled})


def _prepare(
    model: keras.Model,
    arguments: Mapping[str, Any] | None,
    *,
    convert_arguments: Mapping[str, Any] | None,
    narrow_frozen: bool,
    verbose: bool,
    **settings: Any,
) -> keras.Model:
    """Prepares a built model, and compiles it where there are arguments of `compile`."""
    plan = ChangePlan(model)
    sensitive = plan_float32(plan)
    if convert_arguments is not None:
        plan_products(plan, **convert_arguments)
    if narrow_frozen:
        plan_frozen(plan, [row for row in sensitive if not row.treatments], {})
    scales = any(plan.compute_dtype(layer) == "float16" for layer in plan.every)
    step = {STEP_ON_A_CPU: None, ATOMIC: None} if arguments is None and scales else {STEP_ON_A_CPU: None}
    plan.rows.append(Planned("", model, step))
    told = _told_before(plan, [row.layer for row in sensitive if row.treatments]) if verbose else {}
    plan.apply()
    if arguments is None:  # a clone, say, which is compiled later
        return model
    used = {
        id(held): held if isinstance(held, LossScaleOptimizer) else wrap_optimizer(held, model, **settings)
        for held in keras.tree.flatten(dict(arguments))
        if isinstance(held, keras.optimizers.Optimizer)
    }
    jit = _jit(plan.layers, arguments)
    # Not "auto", by which Keras never jits on a CPU. Whether the layers support it, `_jit` has seen.
    jitted = {"jit_compile": jit.ok} if takes(model.compile, "jit_compile") else {}
    wrapped = keras.tree.map_structure(lambda value: used.get(id(value), value), dict(arguments))
    model.compile(**{**jitted, **wrapped})
    if not jitted:
        model.jit_compile = jit.ok
    optimizers = held_optimizers(model)
    if scales:
        _check_scaled(model, without_default(optimizers))
    if any(isinstance(held, LossScaleOptimizer) for held in optimizers.values()):
        atomic_skip(model)
    if verbose:
        below = " " * _LABEL
        for label, words in (told | _told_after(plan, jit)).items():
            print(textwrap.fill(f"{label:<{_LABEL}}{words}", _WIDTH, subsequent_indent=below))
    return model


def _check_settings(
    optimizer: LossScaleOptimizer, state_dtype: str | None, state_memory: str | None, release_gradients: bool
) -> None:
    """Refuses settings of `prepare` that are not those of an optimizer which is used as it is."""
    given = {"state_dtype": state_dtype, "state_memory": state_memory, "release_gradients": release_gradients or None}
    for name, value in given.items():
        own = getattr(optimizer, name)
        if value not in (None, own):
            raise ValueError(
                f"{name}={value!r} and optimizer={optimizer.name!r}, a LossScaleOptimizer with {name}={own!r}: give it "
                "to the optimizer alone"
            )


def _check_scaled(model: keras.Model, optimizers: Mapping[str, keras.optimizers.Optimizer]) -> None:
    """Refuses a model in float16 with optimizers that it made itself: their gradients would be lost below 6e-8."""
    unscaled = {name: held for name, held in optimizers.items() if not isinstance(held, LossScaleOptimizer)}
    if unscaled:
        names = ", ".join(f"{name} ({type(held).__name__})" for name, held in unscaled.items())
        raise ValueError(
            f"model {model.name!r} computes in float16, and optimizers that its own code made do not scale the loss: "
            f"{names}. Make each a keras_mp.LossScaleOptimizer(optimizer), or give it to prepare as an "
            "argument of compile"
        )


def _arguments(model: keras.Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """What to call `model.compile` with, which may be one of the model's class: it need not take loss and metrics."""
    compile_ = inspect.signature(model.compile)
    arguments = {name: value for name, value in given.items() if value is not None or name in compile_.parameters}
    try:
        compile_.bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"compile() of {original_class(model).__name__} cannot be called by prepare: {error}. Give its arguments "
            "to prepare by their names; or, where it takes no optimizer of that name, call keras_mp.stabilize(model), "
            "and then compile() yourself"
        ) from error
    return arguments


def _convert_arguments(fp8: Any) -> dict[str, Any] | None:
    if fp8 is False:
        return None
    if isinstance(fp8, Mapping):
        return checked_arguments(**fp8)
    if fp8 is True or isinstance(fp8, (str, Scaling, Scalings)):
        return checked_arguments(None if fp8 is True else fp8)
    raise TypeError(f"fp8={fp8!r} must be a bool, a scaling or its name, or a dict of arguments of convert")


def _jit(layers: Mapping[str, keras.Layer], compile_arguments: Mapping[str, Any]) -> Support:
    """Whether to jit the step, and why: the reason begins behind the colon."""
    if "jit_compile" in compile_arguments:
        return Support(compile_arguments["jit_compile"], f"Jit: jit_compile={compile_arguments['jit_compile']!r}.")
    if compile_arguments.get("run_eagerly"):
        return Support(False, "Jit: run_eagerly=True.")
    if keras.backend.backend() == "tensorflow" and updates.replica_count() > 1:
        return Support(False, "Jit is off: XLA's program is for one device, and here are several replicas.")
    chosen = choose_jit("fp8" if _fp8_layers(layers) else "")
    if not chosen.ok:
        return chosen
    if keras.backend.backend() == "jax":
        # Keras rules out jit for augmentation because of TensorFlow's kernels. JAX would be 150 times slower without.
        for layer in layers.values():
            layer.supports_jit |= type(layer).__module__.startswith("keras.src.layers.preprocessing.image_")
    without = [path for path, layer in layers.items() if not layer.supports_jit]
    return Support(False, f"Jit is off: {without[0]} cannot be compiled by XLA.") if without else chosen


# What `prepare` did with a model, and why, in lines of at most 80 characters.

_LABEL, _WIDTH = 11, 80  # characters


def _fp8_layers(layers: Mapping[str, keras.Layer]) -> list[keras.Layer]:
    return [layer for layer in layers.values() if isinstance(layer, Float8Layer)]


def _told_before(plan: ChangePlan, needed: Sequence[keras.layers.Layer]) -> dict[str, str]:
    """What is said of a model before `prepare` lets the needed layers compute in float32, by the label of the line."""
    dtypes = {layer.compute_dtype for layer in plan.layers.values()}
    low = " and ".join(sorted(dtypes & set(LOW_PRECISION)))
    if not low:
        policy = keras.config.dtype_policy().name
        why = " (its layers' policy)" if policy == "float32" else f": it was built before the policy {policy}"
        return {"precision": f"computes in float32{why}", "float32": "everything"}
    weights = "bfloat16" if any(map(is_narrow, plan.model.trainable_variables)) else "float32"
    told = {"precision": f"computes in {low}, trains {weights} weights (its layers' policy)"}
    if needed:
        return told | {"float32": f"{_named(needed)}: there {low} is too imprecise"}
    return told | {"float32": f"no {'other ' * ('float32' in dtypes)}layer needs it"}


def _told_after(walk: Walk, jit: Support) -> dict[str, str]:
    """What is said of the model that `prepare` returns, compiled, by the label of the line."""
    prepared, layers = walk.model, walk.layers.values()
    told: dict[str, str] = {}
    by: dict[str, list[str]] = {}
    for name, words in attended_by(walk).items():
        by.setdefault(words, []).append(name)
    if by:
        told["attention"] = "; ".join(f"{words} ({_layers(len(names))})" for words, names in by.items())
    in_fp8 = _fp8_layers(walk.layers)
    told["fp8"] = f"products of {_named(in_fp8)}" if in_fp8 else "not used"
    told["optimizer"] = _optimizer(prepared)
    if jit.ok and not prepared.jit_compile:
        told["jit"] = "off: Keras says that this model does not support it"
    else:
        told["jit"] = f"{'on' if prepared.jit_compile else 'off'}: {jit.reason.partition(': ')[2].rstrip('.')}"
    modes = Counter(layer.quantization_mode for layer in layers if layer.quantization_mode not in (None, "float8"))
    if modes:
        stored = " and ".join(f"{_layers(count)} in {mode}" for mode, count in sorted(modes.items()))
        adapted = sum(bool(getattr(layer, "lora_enabled", False)) for layer in layers)
        lora = _layers(adapted) if adapted else "none"
        told["quantized"] = f"{stored}, {lora} with LoRA; {_number(prepared.trainable_variables)} weights train"
    narrowed = [variable for variable in prepared.non_trainable_variables if is_narrow(variable)]
    if narrowed and prepared.dtype_policy.variable_dtype != "bfloat16":
        told["frozen"] = f"{_number(narrowed)} weights that do not train, in bfloat16"
    return told


def _named(layers: Sequence[keras.layers.Layer]) -> str:
    """Names of layers, or too many for a line, of kinds."""
    names = " and ".join(layer.name for layer in layers)
    if len(names) < _WIDTH // 2:
        return names
    kinds = Counter(original_class(layer).__name__ for layer in layers)
    return f"{_layers(len(layers))} ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})"


def _number(weights: Iterable[keras.Variable]) -> str:
    return f"{sum(math.prod(variable.shape) for variable in weights):,}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _optimizer(prepared: keras.Model) -> str:
    held = list(without_default(held_optimizers(prepared)).values())
    counts = Counter(type(unwrapped(optimizer)).__name__ for optimizer in held)
    name = " and ".join(name if len(held) == 1 else f"{count} {name}" for name, count in counts.items())
    optimizer = next((optimizer for optimizer in held if isinstance(optimizer, LossScaleOptimizer)), None)
    if optimizer is None:
        return f"{name}, loss not scaled: no layer computes in float16"
    states = optimizer.state_dtype
    if optimizer.release_gradients:
        place = " on the host" if optimizer.state_memory == "host" else ""
        return f"{name}, states in {states}{place}, gradients released"
    if any(map(is_narrow, prepared.trainable_variables)):
        step, more = "bfloat16 weights rounded stochastically", ", updated in float32"
    elif isinstance(optimizer.loss_scale, NoLossScale):
        step, more = "loss not scaled", "; wrapped, so that it updates as in float16"
    else:
        scale = optimizer.loss_scale.initial_state().scale
        step, more = f"loss scale {scale:g}, for float16", "; an overflow changes nothing"
    return f"{name}, {step}{more}" if states == "float32" else f"{name}, states in {states}, {step}"

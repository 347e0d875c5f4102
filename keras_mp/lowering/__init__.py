"""One step of a model, for the planner.

This is all that `keras_mp.planner` takes from what knows models. It asks a `Source`, and touches no model: `lower`
traces a step for a chip, with the roles of its arguments and the layer that each operation belongs to; `outline` says
what weights, slots and layers there are, without a trace. Either is of the model as it is, or under other policies and
changes, which are named as programs name them.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.backend.common.device import CUDNN, TracedChip, absent_chip, capability_of
from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.conversion.other_precision import FP8, in_precision, precision_of
from keras_mp.lean.blocks import find_blocks
from keras_mp.lean.frozen import narrow_frozen
from keras_mp.lean.lean_model import lean_parts, make_lean
from keras_mp.lean.training_step import compiler_options
from keras_mp.loss_scaling.compiled_optimizer import change_optimizer
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.lowering.lowered import UNATTRIBUTED, Argument, CompileError, Lowered, call_of, is_backward
from keras_mp.optimizer.inner_optimizer import check_can_release
from keras_mp.parallel.plan import FLOAT16_ON_TPU, Plan, Rules, plan_of
from keras_mp.parallel.split_rules import with_rules_of
from keras_mp.precision.chip import Chip, GpuDescription
from keras_mp.precision.hardware import Device, support
from keras_mp.precision.policy import CHOICES, COMPUTES_IN, PRECISIONS, asked_about
from keras_mp.rebuild.merged import packed_weights
from keras_mp.rebuild.model import rebuild, unchanged
from keras_mp.rebuild.optimizers import carry_compiled
from keras_mp.rebuild.walk import (
    Walk,
    compute_dtypes,
    has_no_value,
    layers_by_path,
    original_class,
    own_variables,
    package_of,
    treatments_of,
)
from keras_mp.system.argument_checks import one_of

engine = backend.engine_of(__package__)

__all__ = [
    "CUDNN",
    "UNATTRIBUTED",
    "Argument",
    "Change",
    "CompileError",
    "Lowered",
    "Outline",
    "Plan",
    "Source",
    "TracedChip",
    "call_of",
    "is_backward",
    "lower_step",
    "plan_of",
    "policy_on",
    "traced",
]

# How a backbone of KerasHub calls the number of its blocks.
_NUMBER = "num_layers"


class Change(NamedTuple):
    """A change of a model in place: function and arguments."""

    name: str  # "narrow_frozen", "make_lean" or "change_optimizer"
    options: Mapping[str, Any] = {}  # the arguments by name


@dataclass(frozen=True)
class Outline:
    """What is known of a model without its step's program."""

    parameters: int  # the number of elements of its weights
    depth: int  # the number of equal blocks that it has, where it can be built with fewer; 0 where not
    kinds: Counter[Any]  # the number of its layers of each class, treatment, policy and shapes of weights
    sees_batch: tuple[str, ...]  # names of its layers that compute statistics of a batch
    arguments: tuple[Argument, ...]  # the weights and slots, as arguments of its step
    rules: Rules | None  # the axes that "tensor" splits, where that was asked for
    helped: frozenset[str]  # which of "make_lean", "remat" and "release_gradients" would make something smaller


class Source:
    """A model, or the function that builds it.

    Args:
        given: a built and compiled model, or a function without arguments that builds and compiles one. On JAX the
            function's variables get shapes and no values. A parameter `blocks` of it has the number of the model's
            equal blocks as its default.
        text: the way in which a program gets the model, the text right of `model =`; by default the function's name.
        argument: the name by which errors call it.

    Raises:
        TypeError: If it is neither, or the function's `blocks` has no number as its default.
    """

    def __init__(self, given: Any, text: str = "", argument: str = "model") -> None:
        self.is_function = not isinstance(given, keras.Model)
        if self.is_function and not callable(given):
            raise TypeError(
                f"{argument} must be a keras.Model, or a function without arguments that builds and compiles one; got "
                f"{type(given).__name__}"
            )
        self._given = given
        self._blocks = default_blocks(given) if self.is_function else 0
        name = getattr(given, "__name__", "build")
        self.text = text or (f"{name if name.isidentifier() else 'build'}()" if self.is_function else "")

    @property
    def precision(self) -> str:
        """The precision that it has without any change."""
        return keras.config.dtype_policy().name if self.is_function else precision_of(self._given)

    def check_precisions(self, compare: Sequence[str]) -> list[str]:
        """Checks names of precisions; a function has no "fp8"."""
        names = [compare] if isinstance(compare, str) else compare
        precisions = [one_of("compare", name, PRECISIONS) for name in names]
        if FP8 in precisions and self.is_function:
            raise ValueError(
                "compare='fp8' needs a model: a function that builds one in FP8 can be inspected by itself"
            )
        return precisions

    def build(
        self,
        policy: str = "",
        changes: Sequence[Change] = (),
        blocks: int | None = None,
        chip: TracedChip | None = None,
    ) -> keras.Model:
        """Builds the model; the original is not changed.

        Args:
            policy: the policy that a function builds it in, also where it asks for "auto"; of a model its precision.
                "" for what it has by itself.
            changes: the changes, in the order in which they are made.
            blocks: the number of blocks; None for all. For others the outline's `depth` must not be 0.
            chip: the chip whose policy a function gets where it asks for "auto".

        Raises:
            TypeError: If the function returns no model.
            ValueError: If the model cannot be compiled again with other blocks, or a change cannot be made.
        """
        asked = asked_about(policy) if self.is_function and policy else restored_policy()
        with absent_chip(chip) if self.is_function and chip else nullcontext(), asked, self._scope():
            model = self._built(policy, blocks)
            if changes and model is self._given:
                model = rebuild(model, unchanged).model  # they change it
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"make_lean\(", UserWarning)  # of what cannot be lean
                for change in changes:
                    _CHANGES[change.name](model, **change.options)
        return model

    def _built(self, policy: str, blocks: int | None) -> keras.Model:
        if not self.is_function:
            model = self._given if blocks is None else with_blocks(self._given, blocks)
            return in_precision(model, policy) if policy else model
        model = self._given(blocks=blocks) if blocks is not None and self._blocks else self._given()
        if not isinstance(model, keras.Model):
            raise TypeError(f"{self.text} must return a keras.Model, got {type(model).__name__}")
        return model if blocks is None or self._blocks else with_blocks(model, blocks)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        # On JAX the variables of a function's models have no values.
        with backend.no_allocation() if self.is_function else nullcontext():
            yield

    def lower(
        self,
        batch: Any,
        chip: TracedChip,
        *,
        policy: str = "",
        changes: Sequence[Change] = (),
        blocks: int | None = None,
        training: bool = True,
        plan: Plan | None = None,
    ) -> Lowered:
        """Lowers a step; arguments are of `build` and `lower_step`.

        Raises:
            ValueError: If the model is not built or not compiled, or the batch does not fit it or the devices.
            CompileError: If the backend cannot trace the step.
        """
        model = self.build(policy, changes, blocks, chip)
        whose = f"{self.text} returns model {model.name!r}" if self.is_function else f"model {model.name!r}"
        if not model.built:
            raise ValueError(f"{whose}, which is not built: call it once on a batch, or give it an Input")
        if training and (not model.compiled or model.optimizer is None):
            raise ValueError(
                f"{whose}, which is not compiled with an optimizer and a loss: a training step has both. Call "
                f"compile(optimizer, loss){' in it' if self.is_function else ''}; inspect(..., training=False) is "
                "about inference"
            )
        with self._scope():
            return lower_step(model, batch, training=training, chip=chip, plan=plan)

    def outline(
        self, policy: str = "", changes: Sequence[Change] = (), blocks: int | None = None, strategy: str = ""
    ) -> Outline:
        """Describes the model; arguments are those of `build`.

        Args:
            strategy: the way in which devices share the model, where it has rules for that.

        Raises:
            ValueError: If the model has no loss, or no rule that splits a weight of it.
        """
        model = self.build(policy, changes, blocks)
        _check_trains(model)
        with self._scope():
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        layers = layers_by_path(model).values()
        kinds = {
            "parameters": model.trainable_variables,
            "state": model.non_trainable_variables,
            "optimizer": model.optimizer.variables,
        }
        return Outline(
            parameters=model.count_params(),
            depth=self._blocks or blocks_of(model),
            kinds=Counter(map(_kind, layers)),
            sees_batch=tuple(one.name for one in layers if isinstance(one, keras.layers.BatchNormalization)),
            arguments=tuple(_argument(kind, one) for kind, variables in kinds.items() for one in variables),
            rules=with_rules_of(plan_of(strategy, 1), model).rules if strategy else None,
            helped=frozenset(name for name, helps in _HELPS.items() if helps(model)),
        )


def lower_step(
    model: keras.Model, batch: Any, *, training: bool, chip: TracedChip, plan: Plan | None = None
) -> Lowered:
    """Lowers one step of a model; nothing is executed.

    It is the step as `fit` or `predict` would run it. What `fit` creates before its first step, the optimizer's
    variables and the metrics', is created here too.

    Args:
        model: a built model, compiled if `training`.
        batch: a batch as `fit` takes it, (x, y) or (x, y, sample_weight); without `training`, x. Its parts are arrays,
            or anything that has a shape and a dtype.
        training: whether it is a training step, otherwise inference.
        chip: the chip that the step is for, as `traced` makes it.
        plan: a plan for a step on several devices; its `batch` is that of all.

    Raises:
        ValueError: If the batch does not fit the model or the devices.
    """
    shapes = _shapes(batch)
    x = _inputs(model, shapes, training)
    _check_inputs(model, x)
    if plan is not None:
        plan.check_rows(keras.tree.flatten(x)[0].shape[0])
        if chip.platform == "tpu" and "float16" in compute_dtypes(model):
            raise ValueError(FLOAT16_ON_TPU)
        plan = with_rules_of(plan, model)
    if training:
        with backend.no_allocation() if any(map(has_no_value, model.variables)) else nullcontext():
            _build_for(model, shapes)
    layers = layers_by_path(model)
    operations = {operation.name: operation for operation in Walk(model).operations}
    lowered = engine.lower(model, shapes, {**operations, **layers, "": model}, training=training, chip=chip, plan=plan)
    packed = {variable.path for layer in layers.values() for variable in packed_weights(layer)}
    arguments = tuple(replace(one, holds="int4") if one.path in packed else one for one in lowered.arguments)
    return replace(
        lowered,
        arguments=arguments,
        precision=precision_of(model),
        layers=tuple(layers),
        flags=compiler_options(model) if chip.platform == "cpu" else {},
    )


def policy_on(chip: Chip) -> str:
    """Chooses the policy in which training pays on a chip.

    It is bfloat16 if the chip has it, else float16, else float32.
    """
    device = Device("tpu" if chip.vendor == "google" else "gpu", chip.title, chip.architecture, chip)
    return next(policy for policy in CHOICES if support(COMPUTES_IN[policy], device).ok)


def traced(chip: Chip | None) -> TracedChip:
    """Describes a chip as runtimes do; None: this CPU."""
    if chip is None:
        return TracedChip("cpu")
    if chip.vendor == "google":
        kind = chip.device_kinds[0] if chip.device_kinds else f"tpu {chip.name}"
        return TracedChip("tpu", None, kind.replace("tpu", "TPU"))
    name = chip.compiler.device_name if isinstance(chip.compiler, GpuDescription) else chip.title
    kind = name if chip.vendor != "nvidia" or name.startswith("NVIDIA") else f"NVIDIA {name}"
    return TracedChip("gpu", capability_of(chip.architecture), kind)


_CHANGES: Mapping[str, Callable[..., Any]] = {
    "narrow_frozen": narrow_frozen,
    "make_lean": make_lean,
    "change_optimizer": change_optimizer,
}


def _waits(model: keras.Model) -> bool:
    """Whether all gradients are kept without need."""
    optimizer = model.optimizer
    unscaled = isinstance(optimizer, LossScaleOptimizer) and isinstance(optimizer.loss_scale, NoLossScale)
    if not unscaled or optimizer.release_gradients:
        return False
    try:
        check_can_release(optimizer.inner_optimizer)
    except ValueError:
        return False
    return True


_HELPS: Mapping[str, Callable[[keras.Model], bool]] = {
    "make_lean": lambda model: any(bool(row.treatments) and not row.done for row in lean_parts(Walk(model))),
    "remat": lambda model: bool(find_blocks(model)) and not any(row.kind == "block" for row in lean_parts(Walk(model))),
    "release_gradients": _waits,
}


def default_blocks(build: Callable[..., Any]) -> int:
    """Reads the default of a parameter `blocks`; 0 without one.

    Raises:
        TypeError: If the default is not a number.
    """
    parameter = inspect.signature(build).parameters.get("blocks")
    if parameter is None:
        return 0
    if not isinstance(parameter.default, int):
        raise TypeError("the parameter blocks of build must have the model's number of blocks as its default")
    return parameter.default


def blocks_of(model: keras.Model) -> int:
    """Counts the blocks of a KerasHub model; 0 where unknown."""
    backbone = getattr(model, "backbone", model)
    number = backbone.get_config().get(_NUMBER) if package_of(type(backbone)) == "keras_hub" else None
    return number if isinstance(number, int) else 0


def with_blocks(model: keras.Model, blocks: int) -> keras.Model:
    """Builds and compiles a KerasHub model with other block counts.

    Raises:
        ValueError: If it cannot be compiled by the arguments that it keeps.
    """
    backbone = getattr(model, "backbone", model)
    with backend.no_allocation() if any(map(has_no_value, model.variables)) else nullcontext():
        new = type(backbone).from_config(backbone.get_config() | {_NUMBER: blocks})
        if backbone is not model:
            new = type(model).from_config(model.get_config() | {"backbone": new, "preprocessor": None})
        carry_compiled(model, new, {})
    if not new.compiled:
        raise ValueError(f"model {model.name!r} cannot be compiled again by the arguments that it keeps")
    return new


def _kind(layer: keras.layers.Layer) -> Any:
    weights = tuple((tuple(weight.shape), weight.dtype, weight.trainable) for weight in own_variables(layer))
    return type(layer).__qualname__, tuple(treatments_of(layer)), layer.dtype_policy.name, weights


def _argument(kind: str, variable: keras.Variable) -> Argument:
    # Private: where `keras_mp.backend.keep_on_host` notes it, on JAX.
    on_host = getattr(getattr(variable, "_layout", None), "memory_kind", None) == "pinned_host"
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return Argument(kind, variable.path, tuple(variable.shape), dtype, on_host=on_host)


def _check_trains(model: keras.Model) -> None:
    """Checks that a model has a loss."""
    # Without one Keras trains nothing, and says nothing.
    cls = original_class(model)
    own = cls.train_step is not keras.Model.train_step or cls.compute_loss is not keras.Model.compute_loss
    if not own and getattr(model, "loss", None) is None and not model.losses:
        raise ValueError(f"model {model.name!r} has no loss, so that nothing trains: give compile() a loss")


def _build_for(model: keras.Model, batch: Any) -> None:
    """Makes what `fit` makes before its first step."""
    try:
        model._symbolic_build(data_batch=batch)
    except (TypeError, ValueError) as error:
        given = ", ".join(
            f"{leaf.dtype}{list(leaf.shape)}" for leaf in keras.tree.flatten(batch[1:]) if leaf is not None
        )
        raise ValueError(
            f"model {model.name!r}, its loss or a metric fails on the batch, whose targets are {given}: {error}"
        ) from error


def _shapes(batch: Any) -> Any:
    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"batch holds {leaf!r} of type {type(leaf).__name__}, which has no shape and dtype: pass arrays, or "
                "keras.KerasTensor(shape, dtype)"
            )
        if any(size is None for size in leaf.shape):
            raise ValueError(f"batch holds the shape {tuple(leaf.shape)}: a compiled step has fixed sizes, give all")
        return keras.KerasTensor(tuple(leaf.shape), _as_fed(keras.backend.standardize_dtype(leaf.dtype)))

    return keras.tree.map_structure(one, tuple(batch) if isinstance(batch, list) else batch)


def _as_fed(dtype: str) -> str:
    """Returns the dtype in which Keras feeds an array."""
    if dtype == "float64":
        return str(keras.backend.floatx())
    if keras.backend.backend() == "jax":
        return {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)
    return dtype


def _inputs(model: keras.Model, batch: Any, training: bool) -> Any:
    if not training:
        return batch
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        shapes = keras.tree.map_structure(lambda leaf: getattr(leaf, "shape", None), batch)
        raise ValueError(
            f"batch must be (x, y) or (x, y, sample_weight) to train model {model.name!r}, got the shapes {shapes}"
        )
    return batch[0]


def _check_inputs(model: keras.Model, x: Any) -> None:
    expected = getattr(model, "inputs", None)
    if not expected:
        return
    given = keras.tree.flatten(x)
    if len(given) != len(expected):
        raise ValueError(f"batch gives model {model.name!r} {len(given)} inputs, and it takes {len(expected)}")
    for tensor, spec in zip(given, expected, strict=True):
        same = len(tensor.shape) == len(spec.shape) and all(
            want is None or want == have for want, have in zip(spec.shape, tensor.shape, strict=True)
        )
        # Keras adds a last dimension of 1 where it is left out.
        if not same and (*tensor.shape, 1) != (tensor.shape[0], *spec.shape[1:]):
            raise ValueError(
                f"batch gives the shape {tuple(tensor.shape)} for input {spec.name!r} of model {model.name!r}, which "
                f"takes {tuple(spec.shape)}"
            )

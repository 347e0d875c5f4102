"""The training step of a model, and on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from keras_mp import backend
from keras_mp.backend.common.keras_private import global_state
from keras_mp.lean.gelu import gelu
from keras_mp.precision.policy import pays
from keras_mp.rebuild.walk import existing_notes, layers_by_path
from keras_mp.treatment.treated import Treatment, register_treatments

engine = backend.engine_of(__package__)

STEP = "lean step"
_IN_STEP: ContextVar[bool] = ContextVar("in_step", default=False)


class LeanStep:
    """A model whose layers know that its step runs."""

    def train_step(self, *arguments: Any) -> Any:
        before = _IN_STEP.set(True)
        try:
            with backend.lookups_wait():
                return super().train_step(*arguments)  # type: ignore[misc]
        finally:
            _IN_STEP.reset(before)


def is_training(given: Any = None) -> bool:
    """Whether the layers that are called now train.

    `given` is the argument `training` of the layer; None where it was told nothing.
    """
    if given is None:
        context = global_state.get_global_attribute("current_call_ctx")
        given = getattr(context, "training", None)
    # A tensor cannot say before the step runs.
    return given if isinstance(given, bool) else False


def may_be_differentiated(given: Any = None) -> bool:
    """Whether layers train, or a step calls them otherwise.

    Keras tells the layers of a model nothing whose `call()` has no argument `training`, and they then compute as in
    inference; so do layers that are called with `training=False`. Gradients flow through them all the same.
    """
    if given is not None and not isinstance(given, bool):
        return False  # a tensor, which cannot say before the step runs whether dropout is drawn
    return _IN_STEP.get() or is_training(given)


# The step of a prepared model on a CPU: TensorFlow's kernels sum and compute in 16 bits, and XLA multiplies slowly.

STEP_ON_A_CPU = "step on a CPU"


class StepOnACPU:
    """A model whose step on a CPU sums in float32."""

    def train_step(self, *arguments: Any) -> Any:
        # On JAX there is a state before the batch.
        with existing_notes(self).kept[STEP_ON_A_CPU](arguments[-1]):
            return super().train_step(*arguments)  # type: ignore[misc]

    def make_train_function(self, *arguments: Any, **named: Any) -> Any:
        with engine.steps_compiled_with(compiler_options(self)):
            return super().make_train_function(*arguments, **named)  # type: ignore[misc]

    def make_test_function(self, *arguments: Any, **named: Any) -> Any:
        with engine.steps_compiled_with(compiler_options(self)):
            return super().make_test_function(*arguments, **named)  # type: ignore[misc]

    def make_predict_function(self, *arguments: Any, **named: Any) -> Any:
        with engine.steps_compiled_with(compiler_options(self)):
            return super().make_predict_function(*arguments, **named)  # type: ignore[misc]


def compiler_options(model: Any) -> Mapping[str, Any]:
    """XLA's options for a prepared model's steps on a CPU."""
    if not isinstance(model, StepOnACPU) or not pays("mixed_bfloat16").ok:
        return {}
    computed = {layer.compute_dtype for layer in layers_by_path(model).values()}
    return backend.bfloat16_options() if "bfloat16" in computed else {}


def _keep_scopes(model: Any) -> None:
    existing_notes(model).kept[STEP_ON_A_CPU] = engine.step_scopes(gelu)


register_treatments({STEP_ON_A_CPU: Treatment(lambda original, names: StepOnACPU, _keep_scopes, order=-2)})

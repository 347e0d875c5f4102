"""Where the model comes from, and the same model under a set of measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from keras_mp import backend
from keras_mp.advice.lean_forms import lean_forms, lean_model
from keras_mp.advice.measures import Measures
from keras_mp.backend.common.lowered import Argument
from keras_mp.conversion.in_precision import in_precision, precision_of
from keras_mp.loss_scaling.compiled_optimizer import accumulate_gradients, set_state_dtype
from keras_mp.precision.policy import restored_policy
from keras_mp.rebuild import rebuild, unchanged


class Source:
    """A model, or the function that builds it.

    Args:
        model: a built and compiled model, or a function without arguments that builds and compiles one.
        text: how a program gets it: what stands right of `model =` in the lines that apply measures; by default the
            name of the function.

    Raises:
        TypeError: If it is neither.
    """

    def __init__(self, model: Any, text: str = "") -> None:
        self.is_function = not isinstance(model, keras.Model)
        if self.is_function and not callable(model):
            raise TypeError(
                "build must be a function without arguments that builds and compiles a model, or such a model; got "
                f"{type(model).__name__}"
            )
        self._given = model
        name = getattr(model, "__name__", "build")
        self.text = text or (f"{name if name.isidentifier() else 'build'}()" if self.is_function else "")

    @property
    def precision(self) -> str:
        """The precision that it has without any measure."""
        return keras.config.dtype_policy().name if self.is_function else precision_of(self._given)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope in which models that `under` returns are used: on JAX, of a function's, variables have no values."""
        with backend.no_allocation() if self.is_function else nullcontext():
            yield

    def under(self, measures: Measures) -> keras.Model:
        """The model under the measures, but for the devices that share it; the original is not changed.

        Raises:
            TypeError: If the function returns no model.
        """
        with restored_policy(), self.scope():
            model = self._in(measures.precision)
            changes = measures.lean or measures.remat or measures.state_dtype or measures.micro_batches > 1
            if model is self._given and changes:
                model = rebuild(model, unchanged).model  # the next three change it
            if measures.lean or measures.remat:
                model = lean_model(model, remat=measures.remat)
            if measures.state_dtype:
                model = set_state_dtype(model, measures.state_dtype)
            if measures.micro_batches > 1:
                model = accumulate_gradients(model, measures.micro_batches)
        return model

    def forms(self, precision: str) -> tuple[bool, bool]:
        """Whether a layer of the model has a lean form, and whether it has blocks to recompute."""
        return lean_forms(self.under(Measures(precision)))

    def slots(self, state_dtype: str) -> list[Argument]:
        """What the optimizer keeps where its slots are stored in a dtype.

        Returns:
            An argument of a step for each of its variables; none where its optimizer cannot be exchanged, because the
            model was trained or has a compile() of its own.
        """
        with self.scope():
            try:
                model = self.under(Measures(self.precision, state_dtype=state_dtype))
            except (TypeError, ValueError):
                return []
            model.optimizer.build(model.trainable_variables)
        return [
            Argument("optimizer", variable.path, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype))
            for variable in model.optimizer.variables
        ]

    def check_compiled(self, model: keras.Model) -> None:
        """Checks that a model is compiled to train: whether a training step fits is what is asked.

        Raises:
            ValueError: If it is not compiled with an optimizer.
        """
        whose = f"{self.text} returns model {model.name!r}" if self.is_function else f"model {model.name!r}"
        where = " in it" if self.is_function else ""
        if not model.compiled or model.optimizer is None:
            raise ValueError(
                f"{whose}, which is not compiled with an optimizer and a loss: advise asks whether a training step "
                f"fits. Call compile(optimizer, loss){where}"
            )

    def _in(self, precision: str) -> keras.Model:
        if not self.is_function:
            return in_precision(self._given, precision)
        keras.config.set_dtype_policy(precision)
        model = self._given()
        if not isinstance(model, keras.Model):
            raise TypeError(f"{self.text} must return a keras.Model, got {type(model).__name__}")
        return model

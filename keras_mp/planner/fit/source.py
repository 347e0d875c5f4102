"""Where the model comes from, the same model under a set of measures, and the lines of a program that apply them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from keras_mp import backend
from keras_mp.conversion.other_precision import in_precision, precision_of
from keras_mp.planner.chips.place import Place
from keras_mp.planner.fit.fewer_blocks import blocks_of, takes_blocks, with_blocks
from keras_mp.planner.fit.measures import Measures
from keras_mp.precision.policy import asked_about, restored_policy
from keras_mp.rebuild import rebuild, unchanged
from keras_mp.reporting import remedies


class Source:
    """A model, or the function that builds it.

    Args:
        model: a built and compiled model, or a function that builds and compiles one, as for `advise`.
        text: the way in which a program gets it: the text right of `model =` in the lines that apply measures; by
            default the name of the function.

    Raises:
        TypeError: If it is neither, or the function's `blocks` has no number as its default.
    """

    def __init__(self, model: Any, text: str = "") -> None:
        self.is_function = not isinstance(model, keras.Model)
        if self.is_function and not callable(model):
            raise TypeError(
                "build must be a function without arguments that builds and compiles a model, or such a model; got "
                f"{type(model).__name__}"
            )
        self._given = model
        self._blocks = takes_blocks(model) if self.is_function else 0
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

    def depth(self, model: keras.Model) -> int:
        """How many blocks a model of it has, where it can be built with fewer of them; 0 where not."""
        return self._blocks or blocks_of(model)

    def under(self, measures: Measures, blocks: int | None = None) -> keras.Model:
        """The model under the measures, but for the devices that share it; the original is not changed.

        Args:
            blocks: the number of blocks; None for all. For others `depth` must not be 0.

        Raises:
            TypeError: If the function returns no model.
            ValueError: If the model cannot be compiled again with other blocks, or a measure cannot be taken of it.
        """
        with asked_about(measures.policy) if self.is_function else restored_policy(), self.scope():
            model = self._in(measures.policy, blocks)
            if model is self._given and measures.applied:
                model = rebuild(model, unchanged).model  # they change it
            for measure in measures.applied:
                measure.apply(model, measures.micro_batches)
        return model

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

    def _in(self, precision: str, blocks: int | None) -> keras.Model:
        if not self.is_function:
            return in_precision(self._given if blocks is None else with_blocks(self._given, blocks), precision)
        model = self._given(blocks=blocks) if blocks is not None and self._blocks else self._given()
        if not isinstance(model, keras.Model):
            raise TypeError(f"{self.text} must return a keras.Model, got {type(model).__name__}")
        return model if blocks is None or self._blocks else with_blocks(model, blocks)


def lines(measures: Measures, source: Source, place: Place, rows: int) -> tuple[str, ...]:
    """Writes the measures as code, from the policy to `fit`.

    Args:
        rows: the rows of the whole batch.
    """
    changes = measures.policy != source.precision
    before, within = [], []
    if source.is_function:
        if changes:
            before.append(remedies.POLICY.format(precision=measures.policy))
        within.append(f"model = {source.text}")
    else:
        within += [f"model = {source.text}"] if source.text else []
        within += [remedies.PRECISION_OF_MODEL.format(precision=measures.policy)] if changes else []
    within += [measure.code.format(steps=measures.micro_batches) for measure in measures.applied]
    within.append(f"model.fit(x, y, batch_size={rows // measures.micro_batches})")
    if measures.strategy:
        before.append(remedies.DEVICES.format(strategy=measures.strategy, devices=place.devices))
        within = [f"    {line}" for line in within]
    return (*before, *within)

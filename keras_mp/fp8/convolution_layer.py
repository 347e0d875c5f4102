"""Keras's Conv2D with INT8 convolutions."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.fp8.convolution import convolution
from keras_mp.fp8.int8_scaling import Int8Scaling
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.recipes import get_recipe
from keras_mp.fp8.window import Window


class Int8Convolution(Float8Layer):
    """What comes before Conv2D, whose forward pass and gradient of the inputs are then in INT8."""

    def multiply(self, inputs: Any, kernel: Any, **arguments: Any) -> Any:
        """The convolution, without bias and activation."""
        return convolution(inputs, kernel, self.recipe, window_of(self), **arguments)  # type: ignore[arg-type]


@keras.saving.register_keras_serializable("keras_mp")
class Int8Conv2D(Int8Convolution, keras.layers.Conv2D):
    """`keras.layers.Conv2D` that convolves in INT8, and so the gradient of its inputs; see `Int8Scaling`.

    The kernel's gradient is computed as in Conv2D. Everything else is as in Conv2D: activation, bias, regularizers,
    constraints, LoRA, and float32 weights under the policies "mixed_bfloat16" and "mixed_float16".

    Args:
        filters: channels of the result.
        kernel_size: as in Conv2D.
        recipe: an `Int8Scaling` with a scale a tensor, or the name of one; `Int8Scaling()` by default.
        **arguments: those of `keras.layers.Conv2D`; one group, channels last.

    Raises:
        ValueError: another scaling recipe, several groups or channels first, or as Conv2D.
        TypeError: called on integers.
    """

    def __init__(self, filters: int, kernel_size: Any, *arguments: Any, recipe: Any = None, **options: Any) -> None:
        super().__init__(filters, kernel_size, *arguments, **options)
        recipe = Int8Scaling() if recipe is None else get_recipe(recipe)
        if not recipe.takes_convolutions:
            raise ValueError(f"recipe={recipe} does not convolve: use Int8Scaling() or Int8Scaling('static')")
        wrong = convolution_problem(self)
        if wrong:
            raise ValueError(f"Int8Conv2D convolves all channels, which are the last axis, but {wrong}")
        self.recipe = recipe


def convolution_problem(layer: keras.layers.Conv2D) -> str:
    """Says why a layer cannot convolve in INT8, or ""."""
    if layer.groups != 1:
        return f"it has groups={layer.groups}"
    return "" if layer.data_format == "channels_last" else f"its data_format is {layer.data_format!r}"


def window_of(layer: keras.layers.Conv2D) -> Window:
    """The window of a layer."""
    return Window(layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding == "same")

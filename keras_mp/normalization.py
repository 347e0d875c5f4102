"""Layer normalization that keeps its 16-bit input, and two numbers a row, for the backward pass."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend


def layer_normalization(x: Any, scale: Any, offset: Any, epsilon: float) -> Any:
    """Normalizes the last axis, in float32 inside.

        y = (x - mean) / sqrt(variance + epsilon) scale + offset

    Kept for the backward pass: x in its own dtype, and mean and 1 / sqrt(variance + epsilon) in float32.

    Args:
        x: floats, shape `(..., features)`.
        scale, offset: float32, shape `(features,)`.
        epsilon: added to the variance.

    Returns:
        A tensor of the shape and dtype of x. The gradients of scale and offset are float32.

    References:
        Ba, Kiros, Hinton, "Layer Normalization", 2016 (arXiv:1607.06450), equation 4; the gradient is its derivative.
    """

    @keras.ops.custom_gradient
    def apply(x: Any, scale: Any, offset: Any) -> Any:
        y, mean, inverse = _forward(x, scale, offset, keras.ops.convert_to_tensor(epsilon, "float32"))

        def gradient(*arguments: Any, upstream: Any = None) -> Any:
            return _backward(x, scale, mean, inverse, arguments[0] if upstream is None else upstream)

        return y, gradient

    return apply(*map(backend.as_tensor, (x, scale, offset)))


@keras.saving.register_keras_serializable("keras_mp")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` over the last axis; see `keras_mp.normalization.layer_normalization`.

    In inference it runs Keras's own operations, so that an export holds nothing else.

    Args:
        **arguments: those of `keras.layers.LayerNormalization`; `axis` is -1, `center` and `scale` are True.

    Raises:
        ValueError: another axis, or no center or scale.
    """

    # It sums in float32 whatever its policy: `stabilize` need not see to it.
    float32_inside = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for name, only in (("axis", -1), ("center", True), ("scale", True), ("rms_scaling", False)):
            given = getattr(self, name, only)  # Keras 3.13 to 3.15 differ in what they take
            if given != only:
                raise ValueError(f"{name} must be {only}, got {given!r}: keras.layers.LayerNormalization takes others")

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.axis = -1  # Keras makes it a list of the axis from the front

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if training:
            return layer_normalization(inputs, self.gamma, self.beta, self.epsilon)
        return super().call(inputs)


@backend.fused
def _forward(x: Any, scale: Any, offset: Any, epsilon: Any) -> Any:
    wide = keras.ops.cast(x, "float32")
    mean = keras.ops.mean(wide, axis=-1, keepdims=True)
    centered = wide - mean
    inverse = keras.ops.rsqrt(keras.ops.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    return keras.ops.cast(centered * inverse * scale + offset, x.dtype), mean, inverse


@backend.fused
def _backward(x: Any, scale: Any, mean: Any, inverse: Any, upstream: Any) -> Any:
    # Without the barrier the compiler keeps the float32 copy of x that the forward pass made.
    (again,) = backend.barrier([x], [upstream])
    normal = (keras.ops.cast(again, "float32") - mean) * inverse
    wide = keras.ops.cast(upstream, "float32")
    rows = tuple(range(len(x.shape) - 1))
    to_scale, to_offset = keras.ops.sum(wide * normal, axis=rows), keras.ops.sum(wide, axis=rows)
    wide = wide * scale
    projected = keras.ops.mean(wide * normal, axis=-1, keepdims=True)
    to_x = (wide - keras.ops.mean(wide, axis=-1, keepdims=True) - normal * projected) * inverse
    return keras.ops.cast(to_x, x.dtype), to_scale, to_offset

"""The gradient of a convolution's kernel as a product of matrices, in a training step on a CPU.

    gradient at (i, j) = x at place (i, j) of the windows^T . upstream        (channels, rows) x (rows, filters)

In bfloat16 TensorFlow's kernel takes up to five times as long where an image has few positions and many channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.islands import is_differentiated_island


def conv(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's convolution: its kernel gets its gradient by a product, where that is faster."""

    def conv(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
    ) -> Any:
        arguments = (strides, padding, data_format, dilation_rate)
        plain = data_format in (None, "channels_last") and {dilation_rate} <= {1, (1, 1)} and len(inputs.shape) == 4
        if not plain or not is_differentiated_island():
            return keras_own(inputs, kernel, *arguments)
        inputs, kernel = tf.convert_to_tensor(inputs), tf.convert_to_tensor(kernel)
        steps = (strides, strides) if isinstance(strides, int) else tuple(strides)
        if not _is_faster(inputs, kernel, steps):
            return keras_own(inputs, kernel, *arguments)

        @tf.custom_gradient
        def convolve(inputs: Any, kernel: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                to_inputs = tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=tf.shape(inputs),
                    filter=kernel,
                    out_backprop=upstream,
                    strides=(1, *steps, 1),
                    padding=padding.upper(),
                )
                return to_inputs, _to_kernel(inputs, kernel.shape, upstream, steps, padding)

            return keras_own(inputs, kernel, *arguments), gradient

        return convolve(inputs, kernel)

    return conv


def _is_faster(inputs: Any, kernel: Any, steps: tuple[int, int]) -> bool:
    """Whether the product was measured to be faster: on 2 cores with bfloat16 instructions, 16 and 64 images.

    Of the kernel's time it takes 0.6 to 1.0 for one position a window, 0.2 to 0.9 for 3 x 3 with strides of 2 and at
    least 128 channels, 0.4 to 0.9 for 3 x 3 on at most 8 x 8 positions of at least 256 channels; 1.1 to 4 elsewhere.
    """
    height, width, channels = inputs.shape[1:]
    if inputs.dtype != tf.bfloat16 or None in (height, width) or kernel.shape[2] != channels:
        return False  # unknown sizes, and convolutions in groups
    if kernel.shape[:2] == (1, 1):
        return steps == (1, 1)
    if steps == (1, 1):
        return height * width <= 64 and channels >= 256
    return channels >= 128


def _to_kernel(x: Any, shape: Any, upstream: Any, steps: tuple[int, int], padding: str) -> Any:
    """The gradient of the kernel."""
    rows = tf.reshape(upstream, (-1, shape[3]))
    if tuple(shape[:2]) == (1, 1):
        return tf.reshape(tf.matmul(tf.reshape(x, (-1, shape[2])), rows, transpose_a=True), shape)
    windows = _windows(x, shape[:2], steps, upstream.shape[1:3], padding)
    return tf.reshape(tf.matmul(windows, rows[tf.newaxis], transpose_a=True), shape)


def _windows(x: Any, kernel: Sequence[int], steps: tuple[int, int], outputs: Sequence[int], padding: str) -> Any:
    """What each place of the kernel is multiplied with: shape (places, rows, channels)."""
    pads, phases = [], []
    for side, size, step, output in zip(x.shape[1:3], kernel, steps, outputs, strict=True):
        # As TensorFlow pads: what is odd stands behind.
        before = max((output - 1) * step + size - side, 0) // 2 if padding.lower() == "same" else 0
        phases.append(output + (size - 1) // step)
        pads.append((before, max(phases[-1] * step - before - side, 0)))
    lengths = [phase * step for phase, step in zip(phases, steps, strict=True)]
    x = tf.pad(x, ((0, 0), *pads, (0, 0)))[:, : lengths[0], : lengths[1]]
    # Strided slices are slow, so what lies a stride apart is brought together once.
    x = tf.reshape(x, (-1, phases[0], steps[0], phases[1], steps[1], x.shape[3]))
    x = tf.transpose(x, (2, 4, 0, 1, 3, 5)) if steps != (1, 1) else x[tf.newaxis, tf.newaxis, :, :, 0, :, 0]
    return tf.stack(
        [
            tf.reshape(
                x[i % steps[0], j % steps[1], :, i // steps[0] :, j // steps[1] :][:, : outputs[0], : outputs[1]],
                (-1, x.shape[-1]),
            )
            for i in range(kernel[0])
            for j in range(kernel[1])
        ]
    )

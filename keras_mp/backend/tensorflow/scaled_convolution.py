"""Convolutions of INT8 operands, whose sums are scaled."""

from typing import Any

from keras_mp.backend.tensorflow.scaled_sums import scaled_sums


def scaled_convolution(
    inputs: Any,
    kernel: Any,
    factor: Any,
    dtype: str,
    *,
    strides: tuple[int, ...],
    padding: list[tuple[int, int]],
    input_dilations: tuple[int, ...],
    kernel_dilations: tuple[int, ...],
    turned: bool,
    name: str,
) -> Any:
    """Convolves two INT8 tensors, adds up in int32, and scales the sums in float32.

    Args:
        inputs: int8 of shape (batch, *lengths, channels); batch and lengths may be unknown.
        kernel: int8 of shape (*sizes, channels of the inputs, channels of the result); the last two the other way
            round, where it is turned.
        factor: float32, of shape (), that the sums are multiplied by.
        dtype: of the result.
        strides: by spatial axis.
        padding: zeros before and after, by spatial axis.
        input_dilations: one more than the zeros between elements of the inputs, by spatial axis.
        kernel_dilations: likewise of the kernel.
        turned: whether the kernel is read from its last place to its first, as the gradient of an input needs it.
        name: of the operation in the compiled program, after the name scopes that it is in.

    Returns:
        A tensor of shape (batch, *lengths, channels).
    """
    rank = len(strides)
    lengths = []
    for axis in range(rank):
        length = inputs.shape[1 + axis]
        if length is not None:
            dilated = (length - 1) * input_dilations[axis] + 1 if length else 0
            reach = (kernel.shape[axis] - 1) * kernel_dilations[axis]
            length = max((dilated + sum(padding[axis]) - reach - 1) // strides[axis] + 1, 0)
        lengths.append(length)
    shape = [inputs.shape[0], *lengths, kernel.shape[rank if turned else rank + 1]]
    places = ", ".join(map(str, range(rank)))
    channels = "o, i" if turned else "i, o"
    window = ", ".join(
        f"{key} = {value}"
        for key, value in (
            ("stride", list(strides)),
            ("pad", [list(pair) for pair in padding]),
            ("lhs_dilate", list(input_dilations)),
            ("rhs_dilate", list(kernel_dilations)),
            ("reverse", f"[{', '.join(['true' if turned else 'false'] * rank)}]"),
        )
    )

    def convolution(types: str) -> str:
        numbers = f"[b, {places}, f]x[{places}, {channels}]->[b, {places}, f]"
        groups = "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"
        return (
            f"%sums = stablehlo.convolution(%left, %right) dim_numbers = {numbers}, window = {{{window}}} {groups} "
            f": {types}"
        )

    return scaled_sums(inputs, kernel, factor, dtype, shape, convolution, apart=False, name=name)

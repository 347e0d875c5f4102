"""Counts against brute force: every product of a random convolution, one by one."""

import numpy as np

from keras_mp.planner.read.flops import convolution_flops, dot_flops


def test_a_dot_is_two_operations_a_product():
    rows, summed, columns = np.random.default_rng().integers(1, 9, size=3)
    products = sum(1 for _ in np.ndindex(int(rows), int(summed), int(columns)))
    assert dot_flops((rows, columns), (summed,)) == 2 * products


def test_a_convolution():
    for _ in range(20):
        a_random_convolution(np.random.default_rng())


def a_random_convolution(rng):
    size, kernel = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    stride, dilation, kernel_dilation = (int(n) for n in rng.integers(1, 4, size=3))
    before, after = (int(n) for n in rng.integers(-1, 4, size=2))
    whole = (size - 1) * dilation + 1 + before + after
    output = max(0, (whole - (kernel - 1) * kernel_dilation - 1) // stride + 1)

    # A row of ones with holes and padding; each output adds up what its window sees.
    line = np.zeros(max(0, whole))
    for place in range(size):
        at = place * dilation + before
        if 0 <= at < whole:
            line[at] = 1
    seen = sum(int(line[o * stride + k * kernel_dilation]) for o in range(output) for k in range(kernel))
    window = (size, kernel, output, stride, before, dilation, kernel_dilation)
    assert convolution_flops((2, 3), 5, [window]) == 2 * 2 * 3 * 5 * seen

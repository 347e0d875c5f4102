"""Convolutions once more, in NumPy: a sum for each place of the result, and its transpose for the gradients."""

import numpy as np


def windows(lengths, sizes, strides, dilations, same):
    """For each place of the result, the places of the input and of the kernel that meet there, by axis."""
    axes = []
    for length, size, stride, dilation in zip(lengths, sizes, strides, dilations, strict=True):
        covered = (size - 1) * dilation + 1
        count = -(-length // stride) if same else (length - covered) // stride + 1
        before = max((count - 1) * stride + covered - length, 0) // 2 if same else 0
        rows = []
        for place in range(count):
            reached = [(place * stride - before + k * dilation, k) for k in range(size)]
            rows.append([(at, k) for at, k in reached if 0 <= at < length])
        axes.append(rows)
    return axes


def meetings(shape, kernel, strides, dilations, same):
    """Places of the result, of the input and of the kernel that meet, all of them."""
    rows, columns = windows(shape[1:3], kernel[:2], strides, dilations, same)
    for i, own in enumerate(rows):
        for j, other in enumerate(columns):
            for h, k in own:
                for w, m in other:
                    yield (i, j), (h, w), (k, m)


def result(x, w, strides, dilations, same):
    rows, columns = windows(x.shape[1:3], w.shape[:2], strides, dilations, same)
    y = np.zeros((len(x), len(rows), len(columns), w.shape[-1]), np.result_type(x, w))
    for (i, j), (a, b), (k, m) in meetings(x.shape, w.shape, strides, dilations, same):
        y[:, i, j] += x[:, a, b] @ w[k, m]
    return y


def of_inputs(shape, g, w, strides, dilations, same):
    dx = np.zeros(shape, np.result_type(g, w))
    for (i, j), (a, b), (k, m) in meetings(shape, w.shape, strides, dilations, same):
        dx[:, a, b] += g[:, i, j] @ w[k, m].T
    return dx


def of_kernel(x, g, kernel, strides, dilations, same):
    dw = np.zeros(kernel, np.result_type(x, g))
    for (i, j), (a, b), (k, m) in meetings(x.shape, kernel, strides, dilations, same):
        dw[k, m] += x[:, a, b].T @ g[:, i, j]
    return dw

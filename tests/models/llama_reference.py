"""A Llama in NumPy, float64 or complex128: an independent reference, a token and a head at a time.

Written from the papers and from Meta's description, for one sequence; no fused kernels, masks or blocks.
"""

import numpy as np


def frequencies(pairs, theta, scaling):
    """Radians a token, of each pair: Meta's rule, by wavelengths."""
    result = []
    for pair in range(pairs):
        frequency = 1.0 / theta ** (2 * pair / (2 * pairs))
        wavelength = 2 * np.pi / frequency
        if scaling is None or wavelength < scaling.length / scaling.high:
            result.append(frequency)
        elif wavelength > scaling.length / scaling.low:
            result.append(frequency / scaling.factor)
        else:
            smooth = (scaling.length / wavelength - scaling.low) / (scaling.high - scaling.low)
            result.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return np.array(result)


def rotation(position, radians):
    """The orthogonal matrix that rotates feature j with feature j + pairs."""
    pairs = len(radians)
    matrix = np.zeros((2 * pairs, 2 * pairs))
    for j, angle in enumerate(position * radians):
        matrix[j, j] = matrix[j + pairs, j + pairs] = np.cos(angle)
        matrix[j, j + pairs], matrix[j + pairs, j] = -np.sin(angle), np.sin(angle)
    return matrix


def normalized(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(x, kernel, output, size, rotations):
    """Attention of a sequence of shape (length, width); kernel holds queries, keys and values side by side."""
    features, group = size.width // size.heads, size.heads // size.key_heads
    query, key, value = np.split(x @ kernel, [size.width, size.width + size.key_heads * features], axis=1)
    heads = []
    for head in range(size.heads):
        mine = slice(head * features, (head + 1) * features)
        shared = slice(head // group * features, (head // group + 1) * features)
        q, k, v = query[:, mine], key[:, shared], value[:, shared]
        rows = []
        for i in range(len(x)):
            scores = [(rotations[i] @ q[i]) @ (rotations[j] @ k[j]) / np.sqrt(features) for j in range(i + 1)]
            weights = np.exp(np.array(scores))
            rows.append(weights / weights.sum() @ v[: i + 1])
        heads.append(np.stack(rows))
    return np.concatenate(heads, axis=1) @ output


def logits(weights, tokens, size):
    """The logits of one sequence of tokens.

    Args:
        weights: arrays in the order of the model's; may be complex.
        tokens: ints, shape (length,).
        size: the LlamaSize.
    """
    remaining = iter(weights)
    words = next(remaining)
    head = words.T if size.tied else next(remaining)
    radians = frequencies(size.width // size.heads // 2, size.theta, size.scaling)
    rotations = [rotation(position, radians) for position in range(len(tokens))]
    x = words[tokens]
    for _ in range(size.layers):
        scale, kernel, output = (next(remaining) for _ in range(3))
        x = x + attention(normalized(x, scale), kernel, output, size, rotations)
        scale, gate, up, down = (next(remaining) for _ in range(4))
        y = normalized(x, scale)
        opened = y @ gate
        x = x + (opened / (1 + np.exp(-opened)) * (y @ up)) @ down
    return normalized(x, next(remaining)) @ head


def loss(weights, tokens, targets, size):
    """The mean cross-entropy of a batch."""
    total = 0.0
    for row, wanted in zip(tokens, targets, strict=True):
        scores = logits(weights, row, size)
        total = total + np.sum(np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(row)), wanted])
    return total / tokens.size


def gradient(weights, index, tokens, targets, size):
    """The gradient of the loss for one array, exact to float64: the derivative along the imaginary axis.

    Squire, Trapp, "Using Complex Variables to Estimate Derivatives of Real Functions", 1998.
    """
    result = np.empty(weights[index].shape)
    for place in np.ndindex(result.shape):
        shifted = [w.astype("complex128") if i == index else w for i, w in enumerate(weights)]
        shifted[index][place] += 1e-30j
        result[place] = loss(shifted, tokens, targets, size).imag / 1e-30
    return result

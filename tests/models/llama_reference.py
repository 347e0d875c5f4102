"""A Llama in NumPy, float64 or complex128: an independent reference, from the papers and from Meta's description."""

import numpy as np


def frequencies(pairs, theta, scaling):
    """Radians a token, of each pair: Meta's rule, by wavelengths."""
    plain = theta ** (-np.arange(pairs) / pairs)
    if scaling is None:
        return plain
    wavelengths = 2 * np.pi / plain
    smooth = np.clip((scaling.length / wavelengths - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def rotated(x, radians):
    """Features j turned with features j + pairs, by angles that grow with the token; (length, heads, features)."""
    angles = np.arange(len(x))[:, None, None] * radians
    first, second = np.split(x, 2, axis=-1)
    turned = first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)
    return np.concatenate(turned, axis=-1)


def normalized(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(x, kernel, output, size, radians):
    """Attention of a sequence of shape (length, width); kernel holds queries, keys and values side by side."""
    features, length = size.width // size.heads, len(x)
    split = np.split(x @ kernel, [size.width, size.width + size.key_heads * features], axis=1)
    query, key, value = (part.reshape(length, -1, features) for part in split)
    query, key = rotated(query, radians), rotated(key, radians)
    key, value = (np.repeat(part, size.heads // size.key_heads, axis=1) for part in (key, value))
    weights = np.exp(np.einsum("ihf,jhf->hij", query, key) / np.sqrt(features)) * np.tri(length)
    return np.einsum("hij,jhf->ihf", weights / weights.sum(-1, keepdims=True), value).reshape(length, -1) @ output


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
    x = words[tokens]
    for _ in range(size.layers):
        scale, kernel, output = (next(remaining) for _ in range(3))
        x = x + attention(normalized(x, scale), kernel, output, size, radians)
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

"""The bits that a language model takes for a text, in NumPy and float64."""

import numpy as np


def bits_of(model, inputs, targets):
    logits = model.predict(inputs, verbose=0).astype("float64")
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log2(np.take_along_axis(probabilities, targets[..., None], -1)).sum()

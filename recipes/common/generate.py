"""Text from a language model, byte by byte or token by token."""

from collections.abc import Sequence

import keras
import numpy as np


def generate(model: keras.Model, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """Draws bytes from a model of bytes, as `generate_tokens` draws tokens.

    Args:
        model: a causal model from bytes `(batch, length)` to the logits of the next byte.
        prompt: the bytes to continue, at least one.
        count: the number of bytes to draw.
        temperature: the number that the logits are divided by; 0 takes the likeliest byte.
        seed: the seed of the drawing.

    Returns:
        The drawn bytes, without the prompt.

    Raises:
        ValueError: for an empty prompt, or a count or temperature below 0.
    """
    return bytes(generate_tokens(model, prompt, count, temperature, seed, vocabulary=256))


def generate_tokens(
    model: keras.Model, prompt: Sequence[int], count: int, temperature: float, seed: int, vocabulary: int
) -> list[int]:
    """Draws tokens from a model, each from the distribution given those before it.

    Every call of the model has the shape `(1, length)`, so it is compiled once. While the text is shorter than that,
    what follows it is 0, which a causal model does not see; later the model sees the last `length` tokens.

    Args:
        model: a causal model from tokens `(batch, length)` to the logits of the next token.
        prompt: the tokens to continue, at least one.
        count: the number of tokens to draw.
        temperature: the number that the logits are divided by; 0 takes the likeliest token.
        seed: the seed of the drawing.
        vocabulary: the number of logits that are of tokens that occur.

    Returns:
        The drawn tokens, without the prompt.

    Raises:
        ValueError: for an empty prompt, or a count or temperature below 0.
    """
    if not prompt:
        raise ValueError(f"prompt must hold at least one token, got {prompt!r}")
    for name, value in (("count", count), ("temperature", temperature)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    length = model.input_shape[1]
    generator = np.random.default_rng(seed)
    text = list(prompt)
    for _ in range(count):
        seen = text[-length:]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(seen)] = seen
        logits = model.predict_on_batch(tokens)[0, len(seen) - 1, :vocabulary]
        text.append(_draw(logits.astype(np.float64), temperature, generator))
    return text[len(prompt) :]


def readable(text: bytes) -> str:
    """Bytes as text that is safe on a terminal: what is no text, or controls the terminal, becomes a question mark."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in decoded
    )


def _draw(logits, temperature, generator):
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    return int(generator.choice(len(probabilities), p=probabilities))

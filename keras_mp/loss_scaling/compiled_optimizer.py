"""The optimizer of a compiled model, and whether another may take its place."""

from __future__ import annotations

import keras


def compiled_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a model.

    Raises:
        ValueError: If the model is not compiled with an optimizer.
    """
    optimizer = getattr(model, "optimizer", None)
    if not getattr(model, "compiled", False) or optimizer is None:
        raise ValueError(f"model {model.name!r} is not compiled with an optimizer: call compile() first")
    return optimizer


def check_untrained(model: keras.Model, function: str, instead: str) -> None:
    """Checks that the optimizer of a compiled model has made no update, which a new one would forget.

    Args:
        model: the model.
        function: which function is to exchange its optimizer, for the message.
        instead: what else to do, for the message.

    Raises:
        ValueError: If it has made one.
    """
    updates = _updates(compiled_optimizer(model))
    if updates:
        raise ValueError(
            f"model {model.name!r} was trained for {updates} steps, and its optimizer would start anew: call "
            f"{function} before fit, or {instead}"
        )


def _updates(optimizer: keras.optimizers.Optimizer) -> int:
    iterations = getattr(optimizer, "_iterations", None)  # `iterations` divides it by the steps of an accumulation
    if not optimizer.built or iterations is None or getattr(iterations, "_value", 0) is None:
        return 0
    return int(keras.ops.convert_to_numpy(iterations))

"""Whether a model needs loss scaling: decided by what its layers compute in, not by the name of a policy."""

from __future__ import annotations

from typing import Any

from keras_mp import backend
from keras_mp.loss_scaling.inner_optimizer import check_unscaled
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.rebuild import layers_by_path


def wrap_optimizer(optimizer: Any, model: Any) -> Any:
    """Wraps an optimizer in the loss scaling that a model needs.

    Args:
        optimizer: a Keras optimizer that does not scale the loss yet.
        model: the model it is to train.

    Returns:
        `LossScaleOptimizer(optimizer)` if a layer computes in float16, whatever the name of the model's policy or of
        the global one; with `NoLossScale()` if none does and there are several replicas; else the optimizer itself.

    Raises:
        TypeError: If optimizer is not a Keras optimizer.
        ValueError: If optimizer scales the loss already.
    """
    check_unscaled("optimizer", optimizer)
    if "float16" in compute_dtypes(model):
        return LossScaleOptimizer(optimizer)
    return LossScaleOptimizer(optimizer, NoLossScale()) if backend.replica_count() > 1 else optimizer


def compute_dtypes(model: Any) -> set[str]:
    """Returns the dtypes that the layers of a model, and the model itself, compute in."""
    return {layer.compute_dtype for layer in [model, *layers_by_path(model).values()]}

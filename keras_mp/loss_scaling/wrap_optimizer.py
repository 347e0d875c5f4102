"""Whether a model needs loss scaling: decided by what its layers compute in, not by the name of a policy."""

from __future__ import annotations

import keras

from keras_mp import backend
from keras_mp.loss_scaling.inner_optimizer import check_unscaled, leaves
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.one_program import UpdateInOneProgram
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.other_step import makes_another_step
from keras_mp.loss_scaling.state_formats import check_state_dtype
from keras_mp.loss_scaling.wide_weight import check_weights, is_narrow
from keras_mp.rebuild import layers_by_path


def wrap_optimizer(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, *, state_dtype: str = "float32"
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer in the loss scaling that a model needs, so that it makes the same step in every precision.

    Keras's optimizers by themselves make another step than `LossScaleOptimizer`, which is wrapped around them in
    float16, where

    - TensorFlow keeps the gradient of a weight sparse, because its rows are looked up (Embedding, ReversibleEmbedding,
      layers with such code of their own, sparse inputs, layers that encode as sparse tensors), and the optimizer
      squares, clips or divides each occurrence of a row by itself: every optimizer but SGD and Lion without clipping.
      `LossScaleOptimizer` sums them first.
    - with `gradient_accumulation_steps`, weights are averaged (`use_ema`) or constrained: Keras does both at each
      micro-batch, `LossScaleOptimizer` at each applied step.

    There it is wrapped in every precision, as it is on several replicas. On TensorFlow a model with layers whose code
    is neither Keras's nor this package's is traced once to find out, which computes nothing and takes a large model
    seconds.

    Args:
        optimizer: a Keras optimizer that does not scale the loss yet.
        model: the model it is to train, built: of one that is not, nothing but its embeddings is known to give sparse
            gradients.
        state_dtype: what the optimizer's slots are stored in: "float32", "bfloat16" or "float8", as
            `LossScaleOptimizer` says.

    Returns:
        `LossScaleOptimizer(optimizer)` if a layer computes in float16, whatever the name of the model's policy or of
        the global one; `LossScaleOptimizer(optimizer, NoLossScale())`, which scales nothing, if none does and the
        optimizer by itself would make another step, or there are several replicas, or state_dtype is not "float32", or
        a weight is stored in bfloat16, whose update it rounds stochastically; else the optimizer itself.

    Raises:
        TypeError: If optimizer is not a Keras optimizer.
        ValueError: If optimizer scales the loss already; if state_dtype is unknown, or is not "float32" and the
            optimizer is built; if a weight is stored in float16.
    """
    check_unscaled("optimizer", optimizer)
    check_state_dtype(state_dtype)
    check_weights(model.trainable_variables)
    if "float16" in compute_dtypes(model):
        return LossScaleOptimizer(optimizer, state_dtype=state_dtype)
    is_needed = (
        state_dtype != "float32"
        or _has_narrow_weights(model)
        or backend.replica_count() > 1
        or makes_another_step(optimizer, model)
    )
    if is_needed:
        return LossScaleOptimizer(optimizer, NoLossScale(), state_dtype=state_dtype)
    for leaf in leaves(optimizer):
        leaf._backend_apply_gradients = UpdateInOneProgram(leaf)
    return optimizer


def _has_narrow_weights(model: keras.Model) -> bool:
    if model.built:
        return any(map(is_narrow, model.trainable_variables))
    return any(layer.variable_dtype == "bfloat16" for layer in layers_by_path(model).values())


def compute_dtypes(model: keras.Model) -> set[str]:
    """Returns the dtypes that the layers of a model, and the model itself, compute in."""
    return {layer.compute_dtype for layer in [model, *layers_by_path(model).values()]}

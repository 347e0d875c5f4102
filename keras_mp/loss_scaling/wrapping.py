"""Whether a model needs loss scaling: decided by what its layers compute in, not by the name of a policy."""

from __future__ import annotations

from functools import partial

import keras

from keras_mp import backend
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.optimizer.inner_optimizer import apply_in_one_program, check_unscaled, check_weights
from keras_mp.rebuild.optimizers import leaves
from keras_mp.rebuild.walk import LIBRARIES, Walk, is_narrow, original_class, own_variables, package_of

updates = backend.engine_of("keras_mp.optimizer")


def wrap_optimizer(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    *,
    state_dtype: str = "float32",
    state_memory: str = "device",
    release_gradients: bool = False,
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer in the model's loss scaling.

    So it makes the same step in every precision. Keras's optimizers by themselves make another step than
    `LossScaleOptimizer`, which is wrapped around them in float16, where

    - TensorFlow keeps the gradient of a weight sparse, because its rows are looked up (Embedding, ReversibleEmbedding,
      sparse inputs, layers that encode as sparse tensors), and the optimizer squares, clips or divides each occurrence
      of a row by itself: every optimizer but SGD and Lion without clipping. `LossScaleOptimizer` sums them first. So
      may layers whose code is neither Keras's nor this package's.
    - with `gradient_accumulation_steps`, weights are averaged (`use_ema`) or constrained: Keras does both at each
      micro-batch, `LossScaleOptimizer` at each applied step. Other weights are the same, and on JAX in less memory:
      there Keras's step has a copy of all weights and slots.

    There it is wrapped in every precision, as it is on several replicas.

    Args:
        optimizer: a Keras optimizer that does not scale the loss yet.
        model: the model it is to train, built: of one that is not, nothing but its embeddings is known to give sparse
            gradients.
        state_dtype: the dtype that the optimizer's slots are stored in: "float32", "bfloat16" or "float8", as
            `LossScaleOptimizer` says.
        state_memory: the place of the slots, "device" or "host", as `LossScaleOptimizer` says.
        release_gradients: Whether each weight is updated as soon as its own gradient is there, as
            `LossScaleOptimizer` says.

    Returns:
        `LossScaleOptimizer(optimizer)` if a layer computes in float16, whatever the name of the model's policy or of
        the global one; `LossScaleOptimizer(optimizer, LossScale.none())`, which scales nothing, if none does and the
        optimizer by itself would make another step, or accumulates gradients on JAX, or there are several replicas, or
        state_dtype is not "float32", or gradients are released, or a weight is stored in bfloat16, whose update it
        rounds stochastically; else the optimizer itself, whose updates are then one jitted program where they run on a
        CPU outside one.

    Raises:
        TypeError: If optimizer is not a Keras optimizer.
        ValueError: If optimizer scales the loss already; if state_dtype is unknown, or is not "float32" and the
            optimizer is built; if a weight is stored in float16; if gradients are to be released, and a layer computes
            in float16, or `LossScaleOptimizer` refuses the optimizer.
    """
    check_unscaled("optimizer", optimizer)
    check_weights(model.trainable_variables)
    walk = Walk(model)
    if any(layer.compute_dtype == "float16" for layer in walk.every):
        if release_gradients:
            raise ValueError(
                "release_gradients=True updates each weight as soon as its gradient is there, and a layer of model "
                f"{model.name!r} computes in float16, where an overflow in one gradient must skip the step of all: "
                "build the model under 'mixed_bfloat16'"
            )
        return LossScaleOptimizer(optimizer, state_dtype=state_dtype, state_memory=state_memory)
    if model.built:
        has_narrow_weights = any(map(is_narrow, model.trainable_variables))
    else:
        has_narrow_weights = any(layer.variable_dtype == "bfloat16" for layer in walk.layers.values())
    is_needed = (
        release_gradients
        or (state_dtype, state_memory) != ("float32", "device")
        or has_narrow_weights
        or updates.replica_count() > 1
        or is_better_wrapped(optimizer, walk)
    )
    if is_needed:
        return LossScaleOptimizer(
            optimizer,
            NoLossScale(),
            state_dtype=state_dtype,
            state_memory=state_memory,
            release_gradients=release_gradients,
        )
    for leaf in leaves(optimizer):
        leaf._backend_apply_gradients = partial(apply_in_one_program, leaf)
    return optimizer


# Where a Keras optimizer by itself makes another step than inside `LossScaleOptimizer`, from the same gradients.
#
# sparse gradients   Keras squares, or clips, each occurrence of a row by itself; we sum the occurrences first
# accumulation       Keras averages (use_ema) and constrains weights at each micro-batch, we at each applied step; and
#                    on JAX it chooses between old and new weights and slots, for which XLA keeps both

# Their updates are linear in the gradient, or need its sum only: rows that occur twice are summed on the way.
_SUMMING = (keras.optimizers.SGD.update_step, keras.optimizers.Lion.update_step)


def is_better_wrapped(optimizer: keras.optimizers.Optimizer, walk: Walk) -> bool:
    """Tells whether an optimizer by itself makes another, larger step.

    Of a model that is not built only the kinds of its layers are known.
    """
    # Several that accumulate over different numbers of steps cannot be wrapped at all.
    if len({leaf.gradient_accumulation_steps for leaf in leaves(optimizer)}) > 1:
        return False
    # Private: which of its optimizers takes a variable, Keras's MultiOptimizer tells only once it is built.
    leaf_of = getattr(optimizer, "_optimizer_map", lambda variable: optimizer)
    trained = [(leaf_of(variable), variable) for variable in walk.model.trainable_variables]
    known = {id(leaf): leaf for leaf in [*leaves(optimizer), *(leaf for leaf, _ in trained)]}
    deciding = []
    for leaf in known.values():
        own = [variable for other, variable in trained if other is leaf]
        constrained = any(variable.constraint is not None for variable in own)
        if leaf.gradient_accumulation_steps and (updates.ACCUMULATING_COPIES or leaf.use_ema or constrained):
            return True
        if not _sums_rows(leaf):
            deciding += own
    if not walk.model.built:
        summing = all(map(_sums_rows, known.values()))
        embeds = any(map(_is_embedding, walk.every))
        return updates.HAS_SPARSE_GRADIENTS and embeds and not summing
    looked_up = {id(variable) for variable in _looked_up(walk)} if updates.HAS_SPARSE_GRADIENTS else set()
    return any(id(variable) in looked_up for variable in deciding)


def _sums_rows(leaf: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer's step is that of summed rows."""
    if leaf.gradient_accumulation_steps:
        return True  # accumulated gradients are dense
    rescales = leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue or leaf.loss_scale_factor
    return type(leaf).update_step in _SUMMING and not rescales


def _looked_up(walk: Walk) -> list[keras.Variable]:
    """The weights whose rows are looked up, or may be."""
    # Inputs, and layers that encode as sparse tensors, such as CategoryEncoding.
    sources = [*(getattr(walk.model, "inputs", None) or []), *walk.every]
    reads_sparse = any(getattr(source, "sparse", False) for source in sources)
    return [
        variable
        for layer in walk.every
        # Code of neither Keras nor this package may look rows of a weight up.
        if reads_sparse or _is_embedding(layer) or package_of(original_class(layer).call) not in LIBRARIES
        for variable in own_variables(layer)
    ]


def _is_embedding(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)

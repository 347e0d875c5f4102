"""Where a Keras optimizer by itself makes another step than inside `LossScaleOptimizer`, from the same gradients.

sparse gradients   Keras squares, or clips, each occurrence of a row by itself; we sum the occurrences first
accumulation       Keras averages (use_ema) and constrains weights at each micro-batch; we at each applied step
"""

from __future__ import annotations

import keras

from keras_mp import backend
from keras_mp.loss_scaling import inner_optimizer as inner
from keras_mp.rebuild import layers_by_path, own_variables
from keras_mp.rebuild.notes import original_class

# Their updates are linear in the gradient, or need its sum only: rows that occur twice are summed on the way.
_SUMMING = (keras.optimizers.SGD.update_step, keras.optimizers.Lion.update_step)


def makes_another_step(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> bool:
    """Whether an optimizer makes another step from finite gradients than `LossScaleOptimizer(optimizer)` does.

    Args:
        optimizer: a Keras optimizer that does not scale the loss.
        model: the model it is to train; of one that is not built only the kinds of its layers are known.
    """
    # Several that accumulate over different numbers of steps cannot be wrapped at all.
    if len({leaf.gradient_accumulation_steps for leaf in inner.leaves(optimizer)}) > 1:
        return False
    variables = _variables_by_leaf(optimizer, model)
    if any(_accumulates_otherwise(leaf, own) for leaf, own in variables):
        return True
    deciding = [(leaf, own) for leaf, own in variables if not _sums_rows(leaf)]
    if not deciding:
        return False
    if not model.built:
        return backend.HAS_SPARSE_GRADIENTS and any(map(_is_embedding, layers_by_path(model).values()))
    sparse = {id(variable) for variable in _sparse_variables(model)}
    return any(id(variable) in sparse for _, own in deciding for variable in own)


def _variables_by_leaf(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]:
    # Private: which of its optimizers takes a variable, Keras's MultiOptimizer tells only once it is built.
    leaf_of = getattr(optimizer, "_optimizer_map", lambda variable: optimizer)
    trained = [(leaf_of(variable), variable) for variable in model.trainable_variables]
    leaves = {id(leaf): leaf for leaf in [*inner.leaves(optimizer), *(leaf for leaf, _ in trained)]}
    return [(leaf, [variable for other, variable in trained if other is leaf]) for leaf in leaves.values()]


def _accumulates_otherwise(leaf: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> bool:
    constrained = any(variable.constraint is not None for variable in variables)
    return bool(leaf.gradient_accumulation_steps) and (leaf.use_ema or constrained)


def _sums_rows(leaf: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer's step is that of the summed rows of a sparse gradient."""
    if leaf.gradient_accumulation_steps:
        return True  # accumulated gradients are dense
    rescales = leaf.clipnorm or leaf.global_clipnorm or leaf.clipvalue or leaf.loss_scale_factor
    return type(leaf).update_step in _SUMMING and not rescales


def _sparse_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables whose gradients are sparse, or may be."""
    embeddings, unclear = [], []
    layers = [model, *layers_by_path(model).values()]
    # Inputs, and layers that encode as sparse tensors, such as CategoryEncoding.
    reads_sparse = any(
        getattr(source, "sparse", False) for source in [*(getattr(model, "inputs", None) or []), *layers]
    )
    for layer in layers:
        own = [variable for variable in own_variables(layer) if variable.trainable]
        if _is_embedding(layer):
            embeddings += own
        elif reads_sparse or _has_own_code(layer):
            unclear += own
    return backend.sparse_gradients(model, embeddings, unclear)


def _is_embedding(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)


def _has_own_code(layer: keras.Layer) -> bool:
    """Whether the class of a layer is neither Keras's nor this package's: it may look rows of a weight up."""
    return not original_class(layer).call.__module__.startswith(("keras.", "keras_mp."))

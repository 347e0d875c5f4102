"""The way back from `stabilize`, `convert` and `make_lean`."""

from __future__ import annotations

import keras

from keras_mp.fp8.convert import FLOAT8, made_plain
from keras_mp.lean.lean_model import LEAN
from keras_mp.stability.stabilized import STABILIZED
from keras_mp.system.one_of import one_of
from keras_mp.treatment.change import check_built, undo

_CHANGES = {"stabilize": STABILIZED, "convert": (FLOAT8,), "make_lean": LEAN}


def revert(model: keras.Model, *changes: str) -> keras.Model:
    """Undoes what `stabilize`, `convert` and `make_lean` changed in a model, in place.

        keras_mp.revert(model)  # all of it
        keras_mp.revert(model, "convert")  # plain products again; what is stable or lean stays so

    The weights are the model's own, with their values. What `narrow_frozen` stored in 16 bits is float32 again, without
    the low bits; weights of the policy "bfloat16" that `stabilize` made float32 are rounded to bfloat16. The amaxes of
    delayed scaling go. A compiled model stays compiled; where weights changed their dtype, or amaxes went, its
    optimizer is a new one with the state of the old.

    Args:
        model: a built Keras model. `Float8Dense` and `Float8EinsumDense` layers become plain ones, whoever made them.
        changes: the names of the changes to undo, "stabilize", "convert" and "make_lean" (with `narrow_frozen` and
            recomputed blocks); all by default.

    Returns:
        The model.

    Raises:
        ValueError: If the model is not built, or a name is none of the three.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32), keras.layers.Dense(4, "softmax")])
        >>> model = keras_mp.convert(keras_mp.stabilize(model), select=lambda path, layer: True)
        >>> print(keras_mp.report(keras_mp.revert(model, "convert")))
        sequential...: 1 of 1 layers that need float32 compute in it; 0 of 2 products...
    """
    check_built(model)
    for name in changes:
        one_of("changes", name, _CHANGES)
    wanted = changes or tuple(_CHANGES)
    names = [treatment for change in wanted for treatment in _CHANGES[change]]
    undo(model, names, also=made_plain(model) if "convert" in wanted else ())
    return model

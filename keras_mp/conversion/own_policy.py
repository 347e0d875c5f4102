"""Layers whose call makes layers: these take the policy of the layer that makes them, and not the global one."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from keras_mp.precision.policy import restored_policy
from keras_mp.rebuild.notes import original_class
from keras_mp.rebuild.walk import with_self
from keras_mp.stability.sensitive import names_in
from keras_mp.system.packages import LIBRARIES, package_of
from keras_mp.treatment.treated import Treatment, register_treatments, treat

OWN_POLICY = "own policy"
_BEFORE_CALL = {"__init__", "build", "get_config", "from_config"}


class CallsUnderOwnPolicy:
    """Runs its call with its own dtype policy as the global one, which a layer that is made there takes."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with restored_policy(self.dtype_policy):  # type: ignore[attr-defined]
            return super().call(*args, **kwargs)  # type: ignore[misc]


def keep_own_policies(model: keras.Model) -> keras.Model:
    """Lets the layers of a new model whose calls make layers give these their own policy; returns the model."""
    for layer in filter(_makes_layers, with_self(model)):
        treat(layer, {OWN_POLICY: None})
    return model


def _makes_layers(layer: keras.Layer) -> bool:
    """Whether code of the layer's own class, outside Keras, names a class of layers while it is called."""
    own = [cls for cls in original_class(layer).__mro__ if package_of(cls) not in (*LIBRARIES, "builtins")]
    methods = [value for cls in own for name, value in vars(cls).items() if name not in _BEFORE_CALL]
    names = set().union(*(names_in(inspect.unwrap(f).__code__) for f in methods if inspect.isfunction(f)))
    return any(isinstance(getattr(keras.layers, name, None), type) for name in names)


register_treatments({OWN_POLICY: Treatment(lambda original, names: CallsUnderOwnPolicy)})

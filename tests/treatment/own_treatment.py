"""The treatment of docs/maintainers/architecture.md."""

from keras import ops

from keras_mp.rebuild.walk import treatments_of
from keras_mp.treatment.change import change
from keras_mp.treatment.treated import Treatment, register_treatments


class Clipped:
    """Comes before a layer's class: the result within plus and minus the limit."""

    def call(self, *args, **kwargs):
        limit = treatments_of(self)["clip"]["limit"]
        return ops.clip(super().call(*args, **kwargs), -limit, limit)


register_treatments({"clip": Treatment(lambda original, names: Clipped)})


def clip(model, layers, limit=60000.0):
    """Clips what some layers of a model return, in place."""
    change(model, [(layer, {"clip": {"limit": limit}}) for layer in layers])
    return model

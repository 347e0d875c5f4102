"""A second model of the same weights, for tests that compare a model that is changed in place with what it was."""

from keras_mp.rebuild.compiled import carry_compiled
from keras_mp.rebuild.model import _rebuilt, unchanged


def twin(model):
    """A model like the other, compiled like it, with its optimizer's state."""
    new, _, _, variables = _rebuilt(model, unchanged, None, None, False)
    if model.compiled:
        carry_compiled(model, new, variables)
    return new

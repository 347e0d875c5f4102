"""A second model of the same weights, for tests that compare a model that is changed in place with what it was."""

from unittest.mock import patch

from keras_mp.rebuild.model import rebuild, unchanged


def twin(model):
    """A model like the other, compiled like it, with its optimizer's state."""
    with patch("keras_mp.rebuild.model.check_same"):  # a test of its own
        return rebuild(model, unchanged).model

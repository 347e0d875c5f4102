"""GPT: its size against the published one, that it is causal, and that its sizes are checked."""

import numpy as np
import pytest
from shapes_alone import shapes_alone

from models.gpt import gpt
from models.transformer import Size

TINY = Size(1, 128, 2)


def parameters(**arguments):
    with shapes_alone():
        return gpt(**arguments).count_params()


def test_gpt2_has_the_published_number_of_parameters():
    # The checkpoint that OpenAI released: 124,439,808, with the vocabulary as it is and the output tied.
    assert parameters(vocabulary_multiple=1) == 124_439_808
    assert parameters() == 124_439_808 + (50304 - 50257) * 768


def test_an_untied_output_has_weights_of_its_own():
    tied, untied = (parameters(size=TINY, vocabulary=200, length=8, tied=tied) for tied in (True, False))
    assert untied - tied == 256 * 128


def test_a_sequence_longer_than_the_models_is_an_error_also_after_a_shorter_one():
    model = gpt(TINY, 100, 8)
    with pytest.raises(ValueError, match=r"expected shape=\(None, 8\), found shape=\(2, 16\)"):
        model(np.zeros((2, 16), "int32"))
    model.predict_on_batch(np.zeros((2, 8), "int32"))
    with pytest.raises(Exception, match="(?i)incompatible"):
        model.predict_on_batch(np.zeros((2, 16), "int32"))

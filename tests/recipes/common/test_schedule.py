import math

import numpy as np

from recipes.common.schedule import warmup_then_cosine


def test_it_rises_for_a_tenth_and_falls_along_a_cosine():
    schedule = warmup_then_cosine(0.5, 50)
    rates = [float(schedule(step)) for step in range(51)]
    rise = [0.5 * step / 5 for step in range(5)]
    fall = [0.25 * (1 + math.cos(math.pi * step / 45)) for step in range(46)]
    np.testing.assert_allclose(rates, rise + fall, atol=1e-7)

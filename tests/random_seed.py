"""Fresh random numbers in every run, and the seed that repeats them.

A run has one seed, drawn anew or taken from KERAS_MP_TEST_SEED. A test that fails prints it. Each test draws from a
stream of its own, made of that seed and the test's name: the same numbers alone, in any order, and in any worker.
"""

import functools
import os
import random
import secrets
import sys
import zlib

import numpy as np

numpys_own = np.random.default_rng
VARIABLE = "KERAS_MP_TEST_SEED"


def of_this_run() -> int:
    """The seed of the run; drawn at the first call, and inherited by workers and by processes that tests start."""
    text = os.environ.setdefault(VARIABLE, str(secrets.randbits(31)))
    try:
        seed = int(text, 0)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise ValueError(f"{VARIABLE}={text!r} must be a whole number from 0 to 2**63 - 1")
    return seed


def of_a_test(name: str) -> list[int]:
    """The seed of one test, from that of the run and the test's name."""
    return [of_this_run(), zlib.crc32(name.encode())]


def start(name: str) -> None:
    """Makes all random numbers of the test `name` its own: NumPy's, Python's, Keras's, TensorFlow's if imported.

    `numpy.random.default_rng()` without a seed gives a new generator at each call, as ever, of the test's stream.
    """
    from keras.src.backend.common import global_state

    streams = np.random.SeedSequence(of_a_test(name))

    @functools.wraps(numpys_own)
    def default_rng(seed=None):
        return numpys_own(streams.spawn(1)[0] if seed is None else seed)

    np.random.default_rng = default_rng
    seed = int(streams.generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    global_state.set_global_attribute("global_seed_generator", None)
    # keras.utils.set_random_seed would import TensorFlow under JAX, too.
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)

"""The mask of dropout, written anew in NumPy, for tests that compare with it."""

import keras
import numpy as np
from hashed import scrambled


def kept_in_numpy(seed, shape, rate):
    """Which entries of an array dropout keeps.

    Args:
        seed: two numbers.
        shape: the shape of the whole array; each entry has a number of its own in its row, and each row among all.
    """
    *leading, columns = shape
    low, high = (np.array(word % 2**32, "uint64") for word in seed)
    keys = [scrambled(scrambled(low) ^ high)]
    keys.append(scrambled(keys[0] ^ 0x9E3779B1))
    rows = np.arange(np.prod(leading, dtype=int), dtype="uint64").reshape(*leading, 1)
    first, second = (scrambled(rows ^ key) for key in keys)
    return scrambled((first + np.arange(columns, dtype="uint64")) % 2**32, second) >= round(rate * 2**32)


def seed_state(seed):
    """A seed as `keras.random.SeedGenerator.next` returns it."""
    return keras.ops.convert_to_tensor(seed, keras.random.SeedGenerator(0).state.dtype)

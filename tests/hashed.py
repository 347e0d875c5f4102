"""The hashes that random bits come from, with Python's integers or NumPy's."""

import numpy as np


def murmur(word):
    """Murmur3's finalizer."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def scrambled(word, key=0):
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32 ^ key
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def words(shape, seed, step, variable):
    """The hash of seed, step, variable and place."""
    first = murmur(murmur(murmur(seed % 2**32) ^ seed >> 32) ^ murmur((variable + 0x9E3779B1) % 2**32))
    start, key = scrambled(step ^ first), scrambled(step ^ murmur(first ^ 0x9E3779B1))
    numbers = [scrambled((place + start) % 2**32, key) for place in range(int(np.prod(shape)))]
    return np.array(numbers, "uint64").reshape(shape)

"""Data sets: a tensorflow-datasets builder and a loader each."""

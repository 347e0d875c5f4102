"""The same result in less memory: attention, cross-entropy, GELU, recomputation."""

"""The update: gradients checked and summed, the inner optimizer, its slots in fewer bits, rounding."""

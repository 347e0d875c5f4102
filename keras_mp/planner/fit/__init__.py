"""Measures that make a training fit a chip."""

"""Layers that must compute in float32, and how they are made to."""

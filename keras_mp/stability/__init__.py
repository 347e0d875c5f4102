"""Keeps layers in float32 that must be."""

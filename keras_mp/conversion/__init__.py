"""The same model in another precision."""

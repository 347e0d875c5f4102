"""The chips that a step can be compiled for."""

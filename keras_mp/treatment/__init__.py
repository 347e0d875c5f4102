"""Layers that compute otherwise than their class says: changed in place, undone, saved and loaded."""

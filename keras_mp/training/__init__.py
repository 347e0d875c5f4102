"""Training that can be stopped and resumed to the same numbers."""

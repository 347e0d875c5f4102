"""Training recipes: one file a training, read top to bottom. Run one with `python -m recipes NAME`."""

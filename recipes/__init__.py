"""Training recipes: one file a training, read top to bottom. Run one with `keras-mp train NAME`."""

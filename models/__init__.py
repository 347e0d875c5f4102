"""Plain Keras models, one file each."""

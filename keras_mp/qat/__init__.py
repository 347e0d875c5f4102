"""Training with the numbers of Keras's and LiteRT's quantization."""

"""Training with the numbers of the quantized model: Keras's own int8 and int4, and LiteRT's int8."""

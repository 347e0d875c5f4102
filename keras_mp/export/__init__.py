"""A trained model for other runtimes: ONNX and LiteRT, in float32 or in int8."""

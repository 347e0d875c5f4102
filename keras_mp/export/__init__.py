"""Every way out of training: a float32 SavedModel, ONNX and LiteRT."""

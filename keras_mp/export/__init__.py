"""Ways out of training: a float32 SavedModel, ONNX, LiteRT."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

"""Time and memory of training steps, measured side by side."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

"""The kit's own layers, for models that are written with them."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

"""The exceptions of the kit, to catch by name."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

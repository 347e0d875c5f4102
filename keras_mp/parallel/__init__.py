"""One script on several devices or machines."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

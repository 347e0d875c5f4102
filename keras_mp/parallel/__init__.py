"""One script on several devices or machines: `distribute`, and what is behind it."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

"""Find what a precision breaks, and choose one."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

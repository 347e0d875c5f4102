"""Matrix products with operands in 8 or 4 bits."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

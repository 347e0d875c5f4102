"""FP8 that really is FP8, INT8 and NVFP4: matrix products with operands in 8 or 4 bits, forward and backward."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

from keras_mp.numerics.nonfinite import find_nonfinite as find_nonfinite
from keras_mp.numerics.parity import compare_training as compare_training

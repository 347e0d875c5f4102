from keras_mp.numerics.nonfinite import find_nonfinite as find_nonfinite

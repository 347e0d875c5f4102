from keras_mp.lean.gelu import Gelu as Gelu

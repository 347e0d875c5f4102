from keras_mp.fp8.convert import Float8Dense as Float8Dense
from keras_mp.fp8.convert import Float8EinsumDense as Float8EinsumDense
from keras_mp.lean.gelu import Gelu as Gelu

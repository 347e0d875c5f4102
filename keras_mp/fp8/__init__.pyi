from keras_mp.fp8.scaled_product import matmul as matmul
from keras_mp.fp8.scaling import Scaling as Scaling
from keras_mp.fp8.scaling import Scalings as Scalings

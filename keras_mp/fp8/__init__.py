"""FP8 that really is FP8, INT8 and NVFP4: matrix products with operands in 8 or 4 bits, forward and backward."""

from keras_mp.fp8.convert import convert, explain, is_available, revert
from keras_mp.fp8.layers import Float8Dense, Float8EinsumDense
from keras_mp.fp8.matmul import matmul
from keras_mp.fp8.scaling import Scaling, Scalings

__all__ = [
    "Float8Dense",
    "Float8EinsumDense",
    "Scaling",
    "Scalings",
    "convert",
    "explain",
    "is_available",
    "matmul",
    "revert",
]

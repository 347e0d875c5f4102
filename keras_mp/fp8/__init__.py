"""FP8 that really is FP8, and INT8: matrix products with 8-bit operands, forward and backward."""

from keras_mp.fp8.convert import convert, explain, is_available, revert
from keras_mp.fp8.int8_products import Int8Scaling
from keras_mp.fp8.layers import Float8Dense, Float8EinsumDense
from keras_mp.fp8.matmul import matmul
from keras_mp.fp8.mxfp8 import MXFP8Scaling
from keras_mp.fp8.scaling import CurrentScaling, DelayedScaling, RowwiseScaling, StaticScaling, get_recipe
from keras_mp.fp8.scaling_recipe import HYBRID, Recipe, RoleFormats
from keras_mp.precision.formats import E4M3, E5M2

__all__ = [
    "E4M3",
    "E5M2",
    "HYBRID",
    "CurrentScaling",
    "DelayedScaling",
    "Float8Dense",
    "Float8EinsumDense",
    "Int8Scaling",
    "MXFP8Scaling",
    "Recipe",
    "RoleFormats",
    "RowwiseScaling",
    "StaticScaling",
    "convert",
    "explain",
    "get_recipe",
    "is_available",
    "matmul",
    "revert",
]

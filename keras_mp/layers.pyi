from keras_mp.fp8.layers import Float8Dense as Float8Dense
from keras_mp.fp8.layers import Float8EinsumDense as Float8EinsumDense
from keras_mp.lean.chunked_head import LanguageModel as LanguageModel
from keras_mp.lean.gelu import Gelu as Gelu
from keras_mp.lean.self_attention import SelfAttention as SelfAttention

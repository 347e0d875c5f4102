from keras_mp.lean.blockwise_attention import attention as attention
from keras_mp.lean.chunked_loss import ChunkedCrossEntropy as ChunkedCrossEntropy
from keras_mp.lean.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from keras_mp.lean.frozen import narrow_frozen as narrow_frozen
from keras_mp.lean.lean_model import make_lean as make_lean
from keras_mp.lean.recompute import remat as remat

from keras_mp.training.batches import Batches as Batches
from keras_mp.training.batches import ShuffledBatches as ShuffledBatches
from keras_mp.training.fit_loop import fit as fit

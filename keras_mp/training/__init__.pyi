from keras_mp.precision.policy import PolicyChoice as PolicyChoice
from keras_mp.system.atomic_write import atomic_write as atomic_write
from keras_mp.training.batches import Batches as Batches
from keras_mp.training.batches import ShuffledBatches as ShuffledBatches
from keras_mp.training.fit_loop import fit as fit

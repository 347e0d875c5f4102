"""Names of Keras's private modules that the kit needs.

All are there in Keras 3.13 to 3.15. The modules of one of its backends are named in the files of that backend, and what
is replaced in `keras_patches`.
"""

# Shapes and dtypes of what a function returns; the public one of a layer takes no function. The mask of a tensor.
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend import get_keras_mask as get_keras_mask
from keras.src.backend import set_keras_mask as set_keras_mask

# What the layers that are called now were told, such as `training`; whether HDF5 is written; whether a seed is set.
from keras.src.backend.common import global_state as global_state

# Whether assignments are noted in a scope, as in a step of JAX, so that a variable can neither be made nor set.
from keras.src.backend.common.stateless_scope import get_stateless_scope as get_stateless_scope
from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope

# The dtype that variables are read in, to read one in its own, or as the layer did that is recomputed.
from keras.src.backend.common.variables import AutocastScope as AutocastScope
from keras.src.backend.common.variables import get_autocast_scope as get_autocast_scope

# A mask as the weights of a metric; a mean over TensorFlow's replicas, whose gradients are added up.
from keras.src.losses.loss import apply_mask as apply_mask
from keras.src.losses.loss import scale_loss_for_distribution as scale_loss_for_distribution

# Which models have a graph, which classes are made from inputs and outputs, and what calls a node of a graph.
from keras.src.models.functional import Functional as Functional
from keras.src.models.functional import functional_like_constructor as functional_like_constructor
from keras.src.models.functional import operation_fn as operation_fn

# An optimizer's update as it is on backends without distribution strategies.
from keras.src.optimizers.base_optimizer import BaseOptimizer as BaseOptimizer

# What codes in groups stand for: quantized weights as floats.
from keras.src.quantizers.quantizers import dequantize_with_sz_map as dequantize_with_sz_map

# The generator of random numbers that were asked for without a seed, which a resumed training goes on with.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
from keras.src.random.seed_generator import global_seed_generator as global_seed_generator

# A file whose arrays are read part by part.
from keras.src.saving import saving_lib as saving_lib

# A config that writes a layer once which two submodels share.
from keras.src.saving.serialization_lib import ObjectSharingScope as ObjectSharingScope

# One library's sparse tensors as another's, as `fit` makes them.
from keras.src.trainers.data_adapters import data_adapter_utils as data_adapter_utils

# Whether a seed is set.
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

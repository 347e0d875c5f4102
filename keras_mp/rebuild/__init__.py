"""A model rebuilt from its config under a rule, with its state carried over."""

from keras_mp.rebuild.model import Config as Config
from keras_mp.rebuild.model import RebuildError as RebuildError
from keras_mp.rebuild.model import Rebuilt as Rebuilt
from keras_mp.rebuild.model import children_of as children_of
from keras_mp.rebuild.model import custom_objects_of as custom_objects_of
from keras_mp.rebuild.model import has_no_call as has_no_call
from keras_mp.rebuild.model import layers_below as layers_below
from keras_mp.rebuild.model import layers_by_path as layers_by_path
from keras_mp.rebuild.model import operations_of as operations_of
from keras_mp.rebuild.model import original_config as original_config
from keras_mp.rebuild.model import own_variables as own_variables
from keras_mp.rebuild.model import rebuild as rebuild

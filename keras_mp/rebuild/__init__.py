"""A model rebuilt from its config under a rule, with its state carried over."""

from keras_mp.rebuild.config import custom_objects_of as custom_objects_of
from keras_mp.rebuild.config import original_config as original_config
from keras_mp.rebuild.model import Rebuilt as Rebuilt
from keras_mp.rebuild.model import rebuild as rebuild
from keras_mp.rebuild.model import unchanged as unchanged
from keras_mp.rebuild.state import has_no_value as has_no_value
from keras_mp.rebuild.state import narrow as narrow
from keras_mp.rebuild.state import widen as widen
from keras_mp.rebuild.walk import Config as Config
from keras_mp.rebuild.walk import RebuildError as RebuildError
from keras_mp.rebuild.walk import children_of as children_of
from keras_mp.rebuild.walk import has_no_call as has_no_call
from keras_mp.rebuild.walk import is_built as is_built
from keras_mp.rebuild.walk import layers_below as layers_below
from keras_mp.rebuild.walk import layers_by_path as layers_by_path
from keras_mp.rebuild.walk import operations_of as operations_of
from keras_mp.rebuild.walk import own_variables as own_variables
from keras_mp.rebuild.walk import with_self as with_self

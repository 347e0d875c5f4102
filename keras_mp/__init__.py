"""Mixed-precision training for Keras 3 on TensorFlow and JAX, with every claim checked.

The public names are those of `__init__.pyi`, which type checkers read, and of the stubs of the modules that it names.
Each is imported when it is first used, so that `import keras_mp` itself costs nothing and imports neither TensorFlow
nor JAX.
"""

from keras_mp.system.registration import register_with_keras
from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

register_with_keras()

"""Mixed-precision training for Keras 3 on TensorFlow and JAX, with every claim checked.

The public names are those of `__init__.pyi`, which type checkers read, and of the stubs of the modules that it names.
Each is imported when it is first used, so that `import keras_mp` itself costs nothing and imports neither TensorFlow
nor JAX.
"""

import sys

from keras_mp.system.registration import register_classes
from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

# Where Keras is not there yet, the first use of a public name registers them.
if "keras" in sys.modules:
    register_classes()

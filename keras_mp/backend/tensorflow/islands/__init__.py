"""Islands: jitted programs, and other faster forms, inside a step that is not jitted as a whole.

On a CPU TensorFlow's kernels multiply 16-bit matrices faster than XLA's code does, so that the step is not jitted. What
lies between the products reads and writes memory once a kernel there, and once in all where XLA compiles it.

Each function here is the fast one where what is traced may have islands, and elsewhere the plain one, as JAX has it.
"""

from keras_mp.backend.tensorflow.islands.optimizer_update import update_in_one_program
from keras_mp.backend.tensorflow.islands.programs import without_islands
from keras_mp.backend.tensorflow.islands.row_normalization import normalize_rows

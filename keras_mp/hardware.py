"""`keras_mp.precision.hardware`, under its public name."""

import sys
from typing import TYPE_CHECKING

from keras_mp.precision import hardware

if TYPE_CHECKING:
    from keras_mp.precision.hardware import *

sys.modules[__name__] = hardware

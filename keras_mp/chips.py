"""`keras_mp.precision.chips`, under its public name."""

import sys
from typing import TYPE_CHECKING

from keras_mp.precision import chips

if TYPE_CHECKING:
    from keras_mp.precision.chips import *

sys.modules[__name__] = chips

from keras_mp.precision.chips import CHIPS as CHIPS
from keras_mp.precision.chips import find_chip as find_chip
from keras_mp.precision.hardware import list_devices as list_devices
from keras_mp.precision.hardware import support as support

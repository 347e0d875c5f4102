"""Predict the trouble of a precision, find the culprit, choose the precision, prove the parity."""

from keras_mp.system.stub_names import door

__getattr__, __dir__ = door(globals())

"""Predict the trouble of a precision, find the culprit, choose the precision, prove the parity."""

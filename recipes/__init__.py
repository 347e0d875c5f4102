"""Training recipes: one file a training, read top to bottom. Run one with `keras-mp train NAME`."""

from pkgutil import extend_path

# An editable install puts this repository on everyone's path: the modules of a reader's folder recipes come first.
__path__ = extend_path([], __name__)

"""Plain Keras models, one file each."""

from pkgutil import extend_path

# An editable install puts this repository on everyone's path: the modules of a reader's folder models come first.
__path__ = extend_path([], __name__)

"""Mixed-precision training for Keras 3 on TensorFlow and JAX, with every claim checked.

The public names are those of `__init__.pyi`, which type checkers read. Each is imported when it is first used, so that
`import keras_mp` itself costs nothing and imports neither TensorFlow nor JAX.
"""

import sys
from pathlib import Path
from typing import Any

from keras_mp.conversion.registration import register_classes
from keras_mp.system.stub_names import load, names_in_stub

_HOME = names_in_stub(Path(__file__).with_suffix(".pyi"))

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'keras_mp' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name not in _WITHOUT_CLASSES:
        register_classes()
    value = load(_HOME[name], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Modules whose use does not need the classes that saved models name.
_WITHOUT_CLASSES = ("backend", "chips", "hardware")

# Where Keras is not there yet, the first use of a public name registers them.
if "keras" in sys.modules:
    register_classes()

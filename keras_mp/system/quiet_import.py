"""Import Keras and what needs it without the lines that C++ writes before any log level applies."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keras_mp.system.host import NVIDIA_DRIVER, packages_for
from keras_mp.system.packages import install_command

# Where Linux shows an accelerator: NVIDIA's, NVIDIA's under Windows, AMD's, TPUs.
_CHIPS = (*NVIDIA_DRIVER, "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio")


def import_keras() -> None:
    """Imports Keras and its backend quietly.

    Raises:
        ImportError: as `import keras`; where the backend is not installed, the message says what to install.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not has_chip():
        # With the compilers of [inspect] installed, JAX would look for their chips and write pages when it finds none.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        with quiet_stderr():
            import keras  # noqa: F401
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        other = {"tensorflow": "jax", "jax": "tensorflow"}.get(name)
        if other is None or importlib.util.find_spec(name) is not None:
            raise
        way_out = f", or export KERAS_BACKEND={other}" if importlib.util.find_spec(other) is not None else ""
        raise ImportError(
            f"{name} is not installed, and Keras is set to run on it: "
            f"{install_command(name, *packages_for(name))}{way_out}"
        ) from error


def import_tensorflow() -> None:
    """Imports TensorFlow quietly, as Keras on JAX will."""
    if importlib.util.find_spec("tensorflow") is not None:
        with quiet_stderr():
            import tensorflow  # noqa: F401


def has_chip() -> bool:
    """Tells whether this machine may have an accelerator."""
    return sys.platform != "linux" or any(Path(place).exists() for place in _CHIPS)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Swallows the standard error, unless an import fails."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except ImportError:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

"""Import Keras without the lines that TensorFlow's C++ writes before any log level applies."""

import os
import sys
import tempfile


def import_keras() -> None:
    """Imports Keras, and with it the backend, quietly; if that fails, what was written is shown.

    Raises:
        ImportError: as `import keras`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            import keras  # noqa: F401
        except BaseException:
            log.seek(0)
            os.write(stderr, log.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

"""The names that both backends offer, on the one that runs."""

import ast
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_mp import backend
from keras_mp.system.host import cpu_name, peak_process_bytes

pytestmark = pytest.mark.jax


def functions_of(name):
    """The functions that a backend offers, with the names of their arguments, read without importing the backend."""
    folder = Path(backend.__file__).with_name(name)
    imports = [
        node for node in ast.parse((folder / "__init__.py").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    offered = {alias.name for node in imports for alias in node.names}
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for file in folder.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    return {name: functions.get(name) for name in offered}


def test_both_backends_offer_the_same_functions():
    tensorflow, jax = functions_of("tensorflow"), functions_of("jax")
    assert tensorflow == jax and len(tensorflow) > 40
    assert all(hasattr(backend, name) for name in tensorflow)


def test_local_devices_end_with_the_cpu():
    devices = backend.local_devices()
    assert devices[-1] == ("cpu", cpu_name(), "")


def test_peak_memory_of_a_cpu_is_that_of_the_process():
    if backend.local_devices()[0].kind != "cpu":
        pytest.skip("an accelerator is attached: the number is its own")
    assert backend.peak_memory_bytes() == pytest.approx(peak_process_bytes(), rel=0.05)


def test_version():
    assert backend.version() == metadata.version(keras.backend.backend())


def test_importing_it_imports_the_running_backend_only():
    # `import tensorflow` itself imports an installed jax, so only the other direction can be seen.
    if keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow imports an installed jax by itself")
    program = "import sys, keras_mp.backend, keras_mp.precision.policy; print('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_another_backend_is_a_clear_error():
    # Keras's NumPy backend needs nothing installed.
    done = subprocess.run(
        [sys.executable, "-c", "import keras_mp.backend"],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
    )
    assert "ImportError: keras_mp runs on the backends 'tensorflow' and 'jax', and Keras runs on 'numpy'" in done.stderr
    assert "KERAS_BACKEND" in done.stderr


def test_full_float32_is_asked_for_within_it_and_not_after():
    """A CPU has no other products, so what is asked for is looked at, not what comes out."""

    def asked():
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            return not tf.config.experimental.tensor_float_32_execution_enabled()
        import jax

        product = jax.make_jaxpr(lambda x: x @ x)(np.ones((2, 2), "float32"))
        return "HIGHEST" in str(product)

    assert not asked()
    with pytest.raises(RuntimeError, match="left by an error"), backend.full_float32():
        assert asked()
        raise RuntimeError("left by an error")
    assert not asked()

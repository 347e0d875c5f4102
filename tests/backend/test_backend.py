"""The names that both backends offer, on the one that runs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_mp import backend
from keras_mp.system.host import peak_process_bytes

pytestmark = pytest.mark.jax


PACKAGE = Path(backend.__file__).parents[1]
TREES = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
ROOMS = [file.parent for file in TREES if file.name == "_jax.py"]
IMPORTS = {file: [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] for file, tree in TREES.items()}


def offered(file):
    """What a module offers, read without importing it: functions with the names of their arguments, and constants."""
    names = {}
    for node in IMPORTS[file]:
        source = PACKAGE.parent / f"{node.module.replace('.', '/')}.py"
        source = source if source.exists() else source.with_suffix("") / "__init__.py"
        shown = [alias.name for alias in node.names if file.name == "__init__.py" or alias.asname == alias.name]
        names |= {name: offered(source)[name] for name in shown}
    for node in TREES[file].body:
        names |= {target.id: None for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            names[node.name] = [argument.arg for argument in node.args.args]
    return {name: arguments for name, arguments in names.items() if not name.startswith("_")}


def test_both_backends_offer_the_same_functions():
    tensorflow, jax = (offered(PACKAGE / "backend" / name / "__init__.py") for name in ("tensorflow", "jax"))
    assert tensorflow == jax and len(tensorflow) > 10
    assert all(hasattr(backend, name) for name in tensorflow)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_both_backends_offer_the_same_functions_to_a_room(room):
    tensorflow, jax = (offered(room / f"_{name}.py") for name in ("tensorflow", "jax"))
    nodes = [node for file, tree in TREES.items() if file.parent == room for node in ast.walk(tree)]
    taken = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "engine"}
    assert taken and {name: tensorflow[name] for name in taken} == {name: jax[name] for name in taken}
    # What one of them has alone, others of that backend import.
    imported = {alias.name for file in TREES if file.name[0] == "_" for n in IMPORTS[file] for alias in n.names}
    assert {name for name in tensorflow.keys() ^ jax.keys() if name.islower()} <= imported


def test_local_devices_end_with_the_cpu():
    devices = backend.local_devices()
    assert devices[-1] == ("cpu", "", "")


def test_peak_memory_of_a_cpu_is_that_of_the_process():
    if backend.local_devices()[0].kind != "cpu":
        pytest.skip("an accelerator is attached: the number is its own")
    assert backend.peak_memory_bytes() == pytest.approx(peak_process_bytes(), rel=0.05)


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

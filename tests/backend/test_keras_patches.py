"""Each patch of Keras is still possible and still needed, all go through one place, and are taken away again."""

import ast
import pkgutil
import re
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_mp import backend
from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.keras_patches import PATCHES, VERSIONS, Patch, patched

PACKAGE = Path(__file__).parents[2] / "keras_mp"
BACKEND = keras.backend.backend()
OWN = [patch for patch in PATCHES if BACKEND in patch.backends]
pytestmark = pytest.mark.jax
ONES = np.ones((2, 2), "float32")
HALF = "keras.Variable._maybe_autocast"


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


def here(patch):
    """The attribute as it is now."""
    owner, _, attribute = patch.place.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    return vars(owner).get(attribute), getattr(owner, attribute)


def trained():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=BACKEND == "tensorflow")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)


class Unbuilt(keras.layers.Layer):
    """Makes its weights in its first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def trained_on_devices():
    with keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1]).scope():
        trained()


def saved_and_loaded():
    with tempfile.TemporaryDirectory() as folder:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.save_weights(f"{folder}/dense.weights.h5")
        model.load_weights(f"{folder}/dense.weights.h5")


def attended_on_a_gpu():
    import jax

    x = jax.ShapeDtypeStruct((2, 16, 2, 64), "bfloat16")
    jax.eval_shape(lambda x: keras.ops.dot_product_attention(x, x, x), x)


def connected_alone():
    import socket

    from jax._src import distributed

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    state = distributed.State()
    state.initialize(f"localhost:{port}", 1, 0)
    state.shutdown()


def lowered():
    import jax

    jax.jit(lambda x: x + 1).lower(ONES)


CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
USES = {
    "keras.Variable._initialize_with_initializer": lambda: keras.Variable("zeros", (2,)),
    "keras.Variable.assign": lambda: keras.Variable("zeros", (2,)).assign(ONES[0]),
    "keras.src.saving.saving_lib.H5IOStore.__getitem__": saved_and_loaded,
    "keras.Variable._deferred_initialize": lambda: Unbuilt()(keras.Input((2,))),
    "keras.Variable._maybe_autocast": lambda: keras.Variable(1.0).value,
    "keras.StatelessScope.__init__": lambda: keras.StatelessScope(),
    "keras.random.SeedGenerator.next": lambda: keras.random.uniform((1,), seed=keras.random.SeedGenerator(1)),
    "keras.Model.compute_loss_and_updates": trained,
    "keras.src.backend.jax.distribution_lib.distribute_data_input": trained_on_devices,
    "keras.src.backend.jax.trainer.jit": trained,
    "keras.Model._make_function": trained,
    "keras.src.backend.numpy.take": lambda: keras.ops.take(ONES, [0], axis=0),
    "keras.src.backend.numpy.add": lambda: keras.ops.add(ONES, ONES[0]),
    "keras.src.backend.tensorflow.optimizer.TFOptimizer._backend_update_step": trained,
    "keras.src.backend.tensorflow.optimizer.TFOptimizer._apply_weight_decay": trained,
    "keras.src.ops.convert_to_numpy": lambda: keras.quantizers.abs_max_quantize(ONES, 0, to_numpy=True),
    "keras.src.ops.convert_to_tensor": lambda: keras.quantizers.abs_max_quantize(ONES, 0, to_numpy=True),
    "keras.src.backend.nn.gelu": lambda: keras.ops.gelu(ONES),
    "keras.src.backend.nn.silu": lambda: keras.ops.silu(ONES),
    "keras.src.backend.nn.conv": lambda: keras.ops.conv(ONES[None], ONES[None]),
    "keras.src.backend.nn.dot_product_attention": lambda: keras.ops.dot_product_attention(*[ONES[None, None]] * 3),
    "jax.devices": lambda: keras.ops.dot_product_attention(*[ONES[None, None]] * 3),
    "jax._src.dispatch.jaxpr_has_prim_requiring_devices": lowered,
    "jax._src.distributed._jax.get_distributed_runtime_service": connected_alone,
    "jax.default_backend": lambda: keras.layers.LSTM(1)(ONES[None]),
    f"{CUDNN}.check_cudnn_version": attended_on_a_gpu,
    f"{CUDNN}.check_compute_capability": attended_on_a_gpu,
    f"{CUDNN}.is_cuda_compute_capability_equal": attended_on_a_gpu,
    "keras.src.backend.tensorflow.nn._cpu_only": lambda: keras.ops.depthwise_conv(
        ONES[None], ONES[None], data_format="channels_first"
    ),
    "keras.src.backend.tensorflow.rnn._is_gpu_available": lambda: keras.layers.LSTM(1)(ONES[None]),
}


@pytest.mark.parametrize("patch", OWN, ids=lambda patch: patch.name)
def test_keras_still_has_and_calls_what_is_replaced(patch):
    calls = []

    def counted(original):
        def call(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        return call

    gpu = backend.traced_for(TracedChip("gpu", 10.3, "NVIDIA B300")) if patch.name.startswith(CUDNN) else nullcontext()
    with gpu, patched({patch.name: counted}):
        USES[patch.name]()
    assert calls
    assert version(VERSIONS[0]) <= version(keras.__version__) <= version(VERSIONS[1]), "not tried with this Keras"


def test_each_patch_says_why_and_is_of_the_versions_that_the_kit_supports():
    import tomllib

    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    (supported,) = [each for each in project["dependencies"] if each.startswith("keras>=")]
    for patch in PATCHES:
        assert patch.reason.endswith((".", ")."))
    assert supported == f"keras>={VERSIONS[0]},<3.{version(VERSIONS[1])[1] + 1}"
    assert len(PATCHES) == len({patch.name for patch in PATCHES}) == len(USES)


def assigned_to_others(source):
    """The attributes of Keras, TensorFlow or JAX that a module assigns, as `file: line`."""
    tree = ast.parse(source)
    foreign = {"keras", "tensorflow", "jax"}
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: node.module for alias in node.names}
    theirs = {name for name, module in names.items() if module.partition(".")[0] in foreign}

    def root(target):
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        return getattr(target, "id", None)

    lines = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        flat = [part for target in targets for part in getattr(target, "elts", [target])]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            lines += [node.lineno] if root(node.args[0]) in theirs else []
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            lines += [node.lineno for part in flat if isinstance(part, ast.Attribute) and root(part) in theirs]
    return lines


def test_no_other_module_replaces_attributes_of_keras_tensorflow_or_jax():
    sample = "import keras\nfrom keras.src import a as b\nb.c, keras.D.e = 1, 2\nsetattr(b, 'c', 1)\nself.keras = b.c"
    assert assigned_to_others(sample) == [3, 3, 4]
    where = {str(path.relative_to(PACKAGE)): assigned_to_others(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in where.items() if lines} == {}
    imported = [path.name for path in PACKAGE.rglob("*.py") if "unittest" in path.read_text()]
    assert imported == []


@pytest.mark.parametrize("patch", OWN, ids=lambda patch: patch.name)
def test_after_an_exception_the_attribute_is_as_it_was(patch):
    before = here(patch)
    with pytest.raises(KeyError), patched({patch.name: lambda original: None}):
        assert here(patch)[1] is None
        raise KeyError
    assert here(patch) == before


def tagged(tag):
    return lambda read: lambda variable, value: read(variable, value) + tag


def test_scopes_nest_and_end_in_any_order():
    v = keras.Variable(0.0)
    ten, hundred = patched({HALF: tagged(10.0)}), patched({HALF: tagged(100.0)})
    ten.__enter__()
    assert float(v.value) == 10
    hundred.__enter__()
    assert float(v.value) == 110
    ten.__exit__(None, None, None)
    assert float(v.value) == 100
    hundred.__exit__(None, None, None)
    assert float(v.value) == 0


def test_the_same_function_in_two_scopes_is_applied_once():
    v, once = keras.Variable(0.0), tagged(10.0)
    with patched({HALF: once}):
        with patched({HALF: once}):
            assert float(v.value) == 10
        assert float(v.value) == 10
    assert float(v.value) == 0


def test_threads_leave_nothing_behind():
    before, errors = vars(keras.Variable).get("_maybe_autocast"), []
    start = threading.Barrier(8)

    def enter_and_leave(tag):
        start.wait()
        for _ in range(200):
            with patched({HALF: tagged(tag)}):
                v = keras.Variable._maybe_autocast
            if not callable(v):
                errors.append(v)

    threads = [threading.Thread(target=enter_and_leave, args=(float(index),)) for index in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors
    assert vars(keras.Variable).get("_maybe_autocast") is before
    assert float(keras.Variable(3.0).value) == 3


def test_what_cannot_be_made_leaves_the_others_as_they_were():
    def fails(original):
        raise KeyError("no replacement")

    v = keras.Variable(1.0)
    with pytest.raises(KeyError), patched({HALF: tagged(5.0), "keras.StatelessScope.__init__": fails}):
        pass
    assert float(v.value) == 1
    assert keras.StatelessScope().state_mapping == {}


def test_an_attribute_that_keras_has_lost_is_named_with_the_versions_that_have_it(monkeypatch):
    from keras_mp.backend.common import keras_patches

    gone = Patch("keras:Variable._gone", ("jax",), "It was there.")
    monkeypatch.setitem(keras_patches._BY_NAME, gone.name, gone)
    with pytest.raises(AttributeError, match=r"there is no keras\.Variable\._gone.*It was there\..*3\.13 to 3\.15"):
        with patched({gone.name: tagged(1.0)}):
            pass
    with pytest.raises(ValueError, match="'keras.Variable.value' is no patch of Keras"):
        with patched({"keras.Variable.value": tagged(1.0)}):
            pass


def test_private_modules_of_keras_are_named_in_one_file_and_those_of_a_backend_in_its_folder():
    named = {
        (file.relative_to(PACKAGE).as_posix(), node.module)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src")
    }
    elsewhere = {(file, module) for file, module in named if file != "backend/common/keras_private.py"}
    assert len(named) > len(elsewhere)
    assert all(re.search(rf"(^backend/|/_){module.split('.')[3]}", file) for file, module in elsewhere)

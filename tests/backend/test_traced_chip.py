"""A step is traced for the chip that `traced_for` names: each place that asks for a platform, and its answer."""

import ast
import re
import threading
from importlib.metadata import version
from pathlib import Path

import keras
import pytest

import keras_mp
from keras_mp import backend
from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.keras_patches import PATCHES
from keras_mp.planner.chips.targets import find_target

pytestmark = pytest.mark.jax
only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="of TensorFlow's attention there is one form")

# Calls that ask which chip is there. What they return (`device.platform`) is read where they stand.
ASKS = re.compile(
    r"(jax\.(devices|local_devices|device_count|local_device_count|default_backend)|jax\.lax\.platform_dependent"
    r"|tf\.config\.(list_logical_devices|list_physical_devices|experimental\.get_device_details)"
    r"|(\w+\.)*(check_cudnn_version|check_compute_capability|is_cuda_compute_capability_equal)|traced_chip)"
)
ANSWERED = "answered within traced_for"
LOWERED = "JAX lowers the branch of the platform that it lowers for"
NOT_TRACED = "asked before or after a step is traced, about this machine"
NEVER = "never asked on TensorFlow, for which KerasHub has no fused attention"
PLACES = {
    "keras/backend/jax/distribution_lib.py": dict.fromkeys(
        ("list_devices", "get_device_count", "initialize_rng", "_to_backend_device"), NOT_TRACED
    ),
    "keras/backend/jax/export.py": {"JaxExportArchive._check_device_compatible": NOT_TRACED},
    "keras/backend/jax/nn.py": dict.fromkeys(("_can_use_flash_attention", "dot_product_attention"), ANSWERED),
    "keras/backend/jax/numpy.py": {"_uses_cpu": ANSWERED},
    # cuDNN's recurrent layers need cuDNN to be traced: without it Keras takes its own form.
    "keras/backend/jax/rnn.py": {"_is_gpu_available": ANSWERED},
    "keras/backend/jax/trainer.py": {"JAXEpochIterator._get_iterator": NOT_TRACED},
    "keras/backend/tensorflow/distribution_lib.py": {"list_devices": NOT_TRACED},
    "keras/backend/tensorflow/nn.py": {"_cpu_only": ANSWERED},
    "keras/backend/tensorflow/rnn.py": {"_is_gpu_available": ANSWERED},
    "keras/ops/nn.py": {"dot_product_attention": ANSWERED},
    "keras/trainers/data_adapters/data_adapter_utils.py": dict.fromkeys(
        ("scipy_sparse_to_jax_sparse", "tf_sparse_to_jax_sparse"), NOT_TRACED
    ),
    "keras/trainers/trainer.py": dict.fromkeys(("Trainer._resolve_auto_jit_compile", "model_supports_jit"), NOT_TRACED),
    # Each asks JAX in one branch, and TensorFlow in another.
    "keras_hub/utils/keras_utils.py": dict.fromkeys(
        ("running_on_tpu", "running_on_gpu", "get_gpu_names"), f"{ANSWERED}; {NEVER}"
    ),
    "keras_mp/backend/jax/devices.py": {
        **dict.fromkeys(("traced_chip", "_start", "_look_quietly"), NOT_TRACED),
        "bfloat16_options": ANSWERED,
    },
    "keras_mp/backend/tensorflow/devices.py": dict.fromkeys(("_describe", "peak_memory_bytes"), NOT_TRACED),
    "keras_mp/backend/tensorflow/tensors.py": {"_runs_kernels_of_cpus": ANSWERED},
    "keras_mp/fp8/_jax.py": dict.fromkeys(("block_scaled_dot", "row_major"), LOWERED),
    "keras_mp/fp8/_tensorflow.py": {"scaled_dot": ANSWERED},
    "keras_mp/lean/_jax.py": dict.fromkeys(("fused_attention", "keras_has_kernel"), ANSWERED),
    "keras_mp/optimizer/_jax.py": {
        **dict.fromkeys(("check_host_memory", "keep_on_host"), NOT_TRACED),
        **dict.fromkeys(("fetches_early", "_is_for_cpu"), ANSWERED),
    },
    "keras_mp/optimizer/_tensorflow.py": {"_is_jitted_for_an_accelerator": ANSWERED},
    "keras_mp/lowering/_jax.py": {"_lower.laid_out": NOT_TRACED},
    "keras_mp/parallel/_jax.py": {"tpu_coordinates": NOT_TRACED},
    "keras_mp/parallel/_tensorflow.py": {"_take_gpus": NOT_TRACED},
    "keras_mp/stability/_jax.py": {"fused_attention_in_float32": ANSWERED, "einsum_float32": LOWERED},
    "keras_mp/stability/attention/_jax.py": dict.fromkeys(
        ("attention_as_asked", "_as_asked.dot_product_attention"), ANSWERED
    ),
    "keras_mp/stability/_tensorflow.py": {"einsum_float32": ANSWERED},
    "keras_mp/stability/stabilized.py": {"attended_by": ANSWERED},
    "keras_mp/planner/compile/worker.py": {"_compile": NOT_TRACED},
}
LISTED_OF = {"keras": "3.15.1", "keras-hub": "0.32.0"}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def asking(node, inside=""):
    """The names of the functions and methods that ask."""
    for child in ast.iter_child_nodes(node):
        here = inside
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            here = f"{inside}.{child.name}".removeprefix(".")
        if isinstance(child, ast.Call) and ASKS.fullmatch(dotted(child.func).removeprefix("backend.")):
            yield here
        yield from asking(child, here)


def places(package, root):
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.endswith("_test.py") or re.search(r"(^|/)(torch|openvino|testing|tests)/", name):
            continue
        if ASKS.search(path.read_text()):
            found[f"{package}/{name}"] = set(asking(ast.parse(path.read_text())))
    return {name: functions for name, functions in found.items() if functions}


def test_every_place_that_asks_for_a_platform_is_listed_with_its_answer():
    import keras.src
    import keras_hub.src

    roots = {"keras": keras.src, "keras_hub": keras_hub.src, "keras_mp": keras_mp}
    found = {}
    for package, module in roots.items():
        found |= places(package, Path(module.__file__).parent)
    listed = {name: set(functions) for name, functions in PLACES.items()}
    if {name: version(name) for name in LISTED_OF} == LISTED_OF:
        assert found == listed
    unlisted = {name: functions - listed.get(name, set()) for name, functions in found.items()}
    assert {name: functions for name, functions in unlisted.items() if functions} == {}


def test_what_is_replaced_to_answer_is_what_the_list_names():
    names = {patch.name for patch in PATCHES}
    assert {"jax.devices", "jax.default_backend", "keras.src.backend.tensorflow.nn._cpu_only"} <= names
    assert backend.traced_chip().platform == "cpu"
    with backend.traced_for(find_target("v5e").traced):
        assert backend.traced_chip() == TracedChip("tpu", None, "TPU v5 lite")
        with backend.traced_for(find_target("h100").traced):
            assert backend.traced_chip() == TracedChip("gpu", 9.0, "NVIDIA H100 80GB HBM3")


@only_jax
@pytest.mark.parametrize("target", ["v6e", "b300", "t4", "host"])
def test_keras_and_kerashub_find_the_chip_of_the_scope_and_other_threads_this_machine(target):
    import jax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from keras_hub.src.utils import keras_utils

    chip, real, others = find_target(target).traced, jax.devices(), []
    with backend.traced_for(chip):
        assert jax.default_backend() == jax.devices()[0].platform == chip.platform
        assert jax.devices("cpu") == real
        assert (keras_utils.running_on_gpu(), keras_utils.running_on_tpu()) == (
            chip.platform == "gpu",
            chip.platform == "tpu",
        )
        assert keras_utils.gpu_supports_fused_attention_op() is (target != "t4")
        asked = [cudnn.check_compute_capability(capability) for capability in ("7.5", "8.0", "10.0", "10.3", "12.0")]
        assert asked == {"b300": [True] * 4 + [False], "t4": [True] + [False] * 4}.get(target, [False] * 5)
        assert cudnn.is_cuda_compute_capability_equal("10.3") is (target == "b300")
        thread = threading.Thread(target=lambda: others.extend([jax.devices(), jax.default_backend()]))
        thread.start()
        thread.join()
    assert others == [real, "cpu"] and jax.devices() == real


@only_jax
def test_a_model_that_was_lowered_for_one_chip_is_lowered_anew_for_another():
    from keras_mp.lowering import lower_step

    x = keras.Input((256, 128), dtype="bfloat16")
    attention = keras.layers.MultiHeadAttention(2, 64, dtype="bfloat16")
    model = keras.Model(x, attention(x, x))
    kernels = {}
    for target in ("h100", "host", "t4", "b200"):
        step = lower_step(model, keras.KerasTensor((2, 256, 128)), training=False, chip=find_target(target).traced)
        kernels[target] = len(re.findall(r"custom_call @__cudnn\$fmha", step.module.decode()))
    assert kernels == {"h100": 1, "host": 0, "t4": 0, "b200": 1}

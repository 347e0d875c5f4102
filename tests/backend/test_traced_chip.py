"""A step is traced for the chip that `traced_for` names: each place that asks for a platform, and its answer."""

import re
import threading

import keras
import pytest

from keras_mp import backend
from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.keras_patches import PATCHES
from keras_mp.planner.chips.targets import find_target

pytestmark = pytest.mark.jax
only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="of TensorFlow's attention there is one form")


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

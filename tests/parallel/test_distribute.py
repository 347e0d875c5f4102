"""What a plan says, and what it refuses; and the tests of several devices, started in a process of their own."""

from pathlib import Path

import keras
import pytest
from in_own_process import QUICK, RARE, SLOW, run

import keras_mp
from keras_mp.parallel.distribution import make_plan
from keras_mp.parallel.plan import Plan, plan_of
from models.gpt import TENSOR_RULES

HERE = Path(__file__).parent
TENSORFLOW = keras.backend.backend() == "tensorflow"
EIGHT = [f"cpu:{index}" for index in range(8)]
pytestmark = pytest.mark.jax
only_jax = pytest.mark.skipif(TENSORFLOW, reason="TensorFlow has data parallelism only")


@pytest.mark.parametrize("part", [QUICK, SLOW, RARE])
def test_several_devices_do_as_one(part):
    names = ["on_several_devices"]
    if not TENSORFLOW:
        names += ["gathers_on_devices", "loading_on_devices"]
    if part != "not slow":  # the others' models are KerasHub's, which is slow to import
        names += ["experts_on_devices"] * (not TENSORFLOW and part != "rare")
        packs_int4_in_groups = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)
        names += ["quantized_on_devices"] * packs_int4_in_groups
    run([HERE / f"{name}.py" for name in names], part, devices=8)


def test_fully_sharded_splits_the_first_axis_that_divides():
    plan = Plan("fully_sharded", (), (8,))
    assert plan.axes_of("kernel", (16, 24), "float32") == ("batch", None)
    assert plan.axes_of("kernel", (3, 24), "float32") == (None, "batch")
    assert plan.axes_of("kernel", (3, 5), "float32") == (None, None)
    assert plan.axes_of("scale", (), "float32") == ()
    assert plan.axes_of("kernel_momentum", (16, 24), "float8_e4m3fn") == ("batch", None)
    assert plan.axes_of("kernel_momentum_scale", (16, 1), "float32") == ("batch", None)
    assert plan.axes_of("seed_generator_state", (8,), "uint32") == (None,)
    assert plan.axes_of("dense/kernel", (16, 24), "int8") == ("batch", None)
    tensor = Plan("tensor", (), (2, 4), rules=((r"kernel", (None, "model")),))
    assert tensor.axes_of("dense/kernel", (16, 24), "int8") == (None, None)


def test_tensor_rules_hold_for_a_weight_and_its_slots():
    plan = Plan("tensor", (), (2, 4), rules=TENSOR_RULES)
    for path in ("block1_dense_1/kernel", "adamw/block1_dense_1_kernel_momentum"):
        assert plan.axes_of(path, (8, 32), "float32") == (None, "model")
    assert plan.axes_of("block1_attention/output/kernel", (8, 8), "float32") == ("model", None)
    assert plan.axes_of("normalization/gamma", (8,), "float32") == (None,)
    # What Keras calls the layers of a stranger's model.
    assert plan.axes_of("sequential/dense_1/kernel", (8, 32), "float32") == (None, None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"strategy": "sharded"},
            "strategy='sharded' must be one of .*Did you mean 'fully_sharded'",
        ),
        ({"reduce_dtype": "float16"}, "reduce_dtype='float16' must be one of 'float32', 'bfloat16'"),
        ({"devices": 9}, "devices=9 must be from 1 to 8"),
        ({"devices": ["cpu:0", "cpu:9"]}, "must be different names among cpu:0"),
        ({"mesh": (2, 4)}, "mesh=.2, 4. is for strategy='tensor'"),
        ({"gather_dtype": "bfloat16"}, "gather_dtype='bfloat16' must be one of 'compute', 'float8'"),
        ({"gather_dtype": "float8"}, "gather_dtype='float8' is for strategy='fully_sharded'; 'data' leaves"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**({"strategy": "data", "available": EIGHT} | arguments))


@only_jax
def test_a_mesh_that_does_not_match_the_devices():
    with pytest.raises(ValueError, match=r"mesh=\(2, 3\) must be two numbers whose product is .* 8"):
        make_plan("tensor", EIGHT, mesh=(2, 3))
    with pytest.raises(ValueError, match="chooses their dtype"):
        make_plan("tensor", EIGHT, reduce_dtype="bfloat16")


@pytest.mark.skipif(not TENSORFLOW, reason="JAX has all layouts")
@pytest.mark.parametrize("layout", ["fully_sharded", "tensor"])
def test_tensorflow_says_what_it_cannot_do(layout):
    with pytest.raises(ValueError, match=f"strategy='{layout}' needs JAX .*whole copy of the model on each device"):
        with keras_mp.parallel.distribute(layout):
            pass


def test_float16_on_a_tpu():
    plan = Plan("data", ("tpu:0", "tpu:1"), (2,))
    plan.check_dtypes(["float32", "bfloat16"])
    with pytest.raises(ValueError, match="a TPU has no float16 hardware"):
        plan.check_dtypes(["float32", "float16"])


def test_a_plan_for_devices_that_are_not_there():
    assert plan_of("tensor", 16).shape == (1, 16)
    assert plan_of("data", 16).shape == (16,)
    with pytest.raises(ValueError, match="strategy='fsdp' must be one of"):
        plan_of("fsdp", 16)
    with pytest.raises(ValueError, match="which takes 8 devices, not 16"):
        plan_of(Plan("data", (), (8,)), 16)


def test_rows_of_32_numbers_and_more_are_quantized():
    plan = Plan("fully_sharded", (), (8,), gather_dtype="float8")
    assert plan.in_8_bits((16, 32), "float32") and plan.in_8_bits((3, 3, 8, 64), "bfloat16")
    for shape, dtype in [((64,), "float32"), ((64, 31), "float32"), ((64, 64), "int8"), ((64, 64), "float8_e4m3fn")]:
        assert not plan.in_8_bits(shape, dtype)
    assert not Plan("fully_sharded", (), (8,)).in_8_bits((16, 32), "float32")

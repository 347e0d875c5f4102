"""What is gathered in one byte; the tests on 8 devices start in a process of their own."""

from pathlib import Path

import keras
import pytest
from in_own_process import QUICK, REST, SLOW, run

from keras_mp.parallel.distribute import make_plan
from keras_mp.parallel.plan import Plan

only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has data parallelism only")


@only_jax
@pytest.mark.parametrize("part", [QUICK, REST, SLOW])
def test_weights_in_one_byte_on_8_devices(part):
    run(Path(__file__).with_name("gathers_on_devices.py"), part, devices=8)


def test_rows_of_32_numbers_and_more_are_quantized():
    plan = Plan("fully_sharded", (), (8,), gather_dtype="float8")
    assert plan.rows_of((16, 32), "float32") and plan.rows_of((3, 3, 8, 64), "bfloat16")
    for shape, dtype in [((64,), "float32"), ((64, 31), "float32"), ((64, 64), "int8"), ((64, 64), "float8_e4m3fn")]:
        assert plan.rows_of(shape, dtype) is None
    assert Plan("fully_sharded", (), (8,)).rows_of((16, 32), "float32") is None


def test_what_gather_dtype_refuses():
    with pytest.raises(ValueError, match="gather_dtype='bfloat16' is not one of compute, float8"):
        make_plan("data", ["cpu:0"], gather_dtype="bfloat16")
    with pytest.raises(ValueError, match="gather_dtype='float8' is for layout='fully_sharded'; 'data' leaves"):
        make_plan("data", ["cpu:0"], gather_dtype="float8")

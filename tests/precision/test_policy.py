import warnings

import fake_devices as fake
import keras
import pytest

from keras_mp.precision import policy
from keras_mp.precision.policy import choose_policy, set_global_policy


@pytest.fixture(autouse=True)
def global_policy():
    """Leaves the global policy as it was."""
    before = keras.mixed_precision.dtype_policy()
    yield
    keras.mixed_precision.set_global_policy(before)


@pytest.fixture
def on(monkeypatch):
    """Puts the program on a device, and on a backend as far as the choice of a policy goes."""

    def put(device, backend="tensorflow"):
        monkeypatch.setattr(policy, "current_device", lambda: device)
        monkeypatch.setattr(keras.backend, "backend", lambda: backend)

    return put


def global_name():
    return keras.mixed_precision.dtype_policy().name


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_auto_on_accelerators(on, backend):
    for name, devices in {
        "float32": (fake.P100, fake.ARC, fake.METAL),
        "mixed_float16": (fake.V100, fake.T4, fake.MI100),
        "mixed_bfloat16": (*fake.TPUS, fake.A100, fake.L4, fake.H100, fake.B200, fake.MI250X, fake.MI300X),
    }.items():
        for device in devices:
            on(device, backend)
            choice = choose_policy()
            assert choice.policy == name, device.name
            # On JAX always; on TensorFlow wherever there is XLA.
            assert choice.jit_compile == (backend == "jax" or device is not fake.METAL), device.name
            assert device.name in choice.reason


def test_auto_on_a_cpu(on, monkeypatch):
    for device in fake.CPUS:
        on(device, "tensorflow")
        fast = device in (fake.AVX512_CPU, fake.AMX_CPU)
        choice = choose_policy()
        assert choice.policy == ("mixed_bfloat16" if fast else "float32") and not choice.jit_compile, device.flags
        on(device, "jax")
        monkeypatch.setattr(policy, "bfloat16_options", dict)
        choice = choose_policy()
        assert choice.policy == "float32" and choice.jit_compile, device.flags
        monkeypatch.setattr(policy, "bfloat16_options", lambda: {"an_option_of_xla": True})
        choice = choose_policy()
        assert choice.policy == ("mixed_bfloat16" if fast else "float32") and choice.jit_compile, device.flags


def test_the_reason_tells_the_measurement_on_a_cpu(on, monkeypatch):
    on(fake.AVX512_CPU, "tensorflow")
    assert "Dense layers of 256 units or more train 1.1 to 1.4 times as fast as in float32" in choose_policy().reason
    on(fake.AVX512_CPU, "jax")
    monkeypatch.setattr(policy, "bfloat16_options", dict)
    assert "no faster than float32 with JAX: jax 0.12 and Python 3.12" in choose_policy().reason
    monkeypatch.setattr(policy, "bfloat16_options", lambda: {"an_option_of_xla": True})
    assert "a model that prepare made" in choose_policy().reason
    on(fake.ARM_CPU)
    assert "not been measured" in choose_policy().reason


def test_auto_never_warns(on):
    for device in fake.ALL:
        on(device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            choice = set_global_policy()
            assert global_name() == choice.policy
            assert set_global_policy(choice.policy).jit_compile == choice.jit_compile
            assert set_global_policy("float32").policy == global_name() == "float32"


def test_set_global_policy_reaches_layers(on):
    on(fake.T4)
    assert set_global_policy("auto").policy == "mixed_float16"
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    assert (layer.compute_dtype, layer.kernel.dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    ("device", "backend", "name", "use"),
    [
        (fake.T4, "tensorflow", "mixed_bfloat16", "mixed_float16"),
        (fake.P100, "tensorflow", "mixed_float16", "float32"),
        (fake.TPUS[3], "jax", "mixed_float16", "mixed_bfloat16"),
        (fake.PLAIN_CPU, "tensorflow", "mixed_bfloat16", "float32"),
        (fake.AVX512_CPU, "tensorflow", "mixed_float16", "mixed_bfloat16"),
        (fake.AVX512_CPU, "jax", "mixed_bfloat16", "float32"),
    ],
)
def test_an_unserved_policy_is_set_with_a_warning_at_the_caller(on, device, backend, name, use):
    on(device, backend)
    with pytest.warns(UserWarning, match=f"{name}: {device.name}.*Use '{use}' here") as caught:
        assert set_global_policy(name).policy == name
    assert global_name() == name
    with pytest.warns(UserWarning) as caught_in_scope, set_global_policy(name):
        pass
    assert {warning.filename for warning in [*caught, *caught_in_scope]} == {__file__}


def test_fp8_is_mixed_bfloat16_with_layers_to_convert(on):
    on(fake.H100)
    choice = set_global_policy("fp8")
    assert choice.policy == "fp8" and choice.jit_compile and "fp8 tensor cores" in choice.reason
    assert global_name() == "mixed_bfloat16"
    on(fake.A100)
    with pytest.warns(UserWarning, match="fp8: .* no FP8 tensor cores .* Use 'mixed_bfloat16' here"):
        assert set_global_policy("fp8").policy == "fp8"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixed_bfloat", "Did you mean 'mixed_bfloat16'"),
        ("float16", "would keep the weights in float16.*Use 'mixed_float16', or 'bfloat16'"),
        ("bf16", "name='bf16' is no policy. Did you mean 'mixed_bfloat16'\\?"),
        ("FP16", "name='FP16' is no policy. Did you mean 'mixed_float16'\\?"),
        ("fastest", "must be one of 'auto'"),
        (None, "name=None must be one of"),
    ],
)
def test_unknown_name(name, said):
    before = keras.mixed_precision.dtype_policy()
    for call in (set_global_policy, lambda name: set_global_policy(name).__enter__()):
        with pytest.raises(ValueError, match=said) as error:
            call(name)
        assert "mixed_bfloat16" in str(error.value)
        assert keras.mixed_precision.dtype_policy() is before


def test_policy_scope_restores_after_an_exception(on):
    on(fake.H100)
    keras.mixed_precision.set_global_policy("mixed_float16")
    before = keras.mixed_precision.dtype_policy()
    with pytest.raises(KeyError), set_global_policy("float32") as choice:
        assert choice.policy == global_name() == "float32"
        raise KeyError
    assert keras.mixed_precision.dtype_policy() is before


def test_policy_scope_restores_a_map(on):
    on(fake.H100)
    before = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    before["dense"] = keras.dtype_policies.DTypePolicy("float32")
    keras.mixed_precision.set_global_policy(before)
    with set_global_policy("float32"):
        assert global_name() == "float32"
    assert keras.mixed_precision.dtype_policy() is before

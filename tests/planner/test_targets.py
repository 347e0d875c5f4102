import importlib.util
import re

import pytest

from keras_mp.backend.common.device import absent_chip
from keras_mp.lowering import traced
from keras_mp.planner.chips.targets import find_target, missing_compiler, target_names
from keras_mp.precision.chips import CHIPS
from keras_mp.precision.hardware import current_device
from keras_mp.precision.policy import choose_policy
from keras_mp.system.packages import install_command


def test_every_target_is_a_chip_or_the_host():
    assert {name for name in target_names() if name != "host"} <= CHIPS.keys()
    wanted = {"v4", "v5e", "v5p", "v6e", "v7x", "t4", "a100", "l4", "h100", "h200", "b200", "rtx4090", "b300", "host"}
    assert set(target_names()) >= wanted and not set(target_names()) & {"v2", "p100", "mi300x"}


@pytest.mark.parametrize(
    "name", [name for name in target_names() if CHIPS.get(name) and CHIPS[name].vendor == "nvidia"]
)
def test_a_gpu_is_described_as_its_chip_is(name):
    target = find_target(name.upper())
    described = dict(re.findall(r"^  (\w+): ([\d.]+)$", target.configuration, re.MULTILINE))
    chip = target.chip
    assert float(described["memory_bandwidth"]) == pytest.approx(chip.bandwidth, rel=0.01)
    # A device reports a little less than its module's memory.
    assert 0.9 < float(described["device_memory_size"]) / chip.memory_bytes <= 1.01
    major, minor = chip.architecture.split(".")
    assert f"major: {major} minor: {minor}" in target.configuration
    lanes = float(described["core_count"]) * float(described["fpus_per_core"])
    assert 2 * lanes * float(described["clock_rate_ghz"]) * 1e9 == pytest.approx(chip.peak["float32"], rel=0.06)


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.vendor != "amd"])
def test_a_model_that_is_built_for_a_chip_has_its_policy(name):
    with absent_chip(traced(CHIPS[name])):
        device, policy = current_device(), choose_policy().policy
    assert (device.architecture, device.vendor) == (CHIPS[name].architecture, CHIPS[name].vendor)
    generation = float(CHIPS[name].architecture) if device.vendor == "nvidia" else 10.0
    expected = "float32" if generation < 7 else "mixed_float16" if generation < 8 else "mixed_bfloat16"
    assert policy == expected and current_device() != device


def test_unknown():
    with pytest.raises(ValueError, match="target='h10O' is not known. Did you mean 'h100'\\? Known: v4, v5e"):
        find_target("h10O")


@pytest.mark.parametrize("name, module", [("h100", "jax_cuda13_plugin"), ("v5e", "libtpu"), ("host", "jax")])
def test_what_is_missing_is_said_with_the_command(monkeypatch, name, module):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == module else find_spec(wanted))
    missing = missing_compiler(find_target(name))
    assert module in missing and install_command("inspect") in missing


@pytest.mark.parametrize("name", ["h100", "v5e", "host"])
def test_all_is_there(name):
    assert not missing_compiler(find_target(name))


@pytest.mark.parametrize("name", target_names())
def test_a_target_is_found_by_the_title_that_targets_prints(name):
    title = find_target(name).title
    assert find_target(title).name == find_target(title.lower()).name == name


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [("RTX 4090", "rtx4090", 1), ("h100x8", "h100", 8), ("v5e-8", "v5e", 8), ("CPU", "host", 1)],
)
def test_several_of_a_target_are_named_at_once(text, name, count):
    target = find_target(text)
    assert (target.name, target.chips) == (name, count)


@pytest.mark.parametrize("text", ["h10O", "h10Ox8", "v100x8", "h100x0"])
def test_several_of_what_is_no_target(text):
    with pytest.raises(ValueError, match=f"target='{text}' (is not known|names 0 H100 SXM5 chips: the least is 1)"):
        find_target(text)


def test_an_nvidia_gpu_before_turing_cannot_be_compiled_for():
    for name, capability in (("V100", "7.0"), ("P100", "6.0")):
        with pytest.raises(
            ValueError, match=rf"takes Tesla .* \(compute capability {capability}\): .* begins with 7.5"
        ):
            find_target(name)


def test_a_chip_without_a_compiler_here_is_no_target():
    with pytest.raises(ValueError, match="target='MI300X' is not known: no compiler .* Instinct MI300X. Known: v4"):
        find_target("MI300X")

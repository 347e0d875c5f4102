import subprocess
import sys

import pytest

from keras_mp.system import host

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu avx512_bf16 avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16 sve\nCPU implementer\t: 0x41\n"


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path):
    """Replaces /proc/cpuinfo; None removes it."""

    def write(text):
        path = tmp_path / "cpuinfo"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(host, "_CPUINFO", path)

    return write


def test_x86(cpuinfo):
    cpuinfo(X86)
    assert host.cpu_name() == "AMD EPYC 9654"
    assert host.cpu_flags() == {"fpu", "avx512_bf16", "avx2"}


def test_arm_has_features_and_no_model_name(cpuinfo, monkeypatch):
    cpuinfo(ARM)
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")
    assert host.cpu_name() == "aarch64"
    assert host.cpu_flags() == {"fp", "asimd", "bf16", "sve"}


def test_a_system_that_tells_nothing(cpuinfo, monkeypatch):
    cpuinfo(None)
    monkeypatch.setattr(host.sys, "platform", "win32")
    assert host.cpu_flags() == frozenset()
    assert host.cpu_name()


def test_macos_flags():
    printed = "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0\nmachdep.cpu.features: FPU AVX1.0\n"
    assert host._sysctl_flags(printed) == {"bf16", "fpu", "avx1.0"}


def test_macos_without_sysctl(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("sysctl")

    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.subprocess, "run", missing)
    assert host._sysctl("hw.optional") == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the parent's memory counts too")
def test_peak_process_bytes_is_that_of_this_process_alone():
    """A child that holds 100 MB, of a parent that holds more."""
    held = bytearray(b"1") * 200_000_000
    program = f"import runpy; f = runpy.run_path({host.__file__!r}); x = bytearray(b'1') * 100_000_000; "
    program += "print(f['peak_process_bytes']())"
    peak = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert len(held) > 150_000_000 > peak >= 100_000_000

"""`keras-mp doctor`: what is installed, what this hardware can do."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_mp.system.host import packages_for, unseen_accelerators
from keras_mp.system.packages import install_command, installed
from keras_mp.system.quiet_import import has_chip, import_keras

BACKENDS = ("tensorflow", "jax")

# Extra, the modules that it brings, and what it is for.
_EXTRAS = (
    ("tensorflow", ("tensorflow",), "one of the two backends; needed to write SavedModels"),
    ("jax", ("jax",), "one of the two backends; needed for TPUs"),
    ("data", ("tensorflow_datasets", "sklearn"), "the data sets of the training recipes"),
    (
        "inspect",
        ("libtpu", "jax_cuda13_plugin"),
        "the compilers of chips that are not attached, for `keras-mp inspect`",
    ),
    ("export", ("onnx", "onnxruntime", "tf2onnx"), "ONNX files: export_onnx, `keras-mp export --format onnx`"),
    ("plots", ("matplotlib",), "the pictures of training recipes"),
)


def doctor() -> RenderableType:
    """Examines this environment, also with a broken or missing backend."""
    backend = configured_backend()
    problem = _problem(backend)
    middle = [_section("Problem", (), problem)] if problem else _hardware(backend)
    return Group(_section("Versions", _versions(backend)), *middle, *_missing())


def configured_backend() -> str:
    """Finds the backend that Keras would choose, without importing it."""
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text())["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow"


def _problem(backend: str) -> str:
    """Why the backend cannot be used, and the way out."""
    if not _installed("keras"):
        return "Keras is not installed: pip install keras"
    if backend not in BACKENDS:
        return f"Keras is set to the backend {backend!r}, and keras_mp runs on {' and '.join(BACKENDS)}. {_switch()}"
    if not _installed(backend):
        return f"Keras is set to the backend {backend!r}, which is not installed. {_switch(install=backend)}"
    return ""


def _switch(install: str = "") -> str:
    ways = [f"export KERAS_BACKEND={name}" for name in BACKENDS if _installed(name)]
    if install or not ways:
        backend = install or BACKENDS[0]
        ways.append(install_command(backend, *packages_for(backend)))
    return "Way out: " + ", or ".join(ways)


def _installed(module: str) -> bool:
    return find_spec(module) is not None


def _versions(backend: str) -> list[tuple[str, str]]:
    versions = installed(("keras-mp", "keras", *BACKENDS))
    rows = [
        ("keras-mp", versions.get("keras-mp", "run from a checkout, not installed")),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("keras", versions.get("keras", "not installed")),
    ]
    for name in BACKENDS:
        # Builds of TensorFlow have several distribution names (tensorflow-cpu, tensorflow-rocm).
        version = versions.get(name, "installed" if _installed(name) else "not installed")
        rows.append((name, f"{version} (the backend)" if name == backend else version))
    return rows


def _hardware(backend: str) -> list[RenderableType]:
    # Imported here, because these import Keras and with it the backend.
    try:
        import_keras()
        from keras_mp.precision.hardware import DTYPES, list_devices
        from keras_mp.precision.policy import COMPUTES_IN, PRECISIONS, attention_fault, choose_policy, pays

        devices = list_devices()
    except Exception as error:
        return [_section("Problem", (), f"{backend} is installed but does not work: {error}")]

    best = devices[0]
    policies = {COMPUTES_IN[precision]: precision for precision in PRECISIONS}
    supports = [(dtype, pays(policies[dtype], best)) for dtype in DTYPES]
    choice = choose_policy(best)
    notes = filter(None, (*unseen_accelerators(backend, best.kind), attention_fault(best)))
    rows = [(device.kind, f"{device.count} x {device.name} {device.architecture}".rstrip()) for device in devices]
    settings = [("policy", choice.policy), ("jit_compile", str(choice.jit_compile)), ("because", choice.reason)]
    pay = [(dtype, "yes" if ok else "no", reason) for dtype, (ok, reason) in supports]
    return [
        _section("Devices", rows, *notes),
        _section(f"What pays on this {best.kind.upper()}", pay),
        _section("What set_global_policy('auto') chooses", settings),
    ]


def _missing() -> list[RenderableType]:
    rows = [
        (extra, f"{purpose}\n{install_command(extra)}")
        for extra, modules, purpose in _EXTRAS
        if not all(map(_installed, modules))
    ]
    sections = [_section("To install", rows, *([] if rows else ["Nothing: every extra is installed."]))]
    if _installed("libtpu") and not has_chip():
        told = "Set JAX_PLATFORMS=cpu in your JAX programs. Otherwise JAX prints two harmless tracebacks."
        sections.append(_section("No GPU or TPU here?", (), told))
    return sections


def _section(title: str, rows: Sequence[tuple[str, ...]], *lines: str) -> RenderableType:
    """A heading, rows whose first cell is highlighted, and lines."""
    table = Table.grid(padding=(0, 2))
    for label, *values in rows:
        # Text, not str: rich would take the brackets of "keras-mp[jax]" for markup.
        table.add_row(Text(label, style="cyan", no_wrap=True), *map(Text, values))
    parts: list[RenderableType] = [*([table] if rows else []), *map(Text, lines)]
    return Group(Text(f"\n{title}", style="bold"), *(Padding(part, (0, 0, 0, 2)) for part in parts))

"""Takes a lowered step through the real compiler of a chip that is not attached."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_mp.backend.common.lowered import Lowered
from keras_mp.system.packages import install_command, installed
from keras_mp.xla.compiler_memory import WRITTEN, Refusal, refusal_in
from keras_mp.xla.targets import Target, availability

# Of what is described of a step; one more when keras_mp.xla.program changes it. Compiling again is not needed then.
_FORMAT = 9
_REFUSED = "refused.txt"
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")


class CompileError(RuntimeError):
    """A compiler failed; the message names the cause, a remedy, and the file with the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler of a target made of a step.

    Args:
        hlo: the compiled module's text.
        described: what `keras_mp.xla.program.describe` found in the lowered step, with the operations' names and the
            compiler's memory statistics.
        versions: of the packages that compiled.
        seconds: how long the compiler took, now or when the result that was kept was made.
        log: the file with all that the compiler printed.
        note: how it had to be compiled, where not as usual.
        refused: what the compiler says of a step that is larger than the chip's memory, of which `hlo` is empty and no
            memory statistics are known; None where it compiled.
    """

    hlo: str
    described: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    log: str
    note: str = ""
    refused: Refusal | None = None


def cache_folder() -> Path:
    """Where results are kept: `$KERAS_MP_CACHE`, or `keras_mp` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras_mp"
    return Path(os.environ.get("KERAS_MP_CACHE") or default)


def compile_step(
    lowered: Lowered, target: Target, flags: Mapping[str, Any] | None = None, until: str = "code"
) -> Compiled:
    """Compiles a step for a target, in a process of its own; the same step and target a second time costs nothing.

    Args:
        lowered: the step.
        target: the chip.
        flags: further options of the compiler, such as `{"xla_gpu_enable_triton_gemm": False}`.
        until: "memory" to end the compiler of a chip when it has assigned memory: after a twentieth of the time for
            TPUs, and half of it for GPUs. The size of the code is then 0, and on TPUs no kernel has cycles.

    Returns:
        What the compiler made of it.

    Raises:
        ImportError: If the target's compiler is not installed; the message is the command that installs it.
        CompileError: If the compiler fails, but for a step that is larger than the chip's memory.
    """
    available = availability(target)
    if not available.ok:
        raise ImportError(available.reason)
    versions = installed(_PACKAGES)
    request = {
        "format": _FORMAT,
        "name": target.name,
        "platform": target.platform,
        "topology": target.topology,
        "configuration": target.configuration,
        "flags": {**target.flags, **(flags or {})},
    }
    if target.devices > 1:
        request["devices"] = target.devices
    if target.platform != "cpu":
        request["until"] = until
    # TensorFlow counts its functions' names up with every trace; the content is the same.
    content = re.sub(rb"a_inference_\w+?_\d+__\.\d+", b"", lowered.module)
    key = json.dumps([request | {"format": 0}, versions], sort_keys=True).encode() + content
    kept = cache_folder() / "compiled" / hashlib.sha256(key).hexdigest()[:32]
    if not (kept / "memory.json").is_file() and not (kept / _REFUSED).is_file():
        _compile_beside(lowered, request, target, kept)
    described = json.loads((kept / "described.json").read_text())
    if described["format"] != _FORMAT:
        (kept / "target.json").write_text(json.dumps(request))
        _run(kept, target)
        described = json.loads((kept / "described.json").read_text())
    seconds, log = float((kept / "seconds").read_text()), str(kept / "log.txt")
    if not (kept / "memory.json").is_file():
        refused = refusal_in((kept / _REFUSED).read_text())
        return Compiled("", described, versions, seconds, log, refused=refused)
    return Compiled(
        (kept / "compiled.hlo").read_text(),
        described | {"memory": json.loads((kept / "memory.json").read_text())},
        versions,
        seconds,
        log,
        (kept / "note.txt").read_text() if (kept / "note.txt").is_file() else "",
    )


def _compile_beside(lowered: Lowered, request: dict[str, Any], target: Target, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="beside-", dir=kept.parent))
    try:
        (folder / "module.mlir").write_bytes(lowered.module)
        (folder / "target.json").write_text(json.dumps(request))
        started = time.monotonic()
        _run(folder, target)
        (folder / "seconds").write_text(str(time.monotonic() - started))
        shutil.rmtree(kept, ignore_errors=True)
        os.replace(folder, kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, target: Target) -> None:
    with open(folder / "log.txt", "wb") as log:
        command = [sys.executable, "-m", "keras_mp.xla.worker", str(folder)]
        status = subprocess.run(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_environment()
        ).returncode
    shutil.rmtree(folder / WRITTEN, ignore_errors=True)
    if not status:
        return
    refused = refusal_in((folder / "log.txt").read_text(errors="replace"))
    if refused is None:
        raise CompileError(_explain(folder, target, status, folder.parent))
    (folder / _REFUSED).write_text(refused.message)


def _environment() -> dict[str, str]:
    """The user's, less what would make JAX look for chips or ask the network about them."""
    ours = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # libtpu allows one process at a time, for the sake of the chips, of which none is used here.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Before 0.8 the CUDA plugin wants cuDNN even where no GPU is used. To compile it is not needed.
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # This package, wherever the parent found it.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | ours


def _explain(folder: Path, target: Target, status: int, parent: Path) -> str:
    log = (folder / "log.txt").read_text(errors="replace")
    kept = parent / f"failed-{target.name}.log"
    shutil.copyfile(folder / "log.txt", kept)
    where = f" Everything it printed is in {str(kept)!r}."
    start = f"The compiler for {target.title} failed"
    if "No PTX compilation provider" in log:
        return (
            f"{start}: it found no ptxas. The package nvidia-cuda-nvcc brings one: {install_command('inspect')}.{where}"
        )
    if "Invalid TPU external name" in log:
        version = installed(["libtpu"])["libtpu"]
        return f"{start}: libtpu {version} does not know this chip, and a newer one may: pip install -U libtpu.{where}"
    if status < 0:
        return f"{start}: its process was ended by signal {-status}; 9 most often means out of memory.{where}"
    errors = [line for line in log.splitlines() if re.search(r"Error\b|error:|UNIMPLEMENTED|INVALID|RESOURCE", line)]
    last = errors[-1] if errors else (log.strip().splitlines() or ["it printed nothing"])[-1]
    return f"{start}: {last.strip()[:1000]}{where}"

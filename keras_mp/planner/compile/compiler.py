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
from pathlib import Path
from typing import Any

from keras_mp.lowering import CompileError, Lowered
from keras_mp.planner.chips.targets import Target, missing_compiler
from keras_mp.planner.read.asked import asked_in
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.compiler_memory import WRITTEN, refusal_in
from keras_mp.planner.read.hlo import Module, parse
from keras_mp.system.packages import install_command, installed

# What is read of a lowered step: another number when keras_mp.planner.read.program reads more, without compiling again.
_ASKED = "asked-13.json"
_REFUSED = "refused.txt"
_FLAGS = "flags.json"  # those that the compiler had to be given besides
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")


def cache_folder() -> Path:
    """Finds the folder of kept results: `$KERAS_MP_CACHE`, or the user's."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras_mp"
    return Path(os.environ.get("KERAS_MP_CACHE") or default)


def compile_step(
    lowered: Lowered, target: Target, flags: Mapping[str, Any] | None = None, until: str = "code"
) -> CompiledStep:
    """Compiles a step for a target, once, in another process.

    What is kept is found by what the step computes, by the target and its flags, and by the compilers' versions.

    Args:
        flags: further options of the compiler, such as `{"xla_gpu_enable_triton_gemm": False}`.
        until: the stage that the compiler goes to; "memory" ends the compiler of a chip when it has assigned memory:
            after a twentieth of the time for TPUs, and half of it for GPUs. The size of the code is then 0, and on TPUs
            no kernel has cycles; unless the step was compiled to the end before.

    Returns:
        What the compiler made of it.

    Raises:
        ImportError: If the target's compiler is not installed; the message is the command that installs it.
        CompileError: If the compiler fails, but for a step that is larger than the chip's memory.
    """
    if missing := missing_compiler(target):
        raise ImportError(missing)
    from keras_mp.planner.compile.program_hash import step_hash  # imports JAX, on TensorFlow too

    versions = installed(_PACKAGES)
    request: dict[str, Any] = {
        "name": target.name,
        "platform": target.platform,
        "topology": target.topology,
        "configuration": target.configuration,
        "flags": {**target.flags, **(flags or {})},
    }
    if target.devices > 1:
        request["devices"] = target.devices
    program = step_hash(lowered)

    def place(until: str) -> Path:
        if target.platform != "cpu":
            request["until"] = until
        key = json.dumps([request, versions, program], sort_keys=True)
        return cache_folder() / "compiled" / hashlib.sha256(key.encode()).hexdigest()[:32]

    folder = place("code")
    if until != "code" and not _is_kept(folder):  # what was compiled to the end has all that is asked for
        folder = place(until)
    request["asked"] = _ASKED
    kept = _is_kept(folder)
    if not kept:
        _compile_beside(lowered, request, target, folder)
    elif not (folder / _ASKED).is_file():
        (folder / "target.json").write_text(json.dumps(request))
        _run(folder, target)
    refused = not (folder / "memory.json").is_file()
    return CompiledStep(
        lowered=lowered,
        target=target,
        asked=asked_in((folder / _ASKED).read_text()),
        module=Module("", {}) if refused else parse((folder / "compiled.hlo").read_text()),
        statistics={} if refused else json.loads((folder / "memory.json").read_text()),
        flags=request["flags"] | (json.loads((folder / _FLAGS).read_text()) if (folder / _FLAGS).is_file() else {}),
        versions=versions,
        seconds=float((folder / "seconds").read_text()),
        log=str(folder / "log.txt"),
        refused=refusal_in((folder / _REFUSED).read_text()) if refused else None,
        kept=kept,
    )


def _is_kept(folder: Path) -> bool:
    return (folder / "memory.json").is_file() or (folder / _REFUSED).is_file()


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
        command = [sys.executable, "-m", "keras_mp.planner.compile.worker", str(folder)]
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
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]),
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

"""Compiles a lowered step for a chip, in a process of its own: compilers print, crash, and want their environment.

    python -m keras_mp.planner.compile.worker FOLDER

The folder holds `module.mlir` and `target.json`; a file that the target names, `compiled.hlo` and `memory.json` are
written into it. Where the latter two are there already, the module is only read. With `"until": "memory"` in the
target, the compiler of a chip is ended when it has assigned memory: to generate code takes most of its time for TPUs,
and half of it for GPUs.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import topologies
from jaxlib import _jax

from keras_mp.planner.read.compiler_memory import WRITTEN, assigned_memory, compiled_text, dumping_to, is_assigned
from keras_mp.planner.read.program import read, read_module

_TRITON = "xla_gpu_enable_triton_gemm"
# In the words of jax 0.10's compiler and of jax 0.7's.
_NO_TILE = "tile sizes|Too small divisible part"


def main(folder: Path) -> None:
    """Reads, compiles and writes, as the module says."""
    target = json.loads((folder / "target.json").read_text())
    module = read_module((folder / "module.mlir").read_bytes())
    asked = read(module)
    (folder / "asked.partial").write_text(asked.text())
    (folder / "asked.partial").replace(folder / target["asked"])
    if (folder / "memory.json").is_file():
        return
    if target["platform"] == "cpu":
        executable = _compile(module, target)
        _write(folder, _text(executable, module, target), _statistics(executable))
    else:
        _compile_watched(folder, module, target)


def _executable(folder: Path, module: Any, target: dict[str, Any]) -> Any:
    """Compiles, without Triton's products where the compiler finds no tile for one of them."""
    try:
        return _compile(module, target)
    except jax.errors.JaxRuntimeError as error:
        flags = target["flags"]
        if _TRITON in flags or target["platform"] != "cuda" or not re.search(_NO_TILE, str(error)):
            raise
        # Without autotuning XLA takes a default tile, which does not fit every fused product: cuBLAS does.
        target = target | {"flags": flags | {_TRITON: False}}
        executable = _compile(module, target)
        (folder / "flags.json").write_text(json.dumps({_TRITON: False}))
        return executable


def _write(folder: Path, text: str, memory: dict[str, int]) -> None:
    (folder / "compiled.hlo").write_text(text)
    (folder / "memory.json").write_text(json.dumps(memory))


def _statistics(executable: Any) -> dict[str, int]:
    statistics = executable.get_compiled_memory_stats()
    return {
        name.removesuffix("_size_in_bytes").removesuffix("_in_bytes"): getattr(statistics, name)
        for name in dir(statistics)
        if name.endswith("_in_bytes") and not name.startswith("host_")
    }


def _compile_watched(folder: Path, module: Any, target: dict[str, Any]) -> None:
    """Compiles, and reads what the compiler writes about memory on the way."""
    platform, written = target["platform"], folder / WRITTEN
    written.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as pool:
        flags = target["flags"] | dumping_to(written)
        compiling = pool.submit(_executable, folder, module, target | {"flags": flags})
        early = target["until"] == "memory"
        while early and not compiling.done() and not is_assigned(written, platform):
            wait([compiling], timeout=0.1)
        if early and is_assigned(written, platform):
            memory = assigned_memory(written, platform) | {"generated_code": 0}
            _write(folder, compiled_text(written), memory)
            os._exit(0)  # the compiler cannot be asked to stop
        executable = compiling.result()
        memory = _statistics(executable)
        if is_assigned(written, platform):
            memory = {"generated_code": memory["generated_code"]} | assigned_memory(written, platform)
        _write(folder, _text(executable, module, target), memory)


def _compile(module: Any, target: dict[str, Any]) -> Any:
    count = target.get("devices", 1)
    if target["platform"] == "cpu":
        attached = jax.devices("cpu")[:count]
    elif target["platform"] == "tpu":
        attached = topologies.get_topology_desc(platform="tpu", topology_name=target["topology"]).devices[:count]
    else:
        jax.devices()  # registers the plugin
        attached = topologies.get_topology_desc(
            target["name"], "cuda", target_config=target["configuration"], topology=target["topology"] or "1x1x1"
        ).devices[:count]
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=count,
        device_assignment=np.array([[device.id for device in attached]]),
        env_options_overrides=target["flags"],
    )
    client, devices = attached[0].client, _jax.DeviceList(tuple(attached))
    with module.context:
        compile_module = client.compile_and_load if target["platform"] == "cpu" else client.compile
        try:
            return compile_module(module, devices, options)
        except TypeError:  # jax 0.7 takes bytecode
            bytecode = io.BytesIO()
            module.operation.write_bytecode(bytecode)
            return compile_module(bytecode.getvalue(), devices, options)


def _text(executable: Any, module: Any, target: dict[str, Any]) -> str:
    try:
        return executable.hlo_modules()[0].to_string()
    except jax.errors.JaxRuntimeError:
        # Before 0.8 the CUDA plugin does not hand the compiled module out. It writes it down, when asked to.
        with tempfile.TemporaryDirectory() as folder:
            dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            _compile(module, target | {"flags": target["flags"] | dump})
            (path,) = Path(folder).glob("*after_optimizations.txt")
            return path.read_text()


def _with_room() -> None:
    """Starts this process again with the largest stack: libtpu runs out of the usual one in some transformers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == hard:
        return
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
    os.execv(sys.executable, [sys.executable, "-m", "keras_mp.planner.compile.worker", *sys.argv[1:]])


if __name__ == "__main__":
    _with_room()
    main(Path(sys.argv[1]))

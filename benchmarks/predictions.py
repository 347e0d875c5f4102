"""Published training steps beside what `inspect` predicts of them: time and memory.

    python benchmarks/predictions.py                       # the runs that are not in predictions.json
    python benchmarks/predictions.py --only gpt2 --again
    python benchmarks/predictions.py --markdown docs/tables/predictions.md

benchmarks/published_runs.py says which runs are taken. Each is compiled in a process of its own, and its result is
written to predictions.json as soon as it is known.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs import RUNS, compiles, ratios

KEPT = Path(__file__).with_name("predictions.json")


class Step(NamedTuple):
    """What is compiled: a function that builds a compiled model, the shapes of a device's batch, and its blocks.

    Where there are blocks, the function takes their number, whose default is how many the model has.
    """

    build: Callable[..., Any]
    batch: Callable[[int], Any]
    blocks: tuple[int, int] | None = None


def _steps() -> dict[str, Step]:
    import keras

    import keras_mp
    from benchmarks.plain_models import plain_gpt
    from models.gpt import gpt
    from models.llama import LlamaSize, llama
    from models.resnet import resnet_imagenet
    from models.transformer import Size

    def tensor(*shape: int, dtype: str = "int32") -> Any:
        return keras.KerasTensor(shape, dtype)

    def tokens(rows: int, length: int) -> Callable[[int], Any]:
        return lambda devices: (tensor(rows * devices, length), tensor(rows * devices, length))

    def trained(model: Any, optimizer: Any = None, loss: Any = None) -> Any:
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or keras.optimizers.AdamW(1e-4), loss, jit_compile=True)
        return model

    def bert(layers: int, width: int, heads: int, classes: int | None) -> Any:
        import keras_hub

        backbone = keras_hub.models.BertBackbone(30522, layers, heads, width, 4 * width, max_sequence_length=512)
        if classes:
            return trained(keras_hub.models.BertTextClassifier(backbone, classes, preprocessor=None))
        logits = keras.layers.Dense(2, dtype="float32")(backbone.output["sequence_output"])
        spans = keras.layers.Permute((2, 1))(logits)
        return trained(keras.Model(backbone.input, spans), keras.optimizers.Adam(3e-5))

    def bert_batch(rows: int, length: int, targets: tuple[int, ...]) -> Callable[[int], Any]:
        names = ("token_ids", "segment_ids", "padding_mask")
        return lambda devices: ({name: tensor(rows, length) for name in names}, tensor(rows, *targets))

    def pretrained(rows: int, length: int, masked: int) -> Step:
        import keras_hub

        def build(blocks: int = 24) -> Any:
            backbone = keras_hub.models.BertBackbone(30522, blocks, 16, 1024, 4096, max_sequence_length=512)
            return trained(keras_hub.models.BertMaskedLM(backbone, preprocessor=None))

        inputs = {name: tensor(rows, length) for name in ("token_ids", "segment_ids", "padding_mask")}
        inputs["mask_positions"] = tensor(rows, masked)
        return Step(build, lambda devices: (inputs, tensor(rows, masked)), (4, 8))

    def lora(name: str, blocks: int) -> Any:
        import keras_hub

        if name == "mistral":
            backbone = keras_hub.models.MistralBackbone(32000, blocks, 32, 4096, 14336, 8, sliding_window=4096)
            model = keras_hub.models.MistralCausalLM(backbone, preprocessor=None)
        else:
            backbone = keras_hub.models.GemmaBackbone(256000, blocks, 16, 16, 3072, 49152, 256)
            model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
        model.backbone.enable_lora(4)
        return trained(model)

    def lora_batch(devices: int) -> Any:
        rows = {name: tensor(8 * devices, 128) for name in ("token_ids", "padding_mask")}
        return rows, tensor(8 * devices, 128), tensor(8 * devices, 128, dtype="float32")

    def large(model: Any, fp8: bool = False) -> Any:
        model = keras_mp.convert(model) if fp8 else model
        return trained(model, loss=keras_mp.lean.ChunkedCrossEntropy())

    def llama_of(*sizes: int, length: int, fp8: bool = False, **other: float) -> Callable[..., Any]:
        return lambda blocks=sizes[0]: large(llama(LlamaSize(blocks, *sizes[1:], **other), length, remat=True), fp8)

    llama3 = partial(llama_of, 32, 4096, 32, 8, 14336, 128256, length=8192, theta=500000.0)

    def sized(step: str) -> Step:
        """A step whose name ends with the rows of its batch."""
        name, _, rows = step.rpartition("_")
        if name == "resnet50":
            return Step(
                lambda: trained(resnet_imagenet(50), keras.optimizers.SGD(0.1, momentum=0.9)),
                lambda devices: (tensor(int(rows), 224, 224, 3, dtype="float32"), tensor(int(rows))),
            )
        return Step(lambda blocks=24: bert(blocks, 1024, 16, None), bert_batch(int(rows), 384, (2,)), (4, 8))

    steps = {run.step for run in RUNS.values()}
    return {step: sized(step) for step in steps if step.startswith(("resnet50_", "bert_large_squad_"))} | {
        "gpt2": Step(lambda: trained(plain_gpt(12, 768, 12, 50304, 1024)), tokens(12, 1024)),
        "bert_base": Step(lambda: bert(12, 768, 12, 2), bert_batch(32, 512, ())),
        "bert_large_128_128": pretrained(128, 128, 20),
        "bert_large_128_256": pretrained(256, 128, 20),
        "bert_large_512_16": pretrained(16, 512, 80),
        "bert_large_512_32": pretrained(32, 512, 80),
        "mistral": Step(lambda blocks=32: lora("mistral", blocks), lora_batch, (4, 8)),
        "gemma": Step(lambda blocks=28: lora("gemma", blocks), lora_batch, (4, 8)),
        "llama3": Step(llama3(), tokens(1, 8192), (2, 4)),
        "llama3_fp8": Step(llama3(fp8=True), tokens(1, 8192), (2, 4)),
        "maxtext_32b": Step(llama_of(32, 8192, 64, 64, 28672, 32000, length=2048), tokens(4, 2048), (4, 8)),
        "gpt3_175b": Step(
            lambda blocks=96: large(gpt(Size(blocks, 12288, 96), 50304, 2048, remat=True)), tokens(3, 2048), (4, 8)
        ),
        "llama70": Step(llama_of(80, 8192, 64, 8, 28672, 128256, length=8192, theta=500000.0), tokens(2, 8192), (4, 8)),
    }


def compile_run(name: str) -> dict[str, Any]:
    """Predicts a run: seconds by part, bytes, and how it was compiled."""
    import keras_mp
    from benchmarks.by_blocks import inspect_by_blocks
    from keras_mp.precision.chips import parse_target
    from keras_mp.system.packages import installed

    run = RUNS[name]
    step = _steps()[run.step]
    chip, chips = parse_target(run.target)
    devices = chips * chip.devices
    shared = {"strategy": "fully_sharded"} if devices > 1 else {}
    with keras_mp.set_global_policy(run.policy):
        if step.blocks:
            report = inspect_by_blocks(step.build, step.batch(devices), run.target, blocks=step.blocks, **shared)
        else:
            report = keras_mp.inspect(step.build, step.batch(devices), run.target, **shared)
    time, bound = report.time, report.roofline
    if time is None or bound is None:
        raise RuntimeError(f"{name}: {report.refused or 'no time'}")
    return {
        "seconds": time.seconds,
        "products": time.products,
        "other": time.other,
        "uncovered": time.uncovered,
        "kernels": time.kernels,
        "cycles": time.cycles,
        "bound": bound.seconds,
        "bytes": report.memory.peak,
        "flops": report.flops,
        "blocks": [report.extrapolated] if step.blocks else [],
        "backend": report.backend,
        "compile seconds": report.seconds,
        "versions": installed(("jax", "libtpu", "keras")),
        "date": datetime.date.today().isoformat(),
    }


def kept() -> dict[str, dict[str, Any]]:
    """The results that are there, by the names of the runs."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def spreads(results: dict[str, dict[str, Any]], compiled: bool = False) -> dict[str, tuple[int, float, float]]:
    """By chip and by generation: how many runs, and the least and the most of published time divided by predicted.

    Args:
        results: the results of the runs that were compiled.
        compiled: whether to take only those whose source compiles its step.
    """
    from keras_mp.precision.chips import parse_target
    from keras_mp.xla.step_time import scored_as

    taken: dict[str, list[float]] = {}
    for name, ratio in ratios(results).items():
        if compiled and not compiles(RUNS[name]):
            continue
        for key in scored_as(parse_target(RUNS[name].target)[0]):
            taken.setdefault(key, []).append(round(1 / ratio, 2))
    return {key: (len(times), min(times), max(times)) for key, times in sorted(taken.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name or step holds this")
    parser.add_argument("--again", action="store_true", help="also those that are there")
    parser.add_argument("--markdown", type=Path, help="the file to write the table to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_run(options.one)))
        return
    for name, run in RUNS.items():
        if options.markdown or (name in kept() and not options.again):
            continue
        if options.only.lower() in name.lower() or options.only in (run.step, run.target):
            environment = os.environ | {"KERAS_BACKEND": run.backend, "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, __file__, "--one", name]
            process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if process.returncode:
                print(f"{name}: not compiled", flush=True)
                continue
            result = json.loads(process.stdout.splitlines()[-1])
            KEPT.write_text(json.dumps(kept() | {name: result}, indent=1) + "\n")
            print(
                f"{name}: {result['seconds'] * 1e3:.1f} ms predicted, {run.seconds * 1e3:.1f} ms published", flush=True
            )
    for name, ratio in ratios(kept()).items():
        print(f"{ratio:.2f} {name}")
    for compiled in (False, True):
        print("COMPILED" if compiled else "SPREADS")
        for key, spread in spreads(kept(), compiled).items():
            print(f'"{key}": Spread{spread},')
    if options.markdown:
        from benchmarks.predictions_page import page

        options.markdown.write_text(page(kept()))


if __name__ == "__main__":
    main()

"""Published training steps beside what `inspect` predicts of them: time and memory.

    python benchmarks/planner/predictions.py                       # the runs that are not in predictions.json
    python benchmarks/planner/predictions.py --only gpt2 --again
    python benchmarks/planner/predictions.py --only "GPT-3 175B" --until memory    # by rule 15
    python benchmarks/planner/predictions.py --markdown docs/tables/predictions.md

benchmarks/planner/published_runs.py says which runs are taken, and how long a compile may take. Each is compiled in a
process of its own, and its result is written to predictions.json as soon as it is known. Runs with the same step on the
same chips share one compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner.published_fits import FITS, Fit
from benchmarks.planner.published_runs import ATTENTION_BLOCKS, LIMIT, RUNS, SMALLER, TWO_KERNELS, Run, ratios

KEPT = Path(__file__).with_name("predictions.json")
# The sizes of the Llamas: layers, width, heads, heads of keys, features between the products, vocabulary, and whether
# its embedding is the output layer; of MaxText's own decoder layers, width, heads of 256 features, and features between
# the products.
LLAMAS = {
    "llama2_7b": (32, 4096, 32, 32, 11008, 32000, False),
    "llama2_70b": (80, 8192, 64, 8, 28672, 32000, False),
    "llama2_13b": (40, 5120, 40, 40, 13824, 32000, False),
    "llama3.2_1b": (16, 2048, 32, 8, 8192, 128256, True),
    "llama3.2_3b": (28, 3072, 24, 8, 8192, 128256, True),
    "llama3_8b": (32, 4096, 32, 8, 14336, 128256, False),
    "tinyllama_1b": (22, 2048, 32, 4, 5632, 32000, False),
    "mistral_7b": (32, 4096, 32, 8, 14336, 32000, False),
    "llama3_70b": (80, 8192, 64, 8, 28672, 128256, False),
    "fuji_7b": (32, 4096, 32, 32, 11008, 32768, True),
    "gala_85m": (12, 768, 12, 12, 2048, 32768, True),
    "gala_1b": (24, 2048, 32, 32, 5632, 32768, True),
    "honeycrisp_85m": (12, 768, 12, 6, 2304, 49152, True),
    "honeycrisp_3b": (26, 3072, 24, 8, 8064, 49152, True),
    "yx_270m": (18, 1024, 8, 2, 2816, 32768, False),
}
# Of KerasHub's Gemmas: layers, heads, heads of keys, width, features between the products.
GEMMAS = {"gemma_2b": (18, 8, 1, 2048, 32768), "gemma_7b": (28, 16, 16, 3072, 49152)}
MAXTEXTS = {
    "maxtext_16b": (32, 5120, 32, 32768),
    "maxtext_22b": (48, 6144, 24, 24576),
    "maxtext_32b": (32, 10240, 32, 32768),
    "maxtext_52b": (32, 12288, 32, 49152),
    "maxtext_64b": (64, 10240, 32, 32768),
    "maxtext_128b": (64, 10240, 64, 65536),
}


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
    from benchmarks.planner.published_models import maxtext_decoder, maxtext_llama, resnext
    from models.gpt import gpt
    from models.llama import LlamaSize, llama
    from models.resnet import resnet_imagenet
    from models.transformer import Size
    from models.vit import vit

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

    def packed(rows: int, length: int) -> Callable[[int], Any]:
        def batch(devices: int) -> Any:
            shape = rows * devices, length
            inputs = {name: tensor(*shape) for name in ("token_ids", "padding_mask")}
            return inputs, tensor(*shape), tensor(*shape, dtype="float32")

        return batch

    def adapted(name: str, rank: int) -> Callable[..., Any]:
        import keras_hub

        def build(blocks: int) -> Any:
            if name in GEMMAS:
                _, heads, key_heads, width, hidden = GEMMAS[name]
                backbone = keras_hub.models.GemmaBackbone(256000, blocks, heads, key_heads, width, hidden, 256)
                model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
            else:
                _, width, heads, key_heads, hidden, vocabulary, tied = LLAMAS[name]
                backbone = keras_hub.models.LlamaBackbone(
                    vocabulary, blocks, heads, width, hidden, key_heads, tie_word_embeddings=tied
                )
                model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
            if rank:
                model.backbone.enable_lora(rank)
            return keras_mp.lean.make_lean(trained(model))

        depth = (GEMMAS.get(name) or LLAMAS[name])[0]
        return lambda blocks=depth: build(blocks)

    def eager_loss() -> Any:
        from benchmarks.eager_loss import EagerCrossEntropy  # of JAX, where some steps are TensorFlow's

        return EagerCrossEntropy()

    def large(model: Any, how: Sequence[str] = ()) -> Any:
        model = keras_mp.convert(model) if "fp8" in how else model
        if "logits" in how or "eager" in how:
            return trained(keras.Model(model.inputs, model.outputs), loss=eager_loss() if "eager" in how else None)
        return trained(model, loss=keras_mp.lean.ChunkedCrossEntropy())

    def llama_of(*sizes: int, length: int, how: Sequence[str] = (), **other: float) -> Callable[..., Any]:
        def build(blocks: int = sizes[0]) -> Any:
            model = llama(LlamaSize(blocks, *sizes[1:], **other), length, remat="kept" not in how)
            return large(model, how)

        return build

    def decoder_of(name: str, length: int, how: Sequence[str]) -> Callable[..., Any]:
        layers, *sizes = MAXTEXTS[name]

        def build(blocks: int = layers) -> Any:
            width, heads, hidden = sizes
            return large(maxtext_decoder(blocks, width, heads, 256, hidden, 32768, length, "kept" not in how))

        return build

    def gpt3(blocks: int = 96) -> Any:
        return large(gpt(Size(blocks, 12288, 96), 50304, 2048, remat=True))

    def yx_272m(blocks: int = 12) -> Any:
        return trained(maxtext_llama(blocks, 1024, 8, 256, 2816, 32768, 2048, 10000.0, flash=True))

    llama3 = partial(llama_of, *LLAMAS["llama3_8b"][:-1], length=8192, theta=500000.0)

    def images(build: Callable[..., Any], rows: str, blocks: tuple[int, int] | None = None) -> Step:
        def batch(devices: int) -> Any:
            count = int(rows) * devices
            return tensor(count, 224, 224, 3, dtype="float32"), tensor(count)

        return Step(build, batch, blocks)

    def classified(build: Callable[[], Any]) -> Any:
        return trained(build(), keras.optimizers.SGD(0.1, momentum=0.9))

    def efficientnet() -> Any:
        model = keras.applications.EfficientNetB0(weights=None, classifier_activation=None)
        return keras.Model(model.input, keras.layers.Activation("linear", dtype="float32")(model.output))

    def seen(blocks: int = 12) -> Any:
        return trained(vit(Size(blocks, 768, 12), dropout=0.1))

    classifiers: dict[str, Callable[[], Any]] = {
        "resnext101": resnext,
        "se_resnext101": partial(resnext, squeeze=16),
        "efficientnet_b0": efficientnet,
    }

    def sized(step: str) -> Step:
        """A step whose name says its batch: the rows of a device, and the length of a language model's."""
        if "@" in step:
            name, _, batch = step.partition("@")
            shape, *how = batch.split("-")
            if name == "vit_b16":
                return images(seen, shape, (2, 4))
            if name in classifiers:
                return images(lambda: classified(classifiers[name]), shape)
            rows, length = map(int, shape.split("x"))
            if "_lora" in name:
                name, _, rank = name.partition("_lora")
                return Step(adapted(name, int(rank)), packed(rows, length), (2, 4))
            if name == "gpt2":
                return Step(lambda: trained(plain_gpt(12, 768, 12, 50304, length)), tokens(rows, length))
            if name == "gpt3_175b":
                build = gpt3
            elif name == "yx_272m":
                build = yx_272m
            elif name in MAXTEXTS:
                build = decoder_of(name, length, how)
            else:
                *sizes, tied = LLAMAS[name]
                build = llama_of(*sizes, length=length, how=how, tied=tied)
            return Step(build, tokens(rows, length), (2, 4))
        name, _, rows = step.rpartition("_")
        if name.startswith("resnet"):
            return images(lambda: classified(partial(resnet_imagenet, int(name.removeprefix("resnet")))), rows)
        return Step(lambda blocks=24: bert(blocks, 1024, 16, None), bert_batch(int(rows), 384, (2,)), (4, 8))

    def pretraining(step: str) -> Step:
        length, rows = step.split("_")[-2:]
        return pretrained(int(rows), int(length), {"128": 20, "512": 80}[length])

    steps = {run.step for run in (*RUNS.values(), *FITS.values())}
    named = {step: sized(step) for step in steps if "@" in step or step.startswith(("resnet", "bert_large_squad_"))}
    named |= {step: pretraining(step) for step in steps if step.startswith(("bert_large_128_", "bert_large_512_"))}
    return named | {
        "hespas_100m": Step(
            lambda: trained(maxtext_llama(7, 576, 9, 128, 2016, 128256, 4096, 500000.0)), tokens(1, 4096)
        ),
        "gpt2": Step(lambda: trained(plain_gpt(12, 768, 12, 50304, 1024)), tokens(12, 1024)),
        "bert_base": Step(lambda: bert(12, 768, 12, 2), bert_batch(32, 512, ())),
        "mistral": Step(lambda blocks=32: lora("mistral", blocks), packed(8, 128), (4, 8)),
        "gemma": Step(lambda blocks=28: lora("gemma", blocks), packed(8, 128), (4, 8)),
        "llama3": Step(llama3(how=("logits",)), tokens(1, 8192), (2, 4)),
        "llama3_fp8": Step(llama3(how=("fp8", "logits")), tokens(1, 8192), (2, 4)),
        "llama3_eager": Step(llama3(how=("eager",)), tokens(1, 8192), (2, 4)),
        "llama3_eager_fp8": Step(llama3(how=("fp8", "eager")), tokens(1, 8192), (2, 4)),
        "llama3_2x8192_eager": Step(llama3(how=("eager",)), tokens(2, 8192), (2, 4)),
        "llama3_2x8192_eager_fp8": Step(llama3(how=("fp8", "eager")), tokens(2, 8192), (2, 4)),
    }


def compile_run(name: str, form: int = 0, until: str = "code") -> dict[str, Any]:
    """Predicts a run: seconds by part, bytes, and how it was compiled.

    Args:
        name: the name of the run.
        form: 0 for the run as it is, or which of the smaller forms of rule 9, from 1.
        until: the stage that the compiler goes to; "memory" by rule 15.
    """
    import keras_mp
    from benchmarks.planner.by_blocks import inspect_by_blocks
    from benchmarks.selective import kept_products
    from keras_mp.lowering import Source, lower_step
    from keras_mp.parallel.plan import plan_of
    from keras_mp.planner.chips.targets import find_target
    from keras_mp.planner.compile.compiler import compile_step
    from keras_mp.planner.inspect import report_on
    from keras_mp.planner.report.compile_report import CompileReport
    from keras_mp.planner.time.step_time import between_steps
    from keras_mp.precision.chips import parse_target
    from keras_mp.system.packages import installed

    run = RUNS.get(name) or FITS[name]
    step = _steps()[run.step]
    target = smallest(run.target) if form == len(SMALLER) else run.target
    chip, chips = parse_target(target)
    devices = chips * chip.devices
    shared = {"strategy": run.strategy} if devices > 1 else {}
    blocks = SMALLER[form - 1] if form else step.blocks
    if form and (not step.blocks or blocks >= step.blocks):
        raise ValueError("it has no such smaller form")

    def look(build: Callable[[], Any], batch: Any, target: str, strategy: str | None = None) -> CompileReport:
        chips = find_target(target)
        plan = plan_of(strategy, chips.devices, chips.topology) if strategy else None
        model = Source(build).build()
        # By rule 13 scores are in memory where the source does not state flash attention, as on a chip without kernels.
        traced = (chips if run.flash else find_target("host")).traced
        lowered = lower_step(model, batch, training=True, chip=traced, plan=plan)
        return report_on(compile_step(lowered, chips, until=until), run.policy, plan=plan)

    in_blocks = attention_in(ATTENTION_BLOCKS) if "x" in run.step.partition("@")[2] else nullcontext()
    kept = kept_products(run.keeps, fused=TWO_KERNELS not in run.note) if run.keeps else nullcontext()
    with keras_mp.set_global_policy(run.policy), in_blocks, kept:
        if blocks:
            report = inspect_by_blocks(step.build, step.batch(devices), target, blocks=blocks, look=look, **shared)
        else:
            report = look(step.build, step.batch(devices), target, **shared)
    time, bound = report.time, report.roofline
    if name in RUNS and (time is None or bound is None):
        raise RuntimeError(report.refused or "no time")
    timed = {} if time is None else dataclasses.asdict(time) | {"seconds": time.seconds}
    if timed and name in RUNS:  # which may have more chips than were compiled for
        timed["unscored"] = time.unscored or between_steps(chip, RUNS[name].chips, time.seconds)
    return {
        **timed,
        **({} if bound is None else {"bound": bound.seconds}),
        **({"refused": report.refused} if report.refused else {}),
        "bytes": report.memory.peak,
        "flops": report.flops,
        "blocks": [report.extrapolated] if blocks else [],
        **({"stage": until} if until != "code" else {}),
        "target": target,
        "backend": report.backend,
        "compile seconds": report.seconds,
        "versions": installed(("jax", "libtpu", "keras")),
        "date": datetime.date.today().isoformat(),
    }


@contextmanager
def attention_in(blocks: int) -> Iterator[None]:
    """Within it, the kit's own form of attention takes its queries in so many blocks of rows, where they are enough."""
    from keras_mp.lean import blockwise_attention

    before = blockwise_attention.BLOCKS
    blockwise_attention.BLOCKS = blocks
    try:
        yield
    finally:
        blockwise_attention.BLOCKS = before


def smallest(target: str) -> str:
    """The smallest slice of a target's chips; a target that is no slice as it is."""
    from keras_mp.precision.chips import parse_target

    chip, chips = parse_target(target)
    if chip.vendor != "google" or chips == 1:
        return target
    return f"{chip.name}-2x2" + ("x1" if getattr(chip.compiler, "dimensions", 2) == 3 else "")


def in_time(name: str, run: Run | Fit, until: str = "code") -> dict[str, Any]:
    """Compiles a run in a process of its own, and in smaller forms where it takes longer than `LIMIT` or fails.

    Returns:
        What `compile_run` returns, with "tried": what became of larger forms; and the seconds of the whole process. Or
        why none was compiled, as "failed".
    """
    tried: list[str] = []
    environment = os.environ | {"KERAS_BACKEND": run.backend, "JAX_PLATFORMS": "cpu"}
    for form in range(len(SMALLER) + 1):
        start = time.monotonic()
        command = [sys.executable, __file__, "--one", name, "--form", str(form), "--until", until]
        # The compiler runs in a process of that process: both end together.
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            written, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            tried.append(f"not in {LIMIT} s")
            continue
        outcome = json.loads(written.splitlines()[-1]) if written.strip() else {"failed": "the process ended"}
        if "failed" not in outcome:
            return outcome | {"wall seconds": round(time.monotonic() - start), "tried": tried}
        if not outcome.get("no such form"):
            tried.append(outcome["failed"])
    return {"failed": "; ".join(tried), "date": datetime.date.today().isoformat()}


def _one(name: str, form: int, until: str) -> dict[str, Any]:
    try:
        return compile_run(name, form, until)
    except ValueError as error:
        return {"failed": str(error), "no such form": "no such smaller form" in str(error)}
    except Exception as error:  # whatever a compiler raises is a failure of the run, and is listed
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def kept() -> dict[str, dict[str, Any]]:
    """The results that are there, by the names of the runs."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def _same(name: str, run: Run) -> dict[str, Any] | None:
    """The result of another run with the same step on the same chips."""
    alike = ("step", "target", "policy", "backend", "strategy")
    for other, result in kept().items():
        if other != name and other in RUNS and "failed" not in result:
            if all(getattr(RUNS[other], part) == getattr(run, part) for part in alike):
                return result | {"compiled as": other}
    return None


def _before(name: str, run: Run) -> dict[str, float] | None:
    """What was predicted of a run whose source states flash attention before it was compiled with the kernel."""
    known = kept().get(name, {})
    if not run.flash or "before" in known:
        return known.get("before")
    return {"seconds": known["seconds"], "flash": known["flash"]} if "flash" in known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name or step holds this")
    parser.add_argument("--again", action="store_true", help="also those that are there")
    parser.add_argument("--markdown", type=Path, help="the file to write the table to")
    parser.add_argument("--fits", action="store_true", help="the steps of published_fits.py, to the stage of memory")
    parser.add_argument("--until", default="code", choices=("code", "memory"), help="the stage to compile to")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--form", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_one(options.one, options.form, options.until)))
        return
    for name, fit in FITS.items():
        if options.fits and name not in kept() and options.only.lower() in name.lower():
            result = in_time(name, fit, "memory")
            KEPT.write_text(json.dumps(kept() | {name: result}, indent=1) + "\n")
            print(f"{name}: {result.get('failed') or result['bytes'] / 2**30} GiB, {fit.ran=}", flush=True)
    for name, run in RUNS.items():
        if options.markdown or options.fits or (name in kept() and not options.again):
            continue
        if options.only.lower() in name.lower() or options.only in (run.step, run.target):
            result = (None if options.again else _same(name, run)) or in_time(name, run, options.until)
            result |= {"before": before} if "failed" not in result and (before := _before(name, run)) else {}
            KEPT.write_text(json.dumps(kept() | {name: result}, indent=1) + "\n")
            published = "no time" if run.seconds is None else f"{run.seconds:.3f} s"
            outcome = result.get("failed") or f"{result['seconds']:.3f} s predicted, {published} published"
            print(f"{name}: {outcome}", flush=True)
    for name, ratio in ratios(kept()).items():
        print(f"{ratio:.2f} {name}")
    if options.markdown:
        from benchmarks.planner.predictions_page import page

        options.markdown.write_text(page(kept()))


if __name__ == "__main__":
    main()

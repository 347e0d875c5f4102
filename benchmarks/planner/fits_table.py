"""Which backbones of KerasHub train on which chips: in full, with LoRA, and with LoRA on a base in int4.

Of models with experts "LoRA on int4" has their banks in int4, too (`narrow_frozen(model, experts="int4")`).

    python benchmarks/planner/fits_table.py --markdown docs/tables/fits-table.md      # all of it: hours on 2 cores
    python benchmarks/planner/fits_table.py --only "GPT-2 XL" --forms int4 --chips t4 v5e
    python benchmarks/planner/fits_table.py --in-full                  # three cells, compiled with all blocks as well
    python benchmarks/planner/fits_table.py --again --only "Mistral 7B" --forms lora --begin "frozen in 16 bits" lean
    python benchmarks/planner/fits_table.py --only gpt-oss-20b --forms int4 --chips h100 --begin lean remat
    python benchmarks/planner/fits_table.py --kernels                  # which cells have attention's kernel, by a trace
    python benchmarks/planner/fits_table.py --with-kernel --only "Gemma 2B" --forms full --chips h100

Each backbone has its published size and no values, and `advise` finds the cheapest measures that fit. A cell is written
to benchmarks/planner/fits_table.json as soon as it is known, and not asked again. `--again` asks for those that did not
fit, or took nearly all of a GPU, with the measures that `advise` has learned since; `--begin` says from which on, which
is written beside the cell. What was compiled is kept, too (`KERAS_MP_CACHE`). AdamW, rank 8, and the batch of one
update in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import keras
import keras_hub

import keras_mp
from keras_mp.lowering import Source
from keras_mp.planner.advise import Options, answer
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.fit.measures import MEASURES, Measures
from keras_mp.planner.fit.schedule import usable
from keras_mp.planner.fit.step import WITHOUT_CODE
from keras_mp.planner.inspect import report_on
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed

hub = keras_hub.models
CELLS = HERE / "fits_table.json"
CHIPS = ("t4", "rtx4090", "l4", "a100 40gb", "h100", "v5e", "v5e-8")
FORMS = {"full": "in full", "lora": "LoRA", "int4": "LoRA on int4"}
RANK = 8
# The day from which on a step is traced with its chip's kernel of attention.
SINCE = "2026-11-28"
# Compiled with all blocks as well.
IN_FULL = (("GPT-2 XL", "lora", "h100"), ("Qwen 3 4B", "lora", "rtx4090"), ("Mistral 7B", "int4", "v5e"))


class Backbone(NamedTuple):
    """A backbone at its published size.

    Attributes:
        cls: the class in KerasHub.
        sizes: the arguments of the class.
        parameters: the parameters of KerasHub's preset, or of the publication where the preset has a part more.
        task: a function that makes a model that trains of it.
        batch: a function that makes (x, y) of one update.
        rows: the rows of the batch, in words.
    """

    cls: str
    sizes: dict[str, Any]
    parameters: int
    task: Callable[[Any], keras.Model]
    batch: Callable[[], tuple[Any, Any]]
    rows: str


def causal(name: str) -> Callable[[Any], keras.Model]:
    return lambda backbone: getattr(hub, f"{name}CausalLM")(backbone=backbone, preprocessor=None)


def classifier(name: str, classes: int) -> Callable[[Any], keras.Model]:
    return lambda backbone: getattr(hub, name)(backbone=backbone, num_classes=classes, preprocessor=None)


def speech(backbone: Any) -> keras.Model:
    """Whisper with its output projection, which is its embedding's."""
    states = backbone.output["decoder_sequence_output"]
    return keras.Model(backbone.input, backbone.token_embedding(states, reverse=True))


def _tensor(*shape: int, dtype: str = "int32") -> keras.KerasTensor:
    return keras.KerasTensor(shape, dtype)


def tokens(length: int, *more: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (
        {
            "padding_mask": _tensor(8, length, dtype="bool"),
            **{name: _tensor(8, length) for name in ("token_ids", *more)},
        },
        _tensor(8, length),
    )


def sentences() -> tuple[Any, Any]:
    names = ("token_ids", "padding_mask", "segment_ids")
    return {name: _tensor(8, 512) for name in names}, _tensor(8)


def images() -> tuple[Any, Any]:
    return _tensor(8, 224, 224, 3, dtype="float32"), _tensor(8)


def recordings() -> tuple[Any, Any]:
    x = {
        "encoder_features": _tensor(8, 3000, 80, dtype="float32"),
        "decoder_token_ids": _tensor(8, 448),
        "decoder_padding_mask": _tensor(8, 448, dtype="bool"),
    }
    return x, _tensor(8, 448)


def sizes(vocabulary: int, layers: int, hidden: int, intermediate: int, **other: Any) -> dict[str, Any]:
    return {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "hidden_dim": hidden,
        "intermediate_dim": intermediate,
        **other,
    }


def grouped(heads: int, groups: int, **other: Any) -> dict[str, Any]:
    return {"num_query_heads": heads, "num_key_value_heads": groups, **other}


_TEXT = "8 x 1024 tokens"
_GEMMA_3 = {
    "image_size": 896,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
}
_GEMMA_4 = {
    "image_size": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "global_rope_partial_rotary_factor": 0.25,
    "sliding_window_size": 1024,
    "final_logit_soft_cap": 30.0,
    "enable_moe_block": True,
    "num_experts": 128,
    "expert_intermediate_dim": 704,
    "num_experts_per_token": 8,
}
BACKBONES = {
    "BERT-large": Backbone(
        "BertBackbone", sizes(30522, 24, 1024, 4096, num_heads=16), 335_141_888,
        classifier("BertTextClassifier", 2), sentences, "8 x 512 tokens",
    ),
    "ViT-L": Backbone(
        "ViTBackbone",
        {"image_shape": (224, 224, 3), "patch_size": 16, "num_layers": 24, "num_heads": 16, "hidden_dim": 1024,
         "mlp_dim": 4096},
        303_301_632, classifier("ViTImageClassifier", 1000), images, "8 images of 224 x 224",
    ),
    "Llama 3.2 1B": Backbone(
        "Llama3Backbone", sizes(128256, 16, 2048, 8192, tie_word_embeddings=True, **grouped(32, 8)), 1_235_814_400,
        causal("Llama3"), tokens(1024), _TEXT,
    ),
    "GPT-2 XL": Backbone(
        "GPT2Backbone", sizes(50257, 48, 1600, 6400, num_heads=25), 1_557_611_200, causal("GPT2"), tokens(1024), _TEXT
    ),
    "Whisper large": Backbone(
        "WhisperBackbone", sizes(51865, 32, 1280, 5120, num_heads=20), 1_543_304_960, speech, recordings,
        "8 x 30 s of speech, 448 tokens",
    ),
    "Gemma 2B": Backbone(
        "GemmaBackbone", sizes(256000, 18, 2048, 32768, head_dim=256, **grouped(8, 1)), 2_506_172_416,
        causal("Gemma"), tokens(1024), _TEXT,
    ),
    "Gemma 3 4B": Backbone(
        "Gemma3Backbone", sizes(262144, 34, 2560, 10240, head_dim=256, **grouped(8, 4), **_GEMMA_3), 3_880_099_328,
        causal("Gemma3"), tokens(1024), f"{_TEXT}, without its encoder of images",
    ),
    "Qwen 3 4B": Backbone(
        "Qwen3Backbone", sizes(151936, 36, 2560, 9728, head_dim=128, **grouped(32, 8)), 4_022_468_096,
        causal("Qwen3"), tokens(1024), _TEXT,
    ),
    "Mistral 7B": Backbone(
        "MistralBackbone", sizes(32000, 32, 4096, 14336, **grouped(32, 8)), 7_241_732_096, causal("Mistral"),
        tokens(1024), _TEXT,
    ),
    "Llama 3 8B": Backbone(
        "Llama3Backbone", sizes(128256, 32, 4096, 14336, **grouped(32, 8)), 8_030_261_248, causal("Llama3"),
        tokens(1024), _TEXT,
    ),
    "gpt-oss-20b": Backbone(
        "GptOssBackbone",
        sizes(201088, 24, 2880, 2880, head_dim=64, num_experts=32, top_k=4, sliding_window=128, **grouped(64, 8)),
        20_914_757_184, causal("GptOss"), tokens(1024), _TEXT,
    ),
    "Gemma 4 26B-A4B": Backbone(
        "Gemma4Backbone",
        sizes(262144, 30, 2816, 2112, head_dim=256, **grouped(16, 8), **_GEMMA_4), 25_233_141_790,
        causal("Gemma4"), tokens(1024, "position_ids"), f"{_TEXT}, without its encoder of images",
    ),
    "Qwen3-30B-A3B": Backbone(
        "Qwen3MoeBackbone",
        sizes(151936, 48, 2048, 6144, head_dim=128, moe_intermediate_dim=768, num_experts=128, top_k=8,
              norm_top_k_prob=True, **grouped(32, 4)),
        30_532_122_624, causal("Qwen3Moe"), tokens(1024), _TEXT,
    ),
    "Mixtral 8x7B": Backbone(
        "MixtralBackbone",
        sizes(32000, 32, 4096, 14336, num_experts=8, top_k=2, sliding_window=4096, **grouped(32, 8)),
        46_702_792_704, causal("Mixtral"), tokens(1024), _TEXT,
    ),
}  # fmt: skip


def quantized_paths(name: str) -> set[str]:
    """What matches the layers that `backbone.quantize("int4")` quantizes, from a small one: this one has no values."""
    small = {size: min(number, 2) for size, number in BACKBONES[name].sizes.items() if size == "num_layers"}
    widths = {"hidden_dim": 64, "intermediate_dim": 64, "mlp_dim": 64, "vocabulary_size": 64, "head_dim": 16}
    widths |= {"moe_intermediate_dim": 16, "expert_intermediate_dim": 16, "global_head_dim": 16}
    heads = {"num_heads": 2, "num_query_heads": 2, "num_key_value_heads": 1}
    own = BACKBONES[name].sizes
    small |= {size: number for size, number in (widths | heads).items() if size in own}
    with keras_mp.set_global_policy("float32"):
        backbone = getattr(hub, BACKBONES[name].cls)(**(own | small))
        backbone.quantize("int4")
    paths = [layer.path for layer in backbone._flatten_layers() if getattr(layer, "quantization_mode", None) == "int4"]
    return {re.sub(r"\d+", r"\\d+", re.escape(path)) for path in paths if path != backbone.path}


def builder(name: str, form: str) -> Callable[[], keras.Model]:
    """A function that builds and compiles the model of a row, also with fewer blocks."""
    backbone_of, own = getattr(hub, BACKBONES[name].cls), BACKBONES[name]
    policies: dict[str, Any] = {}

    def build(blocks: int = own.sizes["num_layers"]) -> keras.Model:
        policy = keras.config.dtype_policy().name
        backbone = backbone_of(**own.sizes | {"num_layers": blocks}, dtype=policies.get(policy))
        if form != "full":
            backbone.enable_lora(RANK)
        model = own.task(backbone)
        if form == "int4" and "num_experts" in own.sizes:
            keras_mp.lean.narrow_frozen(model, experts="int4")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-4), loss)
        return model

    if form == "int4":
        paths = quantized_paths(name)
        for policy in ("float32", "mixed_float16", "mixed_bfloat16", "bfloat16"):
            int4 = keras.dtype_policies.get(f"int4/128_from_{policy}")  # as `quantize` groups
            policies[policy] = keras.dtype_policies.DTypePolicyMap(policy, dict.fromkeys(paths, int4))
    return build


def ask(name: str, form: str, chips: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of a row, as data.

    Args:
        name, form, chips: the row and the columns of the cells.
        options: the options of the command line.
    """
    started = time.monotonic()
    begin = Measures("", micro_batches=options.parts).with_names(options.begin)
    first = {chip: replace(begin, precision=find_place(chip).policy) for chip in chips}
    if not begin.taken:
        first = {}
    question = Options(first=first, all_blocks=options.all_blocks, code=not options.without_code)
    report = answer(builder(name, form), BACKBONES[name].batch(), chips, question)
    print(report, file=sys.stderr)
    return [
        {
            "model": name,
            "form": form,
            "chip": chip,
            "title": row.title,
            "verdict": row.verdict,
            "measures": row.measures.words if row.measures else "",
            "changes": row.changes,
            "set": asdict(row.measures) if row.measures else None,
            "weights": row.memory.parameters,
            "optimizer": row.memory.optimizer,
            "peak": row.memory.peak,
            "how": f"{row.how}; {row.report.extrapolated if row.report else ''}".rstrip("; "),
            "reason": row.reason,
            "code": list(row.code),
            "compiles": row.compiles - row.shared,
            "trained": report.parameters,
            "seconds": round(time.monotonic() - started),
            "core_seconds": round(sum(os.times()[:4])),  # of this process and its compilers, for the row
            "day": date.today().isoformat(),
            "begin": first[chip].words if chip in first else "",
            "versions": _versions(),
            "without_code": WITHOUT_CODE in row.notes,
        }
        for chip, row in zip(chips, report.rows, strict=True)
        if row.fits is not None  # a compiler that failed is asked again
    ]


def _versions() -> str:
    return ", ".join(f"{name} {text}" for name, text in installed(("jax", "libtpu", "keras", "keras-hub")).items())


def in_full(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell, and what its step needs by a compile of all blocks."""
    measures = Measures(**cell["set"] | {"names": tuple(cell["set"]["names"])})
    source = Source(builder(cell["model"], cell["form"]))

    def part(leaf: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor((leaf.shape[0] // measures.micro_batches, *leaf.shape[1:]), leaf.dtype)

    target = find_target(cell["chip"])
    batch = keras.tree.map_structure(part, BACKBONES[cell["model"]].batch())
    step = source.lower(batch, target.traced, policy=measures.policy, changes=measures.changes)
    # As advise does, whose figure this one is compared with.
    report = report_on(compile_step(step, target, until="memory"), measures.policy)
    print(f"{cell['model']}, {cell['form']}, {cell['title']}: {cell['peak']:,} bytes extrapolated, "
          f"{report.memory.peak:,} with all blocks, compiled in {report.seconds:.0f} s", flush=True)  # fmt: skip
    return cell | {"in_full": report.memory.peak}


def with_kernels(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those cells whose step, as it is traced today for their chip, has a kernel of attention.

    The first two blocks are traced, once for chips whose kernels are the same: a model attends in the same way whatever
    part of it trains, and whatever else is taken, but for lean layers.
    """
    known: dict[tuple[Any, ...], bool] = {}
    found = []
    for cell in cells:
        if not cell["set"]:
            continue
        place, measures = find_place(cell["chip"]), Measures(**cell["set"] | {"names": tuple(_names(cell["set"]))})
        key = cell["model"], place.chip.architecture, place.devices, measures.strategy, "lean" in measures.names
        if key not in known:
            changes = Measures("", tuple(name for name in measures.names if name == "lean")).changes
            step = Source(builder(cell["model"], "full")).lower(
                BACKBONES[cell["model"]].batch(), place.traced, policy=place.policy, changes=changes, blocks=2,
                plan=place.plan(measures.strategy),
            )  # fmt: skip
            known[key] = bool(re.search(rb"tpu_custom_call|__cudnn\$fmha", step.module))
            print(*key, known[key], file=sys.stderr, flush=True)
        found += [cell] * known[key]
    return found


def _names(taken: dict[str, Any]) -> list[str]:
    """The names of measures, also of a cell from before they had names."""
    return taken.get("names") or [name for name in ("lean", "remat") if taken.get(name)]


def kept() -> list[dict[str, Any]]:
    return json.loads(CELLS.read_text()) if CELLS.exists() else []


def keep(cells: list[dict[str, Any]]) -> None:
    old = {(cell["model"], cell["form"], cell["chip"]): cell for cell in kept()}
    new = dict(old)
    for cell in cells:
        key = cell["model"], cell["form"], cell["chip"]
        if key in old:
            before = {part: old[key][part] for part in ("verdict", "peak", "measures")}
            cell["before"] = old[key].get("before", before)
        new[key] = cell
    order = {key: place for place, key in enumerate((m, f, c) for m in BACKBONES for f in FORMS for c in CHIPS)}
    ordered = sorted(new.values(), key=lambda cell: order[cell["model"], cell["form"], cell["chip"]])
    write_text(json.dumps(ordered, indent=1) + "\n", CELLS)


def is_open(cell: dict[str, Any]) -> bool:
    """Whether a cell says that nothing fits, or of a GPU only what takes nearly all."""
    return cell["verdict"] != "fits" or cell["peak"] > usable(find_place(cell["chip"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*BACKBONES], choices=BACKBONES, metavar="MODEL")
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=FORMS)
    parser.add_argument("--chips", nargs="+", default=[*CHIPS], choices=CHIPS, metavar="CHIP")
    parser.add_argument("--again", action="store_true", help="cells that do not fit, or nearly fill a GPU, anew")
    parser.add_argument("--kernels", action="store_true", help="says which cells have a kernel of attention")
    parser.add_argument("--with-kernel", action="store_true", help="cells of before that have one, anew")
    parser.add_argument("--begin", nargs="+", default=[], choices=[one.name for one in MEASURES], metavar="MEASURE")
    parser.add_argument("--parts", type=int, default=1, help="micro-batches of the first set of measures")
    parser.add_argument("--without-code", action="store_true", help="of TPUs no step is compiled to the end")
    parser.add_argument("--all-blocks", action="store_true", help="deep models are compiled with all blocks")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="starts no row after so long")
    parser.add_argument("--markdown", type=Path, help="the page to write")
    parser.add_argument("--in-full", action="store_true", help="three cells, compiled with all blocks as well")
    parser.add_argument("--here", action="store_true", help="asks in this process, for one row")
    options = parser.parse_args()
    if options.kernels:
        cells = kept()
        for cell in with_kernels([cell for cell in cells if cell.get("day", "") < SINCE]):
            cell["kernel"] = True
        write_text(json.dumps(cells, indent=1) + "\n", CELLS)
        return
    started = time.monotonic()
    for name in options.only:
        for form in options.forms:
            known = {
                (cell["model"], cell["form"], cell["chip"])
                for cell in kept()
                if not (options.again and is_open(cell) and "day" not in cell)
                and not (options.with_kernel and cell.get("kernel"))
            }
            chips = [chip for chip in options.chips if (name, form, chip) not in known]
            if not chips or time.monotonic() - started > 60 * options.minutes:
                continue
            if options.here:
                keep(ask(name, form, chips, options))
                continue
            row = ["--only", name, "--forms", form, "--chips", *chips, "--parts", str(options.parts)]
            row += ["--again"] * options.again + ["--begin", *options.begin] * bool(options.begin)
            row += ["--with-kernel"] * options.with_kernel
            row += ["--without-code"] * options.without_code + ["--all-blocks"] * options.all_blocks
            subprocess.run([sys.executable, __file__, "--here", *row], check=True)
    for cell in kept() if options.in_full else []:
        if (cell["model"], cell["form"], cell["chip"]) in IN_FULL and "in_full" not in cell:
            keep([in_full(cell)])
    if options.markdown:
        from fits_page import page

        made = f"{date.today().isoformat()}, {_versions()}"
        write_text(page(kept(), BACKBONES, FORMS, CHIPS, made), options.markdown)


if __name__ == "__main__":
    main()

"""What the lean parts save: memory of the compiled step of GPT-2 124M, and of models of KerasHub, on an H100.

    python benchmarks/lean.py memory --backend jax --model lean
    python benchmarks/lean.py memory --backend tensorflow --model lean --remat
    python benchmarks/lean.py memory --backend jax --model plain --precision float32
    python benchmarks/lean.py families                                # all; kept rows are not made again
    python benchmarks/lean.py families gpt2 resnet50
    python benchmarks/lean.py families --markdown docs/tables/lean-models.md        # only writes the table of kept rows

`memory` compiles the whole training step, with AdamW, for batch 8 x 1024, and prints the compiler's figure for what it
needs besides weights, optimizer and batch, with the largest arrays.
`families` compiles steps of models that KerasHub and Keras build, for an H100 in mixed_bfloat16 with AdamW, from shapes
alone: as the model is, lean, and lean with blocks that are recomputed. Widths are the published ones; of the blocks as
many as compile in a few minutes. Rows are written to benchmarks/lean_models.json as they come.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

RESULTS = Path(__file__).with_name("lean_models.json")
VARIANTS = ("plain", "lean", "lean, remat")


def build(model: str, remat: bool):
    """GPT-2 124M, plain or lean, compiled for training."""
    import keras

    import keras_mp
    from benchmarks.plain_models import plain_gpt
    from models.gpt import gpt
    from models.transformer import Size

    if model == "plain":
        network = plain_gpt(12, 768, 12, 50304, 1024)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        network = gpt(Size(12, 768, 12), 50304, 1024, remat=remat)
        loss = keras_mp.lean.ChunkedCrossEntropy()
    network.compile(keras.optimizers.AdamW(3e-4), loss, jit_compile=True)
    return network


def memory(options: argparse.Namespace) -> None:
    import keras

    import keras_mp

    keras.config.set_dtype_policy(options.precision)
    tokens = keras.KerasTensor((8, 1024), "int32")
    report = keras_mp.inspect(lambda: build(options.model, options.remat), (tokens, tokens), "h100")
    memory_used = report.memory
    print(f"| {options.model}{' with remat' if options.remat else ''} | {report.backend} | {options.precision} | "
          f"{memory_used.temporary / 2**30:.2f} | {memory_used.peak / 2**30:.2f} |")  # fmt: skip
    for buffer in memory_used.largest[: options.buffers]:
        print(f"  {buffer.bytes / 2**20:.0f} MiB {buffer.dtype}{list(buffer.shape)} {buffer.what} of {buffer.layer}")


class Family(NamedTuple):
    """A model at a published width.

    Attributes:
        title: the title of the row.
        build: a function that makes the model, not compiled.
        shape: the shape of the batch, without channels.
        blocks: the number of blocks that the model has here, and the number it has as published.
    """

    title: str
    build: Callable[[], Any]
    shape: tuple[int, ...]
    blocks: str


def causal(name: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        import keras_hub.models as hub

        return getattr(hub, f"{name}CausalLM")(backbone=getattr(hub, f"{name}Backbone")(**sizes), preprocessor=None)

    return build


def bert() -> Any:
    import keras_hub.models as hub

    backbone = hub.BertBackbone(
        vocabulary_size=30522, num_layers=4, num_heads=12, hidden_dim=768, intermediate_dim=3072,
        max_sequence_length=512,
    )  # fmt: skip
    return hub.BertTextClassifier(backbone=backbone, num_classes=2)


def vit() -> Any:
    import keras_hub.models as hub

    backbone = hub.ViTBackbone(
        image_shape=(224, 224, 3), patch_size=16, num_layers=4, num_heads=12, hidden_dim=768, mlp_dim=3072,
    )  # fmt: skip
    return hub.ViTImageClassifier(backbone=backbone, num_classes=1000)


def t5() -> Any:
    import keras_hub.models as hub

    backbone = hub.T5Backbone(
        vocabulary_size=32128, num_layers=2, num_heads=12, hidden_dim=768, intermediate_dim=3072, key_value_dim=64,
    )  # fmt: skip
    return hub.T5Seq2SeqLM(backbone=backbone, preprocessor=None)


def resnet50() -> Any:
    import keras

    return keras.applications.ResNet50(weights=None, classifier_activation=None)


FAMILIES = {
    "gpt2": Family(
        "GPT-2 124M, dropout 0.1",
        causal("GPT2", vocabulary_size=50257, num_layers=12, num_heads=12, hidden_dim=768, intermediate_dim=3072),
        (8, 1024),
        "12 of 12",
    ),
    "gpt2-no-dropout": Family(
        "GPT-2 124M, no dropout",
        causal(
            "GPT2", vocabulary_size=50257, num_layers=12, num_heads=12, hidden_dim=768, intermediate_dim=3072,
            dropout=0.0,
        ),
        (8, 1024),
        "12 of 12",
    ),
    "llama3": Family(
        "Llama 3.2 1B",
        causal(
            "Llama3", vocabulary_size=128256, num_layers=2, num_query_heads=32, num_key_value_heads=8,
            hidden_dim=2048, intermediate_dim=8192, rope_max_wavelength=500000, tie_word_embeddings=True,
        ),
        (2, 2048),
        "2 of 16",
    ),
    "gemma": Family(
        "Gemma 2B",
        causal(
            "Gemma", vocabulary_size=256000, num_layers=2, num_query_heads=8, num_key_value_heads=1, hidden_dim=2048,
            intermediate_dim=32768, head_dim=256,
        ),
        (1, 2048),
        "2 of 18",
    ),
    "qwen": Family(
        "Qwen2.5 0.5B",
        causal(
            "Qwen", vocabulary_size=151936, num_layers=2, num_query_heads=14, num_key_value_heads=2, hidden_dim=896,
            intermediate_dim=4864, tie_word_embeddings=True,
        ),
        (4, 2048),
        "2 of 24",
    ),
    "bert": Family("BERT base, classifier", bert, (32, 512), "4 of 12"),
    "vit": Family("ViT-B/16", vit, (64, 224, 224), "4 of 12"),
    "t5": Family("T5 base", t5, (8, 512), "2 and 2 of 12 and 12"),
    "resnet50": Family("ResNet-50", resnet50, (64, 224, 224), "16 of 16"),
}  # fmt: skip


def batch_of(model: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Shapes of a batch for a model's inputs and outputs."""
    import keras

    def like(tensor: Any) -> Any:
        return keras.KerasTensor((*shape, *tensor.shape[len(shape) :]), tensor.dtype)

    x = keras.tree.map_structure(like, model._inputs_struct)
    (output,) = model.outputs
    rank = 1 if len(output.shape) == 2 else 2
    return (x[0] if isinstance(x, list) else x), keras.KerasTensor(shape[:rank], "int32")


def measure(family: Family, variant: str) -> dict[str, Any]:
    """Temporary and peak bytes of the compiled step, and the seconds that it took."""
    import keras

    import keras_mp
    from keras_mp import backend

    keras.config.set_dtype_policy("mixed_bfloat16")

    def build() -> Any:
        model = family.build()
        if variant != "plain":
            model = keras_mp.lean.make_lean(model, remat=variant.endswith("remat"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(3e-4), loss, jit_compile=True)
        return model

    started = time.perf_counter()
    with backend.no_allocation():
        batch = batch_of(family.build(), family.shape)
    report = keras_mp.inspect(build, batch, "h100")
    versions = {name: importlib.metadata.version(name) for name in ("keras", "keras-hub", "jax", "tensorflow")}
    return {
        "temporary": report.memory.temporary, "peak": report.memory.peak, "backend": report.backend,
        "seconds": round(time.perf_counter() - started), "date": str(datetime.date.today()), "versions": versions,
    }  # fmt: skip


def kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def markdown() -> list[str]:
    """The table of docs/tables/lean-models.md: temporary and peak in GiB, of the families with kept rows."""
    rows = kept()
    header = ["model", "blocks", "batch", *(f"{name}: temporary, peak" for name in VARIANTS)]
    lines = [f"| {' | '.join(header)} |", f"| --- | --- | --- |{' ---: |' * len(VARIANTS)}"]
    for name, family in FAMILIES.items():
        variants = rows.get(name, {})
        if not variants:
            continue
        cells = [
            f"{variants[variant]['temporary'] / 2**30:.2f}, {variants[variant]['peak'] / 2**30:.2f}"
            if variant in variants
            else "not measured"
            for variant in VARIANTS
        ]
        lines.append(
            f"| {family.title} | {family.blocks} | {' x '.join(map(str, family.shape))} | {' | '.join(cells)} |"
        )
    return lines


def compile_families(options: argparse.Namespace) -> None:
    if options.markdown:
        from results import put_table

        put_table(options.markdown, "lean.py", markdown())
        return
    for name in options.families or FAMILIES:
        for variant in VARIANTS:
            rows = kept()
            if variant not in rows.get(name, {}):
                result = measure(FAMILIES[name], variant)
                rows.setdefault(name, {})[variant] = result
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
                print(name, variant, result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "families"))
    parser.add_argument("families", nargs="*", default=[], help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--markdown", type=Path, help="only write the table of kept rows into this page")
    parser.add_argument("--backend", default="jax", choices=("tensorflow", "jax"))
    parser.add_argument("--model", default="lean", choices=("plain", "lean"))
    parser.add_argument("--precision", default="mixed_bfloat16")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--buffers", type=int, default=3, help="how many of the largest arrays to print")
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ["KERAS_BACKEND"] = options.backend
    {"memory": memory, "families": compile_families}[options.what](options)


if __name__ == "__main__":
    main()

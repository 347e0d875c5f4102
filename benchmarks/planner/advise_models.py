"""What `advise` says of four models, how many compiles it took, and how long: the first time, and the second.

    python benchmarks/planner/advise_models.py --markdown docs/tables/advise-models.md
    python benchmarks/planner/advise_models.py --only resnet50

Each model is asked about in a process of its own, twice. The first time holds only where nothing is kept yet: with
`KERAS_MP_CACHE` set to an empty folder. A subclassed model is one as Keras's guides write them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras

from keras_mp.planner.advise import advise
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed

GPUS = ["rtx2080ti", "rtx3060", "rtx4070", "rtx4090", "t4", "l4", "a100", "h100"]
TEN = [*GPUS, "v5e", "v6e"]
SPARSE = {"from_logits": True}


def gpt2():
    """GPT-2 124M of Keras's layers alone, 8 x 1024 tokens."""
    from benchmarks.plain_models import plain_gpt

    def build():
        model = plain_gpt(12, 768, 12, 50304, 1024)
        model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(**SPARSE))
        return model

    return build, (_tokens(8, 1024), _tokens(8, 1024)), TEN


def kerashub():
    """KerasHub's BERT base with a classifier, 32 x 512 tokens."""
    import keras_hub

    def build():
        backbone = keras_hub.models.BertBackbone(30522, 12, 12, 768, 3072, max_sequence_length=512)
        first = backbone.output["sequence_output"][:, 0]
        model = keras.Model(backbone.input, keras.layers.Dense(2)(first))
        model.compile(keras.optimizers.AdamW(3e-5), keras.losses.SparseCategoricalCrossentropy(**SPARSE))
        return model

    names = ("token_ids", "padding_mask", "segment_ids")
    return build, ({name: _tokens(32, 512) for name in names}, keras.KerasTensor((32,), "int32")), TEN


class Block(keras.layers.Layer):
    """A block of a transformer, as a user writes one."""

    def __init__(self, width, heads, **arguments):
        super().__init__(**arguments)
        self.width, self.heads = width, heads
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.first, self.second = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.feed_forward = keras.Sequential([keras.layers.Dense(4 * width, "gelu"), keras.layers.Dense(width)])

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.first, self.second, self.feed_forward):
            layer.build(shape)

    def call(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.feed_forward(self.second(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "heads": self.heads}


class Subclassed(keras.Model):
    """A subclassed language model, as a user writes one."""

    def __init__(self, vocabulary=32000, width=512, count=8, heads=8, **arguments):
        super().__init__(**arguments)
        self.sizes = {"vocabulary": vocabulary, "width": width, "count": count, "heads": heads}
        self.embedding = keras.layers.Embedding(vocabulary, width)
        self.blocks = [Block(width, heads) for _ in range(count)]
        self.head = keras.layers.Dense(vocabulary)

    def build(self, shape):
        self.embedding.build(shape)
        inner = (*shape, self.sizes["width"])
        for layer in (*self.blocks, self.head):
            layer.build(inner)

    def call(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_config(self):
        return {**super().get_config(), **self.sizes}


def subclassed():
    """A subclassed language model of 66 M parameters, 32 x 512 tokens."""

    def build():
        model = Subclassed()
        model.build((None, 512))
        model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(**SPARSE))
        return model

    return build, (_tokens(32, 512), _tokens(32, 512)), TEN


def resnet50():
    """ResNet-50, 256 images."""

    def build():
        model = keras.applications.ResNet50(weights=None, classifier_activation=None)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(**SPARSE))
        return model

    return build, (keras.KerasTensor((256, 224, 224, 3), "float32"), keras.KerasTensor((256,), "int32")), GPUS


MODELS = {function.__name__: function for function in (gpt2, kerashub, subclassed, resnet50)}
NOTE = """# What `advise` says of four models

Which chip holds a training step, and under which measures; how many steps were compiled for it, and how long the whole
took on a machine of 2 cores, the first time and the second.
`KERAS_MP_CACHE=$(mktemp -d) python benchmarks/planner/advise_models.py --markdown docs/tables/advise-models.md`,
{made}.

"""


def _tokens(rows: int, length: int) -> keras.KerasTensor:
    return keras.KerasTensor((rows, length), "int32")


def ask(name: str) -> str:
    """Asks about a model, and returns its table."""
    build, batch, targets = MODELS[name]()
    started = time.monotonic()
    report = advise(build, batch, targets)
    seconds = time.monotonic() - started
    print(report, file=sys.stderr)
    lines = [
        f"## {MODELS[name].__doc__}",
        "",
        f"{report.compiles} steps, {report.kept} of them kept from before; {seconds:.0f} s.",
        "",
        "| chip | fits | with | needs, GiB | has, GiB | compiled | shared |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in report.rows:
        words = row.measures.words if row.measures else "-"
        needs, has = row.memory.peak / 2**30, row.memory.capacity / 2**30
        lines.append(
            f"| {row.title} | {row.verdict} | {words} | {needs:.2f} | {has:.0f} | {row.compiles - row.shared} "
            f"| {row.shared} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="the file to write the tables to")
    parser.add_argument("--only", choices=MODELS, help="one model, in this process")
    arguments = parser.parse_args()
    if arguments.only:
        print(ask(arguments.only))
        return
    parts = []
    for name in MODELS:
        command = [sys.executable, __file__, "--only", name]
        first, second = (subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout for _ in "12")
        again = next(line for line in second.splitlines() if line.endswith(" s."))
        parts.append(first.replace(" s.\n", f" s. The second time: {again}\n", 1))
        if arguments.markdown:
            versions = ", ".join(f"{name} {text}" for name, text in installed(("jax", "libtpu", "keras")).items())
            made = f"{date.today().isoformat()}, {versions}"
            write_text(NOTE.format(made=made) + "\n\n".join(parts) + "\n", arguments.markdown)


if __name__ == "__main__":
    main()

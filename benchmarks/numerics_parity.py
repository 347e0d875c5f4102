"""Trains a training recipe's model in several precisions, three seeds each; writes the table and the picture to docs/.

    KERAS_BACKEND=tensorflow python benchmarks/numerics_parity.py digits
    KERAS_BACKEND=tensorflow python benchmarks/numerics_parity.py language_model

`language_model` first searches a policy among fp8, bfloat16 and float32, and trains with what was found, too.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras

import keras_mp
from keras_mp.training.batches import ShuffledBatches
from recipes import digits, language_model
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets import digits as digits_data
from recipes.datasets import text

DOCS = Path(__file__).parents[1] / "docs"
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def epochs(inputs, targets, batch_size, seed, steps):
    """The first steps of a training on shuffled data, over as many passes as it takes."""
    batches, collected, epoch = ShuffledBatches(inputs, targets, batch_size, seed), [], 0
    while len(collected) < steps:
        batches.start_at(epoch)
        collected += [batches[index] for index in range(len(batches))]
        epoch += 1
    return collected[:steps]


def compare_digits(steps, seeds):
    config = digits.digits()
    images, labels = digits_data.load("train")
    tests = digits_data.load("test")

    def build():
        model = digits.build(config, augment=False)
        optimizer = keras.optimizers.AdamW(warmup_then_cosine(config.learning_rate, steps))
        model.compile(
            keras_mp.loss_scaling.wrap_optimizer(optimizer, model),
            CROSS_ENTROPY,
            jit_compile=False,
            auto_scale_loss=False,
        )
        return model

    return keras_mp.numerics.compare_training(
        build,
        lambda seed: epochs(images, labels, config.batch_size, seed, steps),
        ("float32", "mixed_bfloat16", "mixed_float16"),
        seeds,
        steps,
        held_out=[tests],
    )


def compare_language_model(steps, seeds):
    config = language_model.language_model()
    length = config.sequence_length
    train, validation = text.split(text.read(config.corpus), length)
    inputs, targets = text.sequences(train, length)
    tests = [part[: 8 * config.batch_size] for part in text.sequences(validation, length)]

    def build():
        model = language_model.build(config)
        rate = warmup_then_cosine(config.learning_rate, steps)
        optimizer = keras.optimizers.AdamW(rate, beta_2=0.95, weight_decay=config.weight_decay, global_clipnorm=1.0)
        model.compile(optimizer, CROSS_ENTROPY, jit_compile=False)
        return model

    data = epochs(inputs, targets, config.batch_size, 0, steps)
    candidates = ("fp8", "mixed_bfloat16", "float32")
    search = keras_mp.search_policy(build(), data[:6], candidates, tolerance=0.1)
    print(search)
    return keras_mp.numerics.compare_training(
        build,
        lambda seed: epochs(inputs, targets, config.batch_size, seed, steps),
        {"mixed_bfloat16": "mixed_bfloat16", "searched": lambda: search.apply(build)},
        seeds,
        steps,
        held_out=[tests],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("digits", "language_model"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    start = time.perf_counter()
    compare = compare_digits if options.recipe == "digits" else compare_language_model
    report = compare(options.steps, options.seeds)
    report.to_svg(DOCS / f"numerics-parity-{options.recipe}.svg")
    print(report)
    print(f"{report.steps} steps, final loss {report.final_is}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

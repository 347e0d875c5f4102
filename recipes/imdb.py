"""IMDB: a transformer that tells good movie reviews from bad ones, trained from nothing.

    keras-mp train imdb --download
    keras-mp train imdb --size small --remat --accumulate 4 --batch-size 16

Hardware: one GPU or TPU chip. Nothing here was measured yet: IMDB is in no package, and has to be downloaded (80 MiB).
Expect, on the 25,000 test reviews, an estimate: 85% to 89%. The data set's paper reached 88.89% with a linear
classifier on words (Maas et al. 2011, table 2); without pre-training a transformer is not expected above that.
"""

import dataclasses
from typing import Annotated

import keras

import keras_mp
from keras_mp.parallel import gather
from keras_mp.training import PolicyChoice, ShuffledBatches
from models.text_classifier import SIZES, text_classifier
from recipes.common.config import TransformerConfig, above_zero
from recipes.common.devices import over_devices
from recipes.common.finish import TrainingResult, finish
from recipes.common.fit import fit
from recipes.common.fp8 import every_product
from recipes.common.run_folder import run_folder
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets.imdb import CLASSES, load
from recipes.datasets.prepared import DataConfig
from recipes.datasets.tokens import SMALLEST_VOCABULARY, encode_padded, learn

PADDING = "<|padding|>"


@dataclasses.dataclass(frozen=True)
class Config(DataConfig, TransformerConfig):
    """What can be set, here and on the command line."""

    epochs: Annotated[int, "passes over the training reviews"] = 4
    batch_size: Annotated[int, "reviews a step"] = 64
    learning_rate: Annotated[float, "peak, after warm-up"] = 5e-4
    weight_decay: Annotated[float, "decoupled, as in AdamW"] = 0.1
    dropout: Annotated[float, "share dropped while training"] = 0.2
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "imdb"
    size: Annotated[str, "tiny, mini, small, medium or base"] = "mini"
    sequence_length: Annotated[int, "tokens of a review; longer ones are cut"] = 256
    vocabulary: Annotated[int, "tokens, learned from the training reviews"] = 8192

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "sequence_length")
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise ValueError(f"vocabulary must be at least {SMALLEST_VOCABULARY}, got {self.vocabulary}")


def imdb() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def build(config: Config) -> keras.Model:
    """Builds the classifier: tokens in, float32 logits out."""
    return text_classifier(
        config.size, CLASSES, config.vocabulary, config.sequence_length, config.dropout, remat=config.remat
    )


def model_to_train(config: Config, choice: PolicyChoice, steps: int) -> keras.Model:
    """Builds the classifier and compiles it for a number of steps."""
    optimizer = keras.optimizers.AdamW(
        warmup_then_cosine(config.learning_rate, steps),
        weight_decay=config.weight_decay,
        global_clipnorm=1.0,
        gradient_accumulation_steps=config.accumulate if config.accumulate > 1 else None,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fp8 = every_product(choice, config.fp8)
    return keras_mp.prepare(
        build(config), optimizer, loss, metrics=["accuracy"], fp8=fp8, state_dtype=config.state_dtype
    )


def step(config: Config) -> tuple[keras.Model, tuple]:
    """The model, and the shapes of a batch: what `keras-mp inspect imdb` looks at."""
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), 10)
    tokens = keras.KerasTensor((config.batch_size, config.sequence_length), "int32")
    return model, (tokens, keras.KerasTensor((config.batch_size,), "int32"))


def batches(config: Config) -> ShuffledBatches:
    """The training data: what `keras-mp audit imdb` looks at, too."""
    return _batches(config)[0]


def train(config: Config) -> TrainingResult:
    """Trains, tests, saves and exports, as the config says."""
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    data, tokenizer = _batches(config)
    test_texts, test_labels = load("test", config.data_dir, config.download)
    test_tokens = encode_padded(tokenizer, test_texts, config.sequence_length)

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        # Without it, nobody can use the model.
        tokenizer.save(str(folder / "tokenizer.json"))
        training = fit(model, data, config, folder, (test_tokens, test_labels), config.batch_size)
    model = gather(model)
    accuracy = training.history.rows[-1]["test_accuracy"]
    return finish(model, config, folder, choice, training, "test accuracy", accuracy, verify=test_tokens[:8])


def _batches(config):
    texts, labels = load("train", config.data_dir, config.download)
    tokenizer = learn(texts, config.vocabulary, PADDING)
    tokens = encode_padded(tokenizer, texts, config.sequence_length)
    return ShuffledBatches(tokens, labels, config.batch_size, config.seed), tokenizer

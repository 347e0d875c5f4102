"""A language model of bytes: a small GPT, or Llama, that learns Python's own documentation.

    keras-mp train language_model
    keras-mp train language_model --model llama
    keras-mp train language_model --corpus stdlib
    keras-mp train language_model --remat --accumulate 4 --batch-size 4

Hardware: 2 cores of a CPU. Time: 3 minutes on TensorFlow in either precision (six runs in 17 minutes).
Expect, on the last tenth of the text, the mean of three seeds: 1.77 bits per byte in float32 (1.7795, 1.7673, 1.7626),
1.78 in mixed_bfloat16 (1.7831, 1.7663, 1.7802); docs/tables/language-model-parity.md.
"""

import dataclasses
import math
from typing import Annotated

import keras

import keras_mp
from keras_mp.parallel import gather, workers
from keras_mp.training import PolicyChoice, ShuffledBatches, atomic_write
from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.transformer import Size
from recipes.common.config import TransformerConfig, above_zero, at_least_zero
from recipes.common.devices import over_devices
from recipes.common.finish import TrainingResult, finish
from recipes.common.fit import fit
from recipes.common.fp8 import every_product
from recipes.common.generate import generate, readable
from recipes.common.run_folder import run_folder
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets.text import VOCABULARY, read, sequences, split


@dataclasses.dataclass(frozen=True)
class Config(TransformerConfig):
    """What can be set, here and on the command line."""

    epochs: Annotated[int, "passes over the training text"] = 8
    batch_size: Annotated[int, "sequences a step"] = 16
    learning_rate: Annotated[float, "peak, after warm-up"] = 4e-3
    weight_decay: Annotated[float, "decoupled, as in AdamW"] = 0.1
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "language_model"
    corpus: Annotated[str, "pydoc, stdlib or the path of a text file"] = "pydoc"
    model: Annotated[str, "gpt or llama"] = "gpt"
    sequence_length: Annotated[int, "bytes of a sequence"] = 128
    layers: Annotated[int, "transformer blocks"] = 4
    width: Annotated[int, "features of a token"] = 128
    heads: Annotated[int, "attention heads; they divide the width"] = 2
    prompt: Annotated[str, "what the generated text begins with"] = "The "
    generate: Annotated[int, "bytes to generate at the end"] = 300
    temperature: Annotated[float, "of the generated text; 0 takes the likeliest byte"] = 0.8

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "sequence_length", "layers", "width", "heads")
        at_least_zero(self, "generate", "temperature")
        if self.model not in ("gpt", "llama"):
            raise ValueError(f"model must be gpt or llama, got {self.model!r}")
        if self.model == "llama" and self.dropout:
            raise ValueError(f"dropout must be 0 for the model llama, which drops nothing, got {self.dropout}")
        if not self.prompt:
            raise ValueError("prompt must hold at least one character, got an empty one")


def language_model() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def build(config: Config) -> keras.Model:
    """Builds the model: bytes in, float32 logits of the next byte out."""
    if config.model == "llama":
        return llama(_llama_size(config), config.sequence_length, config.remat)
    size = Size(config.layers, config.width, config.heads)
    return gpt(size, VOCABULARY, config.sequence_length, dropout=config.dropout, remat=config.remat)


def _llama_size(config: Config) -> LlamaSize:
    """As many weights as the GPT: a key for two queries, and as Llama 2 two thirds of a GPT's hidden features."""
    key_heads = config.heads // 2 if config.heads % 2 == 0 else config.heads
    hidden = -(-8 * config.width // (3 * 128)) * 128
    return LlamaSize(config.layers, config.width, config.heads, key_heads, hidden, VOCABULARY, tied=True)


def model_to_train(config: Config, choice: PolicyChoice, steps: int) -> keras.Model:
    """Builds the model in the chosen precision and compiles it for a number of steps."""
    optimizer = keras.optimizers.AdamW(
        # Keras's schedules count batches, of which `accumulate` make an update.
        warmup_then_cosine(config.learning_rate, steps),
        beta_2=0.95,
        weight_decay=config.weight_decay,
        global_clipnorm=1.0,
        gradient_accumulation_steps=config.accumulate if config.accumulate > 1 else None,
    )
    fp8 = every_product(choice, config.fp8)
    return keras_mp.prepare(
        build(config), optimizer, keras_mp.lean.ChunkedCrossEntropy(), fp8=fp8, state_dtype=config.state_dtype
    )


def step(config: Config) -> tuple[keras.Model, tuple]:
    """The model, and the shapes of a batch: what `keras-mp inspect language_model` looks at."""
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), steps=10)
    tokens = keras.KerasTensor((config.batch_size, config.sequence_length), "int32")
    return model, (tokens, tokens)


def batches(config: Config) -> ShuffledBatches:
    """The training data: what `keras-mp audit language_model` looks at, too."""
    train_bytes, _ = split(read(config.corpus), config.sequence_length)
    return ShuffledBatches(*sequences(train_bytes, config.sequence_length), config.batch_size, config.seed)


def train(config: Config) -> TrainingResult:
    """Trains, measures, generates, saves and exports, as the config says."""
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    data = batches(config)
    _, validation_bytes = split(read(config.corpus), config.sequence_length)
    validation_inputs, validation_targets = sequences(validation_bytes, config.sequence_length)

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        training = fit(model, data, config, folder, (validation_inputs, validation_targets), config.batch_size)
    model = gather(model)
    # The loss is the mean cross-entropy of all bytes in nats, reduced in float32; a bit is log(2) nats.
    bits_per_byte = training.history.rows[-1]["test_loss"] / math.log(2)
    text = generate(model, config.prompt.encode(), config.generate, config.temperature, config.seed)
    with atomic_write(folder / "generated.txt") as partial:
        partial.write_bytes(config.prompt.encode() + text)
    result = finish(
        model,
        config,
        folder,
        choice,
        training,
        "validation bits per byte",
        bits_per_byte,
        verify=validation_inputs[:8],
    )
    if workers.is_first():
        print(f"\n{config.prompt}{readable(text)}")
    return result

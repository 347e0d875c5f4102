r"""GPT-2: a language model of subwords, at the size of the paper or at one for a laptop.

    keras-mp train gpt2 --corpus pydoc --size micro --vocabulary 1024 --sequence-length 64 --batch-size 16 \
        --learning-rate 4e-3 --epochs 8
    keras-mp train gpt2 --download --remat --accumulate 16

The first trains on Python's own documentation. Hardware: 2 cores of a CPU. Time: 2 minutes on TensorFlow, on a machine
that others used, too.
Expect, on the last tenth of the text, 1.75 bits per byte in mixed_bfloat16 (seed 0: 1.7525). The training recipe
language_model, which reads the same text byte by byte, reaches 1.78.

The second is GPT-2 124M on the One Billion Word Benchmark (a download of 1.7 GiB), for a GPU or a TPU chip. It was not
run. Trained on the text of the web, the paper's model of this size reached a perplexity of 75.2 a word on this
benchmark, without having seen it (Radford et al. 2019, table 3, where it is called 117M).
"""

import dataclasses
import math
from typing import Annotated

import keras
import numpy as np

import keras_mp
from keras_mp.parallel import gather, workers
from keras_mp.training import PolicyChoice, atomic_write
from models.gpt import SIZES, gpt
from recipes.common.config import TransformerConfig, above_zero, at_least_zero
from recipes.common.devices import over_devices
from recipes.common.finish import TrainingResult, finish
from recipes.common.fit import fit
from recipes.common.fp8 import every_product
from recipes.common.generate import generate_tokens, readable
from recipes.common.run_folder import run_folder
from recipes.common.schedule import warmup_then_cosine
from recipes.datasets.corpus import LM1B, TokenBatches, read, sequences
from recipes.datasets.prepared import DataConfig
from recipes.datasets.tokens import SMALLEST_VOCABULARY, token_lengths


@dataclasses.dataclass(frozen=True)
class Config(DataConfig, TransformerConfig):
    """What can be set, here and on the command line."""

    epochs: Annotated[int, "passes over the training text"] = 1
    batch_size: Annotated[int, "sequences a step"] = 8
    learning_rate: Annotated[float, "peak, after warm-up"] = 6e-4
    weight_decay: Annotated[float, "decoupled, as in AdamW"] = 0.1
    name: Annotated[str, "folder of this run; -2, -3, ... is added when it exists"] = "gpt2"
    checkpoint_every: Annotated[int, "steps between checkpoints; 0 for one at the end of each epoch"] = 1000
    corpus: Annotated[str, "lm1b, pydoc, stdlib or the path of a text file"] = LM1B
    size: Annotated[str, "micro, mini or gpt2"] = "gpt2"
    vocabulary: Annotated[int, "tokens, learned from the training text"] = 50257
    sequence_length: Annotated[int, "tokens of a sequence"] = 1024
    prompt: Annotated[str, "what the generated text begins with"] = "The "
    generate: Annotated[int, "tokens to generate at the end"] = 100
    temperature: Annotated[float, "of the generated text; 0 takes the likeliest token"] = 0.8

    def __post_init__(self):
        super().__post_init__()
        above_zero(self, "sequence_length")
        at_least_zero(self, "generate", "temperature")
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise ValueError(f"vocabulary must be at least {SMALLEST_VOCABULARY}, got {self.vocabulary}")
        if not self.prompt:
            raise ValueError("prompt must hold at least one character, got an empty one")


def gpt2() -> Config:
    """The training recipe as it is meant to be run."""
    return Config()


def build(config: Config) -> keras.Model:
    """Builds the model: tokens in, float32 logits of the next token out."""
    return gpt(config.size, config.vocabulary, config.sequence_length, dropout=config.dropout, remat=config.remat)


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
    """The model, and the shapes of a batch: what `keras-mp inspect gpt2` looks at."""
    model = model_to_train(config, keras_mp.set_global_policy(config.policy), steps=10)
    tokens = keras.KerasTensor((config.batch_size, config.sequence_length), "int32")
    return model, (tokens, tokens)


def batches(config: Config) -> TokenBatches:
    """The training data: what `keras-mp audit gpt2` looks at, too."""
    return _batches(config, read(config.corpus, config.vocabulary, config.data_dir, config.download))


def train(config: Config) -> TrainingResult:
    """Trains, measures, generates, saves and exports, as the config says."""
    choice = keras_mp.set_global_policy(config.policy)
    keras.utils.set_random_seed(config.seed)
    corpus = read(config.corpus, config.vocabulary, config.data_dir, config.download)
    data = _batches(config, corpus)
    inputs, targets = (part.astype(np.int32) for part in sequences(corpus.validation, config.sequence_length))

    with over_devices(config):
        model = model_to_train(config, choice, config.epochs * data.steps)
        folder = run_folder(config)
        # Without it, nobody can use the model.
        corpus.tokenizer.save(str(folder / "tokenizer.json"))
        training = fit(model, data, config, folder, (inputs, targets), config.batch_size)
    model = gather(model)
    # The loss is the mean cross-entropy of all tokens in nats, reduced in float32; a bit is log(2) nats. By the byte,
    # because tokens of different vocabularies are not the same amount of text.
    bits = training.history.rows[-1]["test_loss"] / math.log(2) * targets.size
    bits_per_byte = bits / token_lengths(corpus.tokenizer)[targets].sum()
    prompt = corpus.tokenizer.encode(config.prompt).ids
    drawn = generate_tokens(
        model,
        prompt,
        config.generate,
        config.temperature,
        config.seed,
        vocabulary=corpus.tokenizer.get_vocab_size(),
    )
    text = corpus.tokenizer.decode([*prompt, *drawn], skip_special_tokens=False)
    with atomic_write(folder / "generated.txt") as partial:
        partial.write_text(text, encoding="utf-8")
    result = finish(
        model, config, folder, choice, training, "validation bits per byte", float(bits_per_byte), verify=inputs[:8]
    )
    if workers.is_first():
        print(f"\n{readable(text.encode())}")
    return result


def _batches(config, corpus):
    return TokenBatches(corpus.train, config.sequence_length, config.batch_size, config.seed)

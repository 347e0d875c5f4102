"""A corpus as tokens: an embedded text or a file, or the sentences of the One Billion Word Benchmark."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_mp.training import ShuffledBatches, atomic_write
from recipes.common.require import require
from recipes.datasets import lm1b, text
from recipes.datasets.tokens import encode, learn, token_file

LM1B = lm1b.SOURCE.name
END = "<|endoftext|>"
# A tenth of the corpus is enough to compare by, and a test of hundreds of millions of tokens takes as long as training.
LARGEST_VALIDATION = 2**21


class Corpus(NamedTuple):
    """A text as tokens.

    Attributes:
        train: unsigned integers, shape `(tokens,)`, in memory or mapped into it.
        validation: unsigned integers, shape `(tokens,)`, at most two million.
        tokenizer: the tokenizer that they are made with.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Any


def read(corpus: str, vocabulary: int, data_dir: str | None, download: bool) -> Corpus:
    """Reads a corpus and encodes it with a tokenizer that is learned from its training part.

    The tokens of the benchmark are written beside it the first time, which takes a while, and read from there later.

    Args:
        corpus: `"lm1b"`, or what `recipes.datasets.text.read` takes.
        vocabulary: number of different tokens, at most.
        data_dir: the folder of the benchmark's prepared files, as `prepared` takes it.
        download: whether to download and prepare them, as `prepared` takes it.

    Returns:
        The tokens: the last tenth of a text is for validation, of the benchmark its test set.

    Raises:
        NotPreparedError: the benchmark is not prepared, and is not to be downloaded.
        FileNotFoundError: there is no such file.
        ValueError: the vocabulary has no room for all bytes.
    """
    if corpus == LM1B:
        return _lm1b(vocabulary, data_dir, download)
    train, validation = text.split(text.read(corpus), 1)
    # The last byte of the training part may be within a character.
    tokenizer = learn(train.tobytes().decode("utf-8", errors="replace").splitlines(keepends=True), vocabulary, END)
    validation = encode(tokenizer, validation.tobytes())
    return Corpus(encode(tokenizer, train.tobytes()), validation[:LARGEST_VALIDATION], tokenizer)


class TokenBatches(ShuffledBatches):
    """Sequences of a row of tokens, each beside the tokens that follow its own.

    Args:
        tokens: unsigned integers, shape `(tokens,)`.
        length: tokens of a sequence.
        batch_size: sequences a step.
        seed: the seed of the order.

    Raises:
        ValueError: the tokens do not make one sequence; and as `Batches`.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch_size: int, seed: int) -> None:
        super().__init__(*sequences(tokens, length), batch_size, seed)

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = super().batch(epoch, step)
        # Few devices have 16-bit unsigned integers.
        return np.asarray(inputs, np.int32), np.asarray(targets, np.int32)


def sequences(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts tokens into sequences, each beside the tokens that follow its own, without a copy.

    Args:
        tokens: shape `(tokens,)`.
        length: tokens of a sequence.

    Returns:
        Inputs and targets, both of shape `((tokens - 1) // length, length)`: `targets[i, j]` follows `inputs[i, j]`.

    Raises:
        ValueError: the tokens do not make one sequence.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"sequence_length must be below the {len(tokens)} tokens of this part of the corpus, got {length}"
        )
    inputs, targets = tokens[: count * length], tokens[1 : count * length + 1]
    return inputs.reshape(count, length), targets.reshape(count, length)


def _lm1b(vocabulary, data_dir, download):
    builder = lm1b.find(data_dir, download)
    folder = lm1b.folder(builder)
    # Of this vocabulary, because files of another tokenizer mean another text.
    known = folder / f"{vocabulary}-tokenizer.json"
    if known.is_file():
        tokenizer = require("tokenizers", extra="data").Tokenizer.from_file(str(known))
    else:
        tokenizer = learn(lm1b.sentences(builder, "train"), vocabulary, END)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(known) as partial:
            tokenizer.save(str(partial))
    tokens = []
    for split in ("train", "test"):
        path = Path(folder, f"{vocabulary}-{split}.npy")
        if not path.is_file():
            print(f"encoding the {split} set of {LM1B} into {path}: this is done once", flush=True)
        tokens.append(token_file(path, tokenizer, lambda split=split: lm1b.sentences(builder, split)))
    return Corpus(tokens[0], tokens[1][:LARGEST_VALIDATION], tokenizer)

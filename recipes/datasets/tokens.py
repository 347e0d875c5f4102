"""Tokens of a text: byte-level pair encoding, learned from the text itself, and files of tokens.

Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016 (arXiv:1508.07909), on
bytes as in GPT-2 (Radford et al. 2019, section 2.2): any text can be encoded, and is read back as it was.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_mp.training import atomic_write
from recipes.common.require import require

# The one token that is no text: it ends a document, or fills a sequence up.
SPECIAL = 0
LEARNED_FROM = 100_000_000
SMALLEST_VOCABULARY = 257
ENCODED_AT_A_TIME = 1000


def learn(texts: Iterable[str], vocabulary: int, special: str) -> Any:
    """Learns a tokenizer from the first 100 million characters of texts.

    Args:
        texts: the texts, from which the same tokenizer is learned each time.
        vocabulary: number of different tokens, at most: 1 special one, 256 bytes, and pairs.
        special: the name of token 0, which no text has.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        ValueError: the vocabulary has no room for all bytes.
    """
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary must be at least {SMALLEST_VOCABULARY}: a special token and all bytes, got {vocabulary}"
        )
    tokenizers = require("tokenizers", extra="data")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[special],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts), trainer)
    # What looks like the special token within a text is text.
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_lengths(tokenizer: Any) -> np.ndarray:
    """How many bytes of text each token stands for, int64, shape `(vocabulary,)`; 0 for the special one."""
    # Within a token, a byte is a character.
    lengths = [len(tokenizer.id_to_token(token)) for token in range(tokenizer.get_vocab_size())]
    lengths[SPECIAL] = 0
    return np.array(lengths, np.int64)


def encode(tokenizer: Any, text: bytes) -> np.ndarray:
    """Encodes one long text: uint16 or uint32, shape `(tokens,)`."""
    # By lines, because a tokenizer takes a text as a whole, and is slow at long ones.
    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    return np.concatenate([np.array(line, _dtype(tokenizer)) for line in _encoded(tokenizer, lines)])


def encode_padded(tokenizer: Any, texts: Iterable[str], length: int) -> np.ndarray:
    """Encodes texts to one length: cut at the end, or filled up with the special token.

    Args:
        tokenizer: the result of `learn`.
        length: the tokens of each.

    Returns:
        int32, shape `(texts, length)`.
    """
    rows = []
    for tokens in _encoded(tokenizer, texts):
        row = np.full(length, SPECIAL, np.int32)
        row[: len(tokens)] = tokens[:length]
        rows.append(row)
    return np.stack(rows)


def token_file(path: Path, tokenizer: Any, texts: Callable[[], Iterable[str]]) -> np.ndarray:
    """Encodes documents into a file of tokens, each ended by the special one; reads the file where there is one.

    Args:
        path: the `.npy` file; whole, or not there.
        tokenizer: the result of `learn`.
        texts: a function that opens the documents, where there is no file.

    Returns:
        The tokens, uint16 or uint32, shape `(tokens,)`, mapped into memory.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            _write(partial, tokenizer, texts())
    return np.load(path, mmap_mode="r")


def _write(path, tokenizer, texts):
    """A `.npy` file whose length is known only at its end: the header, which NumPy pads, is written twice."""
    dtype, count = _dtype(tokenizer), 0
    with path.open("wb") as file:
        _header(file, dtype, count)
        for tokens in _encoded(tokenizer, texts):
            file.write(np.array([*tokens, SPECIAL], dtype).tobytes())
            count += len(tokens) + 1
        end = file.tell()
        file.seek(0)
        _header(file, dtype, count)
    assert end == path.stat().st_size


def _header(file, dtype, count):
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (count,)}
    )


def _encoded(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    texts = iter(texts)
    while some := list(itertools.islice(texts, ENCODED_AT_A_TIME)):
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield encoding.ids


def _dtype(tokenizer):
    return np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32


def _first(texts):
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= LEARNED_FROM:
            return

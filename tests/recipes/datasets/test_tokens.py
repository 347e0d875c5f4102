"""Tokens give the text back, and files of them are whole."""

import numpy as np
import pytest

from recipes.datasets import corpus, tokens

pytest.importorskip("tokenizers", reason="tokenizers, which learns the vocabulary, is not installed")
TEXT = "naïve café, 東京 <|endoftext|> \t tabs\n\x0c and\x85 ends \U0001f600 " * 30


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.learn([TEXT, "the theory of the thing"] * 3, 400, "<|endoftext|>")


def test_any_text_is_given_back_and_its_bytes_are_counted(tokenizer):
    generator = np.random.default_rng(0)
    strange = "".join(map(chr, generator.integers(1, 0xD7FF, 500)))
    for text in (TEXT, strange, "never seen: ŁΩ"):
        encoded = tokens.encode(tokenizer, text.encode())
        assert encoded.dtype == np.uint16 and tokens.SPECIAL not in encoded
        assert tokenizer.decode(encoded.tolist(), skip_special_tokens=False) == text
        assert tokens.token_lengths(tokenizer)[encoded].sum() == len(text.encode())


def test_pairs_make_a_text_shorter_and_the_same_text_the_same_tokenizer(tokenizer):
    assert len(tokens.encode(tokenizer, TEXT.encode())) < len(TEXT.encode()) / 3
    again = tokens.learn([TEXT, "the theory of the thing"] * 3, 400, "<|endoftext|>")
    assert again.to_str() == tokenizer.to_str()


def test_texts_are_cut_or_filled_up(tokenizer):
    rows = tokens.encode_padded(tokenizer, ["the", "", "the theory of the thing" * 9], 12)
    assert rows.shape == (3, 12) and rows.dtype == np.int32
    assert rows[1].tolist() == [0] * 12 and rows[2].min() > 0
    count = np.count_nonzero(rows[0])
    assert 1 <= count <= 3 and rows[0, count:].max() == 0


def test_a_file_holds_the_documents_and_their_ends(tokenizer, tmp_path):
    # More than are encoded at a time.
    documents = [f"the {number} things" for number in range(2500)]
    found = tokens.token_file(tmp_path / "tokens.npy", tokenizer, lambda: iter(documents))
    assert found.dtype == np.uint16 and found[-1] == tokens.SPECIAL
    ends = np.flatnonzero(found == tokens.SPECIAL)
    parts = np.split(np.asarray(found), ends + 1)[:-1]
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == documents
    np.testing.assert_array_equal(found, np.load(tmp_path / "tokens.npy"))


def test_targets_follow_inputs_without_a_copy():
    row = np.arange(11, dtype=np.uint16)
    inputs, targets = corpus.sequences(row, 5)
    np.testing.assert_array_equal(inputs, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    np.testing.assert_array_equal(targets, inputs + 1)
    assert np.shares_memory(inputs, row) and np.shares_memory(targets, row)
    with pytest.raises(ValueError, match="sequence_length must be below the 11 tokens .*, got 11"):
        corpus.sequences(row, 11)
    assert corpus.sequences(row, 10)[0].shape == (1, 10)


def test_batches_of_tokens_are_int32_in_an_order_of_seed_and_epoch():
    row = np.random.default_rng(0).integers(0, 50000, 1001).astype(np.uint16)
    batches = corpus.TokenBatches(row, 10, 8, seed=3)
    inputs, targets = batches.batch(2, 5)
    assert inputs.dtype == targets.dtype == np.int32 and inputs.shape == (8, 10)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(inputs, corpus.TokenBatches(row, 10, 8, seed=3).batch(2, 5)[0])
    assert not np.array_equal(inputs, batches.batch(3, 5)[0])


def test_a_vocabulary_without_room_for_all_bytes_is_named():
    with pytest.raises(ValueError, match="vocabulary must be at least 257: .*, got 256"):
        tokens.learn(["a"], 256, "<|endoftext|>")

import pytest


@pytest.fixture(autouse=True)
def vocabulary_in_chunks(monkeypatch):
    """The models of these tests are so small that whole logits take less memory: their heads would not be tested."""
    monkeypatch.setattr("keras_mp.lean.chunked_head.chunks_save_memory", lambda *sizes: True)


@pytest.fixture
def one_mask(monkeypatch):
    """Keras's Dropout layers draw as lean attention does, so that a plain model drops the same probabilities."""
    import keras

    from keras_mp.lean.blockwise_attention import kept, keys_of

    def call(self, inputs, training=False):
        if not training or not self.rate:
            return inputs
        *leading, columns = keras.ops.shape(inputs)
        there = kept(*keys_of(self.seed_generator.next(), tuple(leading)), columns, self.rate)
        return keras.ops.where(there, inputs / (1 - self.rate), 0)

    monkeypatch.setattr(keras.layers.Dropout, "call", call)


@pytest.fixture
def recomputed(monkeypatch):
    """The calls that are made so that the backward pass makes them again."""
    from keras_mp.lean import recompute, remat_blocks

    calls, make = [], recompute.recomputed_call
    for module in (recompute, remat_blocks):
        monkeypatch.setattr(module, "recomputed_call", lambda *arguments: calls.append(1) or make(*arguments))
    return calls

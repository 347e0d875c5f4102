"""A model with a large vocabulary whose loss never holds all logits."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.lean.chunked_head import ChunkedHead, prepare_head


@keras.saving.register_keras_serializable("keras_mp")
class LanguageModel(ChunkedHead, keras.Model):
    """A functional model that ends in logits, and trains without making all of them.

        model = keras_mp.LanguageModel(tokens, logits)
        model.compile("adamw", keras_mp.ChunkedCrossEntropy())
        model.fit(tokens, next_tokens)

    With `ChunkedCrossEntropy`, or Keras's `SparseCategoricalCrossentropy(from_logits=True)`, `fit` and `evaluate`
    compute the loss from the input of the last Dense or ReversibleEmbedding layer, in chunks; the logits are not used,
    so a compiled step does not compute them. In that loss they are float32 sums, which are not rounded to the dtype of
    the layer. Keras's sparse accuracy and cross-entropy, and KerasHub's Perplexity, are measured in the same chunks;
    any other metric that takes predictions makes the logits whole again. With any other loss, and in `predict`,
    `export` and calls, it is an ordinary model.

    Args:
        *args: inputs and outputs, as for `keras.Model`; one output, made by a Dense or ReversibleEmbedding layer, with
            only layers such as Activation("linear") after it.
        **kwargs: name and further arguments, as for `keras.Model`.

    Raises:
        ValueError: more than one output, or another kind of last layer.
    """

    # By this signature, with these names, Keras since 3.13 sees that its own config of a functional model will do.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.outputs) != 1:
            raise ValueError(f"a LanguageModel has one output, its logits; got {len(self.outputs)}")
        prepare_head(self)

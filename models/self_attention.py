"""Self-attention of the transformers of this folder: one product for queries, keys and values, and rotary positions."""

from collections.abc import Sequence
from typing import Any

import keras

import keras_mp


@keras.saving.register_keras_serializable("models")
class SelfAttention(keras.layers.Layer):
    """Attention of a sequence to itself, by `keras_mp.lean.attention`, which keeps no scores for the backward pass.

        query, key, value = split(inputs . W + b)       one Dense layer
        if self.rotary is not None:
            query, key = rotate(query, self.rotary), rotate(key, self.rotary)
        output = attention(query, key, value) . V + c   another

    The weights are those of `keras.layers.MultiHeadAttention` (or `GroupQueryAttention`) side by side: queries, then
    keys, then values, each head by head. The softmax is in float32 under every policy.

    Args:
        heads: number of attention heads, each of `width / heads` features.
        key_heads: number of heads of keys and values, each for `heads / key_heads` heads of queries; as many as heads
            by default.
        causal: whether a token sees only itself and those before it.
        use_bias: whether the two Dense layers have biases.
        kernel_initializer: the initializer of both kernels; a name, a config or an initializer.
        rotary: the rotary positions: radians from a token to the next, by which each of the `width / heads / 2` pairs
            of features of a query and a key is rotated; by default none.
        **arguments: arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: floats, shape `(batch, length, width)`; batch and length may be unknown.
        mask: booleans, shape `(batch, length)` or `(batch, length or 1, length)`, False for tokens that are not seen;
            by default the mask that Keras carries, as from `Embedding(mask_zero=True)`.

    Raises:
        ValueError: heads do not divide the width or are no multiple of key_heads, rotary has another number of pairs,
            or a mask has another shape.

    References:
        Vaswani et al., "Attention Is All You Need", 2017 (arXiv:1706.03762), section 3.2.
    """

    def __init__(
        self,
        heads: int,
        key_heads: int | None = None,
        *,
        causal: bool = False,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        rotary: Sequence[float] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.heads, self.key_heads = heads, heads if key_heads is None else key_heads
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of key_heads, got {heads} and {key_heads}")
        self.causal, self.use_bias = causal, use_bias
        self.rotary = None if rotary is None else list(rotary)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        width = input_shape[-1]
        if len(input_shape) != 3 or width is None or width % self.heads:
            raise ValueError(
                f"inputs must have the shape (batch, length, width), width a multiple of the {self.heads} heads, got "
                f"{tuple(input_shape)}"
            )
        features = width // self.heads
        if self.rotary is not None and 2 * len(self.rotary) != features:
            raise ValueError(
                f"rotary must hold {features / 2:g} numbers, one for each pair of the {features} features of a head, "
                f"got {len(self.rotary)}"
            )
        self.query_key_value = self._dense((self.heads + 2 * self.key_heads) * features, "query_key_value")
        self.output_projection = self._dense(width, "output")
        self.query_key_value.build(input_shape)
        self.output_projection.build(input_shape)
        self.built = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        length, width = inputs.shape[1:]
        length = keras.ops.shape(inputs)[1] if length is None else length
        places = [width, width + self.key_heads * (width // self.heads)]
        query, key, value = (
            keras.ops.reshape(part, (-1, length, heads, width // self.heads))
            for part, heads in zip(
                keras.ops.split(self.query_key_value(inputs), places, axis=-1),
                (self.heads, self.key_heads, self.key_heads),
                strict=True,
            )
        )
        if self.rotary is not None:
            query, key = rotate(query, self.rotary), rotate(key, self.rotary)
        output = keras_mp.lean.attention(query, key, value, mask, causal=self.causal)
        return self.output_projection(keras.ops.reshape(output, (-1, length, width)))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return mask if mask is not None and len(mask.shape) == 2 else None

    def get_config(self) -> dict[str, Any]:
        names = ("heads", "key_heads", "causal", "use_bias", "rotary")
        initializer = keras.initializers.serialize(self.kernel_initializer)
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own, "kernel_initializer": initializer}

    def _dense(self, units: int, name: str) -> Any:
        # A copy, because an initializer draws the same values each time.
        initializer = self.kernel_initializer.clone()
        return keras.layers.Dense(
            units, use_bias=self.use_bias, kernel_initializer=initializer, dtype=self.dtype_policy, name=name
        )


def rotate(x: Any, frequencies: Sequence[float]) -> Any:
    """Rotates pairs of features by an angle that grows with the row, in float32 inside.

        a, b = halves of the features of row i
        angle = i frequencies
        result = a cos(angle) - b sin(angle), b cos(angle) + a sin(angle)

    Feature j is in a pair with feature `j + features / 2`, as in the files of weights that Hugging Face and KerasHub
    publish; Meta's own code pairs neighbours, so its kernels have another order. The backward pass needs the sines and
    cosines alone.

    Args:
        x: floats, shape `(batch, rows, heads, features)`; rows may be unknown.
        frequencies: radians a row, `features / 2` numbers.

    Returns:
        A tensor of the same shape and dtype.

    References:
        Su et al., "RoFormer", 2021 (arXiv:2104.09864), equation 34.
    """
    rows = keras.ops.arange(keras.ops.shape(x)[1], dtype="float32")
    angles = keras.ops.expand_dims(rows, 1) * keras.ops.convert_to_tensor(frequencies, "float32")
    cosine, sine = (keras.ops.expand_dims(f(angles), 1) for f in (keras.ops.cos, keras.ops.sin))
    first, second = keras.ops.split(keras.ops.cast(x, "float32"), 2, axis=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return keras.ops.cast(keras.ops.concatenate(rotated, axis=-1), x.dtype)

"""The sensitive parts of layers in float32, as mixins."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import AutocastScope, get_keras_mask, set_keras_mask
from keras_mp.rebuild.walk import LOW_PRECISION, Config, precision_of_layer
from keras_mp.stability.accumulate import MASKED_SCORE, einsum_float32, last_axis
from keras_mp.stability.quantized_product import dequantized_weights, keeps_float_inputs

engine = backend.engine_of(__package__)


class Float32Inside:
    """Computes in float32, and returns the dtype of `precision`."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(self._lowered, super().call(*args, **kwargs))  # type: ignore[misc]

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        spec = super().compute_output_spec(*args, **kwargs)  # type: ignore[misc]
        return keras.tree.map_structure(
            lambda x: keras.KerasTensor(x.shape, precision_of_layer(self), name=x.name) if has_float_dtype(x) else x,
            spec,
        )

    def _lowered(self, x: Any) -> Any:
        if not has_float_dtype(x) or keras.backend.standardize_dtype(x.dtype) == precision_of_layer(self):
            return x  # the same object: on it Keras keeps the logits of a softmax
        return keras.ops.cast(x, precision_of_layer(self))


class UnroundedArguments(Float32Inside):
    """Reads float32 arguments unrounded; weights and result in `precision`."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with AutocastScope(precision_of_layer(self)):
            return super().call(*args, **kwargs)


class Float32BatchNormalization(Float32Inside):
    """Normalizes 16-bit inputs in one kernel, with float32 statistics.

        moving = momentum . moving + (1 - momentum) . (mean or variance of the batch)

    For Keras's own layer: a subclass that computes otherwise is Float32Inside.
    """

    @staticmethod
    def stands_for(cls: Any) -> bool:
        """Whether a class computes as Keras's layer does."""
        keras_own = keras.layers.BatchNormalization
        return issubclass(cls, keras_own) and (cls.call, cls._moments) == (keras_own.call, keras_own._moments)

    def call(self: Any, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        # What stands here is private to Keras's layer, or newer than the oldest version: renorm.
        takes_moments = training and self.trainable and not self.synchronized and not getattr(self, "renorm", False)
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        # Where the result is wider than the input, as in a model that was exported, it must not be rounded on the way.
        last = self.axis in (-1, len(inputs.shape) - 1)
        reads = mask is None and last and dtype in (precision_of_layer(self), "float32")
        if takes_moments and reads:
            result = engine.normalize_batch(inputs, self.gamma, self.beta, self.epsilon)
            if result is not None:
                outputs, *moments = result
                for moving, moment in zip((self.moving_mean, self.moving_variance), moments, strict=True):
                    wide = keras.ops.cast(moving, "float32")
                    moving.assign(wide * self.momentum + moment * (1.0 - self.momentum))
                return self._lowered(outputs)
        return super().call(keras.ops.cast(inputs, "float32"), training=training, mask=mask)


class Float32RowNormalization(Float32Inside):
    """Layer or RMS normalization over the last axis, in float32.

    For Keras's own layers: a subclass that computes otherwise is Float32Inside.
    """

    @staticmethod
    def stands_for(cls: Any) -> bool:
        """Whether a class computes as one of Keras's layers does."""
        keras_own = (keras.layers.LayerNormalization, keras.layers.RMSNormalization)
        return any(issubclass(cls, own) and cls.call is own.call for own in keras_own)

    def call(self: Any, inputs: Any) -> Any:
        axes = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        # rms_scaling, which Keras warns of, is neither of the two.
        if axes not in ([-1], [len(inputs.shape) - 1]) or getattr(self, "rms_scaling", False):
            return self._plain(inputs)
        rms = isinstance(self, keras.layers.RMSNormalization)
        gamma, beta = (self.scale, None) if rms else (self.gamma, self.beta)
        settings = {"centered": not rms, "dtype": precision_of_layer(self)}
        return engine.normalize_rows(self._plain, inputs, gamma, beta, self.epsilon, **settings)

    def _plain(self, inputs: Any) -> Any:
        return super().call(keras.ops.cast(inputs, "float32"))


class Float32Losses:
    """Adds losses in float32, as TensorFlow cannot add others up."""

    def add_loss(self, loss: Any) -> None:
        super().add_loss(keras.tree.map_structure(_widened, loss))  # type: ignore[misc]


class Float32Operation:
    """Computes an operation in float32, returns the input's dtype."""

    def call(self, x: Any) -> Any:
        return keras.ops.cast(super().call(keras.ops.cast(x, "float32")), x.dtype)  # type: ignore[misc]


class Float32Product:
    """Multiplies 16-bit operands into float32, for an output layer."""

    def _product(self, equation: str, inputs: Any, kernel: Any, dtype: str = "") -> Any:
        dtype = dtype or precision_of_layer(self)
        low = (keras.ops.cast(inputs, dtype), keras.ops.cast(kernel, dtype))
        return keras.ops.einsum(equation, *low) if dtype == "float32" else einsum_float32(equation, *low)

    def _widened(self, inputs: Any) -> Any:
        return keras.ops.cast(keras.ops.cast(inputs, precision_of_layer(self)), "float32")


class Float32Result(Float32Product):
    """Dense or EinsumDense, with bias and activation in float32, too."""

    def call(self: Any, inputs: Any, training: bool | None = None) -> Any:
        return self._finished(self._product(self._equation(inputs), inputs, self.kernel))

    def quantized_call(self: Any, inputs: Any, training: bool | None = None) -> Any:
        # Keras's own, which quantizes its inputs or multiplies integers, rounds nothing to 16 bits.
        if not keeps_float_inputs(self):
            return super().quantized_call(self._widened(inputs))  # type: ignore[misc]
        equation = self._equation(inputs)
        x = self._product(equation, inputs, dequantized_weights(self, precision_of_layer(self)))
        if self.lora_enabled:
            a, b = (keras.ops.cast(matrix, "float32") for matrix in (self.lora_kernel_a, self.lora_kernel_b))
            low_rank = keras.ops.einsum(equation, keras.ops.cast(inputs, "float32"), a)
            x = keras.ops.add(x, self.lora_alpha / self.lora_rank * keras.ops.matmul(low_rank, b))
        return self._finished(x)

    def _equation(self, inputs: Any) -> str:
        return getattr(self, "equation", "") or last_axis(len(inputs.shape))

    def _finished(self: Any, x: Any) -> Any:
        if self.bias is not None:
            x = keras.ops.add(x, keras.ops.cast(self.bias, "float32"))
        return x if self.activation is None else self.activation(x)


class Float32ResultReversibleEmbedding(Float32Product):
    def call(self: Any, inputs: Any, reverse: bool = False) -> Any:
        if not reverse:
            return self._lowered(super().call(inputs))  # type: ignore[misc]
        kernel = keras.ops.transpose(self.embeddings) if self.tie_weights else self.reverse_embeddings
        dtype = "float32" if self.reverse_dtype == "float32" else ""
        return self._capped(self._product(last_axis(len(inputs.shape)), inputs, kernel, dtype))

    def quantized_call(self: Any, inputs: Any, reverse: bool = False) -> Any:
        if not reverse:
            return self._lowered(super().quantized_call(inputs))  # type: ignore[misc]
        if not keeps_float_inputs(self):
            return super().quantized_call(self._widened(inputs), reverse=True)  # type: ignore[misc]
        kernel = dequantized_weights(self, precision_of_layer(self))
        return self._capped(self._product(last_axis(len(inputs.shape)), inputs, kernel))

    def _lowered(self, rows: Any) -> Any:
        low = keras.ops.cast(rows, precision_of_layer(self))
        if get_keras_mask(rows) is not None:
            set_keras_mask(low, get_keras_mask(rows))
        return low

    def _capped(self, logits: Any) -> Any:
        cap = self.logit_soft_cap  # type: ignore[attr-defined]
        return logits if cap is None else cap * keras.ops.tanh(logits / cap)

    def compute_output_spec(self, inputs: Any, reverse: bool = False) -> Any:
        spec = super().compute_output_spec(inputs, reverse=reverse)  # type: ignore[misc]
        return spec if reverse else keras.KerasTensor(spec.shape, precision_of_layer(self))


class Float32Scores:
    """Adds up and normalizes scores in float32, on every path.

        probabilities = softmax(scale . query . key^T + mask)     float32, then 16 bit
        output        = dropout(probabilities) . value            16 bit

    The attributes read here are private to Keras's attention layers, which give no public way to change one step.
    """

    def _attend(
        self: Any, operands: tuple[Any, Any], value: Any, mask: Any, training: bool | None, scale: float, rate: float
    ) -> tuple[Any, Any]:
        scores = einsum_float32(self._dot_product_equation, *operands) * scale
        axes = len(getattr(self, "_attention_axes", (1,)))
        if mask is not None:
            for _ in range(len(scores.shape) - len(mask.shape)):
                mask = keras.ops.expand_dims(mask, -2 * axes - 1)  # the heads stand before the attention axes
            scores = keras.ops.where(keras.ops.cast(mask, "bool"), scores, MASKED_SCORE)  # a row may be all masked
        rank = len(scores.shape)
        if axes == 1:
            normalized = keras.ops.softmax(scores, axis=rank - 1)
        else:  # TensorFlow's softmax over several axes takes tensors of 5 axes at most
            over = tuple(range(rank - axes, rank))
            normalized = keras.ops.exp(scores - keras.ops.logsumexp(scores, axis=over, keepdims=True))
        probabilities = keras.ops.cast(normalized, value.dtype)
        kept = self._dropout_layer(probabilities, training=training) if rate > 0 else probabilities
        return keras.ops.einsum(self._combine_equation, kept, value), probabilities


def _fused_in_float32(query: Any, explicit: bool) -> bool:
    """Whether Keras's attention has float32 scores, explicit or not."""
    dtype = keras.backend.standardize_dtype(query.dtype)
    fused = not explicit and len(query.shape) == 4 and engine.fused_attention_in_float32(dtype)
    return dtype == "float32" or fused


class Float32MultiHeadScores(Float32Scores):
    def _compute_attention(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
    ) -> tuple[Any, Any]:
        scale, rate = self._inverse_sqrt_key_dim, self._dropout
        if _fused_in_float32(query, rate > 0 or return_attention_scores):
            return super()._compute_attention(  # type: ignore[misc]
                query, key, value, attention_mask, training, return_attention_scores
            )
        return self._attend((key, query), value, attention_mask, training, scale, rate)


class Float32GroupedQueryScores(Float32Scores):
    def _compute_attention(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, training: bool | None = None
    ) -> tuple[Any, Any]:
        scale, rate = self._inverse_sqrt_head_dim, self.dropout
        if _fused_in_float32(query, rate > 0 or self._return_attention_scores):
            return super()._compute_attention(  # type: ignore[misc]
                query, key, value, attention_mask=attention_mask, training=training
            )
        return self._attend((query, key), value, attention_mask, training, scale, rate)


@keras.saving.register_keras_serializable("keras_mp")
class Float32Regularizer(keras.regularizers.Regularizer):
    """A regularizer of activations that adds them up in float32."""

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = keras.regularizers.get(regularizer)

    def __call__(self, x: Any) -> Any:
        return self.regularizer(keras.ops.cast(x, "float32"))

    def get_config(self) -> Config:
        return {"regularizer": keras.regularizers.serialize(self.regularizer)}


RESULT_MIXINS = {
    keras.layers.Dense: Float32Result,
    keras.layers.EinsumDense: Float32Result,
    keras.layers.ReversibleEmbedding: Float32ResultReversibleEmbedding,
}
SCORES_MIXINS = {
    keras.layers.MultiHeadAttention: Float32MultiHeadScores,
    keras.layers.GroupQueryAttention: Float32GroupedQueryScores,
}


def _widened(x: Any) -> Any:
    low = keras.ops.is_tensor(x) and keras.backend.standardize_dtype(x.dtype) in LOW_PRECISION
    return keras.ops.cast(x, "float32") if low else x


def has_float_dtype(x: Any) -> bool:
    """Tells whether an array, tensor or variable holds floats."""
    return hasattr(x, "dtype") and keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))

"""A model with a large vocabulary whose loss never holds all logits."""

from __future__ import annotations

from typing import Any

import keras

# Private, because Keras has no public way to read one variable in its own dtype, to see a tensor's mask, or to divide a
# mean by the number of TensorFlow's replicas, over which the gradients are added up.
from keras.src.backend import get_keras_mask
from keras.src.backend.common.variables import AutocastScope
from keras.src.losses.loss import scale_loss_for_distribution

from keras_mp import backend
from keras_mp.lean.cross_entropy import chunked_cross_entropy
from keras_mp.stability.sensitive import PASSING_ON
from keras_mp.system.whole_number import whole_number

Config = dict[str, Any]
_REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")


@keras.saving.register_keras_serializable("keras_mp")
class ChunkedCrossEntropy(keras.losses.Loss):
    """Cross-entropy of integer targets; in a `LanguageModel` without whole logits, elsewhere from the logits.

    The value is that of `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`; see
    `keras_mp.lean.cross_entropy.chunked_cross_entropy`.

    Args:
        label_smoothing: from 0 to 1: this share of each target is spread over the vocabulary.
        ignore_class: targets of this number do not count.
        rows: of a chunk; by default what makes 2^26 logits. It need not divide the number of targets.
        reduction: "sum_over_batch_size" (the mean over the targets that count), "mean_with_sample_weight" or "sum".
        name: of the loss.

    Call arguments:
        y_true: integers, shape `(...)`.
        y_pred: logits, shape `(..., vocabulary)`.
        sample_weight: floats that broadcast to y_true from the left.

    Raises:
        ValueError: an argument outside its range, or shapes that do not fit.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_class: int | None = None,
        rows: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "chunked_cross_entropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction is one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing!r}")
        if rows is not None:
            whole_number("rows", rows)
        self.label_smoothing, self.ignore_class, self.rows = label_smoothing, ignore_class, rows

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # The identity as a kernel would cost a product: the logits are there, so the gradient of logits is all.
        logits = keras.ops.cast(y_pred, "float32")
        targets, weights, divisor = self._weighted(y_true, tuple(logits.shape), sample_weight, get_keras_mask(y_pred))
        log_sum = keras.ops.logsumexp(logits, axis=-1)
        one_hot = keras.ops.arange(logits.shape[-1], dtype="int32") == keras.ops.expand_dims(targets, -1)
        at_target = keras.ops.sum(keras.ops.where(one_hot, logits, 0.0), axis=-1)
        smooth = self.label_smoothing
        losses = log_sum - (1.0 - smooth) * at_target
        if smooth:
            losses = losses - smooth * keras.ops.mean(logits, axis=-1)
        return self._reduced(keras.ops.sum(keras.ops.where(weights == 0, 0.0, losses * weights)), divisor)

    def of_features(
        self, y_true: Any, features: Any, kernel: Any, *, sample_weight: Any = None, mask: Any = None, **arguments: Any
    ) -> Any:
        """The same of `features . kernel`, in chunks.

        Args:
            y_true: as for a call.
            features: floats, shape `(..., width)`.
            kernel: floats, shape `(width, vocabulary)`.
            sample_weight: as for a call.
            mask: booleans of the shape of y_true, False for targets that do not count.
            **arguments: bias, vocabulary_first and gradient of `chunked_cross_entropy`.

        Returns:
            A float32 number.
        """
        targets, weights, divisor = self._weighted(y_true, tuple(features.shape), sample_weight, mask)
        total = chunked_cross_entropy(
            features, kernel, targets, weights, label_smoothing=self.label_smoothing, rows=self.rows, **arguments
        )
        return self._reduced(total, divisor)

    def get_config(self) -> Config:
        own = {"label_smoothing": self.label_smoothing, "ignore_class": self.ignore_class, "rows": self.rows}
        return {**super().get_config(), **own}

    def _weighted(self, y_true: Any, shape: tuple, sample_weight: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Targets, the weight of each, and what their sum is divided by."""
        targets = keras.ops.cast(backend.as_tensor(y_true), "int32")
        if len(targets.shape) == len(shape) and targets.shape[-1] == 1 and len(shape) > 1:
            targets = keras.ops.squeeze(targets, -1)
        counts = keras.ops.ones_like(targets, dtype="float32")
        if self.ignore_class is not None:
            counts = keras.ops.cast(targets != self.ignore_class, "float32")
        if mask is not None:
            counts = counts * keras.ops.cast(mask, "float32")
        weights = counts
        if sample_weight is not None:
            given = keras.ops.cast(backend.as_tensor(sample_weight), "float32")
            if len(given.shape) == len(targets.shape) + 1 and given.shape[-1] == 1:
                given = keras.ops.squeeze(given, -1)
            weights = counts * keras.ops.reshape(given, _broadcast(given, targets))
        divisor = {
            "sum": lambda: 1.0,
            "sum_over_batch_size": lambda: keras.ops.sum(counts),
            "mean_with_sample_weight": lambda: keras.ops.sum(weights),
        }[self.reduction]()
        if self.reduction != "sum":
            # Rows that do not count may be more on one replica than on another.
            if weights is not counts or mask is not None or self.ignore_class is not None:
                divisor = backend.global_mean(divisor)
            divisor = keras.ops.where(divisor == 0, 1.0, divisor)  # the sum is 0 as well
        return targets, weights, divisor

    def _reduced(self, total: Any, divisor: Any) -> Any:
        return total if self.reduction == "sum" else scale_loss_for_distribution(total / divisor)


@keras.saving.register_keras_serializable("keras_mp")
class LanguageModel(keras.Model):
    """A functional model that ends in logits, and trains with `ChunkedCrossEntropy` without making all of them.

        model = keras_mp.LanguageModel(tokens, logits)
        model.compile("adamw", keras_mp.ChunkedCrossEntropy())
        model.fit(tokens, next_tokens)

    In `fit` and `evaluate` that loss is computed from the input of the last Dense or ReversibleEmbedding layer, in
    chunks; the logits are not used, so a compiled step does not compute them. A metric that takes predictions makes
    them whole again. With any other loss, and in `predict`, `export` and calls, it is an ordinary model.

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
        self._head, features, self._plain = _find_head(self.outputs[0])
        self._calls = _Calls(keras.Model(self.inputs, [features, self.outputs[0]]))

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        features, logits = self._calls.graph.call(inputs, training=training, mask=mask)
        self._calls.note(features, logits)
        return logits

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        features = self._calls.features_of(y_pred)
        if features is None or not isinstance(self.loss, ChunkedCrossEntropy) or not self._head_is_plain():
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        head = self._head
        dtype = head._precision if hasattr(head, "_precision") else head.compute_dtype
        with AutocastScope(None):
            # The float32 master weights: their gradient is never rounded.
            if isinstance(head, keras.layers.Dense):
                kernel, bias = head.kernel, head.bias
            else:
                kernel, bias = head.embeddings if head.tie_weights else head.reverse_embeddings, None
            kernel = backend.as_tensor(kernel)
            bias = None if bias is None else backend.as_tensor(bias)
        loss = self.loss.of_features(
            y, keras.ops.cast(features, dtype), kernel, sample_weight=sample_weight, mask=get_keras_mask(y_pred),
            bias=bias, vocabulary_first=bool(getattr(head, "tie_weights", False)), gradient=bool(training),
        )  # fmt: skip
        others = [self._aggregate_additional_loss(keras.ops.cast(loss, "float32")) for loss in self.losses]
        return loss + sum(others)

    def _head_is_plain(self) -> bool:
        """Whether the logits are the product and the bias, and nothing more."""
        head = self._head
        own = ("activation", "logit_soft_cap", "quantization_mode")
        changed = [
            getattr(head, name, None) for name in own if getattr(head, name, None) is not keras.activations.linear
        ]
        return (
            self._plain
            and not any(changed)
            and not getattr(head, "lora_enabled", False)
            and not hasattr(head, "recipe")
        )


class _Calls:
    """The features behind the logits of the calls whose loss is to come, one a replica.

    Args:
        graph: the model that gives both. Here, and not in the language model, where Keras would take it for a layer.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def note(self, features: Any, logits: Any) -> None:
        # What was never asked for, as in predict, is dropped, as many replicas as a host may have are kept.
        while len(self._by_id) > 64:
            self._by_id.pop(next(iter(self._by_id)))
        self._by_id[id(logits)] = logits, features

    def features_of(self, logits: Any) -> Any:
        noted = self._by_id.pop(id(logits), None)
        return noted[1] if noted is not None and noted[0] is logits else None


def _find_head(logits: Any) -> tuple[Any, Any, bool]:
    """The layer that makes the logits, its input, and whether what comes after leaves them as they are."""
    plain = True
    while True:
        # Private, as there is no public way from a symbolic tensor to the layer that made it.
        operation, node_index, _ = logits._keras_history
        node = operation._inbound_nodes[node_index]
        if isinstance(operation, (keras.layers.Dense, keras.layers.ReversibleEmbedding)):
            return operation, node.input_tensors[0], plain
        if not isinstance(operation, PASSING_ON):
            raise ValueError(
                "a LanguageModel ends in a Dense or a ReversibleEmbedding layer, which makes the logits; got "
                f"{type(operation).__name__} {operation.name!r}"
            )
        linear = isinstance(operation, keras.layers.Activation) and operation.activation is keras.activations.linear
        plain = plain and (linear or isinstance(operation, keras.layers.Identity))
        (logits,) = node.input_tensors


def _broadcast(weights: Any, targets: Any) -> tuple[int, ...]:
    """The shape that lets weights, which lack the last axes, meet the targets."""
    have, want = tuple(weights.shape), tuple(targets.shape)
    pairs = zip(have, want, strict=False)
    if len(have) > len(want) or any(a not in (1, b) and a is not None and b is not None for a, b in pairs):
        raise ValueError(f"sample_weight must broadcast from the left to the targets' shape {want}, got {have}")
    return tuple(-1 if size is None else size for size in have) + (1,) * (len(want) - len(have))

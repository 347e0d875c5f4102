"""A loss and metrics that can do without whole logits."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import (
    apply_mask,
    get_keras_mask,
    in_stateless_scope,
    scale_loss_for_distribution,
)
from keras_mp.lean.cross_entropy import RowMetrics, chunked_cross_entropy
from keras_mp.rebuild.walk import Config
from keras_mp.system.argument_checks import one_of, whole_number

engine = backend.engine_of(__package__)


@keras.saving.register_keras_serializable("keras_mp")
class ChunkedCrossEntropy(keras.losses.Loss):
    """Cross-entropy of integer targets, in chunks of logits.

    The value is that of `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, also of targets outside the
    vocabulary, unless their weight is 0; see `keras_mp.lean.cross_entropy.chunked_cross_entropy`.

    Args:
        ignore_class: a class whose targets do not count; None for none.
        rows: the number of rows of a chunk; by default as many as make 2^26 logits. It need not divide the number of
            targets.
        reduction: the way in which the losses of the targets become one number: "sum_over_batch_size" (the mean over
            the targets that count), "mean_with_sample_weight" or "sum".
        name: the name of the loss.

    Call arguments:
        y_true: integers, shape `(...)`.
        y_pred: logits, shape `(..., vocabulary)`.
        sample_weight: floats that broadcast to y_true from the left.

    Raises:
        ValueError: If an argument is outside its range, or if shapes do not fit.
    """

    REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")

    def __init__(
        self,
        ignore_class: int | None = None,
        rows: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "chunked_cross_entropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        one_of("reduction", reduction, self.REDUCTIONS)
        if rows is not None:
            whole_number("rows", rows)
        self.ignore_class, self.rows = ignore_class, rows

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # The identity as a kernel would cost a product: the logits are there, so the gradient of logits is all.
        logits = keras.ops.cast(y_pred, "float32")
        targets, weights, divisor = self._weighted(y_true, tuple(logits.shape), sample_weight, get_keras_mask(y_pred))
        log_sum = keras.ops.logsumexp(logits, axis=-1)
        one_hot = keras.ops.arange(logits.shape[-1], dtype="int32") == keras.ops.expand_dims(targets, -1)
        at_target = keras.ops.sum(keras.ops.where(one_hot, logits, 0.0), axis=-1)
        losses = log_sum - at_target
        outside = engine.loss_outside(keras.ops.where(weights == 0, 0, targets), logits.shape[-1])
        losses = keras.ops.where(keras.ops.any(one_hot, axis=-1), losses, outside)
        return self._reduced(keras.ops.sum(keras.ops.where(weights == 0, 0.0, losses * weights)), divisor)

    def of_features(
        self, y_true: Any, features: Any, kernel: Any, *, sample_weight: Any = None, mask: Any = None, **arguments: Any
    ) -> Any:
        """Loss of the logits `features . kernel`, made in chunks.

        Targets and weights are those of a call; the mask has the shape of the targets, False for those that do not
        count. The other arguments, and what is returned, are those of `chunked_cross_entropy`.
        """
        targets, weights, divisor = self._weighted(y_true, tuple(features.shape), sample_weight, mask)
        total = chunked_cross_entropy(features, kernel, targets, weights, rows=self.rows, **arguments)
        if arguments.get("with_rows"):
            total, rows = total
            return self._reduced(total, divisor), rows
        return self._reduced(total, divisor)

    def get_config(self) -> Config:
        return {**super().get_config(), "ignore_class": self.ignore_class, "rows": self.rows}

    def _weighted(self, y_true: Any, shape: tuple, sample_weight: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Targets, their weights, and the divisor of the sum."""
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
                divisor = engine.global_mean(divisor)
            divisor = keras.ops.where(divisor == 0, 1.0, divisor)  # the sum is 0 as well
        return targets, weights, divisor

    def _reduced(self, total: Any, divisor: Any) -> Any:
        return total if self.reduction == "sum" else scale_loss_for_distribution(total / divisor)


def _broadcast(weights: Any, targets: Any) -> tuple[int, ...]:
    """Shape in which weights broadcast to targets from the left."""
    have, want = tuple(weights.shape), tuple(targets.shape)
    pairs = zip(have, want, strict=False)
    if len(have) > len(want) or any(a not in (1, b) and a is not None and b is not None for a, b in pairs):
        raise ValueError(f"sample_weight must broadcast from the left to the targets' shape {want}, got {have}")
    return tuple(-1 if size is None else size for size in have) + (1,) * (len(want) - len(have))


# Metrics of a model with a large vocabulary, from what its chunked loss knows of each row.


def metrics_of_rows(model: Any, y: Any, y_pred: Any) -> list[tuple[Any, bool]]:
    """Metrics of a compiled model, if `RowMetrics` suffice for each.

    Each comes with whether it counts sample weights. By targets and logits Keras makes metrics that were named.
    """
    # Private, because a model has no public way to its metrics with and without weights.
    compiled = model._compile_metrics
    if compiled is None:
        return []
    if not compiled.built:
        if in_stateless_scope():
            return []
        compiled.build(y, y_pred)
    both = ((compiled._flat_metrics, False), (compiled._flat_weighted_metrics, True))
    metrics = [(metric, weighted) for lists, weighted in both for some in lists if some for metric in some.metrics]
    return metrics if all(_is_known(metric) for metric, _ in metrics) else []


def update_metrics(metrics: list[tuple[Any, bool]], y: Any, rows: RowMetrics, mask: Any, sample_weight: Any) -> None:
    """Updates metrics as `compute_metrics` does."""
    for metric, weighted in metrics:
        weights = sample_weight if weighted else None
        if not _is_perplexity(metric):
            values = rows.hits if isinstance(metric, keras.metrics.SparseCategoricalAccuracy) else rows.losses
            weights = apply_mask(weights, mask, dtype=metric.dtype, reduction="sum")
            keras.metrics.Mean.update_state(metric, values, sample_weight=weights)
            continue
        # The two sums of KerasHub's `Perplexity.update_state`.
        counts = keras.ops.ones_like(rows.losses)
        if metric.mask_token_id is not None:
            targets = keras.ops.reshape(keras.ops.cast(y, "int32"), keras.ops.shape(rows.losses))
            counts = keras.ops.cast(targets != metric.mask_token_id, "float32")
        if weights is not None:
            counts = counts * keras.ops.cast(weights, "float32")
        seen = counts if mask is None else counts * keras.ops.cast(mask, "float32")
        metric._aggregate_crossentropy.assign_add(keras.ops.sum(rows.losses * seen))
        metric._number_of_samples.assign_add(keras.ops.sum(counts))


def _is_known(metric: Any) -> bool:
    if type(metric) is keras.metrics.SparseCategoricalCrossentropy:
        config = metric.get_config()
        return config["from_logits"] and config.get("ignore_class") is None and config.get("axis", -1) == -1
    if _is_perplexity(metric):
        return metric.from_logits
    return type(metric) is keras.metrics.SparseCategoricalAccuracy


def _is_perplexity(metric: Any) -> bool:
    """Whether a metric is KerasHub's, which need not be installed."""
    return keras.saving.get_registered_name(type(metric)) in ("keras_hub>Perplexity", "keras_nlp>Perplexity")


# Which losses take the numbers of classes as targets, and not a row for each.


def is_sparse_crossentropy(loss: Any) -> bool:
    """Whether a loss is a cross-entropy of integer targets."""
    if isinstance(loss, (keras.losses.SparseCategoricalCrossentropy, ChunkedCrossEntropy)):
        return True
    name = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
    return str(name).lower().replace("_", "").startswith("sparsecategorical")

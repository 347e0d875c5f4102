"""Metrics of a model with a large vocabulary, from what its chunked loss knows of each row."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

# Private, as they are what Keras's own metrics and `compute_metrics` use: a mask as weights, and the scope that says
# whether variables can be made.
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.losses.loss import apply_mask

from keras_mp.lean.cross_entropy import Rows


class Measured(NamedTuple):
    """A metric of a compiled model, and whether it counts sample weights."""

    metric: Any
    weighted: bool


def measures(model: Any, y: Any, y_pred: Any) -> list[Measured]:
    """The metrics that a model is compiled with, if each of them can be computed from `Rows`; else none.

    Args:
        model: a compiled model with one output.
        y, y_pred: targets and logits, by which Keras makes the metrics that were given as names.
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
    measured = [
        Measured(metric, weighted)
        for lists, weighted in both
        for metrics in lists
        for metric in (metrics.metrics if metrics else [])
    ]
    return measured if all(_is_known(metric) for metric, _ in measured) else []


def measure(metrics: list[Measured], y: Any, rows: Rows, mask: Any, sample_weight: Any) -> None:
    """Updates metrics as `compute_metrics` does.

    Args:
        metrics: what `measures` returned.
        y: targets.
        rows: what the loss knows of each.
        mask: that Keras has attached to the logits; None for none.
        sample_weight: as the model got it.
    """
    for metric, weighted in metrics:
        weights = sample_weight if weighted else None
        if _is_perplexity(metric):
            _measure_perplexity(metric, y, rows, mask, weights)
        else:
            values = rows.hits if isinstance(metric, keras.metrics.SparseCategoricalAccuracy) else rows.losses
            weights = apply_mask(weights, mask, dtype=metric.dtype, reduction="sum")
            keras.metrics.Mean.update_state(metric, values, sample_weight=weights)


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


def _measure_perplexity(metric: Any, y: Any, rows: Rows, mask: Any, sample_weight: Any) -> None:
    """Adds to the two sums of KerasHub's `Perplexity.update_state`."""
    targets = keras.ops.reshape(keras.ops.cast(y, "int32"), keras.ops.shape(rows.losses))
    weights = keras.ops.ones_like(rows.losses)
    if metric.mask_token_id is not None:
        weights = keras.ops.cast(targets != metric.mask_token_id, "float32")
    if sample_weight is not None:
        weights = weights * keras.ops.cast(sample_weight, "float32")
    seen = weights if mask is None else weights * keras.ops.cast(mask, "float32")
    metric._aggregate_crossentropy.assign_add(keras.ops.sum(rows.losses * seen))
    metric._number_of_samples.assign_add(keras.ops.sum(weights))

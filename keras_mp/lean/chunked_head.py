"""Loss and metrics of a model without whole logits."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import call_scope
from keras_mp.backend.common.keras_private import AutocastScope, get_keras_mask
from keras_mp.fp8.layers import Float8Layer
from keras_mp.lean.chunked_loss import ChunkedCrossEntropy, metrics_of_rows, update_metrics
from keras_mp.lean.cross_entropy import chunks_save_memory
from keras_mp.qat.keras_modes import logits_operands
from keras_mp.rebuild.walk import (
    graph_of,
    layers_below,
    original_class,
    package_of,
    precision_of_layer,
    quantization_trained_for,
    treatments_of,
)
from keras_mp.stability.output_layers import PASSING_ON, trace_layers
from keras_mp.stability.sensitive import activation_of
from keras_mp.treatment.treated import Treatment, register_treatments, see_to

HEADS = (keras.layers.Dense, keras.layers.ReversibleEmbedding)


class ChunkedLoss:
    """Computes a sparse cross-entropy in chunks of logits.

    For a model with one output, whose `call` notes the features behind the logits. The logits that it returns are not
    used then, so a compiled step does not compute them.
    """

    _calls: Calls

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = self.chunked_loss()
        features = None if loss is None else self._calls.features_of(y_pred)
        if features is None or loss is None or not self._saves_memory(features):
            return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)  # type: ignore[misc]
        (y,) = keras.tree.flatten(y)
        weights = next(iter(keras.tree.flatten(sample_weight)), None)
        metrics, mask = metrics_of_rows(self, y, y_pred), get_keras_mask(y_pred)
        head = self._calls.head
        bias = getattr(head, "bias", None)
        with call_scope(head):
            total = loss.of_features(
                y, *self._calls.product(features), sample_weight=weights, mask=mask, gradient=bool(training),
                with_rows=bool(metrics), bias=None if bias is None else _value(bias),
                vocabulary_first=bool(getattr(head, "tie_weights", False)),
            )  # fmt: skip
        if metrics:
            total, rows = total
            update_metrics(metrics, y, rows, mask, weights)
            self._calls.measured = True
        others = [self._aggregate_additional_loss(keras.ops.cast(loss, "float32")) for loss in self.losses]  # type: ignore[attr-defined]
        return total + sum(others)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self.chunked_loss() is not None and self._calls.measured:
            self._calls.measured = False
            return self.get_metrics_result()  # type: ignore[attr-defined]
        return super().compute_metrics(x, y, y_pred, sample_weight)  # type: ignore[misc]

    def _saves_memory(self, features: Any) -> bool:
        if isinstance(keras.tree.flatten(self.loss)[0], ChunkedCrossEntropy):  # type: ignore[attr-defined]
            return True  # asked for
        operand, kernel = self._calls.product(features)
        rows = None if None in operand.shape[:-1] else math.prod(operand.shape[:-1])
        width, dtype = operand.shape[-1], keras.backend.standardize_dtype(operand.dtype)
        return chunks_save_memory(rows, width, math.prod(kernel.shape) // width, np.dtype(dtype).itemsize)

    def chunked_loss(self) -> ChunkedCrossEntropy | None:
        """The loss, where it can be computed in chunks."""
        calls = calls_behind(self)
        plain = calls is not None and calls.plain and not why_not_plain(calls.head)
        return chunked(self) if plain else None


class ChunkedHead(ChunkedLoss):
    """The same for a functional model."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if self.chunked_loss() is None or keras.tree.flatten(inputs) == []:
            return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        features, logits = self._calls.graph.call(inputs, training=training, mask=mask)
        self._calls.note(features, logits)
        return logits


class Calls:
    """Features behind logits whose loss is to come, by replica.

    Keras does not track it: it would take the graph for a layer of the model. `plain` says whether the layers that come
    after the head leave the logits as they are.
    """

    def __init__(self, head: Any, plain: bool = True, graph: Any = None) -> None:
        self.head, self.plain, self.graph = head, plain, graph
        # Whether the metrics of the last call have been updated.
        self.measured = False
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def note(self, features: Any, logits: Any) -> None:
        # What was never asked for, as in predict, is dropped, as many replicas as a host may have are kept. Logits are
        # the largest array of a model: those of an eager call go, and the features with them, when its caller lets go.
        while len(self._by_id) > 64:
            self._by_id.pop(next(iter(self._by_id)))
        key = id(logits)

        def drop(gone: Any) -> None:
            if key in self._by_id and self._by_id[key][0] is gone:
                del self._by_id[key]

        self._by_id[key] = weakref.ref(logits, drop), features
        self.measured = False

    def features_of(self, logits: Any) -> Any:
        noted = self._by_id.pop(id(logits), None)
        return noted[1] if noted is not None and noted[0]() is logits else None

    def product(self, features: Any) -> tuple[Any, Any]:
        """The operands of the product that makes the logits."""
        head = self.head
        dtype = getattr(head, "reverse_dtype", None) or precision_of_layer(head)
        features, kernel = keras.ops.cast(features, dtype), _value(_kernel(head))
        return (features, kernel) if quantization_trained_for(head) is None else logits_operands(head, features, kernel)


def prepare_head(model: Any) -> None:
    """Gives a functional model what `ChunkedHead` needs."""
    head, features, plain = find_head(model.outputs[0])
    graph = keras.Model(model._inputs_struct, [features, model.outputs[0]])
    vars(model)["_calls"] = Calls(head, plain, graph)


def calls_behind(model: Any) -> Calls | None:
    """Features behind a model's logits, or None."""
    return vars(model).get("_calls")


def forget_calls(model: Any) -> None:
    """Takes from a model what `prepare_head` gave it."""
    vars(model).pop("_calls", None)


def _kernel(head: Any) -> Any:
    if isinstance(head, keras.layers.Dense):
        return head.kernel
    return head.embeddings if head.tie_weights else head.reverse_embeddings


def _value(variable: Any) -> Any:
    """A variable in its own dtype, and so its gradient."""
    with AutocastScope(None):
        return backend.as_tensor(variable)


def chunked(model: Any) -> ChunkedCrossEntropy | None:
    """A compiled model's loss as one in chunks, or None."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    # Private, because a compiled model has no public way to say how its losses are weighted.
    weighted = getattr(getattr(model, "_compile_loss", None), "_user_loss_weights", None)
    if len(losses) != 1 or weighted is not None:
        return None
    (loss,) = losses
    if isinstance(loss, ChunkedCrossEntropy):
        return loss
    if type(loss) is not keras.losses.SparseCategoricalCrossentropy:
        return None
    config = loss.get_config()
    if (
        not config["from_logits"]
        or config.get("axis", -1) != -1
        or loss.reduction not in ChunkedCrossEntropy.REDUCTIONS
    ):
        return None
    return ChunkedCrossEntropy(ignore_class=config.get("ignore_class"), reduction=loss.reduction)


def why_not_plain(head: Any) -> str:
    """Why logits are not product and bias alone, or ""."""
    activation = activation_of(getattr(head, "activation", None))
    if activation.function is not keras.activations.linear:
        return f"its activation is {activation.name}, so its result is not logits"
    if getattr(head, "logit_soft_cap", None):
        return "it caps its logits"
    if getattr(head, "quantization_mode", None):
        return f"it is quantized to {head.quantization_mode}"
    if getattr(head, "lora_enabled", False):
        return "LoRA adds a product to it"
    return f"it computes in {head.scaling.title}" if isinstance(head, Float8Layer) else ""


def why_not_head(model: Any) -> tuple[Any, str]:
    """Finds the layer that makes logits, and why it stays.

    The reason is empty where the loss can be computed in chunks. The layer is None for a model that has no vocabulary,
    and for one that does not show which layer makes its output.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1:
        return None, ""
    try:
        head, features, plain = find_head(outputs[0])
    except ValueError:
        return None, ""
    if len(features.shape) < 3 or not features.shape[-1] < outputs[0].shape[-1]:
        return None, ""  # all logits are smaller than what they are made of
    reason = why_not_plain(head) if plain else "layers after it change the logits"
    # Private, because `outputs` is flat: a graph does not show publicly that it returns a dict.
    if isinstance(getattr(model, "_outputs_struct", None), dict):
        reason = "the model returns its logits in a dict"
    own = original_class(model)
    if not reason and not issubclass(own, ChunkedHead):
        reason = own_code(own, ("call", "compute_loss", "compute_metrics"))
    return head, reason or why_not_compiled(model)


def why_not_compiled(model: Any) -> str:
    """Why the compiled loss cannot be in chunks, or ""."""
    if getattr(model, "compiled", False) and chunked(model) is None:
        return "the model is not compiled with SparseCategoricalCrossentropy(from_logits=True)"
    return ""


def find_head(logits: Any) -> tuple[Any, Any, bool]:
    """Finds what makes logits, its input, whether they stay so.

    Raises:
        ValueError: another kind of layer makes them.
    """
    plain = True
    while True:
        # Private, as there is no public way from a symbolic tensor to the layer that made it.
        operation, node_index, _ = logits._keras_history
        node = operation._inbound_nodes[node_index]
        if isinstance(operation, HEADS):
            return operation, node.input_tensors[0], plain
        if not isinstance(operation, PASSING_ON):
            raise ValueError(
                f"logits are made by a Dense or a ReversibleEmbedding layer, not by {type(operation).__name__} "
                f"{operation.name!r}"
            )
        linear = isinstance(operation, keras.layers.Activation) and operation.activation is keras.activations.linear
        plain = plain and (linear or isinstance(operation, keras.layers.Identity))
        (logits,) = node.input_tensors


def own_code(cls: Any, methods: Sequence[str]) -> str:
    """Says which of the methods are not Keras's, or ""."""
    for name in methods:
        definer = next(base for base in cls.__mro__ if name in vars(base))
        if package_of(definer) != "keras":
            return f"{definer.__name__} has a {name}() of its own"
    return ""


# The vocabulary of a subclassed model: the layer whose result `call` returns, and the loss from its input.


CALLED_HEAD, NOTED_HEAD = "lean head of call", "lean noted head"
_NOTES: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("notes", default=None)


class CalledHead(ChunkedLoss):
    """The same for a subclassed model.

    Which call of the layer made the logits is known only where the model returns that very tensor; else the loss is
    computed as it was.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        see_to(self)
        if self.chunked_loss() is None:
            return super().call(*args, **kwargs)  # type: ignore[misc]
        before = _NOTES.set([])
        try:
            logits = super().call(*args, **kwargs)  # type: ignore[misc]
            for features, made in _NOTES.get() or ():
                if made is logits:
                    self._calls.note(features, logits)
            return logits
        finally:
            _NOTES.reset(before)


class NotedHead:
    """A layer that makes logits, and notes from what."""

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        notes = _NOTES.get()
        if notes is not None:
            notes.append((inputs, outputs))
        return outputs


def why_not_called_head(model: Any) -> tuple[Any, str]:
    """Answers as `why_not_head` for a subclassed model.

    The model is traced by the shapes that it was built for; it must return the result of the layer as it is.
    """
    if not isinstance(model, keras.Model) or graph_of(model) is not None or not model.built:
        return None, ""
    heads = [layer for layer in layers_below(model) if isinstance(layer, HEADS)]
    traced = trace_layers(model, heads) if heads else None
    called = next(iter(traced.makers(traced.outputs)), None) if traced else None
    if called is None:
        return None, ""
    shape = called.outputs.shape
    if len(shape) < 3 or not called.inputs.shape[-1] < (shape[-1] or 0):
        return None, ""
    reason = why_not_plain(called.layer) or own_code(original_class(model), ("compute_loss", "compute_metrics"))
    return called.layer, reason or why_not_compiled(model)


def _note_head(model: Any) -> None:
    head = next((layer for layer in layers_below(model) if NOTED_HEAD in treatments_of(layer)), None)
    calls = calls_behind(model)
    if head is not None and (calls is None or calls.head is not head):
        vars(model)["_calls"] = Calls(head)


register_treatments(
    {
        CALLED_HEAD: Treatment(lambda original, names: CalledHead, undo=forget_calls, before_call=_note_head, order=-1),
        NOTED_HEAD: Treatment(lambda original, names: NotedHead, order=-2),
    }
)

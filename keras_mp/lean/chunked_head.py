"""The loss and the metrics of a model with a large vocabulary, without all of its logits."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.calls import call_scope
from keras_mp.backend.common.keras_private import AutocastScope, get_keras_mask
from keras_mp.fp8.layers import Float8Layer
from keras_mp.lean.chunked_loss import ChunkedCrossEntropy, measures, update_metrics
from keras_mp.lean.cross_entropy import chunks_save_memory
from keras_mp.qat.keras_modes import logits_operands
from keras_mp.rebuild.notes import original_class, precision_of_layer, quantization_trained_for, treatments_of
from keras_mp.rebuild.traced_call import trace_layers
from keras_mp.rebuild.walk import graph_of, layers_below
from keras_mp.stability.float32_layers import activation_of
from keras_mp.stability.output_layers import PASSING_ON
from keras_mp.system.packages import package_of
from keras_mp.treatment.treated import Treatment, register_treatments, see_to

HEADS = (keras.layers.Dense, keras.layers.ReversibleEmbedding)


class ChunkedLoss:
    """Computes a sparse cross-entropy from the input of the layer that makes the logits, in chunks.

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
        metrics, mask = measures(self, y, y_pred), get_keras_mask(y_pred)
        with call_scope(self._calls.head):
            total = loss.of_features(
                y, *self._calls.product(features), sample_weight=weights, mask=mask, gradient=bool(training),
                with_rows=bool(metrics), **self._calls.options(),
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

    _calls: _GraphCalls

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if self.chunked_loss() is None or keras.tree.flatten(inputs) == []:
            return super().call(inputs, training=training, mask=mask)  # type: ignore[misc]
        features, logits = self._calls.graph.call(inputs, training=training, mask=mask)
        self._calls.note(features, logits)
        return logits


class Calls:
    """The features behind the logits of the calls whose loss is to come, one a replica.

    Args:
        plain: whether the layers that come after it leave the logits as they are.
    """

    graph: Any = None

    def __init__(self, head: Any, plain: bool = True) -> None:
        self.head, self.plain = head, plain
        # Whether the metrics of the last call have been updated.
        self.measured = False
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def note(self, features: Any, logits: Any) -> None:
        # What was never asked for, as in predict, is dropped, as many replicas as a host may have are kept. Logits are
        # the largest array of a model: those of an eager call go, and the features with them, when its caller lets go.
        while len(self._by_id) > 64:
            self._by_id.pop(next(iter(self._by_id)))
        self._by_id[id(logits)] = weakref.ref(logits, functools.partial(self._drop, id(logits))), features
        self.measured = False

    def _drop(self, key: int, gone: Any) -> None:
        if key in self._by_id and self._by_id[key][0] is gone:
            del self._by_id[key]

    def features_of(self, logits: Any) -> Any:
        noted = self._by_id.pop(id(logits), None)
        return noted[1] if noted is not None and noted[0]() is logits else None

    def product(self, features: Any) -> tuple[Any, Any]:
        """The operands of the product that makes the logits."""
        head = self.head
        dtype = getattr(head, "reverse_dtype", None) or precision_of_layer(head)
        features, kernel = keras.ops.cast(features, dtype), _value(_kernel(head))
        return (features, kernel) if quantization_trained_for(head) is None else logits_operands(head, features, kernel)

    def options(self) -> dict[str, Any]:
        """What else the product is made with."""
        bias = getattr(self.head, "bias", None)
        return {
            "bias": None if bias is None else _value(bias),
            "vocabulary_first": bool(getattr(self.head, "tie_weights", False)),
        }


class _GraphCalls(Calls):
    """The same of a functional model, with the graph that gives both."""

    def __init__(self, model: Any) -> None:
        head, features, plain = find_head(model.outputs[0])
        super().__init__(head, plain)
        # Here, and not in the model, where Keras would take it for a layer.
        self.graph = keras.Model(model._inputs_struct, [features, model.outputs[0]])


def prepare_head(model: Any) -> None:
    """Gives a functional model what `ChunkedHead` needs."""
    note_calls(model, _GraphCalls(model))


def note_calls(model: Any, calls: Calls) -> None:
    """Gives a model the features behind its logits: a value, which Keras need not track."""
    object.__setattr__(model, "_calls", calls)


def calls_behind(model: Any) -> Calls | None:
    """The features behind a model's logits; None of a model that notes none."""
    return vars(model).get("_calls")


def forget_calls(model: Any) -> None:
    """Takes from a model what `prepare_head` gave it."""
    vars(model).pop("_calls", None)


def _kernel(head: Any) -> Any:
    if isinstance(head, keras.layers.Dense):
        return head.kernel
    return head.embeddings if head.tie_weights else head.reverse_embeddings


def _value(variable: Any) -> Any:
    """A variable in its own dtype: the gradient of master weights in float32 is never rounded."""
    with AutocastScope(None):
        return backend.as_tensor(variable)


def chunked(model: Any) -> ChunkedCrossEntropy | None:
    """The loss that a model is compiled with as one that can be computed in chunks; None where it cannot."""
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
    """Why the logits are not only a product and a bias; empty where they are."""
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
    """The layer that makes a model's logits, and why its loss cannot be computed in chunks; empty where it can.

    None for a model that has no vocabulary, and for one that does not show which layer makes its output.
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
    """Why the loss that a model is compiled with cannot be computed in chunks; empty where it can, or is to come."""
    if getattr(model, "compiled", False) and chunked(model) is None:
        return "the model is not compiled with SparseCategoricalCrossentropy(from_logits=True)"
    return ""


def find_head(logits: Any) -> tuple[Any, Any, bool]:
    """The layer that makes logits, its input, and whether what comes after leaves them as they are.

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
    """Which of the methods a class does not have from Keras, as a reason; empty for none."""
    for name in methods:
        definer = next(base for base in cls.__mro__ if name in vars(base))
        if package_of(definer) != "keras":
            return f"{definer.__name__} has a {name}() of its own"
    return ""


# The vocabulary of a subclassed model: the layer whose result `call` returns, and the loss from its input.


CALLED_HEAD, NOTED_HEAD = "lean head of call", "lean noted head"
_NOTES: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("notes", default=None)


class CalledHead(ChunkedLoss):
    """A subclassed model that computes a sparse cross-entropy from the input of the layer that makes the logits.

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


class Found(NamedTuple):
    """The layer that makes a model's logits.

    Attributes:
        head: the layer.
        width: the number of features of its input.
        shape: the shape of the logits.
    """

    head: keras.layers.Layer
    width: int
    shape: tuple[int | None, ...]


def find_called_head(model: Any) -> Found | None:
    """The layer whose result a subclassed model returns as it is; None where there is none, or where it cannot be seen.

    The model is traced by the shapes that it was built for.
    """
    if not isinstance(model, keras.Model) or graph_of(model) is not None or not model.built:
        return None
    heads = [layer for layer in layers_below(model) if isinstance(layer, HEADS)]
    traced = trace_layers(model, heads) if heads else None
    for call in traced.makers(traced.outputs) if traced else ():
        return Found(call.layer, call.inputs.shape[-1], tuple(call.outputs.shape))
    return None


def why_not_called_head(model: Any) -> tuple[Any, str]:
    """The answer of `why_not_head` for a subclassed model."""
    called = find_called_head(model)
    if called is None or len(called.shape) < 3 or not called.width < (called.shape[-1] or 0):
        return None, ""
    reason = why_not_plain(called.head) or own_code(original_class(model), ("compute_loss", "compute_metrics"))
    return called.head, reason or why_not_compiled(model)


def _note_head(model: Any) -> None:
    head = next((layer for layer in layers_below(model) if NOTED_HEAD in treatments_of(layer)), None)
    calls = calls_behind(model)
    if head is not None and (calls is None or calls.head is not head):
        note_calls(model, Calls(head))


register_treatments(
    {
        CALLED_HEAD: Treatment(lambda original, names: CalledHead, undo=forget_calls, before_call=_note_head, order=-1),
        NOTED_HEAD: Treatment(lambda original, names: NotedHead, order=-2),
    }
)

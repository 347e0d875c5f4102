"""A model in which what needs float32 runs in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import compute_output_spec
from keras_mp.rebuild.quantized_policies import (
    keep_statistics_as_computed,
    policy_of,
    to_compute_in_float32,
    with_source,
)
from keras_mp.rebuild.walk import (
    FLOAT8,
    Walk,
    existing_notes,
    inputs_of,
    narrow,
    notes_of,
    original_class,
    own_variables,
    widen,
)
from keras_mp.stability.accumulate import SumsInFloat32
from keras_mp.stability.attention import ATTENTION, AttentionAsAsked
from keras_mp.stability.float32_layers import (
    RESULT_MIXINS,
    SCORES_MIXINS,
    Float32BatchNormalization,
    Float32Inside,
    Float32Losses,
    Float32Operation,
    Float32Regularizer,
    Float32RowNormalization,
    UnroundedArguments,
)
from keras_mp.stability.quantized_product import ExactGroups, StraightThroughLogits, TakesLora
from keras_mp.stability.sensitive import ACTIVATION_ATTRIBUTES, attending, find, float32_activation, plain_activation
from keras_mp.treatment.change import ChangePlan, Planned
from keras_mp.treatment.treated import Treatment, register_treatments, treat
from keras_mp.treatment.waiting import register_calls, waits


def stabilize(model: keras.Model) -> keras.Model:
    """Lets sensitive parts of a model run in float32.

    These are normalization, softmax, activity regularizers and the model's output; the model is changed in place.

    - Normalization and softmax compute in float32 and return the 16-bit dtype that they returned before.
    - Attention adds up and normalizes its scores in float32; the products keep 16-bit operands. On a TPU it is what was
      asked for, in any precision, where Keras's own is not; `report` says by what it is computed there.
    - The output layer keeps 16-bit operands and returns float32: bias, activation and the loss are in float32. So do
      KerasHub's routers: logits, softmax and the choice of experts are in float32.
    - A layer whose class takes sines or cosines computes in float32, or, where it has layers inside or names float32
      for the angles, reads what it is given in float32 unrounded. Times and positions have to reach it so, as inputs of
      a functional model do; a subclassed model rounds its inputs. `audit` measures how far such a layer is off.
    - Regularizers of activations add up in float32; what a layer's own code hands to `add_loss` becomes float32.
    - Of weights that Keras quantized, the numbers of int4 groups are not rounded to 16 bits; and, in any precision, the
      logits of an int8 ReversibleEmbedding layer pass gradients on, which Keras stops. Layers that GPTQ or AWQ
      quantized take LoRA by their `enable_lora`, and are saved with their zero points.

    Of a model built under the policy "bfloat16", the weights of what computes in float32 become float32: those of
    normalization, moving statistics, a softmax's. Those of the output layer stay 16-bit operands.

    The weights are the model's own, and their values stay. A compiled model stays compiled: the step that it has traced
    is dropped, and where weights became float32 its optimizer is a new one with the state of the old. Twice is as once.
    The model is saved and loaded as usual, wherever `keras_mp` is imported after Keras. To have the old model beside
    it, build it twice:

        model, reference = build(), build()
        reference.set_weights(model.get_weights())
        keras_mp.stabilize(model)

    Args:
        model: a Keras model: functional, sequential, subclassed, nested; before or after training. One that is not
            built is changed once it is: by `fit` or another call on its first batch.

    Returns:
        The model. Each layer that was changed is still an instance of its class.

    Raises:
        TypeError: If the model is no Keras model.

    Warns:
        UserWarning: If something could not be made float32; the message names it, and says what to do.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.LayerNormalization()])
        >>> [layer.compute_dtype for layer in keras_mp.stabilize(model).layers]
        ['bfloat16', 'float32']
        >>> [layer.compute_dtype for layer in keras_mp.revert(model).layers]
        ['bfloat16', 'bfloat16']
    """
    if not waits(model, "stabilize"):
        plan_float32(plan := ChangePlan(model))
        plan.apply()
    return model


def plan_float32(plan: ChangePlan) -> list[Planned]:
    """Plans what `stabilize` does; returns what needs float32."""
    sensitive = find(plan)
    plan.rows += [*sensitive, *(Planned("", part, {ATTENTION: None}) for part in attending(plan))]
    missed = [f"{row.path!r}: {row.reason}" for row in sensitive if not row.treatments]
    if missed:
        words = f"stabilize({plan.model.name!r}) could not change some layers: {'; '.join(missed)}"
        warnings.warn(words, stacklevel=3)
    return sensitive


def attended_by(walk: Walk) -> dict[str, str]:
    """Says what computes attention on a TPU, by path."""
    parts = attending(walk)
    if not parts or backend.traced_chip().platform != "tpu":
        return {}
    inputs = inputs_of(walk.model)
    if inputs is not None and not any(x.dtype == "string" or None in x.shape[1:] for x in keras.tree.flatten(inputs)):
        shapes = keras.tree.map_structure(lambda x: keras.KerasTensor((x.shape[0] or 1, *x.shape[1:]), x.dtype), inputs)
        compute_output_spec(walk.model, shapes, training=False)  # in which layers note how they attend
    paths = {id(layer): path for path, layer in walk.layers.items()}
    return {paths.get(id(part), part.name): _told(part) for part in parts}


def _told(part: Any) -> str:
    if not isinstance(part, AttentionAsAsked):
        return "Keras's attention, which on a TPU is causal where there is no mask, and does not scale scores"
    notes = notes_of(part)
    lengths = "Splash where lengths are multiples of 128, else the kit's own form"
    return lengths if notes is None else notes.kept.get(ATTENTION, lengths)


class _Before(NamedTuple):
    """What a layer was before it computed in float32."""

    policy: Any
    autocast: bool  # whether it cast its inputs
    wide: frozenset[str]  # the paths of its weights that were float32, once it was built


def _note(layer: Any) -> None:
    wide = frozenset(variable.path for variable in own_variables(layer) if variable.dtype == "float32")
    existing_notes(layer).kept.setdefault("stabilize", _Before(layer._dtype_policy, layer.autocast, wide))


def _to_float32(layer: Any) -> None:
    _policy_float32(layer)
    if _inside(original_class(layer)) is not Float32Inside:
        layer.autocast = False  # its inputs stay in 16 bits: they do not go up to float32 first


def _to_unrounded_arguments(layer: Any) -> None:
    _note(layer)
    layer.autocast = False


def _to_float32_result(layer: Any) -> None:
    # Its weights stay as they are: they are operands, of 16 bits.
    _note(layer)
    to_compute_in_float32(layer)
    layer.autocast = False  # its inputs go down to 16 bits: not first up to float32


def _exchange_activations(layer: Any, other: Callable[[Any], Any]) -> None:
    for name in ACTIVATION_ATTRIBUTES:
        exchanged = other(vars(layer).get(name))
        if exchanged is not None:
            setattr(layer, name, exchanged)


def _regularizer_in_float32(layer: Any) -> None:
    if not isinstance(layer.activity_regularizer, Float32Regularizer):
        layer.activity_regularizer = Float32Regularizer(layer.activity_regularizer)


def _as_before(layer: Any) -> None:
    notes = existing_notes(layer)
    before = notes.kept.pop("stabilize", None)
    if before is None:
        return
    policy, now = notes.policy or before.policy, policy_of(layer)
    if policy.compute_dtype != notes.precision or policy.quantization_mode != now.quantization_mode:
        # It was read from a file that has its policy of now, or quantized since.
        mixed = "float32" if notes.precision == "float32" else f"mixed_{notes.precision}"
        policy = with_source(now, policy.name if notes.policy is not None else mixed)
    layer._dtype_policy, layer.autocast = policy, before.autocast  # private, as in to_compute_in_float32
    keep_statistics_as_computed(layer)
    for variable in own_variables(layer) if policy.variable_dtype != "float32" else ():
        if variable.path not in before.wide:
            narrow(variable, policy.variable_dtype)


def _regularizer_as_before(layer: Any) -> None:
    if isinstance(layer.activity_regularizer, Float32Regularizer):
        layer.activity_regularizer = layer.activity_regularizer.regularizer


def _keep_lora(layer: Any) -> None:
    if layer.lora_enabled:  # Keras would leave it out of the result
        treat(layer, {"calibrated": None})


def _policy_float32(layer: Any) -> None:
    _note(layer)
    to_compute_in_float32(layer)
    keep_statistics_as_computed(layer)
    for variable in own_variables(layer):
        widen(variable)


def _by_base(mixins: dict[Any, Any], original: type) -> type:
    return next(mixin for cls, mixin in mixins.items() if issubclass(original, cls))


def _inside(original: type, names: Any = ()) -> type:
    own = (Float32BatchNormalization, Float32RowNormalization)
    return next((mixin for mixin in own if mixin.stands_for(original)), Float32Inside)


def result_mixin(original: type, names: Any) -> type | None:
    """The mixin for float32 results; None of an FP8 layer."""
    float8 = FLOAT8 in names or issubclass(original, SumsInFloat32)
    return None if float8 else _by_base(RESULT_MIXINS, original)


_TREATMENTS = {
    # Inputs, weights and sums in float32, the result in the layer's precision.
    "float32": Treatment(_inside, _to_float32, _as_before, wide=True),
    # Arguments that are float32 as they are, weights and the result in the layer's precision.
    "arguments": Treatment(lambda original, names: UnroundedArguments, _to_unrounded_arguments, _as_before),
    # The result in float32, too.
    "everywhere": Treatment(apply=_policy_float32, undo=_as_before, wide=True),
    # Products of 16-bit operands, everything after them in float32.
    "result": Treatment(result_mixin, _to_float32_result, _as_before, wide=True),
    # Attention's scores in float32.
    "scores": Treatment(lambda original, names: _by_base(SCORES_MIXINS, original)),
    "activation": Treatment(
        apply=partial(_exchange_activations, other=float32_activation),
        undo=partial(_exchange_activations, other=plain_activation),
    ),
    "regularizer": Treatment(apply=_regularizer_in_float32, undo=_regularizer_as_before),
    # The groups of int4 weights by numbers that are exact.
    "groups": Treatment(lambda original, names: ExactGroups),
    # The same of weights that GPTQ or AWQ quantized, and LoRA beside them.
    "calibrated": Treatment(
        lambda original, names: TakesLora, undo=_keep_lora, before_build=True, keeps_adaptation=True, order=1
    ),
    # Logits of inputs that are quantized, with a gradient for these; that of an output layer calls it.
    "input gradient": Treatment(lambda original, names: StraightThroughLogits, order=1),
    "operation": Treatment(lambda original, names: Float32Operation),
    # Losses that the layer's own code adds, as float32.
    "losses": Treatment(lambda original, names: Float32Losses),
    # On a TPU attention as it was asked for.
    ATTENTION: Treatment(lambda original, names: AttentionAsAsked),
}
register_treatments(_TREATMENTS)
register_calls({"stabilize": stabilize})
STABILIZED = tuple(_TREATMENTS)

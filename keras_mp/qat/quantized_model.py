"""Quantizes a model that trained for it, bit for bit."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_mp.qat.litert_ranges import trained_for
from keras_mp.rebuild.compared import made_up_batches
from keras_mp.rebuild.walk import QAT, children_of, layers_by_path, quantization_trained_for, treatments_of
from keras_mp.treatment.change import change, check_built, shows_its_parts, undo
from keras_mp.treatment.treated import untreat


def quantize(model: keras.Model, sample: Any = None) -> keras.Model:
    """Quantizes a model that trained for it, in place.

    `keras_mp.convert(model, "qat_int4")` let it train so. Each layer that trained so is quantized by Keras's own
    `quantize()`, with the config that it trained for. The model predicts a batch before and after, and every bit of its
    outputs must be the same. It is then one of Keras alone, but for layers with LoRA, which Keras would merge as it
    saves them, and those that code of other layers makes, such as KerasHub's, of whose quantization Keras's files lack
    a part: `revert(model, "convert")` makes them Keras's.

    Args:
        model: a built Keras model with layers that train for int8 or int4.
        sample: a batch of inputs; made up from the shapes of the inputs where None.

    Returns:
        The model. A line is printed that says how many layers are quantized to what, and what was compared.

    Raises:
        ValueError: If no layer trains for a quantization of Keras, if the model cannot be run on made-up inputs, or if
            an output has other bits; the model is then as it was.

    Examples:
        >>> import keras, keras_mp
        >>> model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(8)])
        >>> model = keras_mp.quantize(keras_mp.convert(model, "qat_int4"))
        quantize('sequential...'): 1 layer in int4/128, ... the same bits as in training
    """
    check_built(model)
    layers = [layer for layer in layers_by_path(model).values() if quantization_trained_for(layer) is not None]
    if not layers and (file := trained_for(model)) is not None:
        raise ValueError(
            f"quantize({model.name!r}): it trains for LiteRT's {file}, which keras_mp.export.export_litert writes"
        )
    if not layers:
        raise ValueError(
            f"quantize({model.name!r}): no layer trains for int8 or int4. Call keras_mp.convert(model, "
            '"qat_int4") and train; without training, call Keras\'s model.quantize("int4")'
        )
    batch, expected = _predicted(model, sample)
    bytes_before = _bytes_of(layers)
    kept = [(layer, treatments_of(layer)[QAT], _Kept(layer)) for layer in layers]
    shown = _shown(model)
    # What no config shows of other layers, files hold as long as these have the treatment.
    plain = [
        (layer, partial(untreat, names=(QAT,))) for layer in layers if id(layer) in shown and not layer.lora_enabled
    ]

    def check(model: Any) -> None:
        outputs = _outputs(model, batch)
        other = sum(a.tobytes() != b.tobytes() for a, b in zip(outputs, expected, strict=True))
        if other:
            raise ValueError(
                f"quantize({model.name!r}): {other} of {len(expected)} outputs would have other bits than in training, "
                "so the model stays as it was. Keras makes the codes on the host, and this device rounds otherwise"
            )

    try:
        # The check comes before the optimizer loses what it knows of the float weights, of which it would warn.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*begins anew in part")
            undo(model, (), also=[*((layer, _quantize_layer) for layer in layers), *plain, (model, check)])
    except Exception:
        for layer, _, before in kept:
            before.restore(layer)
        change(model, [(layer, {QAT: options}) for layer, options, _ in kept])
        raise
    counts = Counter(layer.dtype_policy.name.partition("_from_")[0] for layer in layers)
    told = " and ".join(f"{count} layer{'s' * (count != 1)} in {name}" for name, count in counts.items())
    values = sum(x.size for x in expected)
    print(
        f"quantize({model.name!r}): {told}, {_bytes_of(layers) / 2**20:.3g} instead of {bytes_before / 2**20:.3g} MiB; "
        f"all {values:,} values of {len(expected)} output{'s' * (len(expected) != 1)} have the same bits as in training"
    )
    return model


def _quantize_layer(layer: Any) -> None:
    config = quantization_trained_for(layer)
    layer.quantize(config.mode, config=config)


def _shown(layer: Any) -> set[int]:
    """The ids of the layers that a model's config shows."""
    parts = children_of(layer) if shows_its_parts(layer) else []
    return {id(part) for part in parts}.union(*map(_shown, parts))


def _predicted(model: keras.Model, sample: Any) -> tuple[Any, list[np.ndarray]]:
    """A batch that the model takes, and its outputs."""
    error: Exception | None = None
    for batch in made_up_batches(model) if sample is None else [sample]:
        try:
            return batch, _outputs(model, batch)
        except Exception as raised:  # whatever a stranger's call raises on what it was not made for
            error = error or raised
    raise ValueError(f"quantize({model.name!r}): the model fails on its sample: give another, sample=x[:8]") from error


def _outputs(model: keras.Model, batch: Any) -> list[np.ndarray]:
    model.make_predict_function(force=True)
    return [np.asarray(x) for x in keras.tree.flatten(model.predict_on_batch(batch))]


def _bytes_of(layers: list[Any]) -> int:
    return sum(np.dtype(v.dtype).itemsize * int(np.prod(v.shape)) for layer in layers for v in layer.variables)


class _Kept:
    """A layer's attributes and variables, to be put back."""

    def __init__(self, layer: Any) -> None:
        self.attributes = dict(vars(layer))
        # Private, as a layer gives its variables up by attribute and would take them back in another order.
        self.stores = {name: list(store) for name, (_, store) in layer._tracker.config.items()}
        self.ids = {name: set(ids) for name, ids in layer._tracker.stored_ids.items()}

    def restore(self, layer: Any) -> None:
        vars(layer).clear()
        vars(layer).update(self.attributes)
        for name, (_, store) in layer._tracker.config.items():
            store[:] = self.stores[name]
        layer._tracker.stored_ids = self.ids

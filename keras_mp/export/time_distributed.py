"""TimeDistributed layers along an open number of steps, as Keras means them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_mp.backend.common.calls import wrapped_methods
from keras_mp.rebuild import layers_by_path


@contextmanager
def corrected_time_distributed(model: keras.Model) -> Iterator[None]:
    """Makes the TimeDistributed layers below a model go over all steps where a graph leaves their number open.

    Keras 3.15 takes the size of the batch for the number of steps there (`call` reads the shape before it swaps the
    two axes). Layers of a class that has a `call` of its own are left alone.
    """
    layers = [
        (path, layer)
        for path, layer in layers_by_path(model).items()
        if isinstance(layer, keras.layers.TimeDistributed) and type(layer).call is keras.layers.TimeDistributed.call
    ]
    with wrapped_methods(layers, ["call"], _over_all_steps):
        yield


def _over_all_steps(path: str, layer: keras.layers.Layer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def corrected(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if inputs.shape[1] is not None:
            return call(inputs, training=training, mask=mask)
        # Private, as in Keras's own: which arguments the wrapped layer's call takes.
        takes_mask, takes_training = layer.layer._call_has_mask_arg, layer.layer._call_has_training_arg
        steps = {"inputs": inputs} | ({"mask": mask} if takes_mask and mask is not None else {})

        def one_step(step: dict[str, Any]) -> Any:
            options = {"training": training} if takes_training else {}
            options |= {"mask": step["mask"]} if "mask" in step else {}
            return layer.layer.call(step["inputs"], **options)

        steps = {key: _swapped(value) for key, value in steps.items()}
        return _swapped(keras.ops.vectorized_map(one_step, steps))

    return corrected


def _swapped(x: Any) -> Any:
    """The tensor with its first two axes, batch and steps, swapped."""
    return keras.ops.transpose(x, [1, 0, *range(2, len(x.shape))])

"""The amaxes of the steps before: how a layer keeps them, and how they leave a backward pass."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.roles import ROLES

CALL_SITES = 16
"""How many calls of one layer in a step each have a slot of their own."""


@keras.saving.register_keras_serializable("keras_mp")
class AmaxHistory(keras.layers.Layer):
    """The amaxes of one FP8 layer's input, kernel and gradient in the last steps.

    What is known of a step is known in the backward pass, and on JAX only gradients leave that. So the history is a
    weight that is marked `overwrite_with_gradient`: its "gradient" is its next value, and a step that is not applied
    leaves it as it is. But gradients of one weight are added up where a layer is called several times. So each call has
    a slot: its gradient is the whole next history there and 0 elsewhere, and the history is the largest over the
    slots, as the optimizer takes the largest over micro-batches and replicas.

    A slot begins with a count, 1. Should two calls meet in one slot (more than `CALL_SITES` calls in a step, or a
    loop), it says by how much to divide what was added up; their newest amaxes remain added up, which scales too
    little, never too much.

    Where a step's gradients do not pass the layer, JAX overwrites the history with zeros: it starts over.

    Args:
        length: number of steps whose amaxes are kept.
        counts_steps: whether the number of steps is kept as well, in a last column.
    """

    def __init__(self, length: int, counts_steps: bool = False, name: str = "amax_history", **arguments: Any) -> None:
        super().__init__(name=name, dtype="float32", autocast=False, **arguments)
        self.length = length
        self.counts_steps = counts_steps
        self.columns = length + counts_steps
        self._calls = 0

    def build(self, input_shape: Any = None) -> None:
        self.slots = self.add_weight(
            shape=(CALL_SITES, len(ROLES), 1 + self.columns),
            initializer="zeros",
            dtype="float32",
            autocast=False,
            overwrite_with_gradient=True,
            aggregation="only_first_replica",
            name="slots",
        )
        self.built = True

    def call(self, inputs: Any = None) -> Any:
        """Reads the history, for one call of the FP8 layer.

        Returns:
            float32 of shape (3, length), by role and step, the newest step first; and one column more where steps are
            counted. Its gradient is the next history. Of a layer that is not trainable all zeros.
        """
        if not self.slots.trainable:
            return keras.ops.zeros((len(ROLES), self.columns))
        # In the order of the calls, whatever the step: those of one step are next to each other.
        slot = self._calls % CALL_SITES
        self._calls += 1

        @backend.custom_gradient
        def read(slots: Any) -> Any:
            def gradient(following: Any) -> Any:
                counted = keras.ops.concatenate([keras.ops.ones((len(ROLES), 1)), following], axis=1)
                own = keras.ops.reshape(keras.ops.one_hot(slot, CALL_SITES), (-1, 1, 1))
                return own * counted

            return self._combined(slots), gradient

        return read(self.slots)

    def save_own_variables(self, store: Any) -> None:
        history = keras.ops.convert_to_numpy(self._combined(keras.ops.convert_to_tensor(self.slots)))
        store["0"] = history[:, : self.length]
        if self.counts_steps:
            store["1"] = history[:, self.length :]

    def load_own_variables(self, store: Any) -> None:
        """Takes the newest amaxes of a file; those of a longer history are left, and a plain model's has none."""
        if "0" not in store.keys():
            return
        saved = keras.ops.cast(store["0"][...], "float32")
        had = saved.shape[1]
        if had > self.length:
            warnings.warn(
                f"{self.path}: the amax history of {had} steps is loaded into one of {self.length}: the newest "
                f"{self.length} are kept",
                stacklevel=2,
            )
        elif had < self.length:
            saved = keras.ops.pad(saved, ((0, 0), (0, self.length - had)))
        first = [keras.ops.ones((len(ROLES), 1)), saved[:, : self.length]]
        if self.counts_steps:
            steps = store["1"][...] if "1" in store.keys() else keras.ops.zeros((len(ROLES), 1))
            first.append(keras.ops.cast(steps, "float32"))
        rest = keras.ops.zeros((CALL_SITES - 1, len(ROLES), 1 + self.columns))
        self.slots.assign(keras.ops.concatenate([keras.ops.concatenate(first, axis=1)[None], rest]))

    def _combined(self, slots: Any) -> Any:
        newest_end = 1 + min(self.length, 1)
        count, newest, older = slots[:, :, :1], slots[:, :, 1:newest_end], slots[:, :, newest_end:]
        older = older / keras.ops.maximum(count, 1.0)
        return keras.ops.max(keras.ops.concatenate([newest, older], axis=2), axis=0)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length, "counts_steps": self.counts_steps}

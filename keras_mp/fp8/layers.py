"""Dense and EinsumDense layers with FP8 products."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_private import AutocastScope
from keras_mp.fp8.quantize import read_kernel
from keras_mp.fp8.scaled_product import matmul
from keras_mp.fp8.scaling import ROLES, Scalings
from keras_mp.rebuild.walk import FLOAT8, treatments_of
from keras_mp.stability.accumulate import SumsInFloat32
from keras_mp.treatment.waiting import is_traced

# The amaxes of the steps before: how a layer keeps them, and how they leave a backward pass.

CALL_SITES = 16
"""How many calls of one layer in a step each have a slot of their own."""


@keras.saving.register_keras_serializable("keras_mp")
class AmaxHistory(keras.layers.Layer):
    """Amaxes of an FP8 layer's operands in the last steps.

    What is known of a step is known in the backward pass, and on JAX only gradients leave that. So the history is a
    weight that is marked `overwrite_with_gradient`: its "gradient" is its next value, and a step that is not applied
    leaves it as it is. But gradients of one weight are added up where a layer is called several times. So each call has
    a slot: its gradient is the whole next history there and 0 elsewhere, and the history is the largest over the
    slots, as the optimizer takes the largest over micro-batches and replicas.

    A slot begins with a count, 1. Should two calls meet in one slot (more than `CALL_SITES` calls in a step, or a
    loop), it says by how much to divide what was added up; their newest amaxes remain added up, which scales too
    little, never too much.

    Where a step's gradients do not pass the layer, JAX overwrites the history with zeros: it starts over. So it does
    where weights are loaded without amaxes, as those of other weights would clip them.

    Args:
        length: the number of steps whose amaxes are kept.
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

        Its gradient is the next history. Of a layer that is not trainable it is all zeros.
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

    def amaxes(self) -> Any:
        """Combines the calls: shape (3, columns), by role and step."""
        return self._combined(keras.ops.convert_to_tensor(self.slots))

    def save_own_variables(self, store: Any) -> None:
        history = keras.ops.convert_to_numpy(self.amaxes())
        store["0"] = history[:, : self.length]
        if self.counts_steps:
            store["1"] = history[:, self.length :]

    def load_own_variables(self, store: Any) -> None:
        """Takes the newest amaxes of a file, or starts over."""
        if "0" not in store.keys():
            self.forget()
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

    def forget(self) -> None:
        """Starts over: products scale by their tensors."""
        self.slots.assign(np.zeros(self.slots.shape, "float32"))

    def _combined(self, slots: Any) -> Any:
        newest_end = 1 + min(self.length, 1)
        count, newest, older = slots[:, :, :1], slots[:, :, 1:newest_end], slots[:, :, newest_end:]
        older = older / keras.ops.maximum(count, 1.0)
        return keras.ops.max(keras.ops.concatenate([newest, older], axis=2), axis=0)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length, "counts_steps": self.counts_steps}


# Keras's Dense and EinsumDense with FP8 matrix products.


class Float8Layer(SumsInFloat32):
    """Mixin of FP8 layers: scalings, their amaxes, and the product."""

    kernel: Any
    bias: Any
    activation: Any
    compute_dtype: str
    path: str
    name: str
    amax_history: AmaxHistory | None = None

    @property
    def scaling(self) -> Scalings:
        """How operands are scaled; `keras_mp.convert(model, scaling)` changes it."""
        return treatments_of(self)[FLOAT8]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        with AutocastScope(None):
            # The float32 master weights: they are rounded once, to FP8, and their gradient is never rounded.
            kernel, part = read_kernel(self.kernel, self.scaling)
        history = None if self.amax_history is None else self.amax_history.call()
        path = self.path or self.name
        x = self.multiply(inputs, kernel, dtype=self.compute_dtype, path=path, history=history, part=part)
        if self.bias is not None:
            x = keras.ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)

    def multiply(self, inputs: Any, kernel: Any, **arguments: Any) -> Any:
        """The product, without bias and activation, as `matmul`."""
        return matmul(inputs, kernel, self.scaling, equation=getattr(self, "equation", ""), **arguments)


def build_history(layer: Any) -> None:
    """Gives an FP8 layer the amax history that scalings need."""
    old, length = layer.amax_history, (layer.scaling.kept, layer.scaling.counts)
    if old is not None and (old.length, old.counts_steps) == length:
        return
    store: dict[str, Any] = {}
    if old is not None:
        old.save_own_variables(store)
    set_history(layer, AmaxHistory(*length) if any(length) else None)
    if not any(length):
        return
    layer.amax_history.build()
    store = {key: value[:, : length[0]] if key == "0" else value for key, value in store.items()}
    layer.amax_history.load_own_variables(store)
    if not layer.trainable:
        layer.amax_history.trainable = False


def set_history(layer: Any, history: AmaxHistory | None) -> None:
    """Gives an FP8 layer an amax history, or takes it."""
    layer._tracker.unlock()  # Keras locks a layer that is built, as one that is converted may be
    if vars(layer).get("amax_history") is not None:
        layer._tracker.untrack(layer.amax_history)
        del layer.amax_history
        vars(layer._kernel).pop("assign", None)
    if history is not None:
        layer.amax_history = history
        if history.length:  # else it counts steps
            _forget_other_kernels(layer._kernel, history)
    layer._tracker.lock()


def _forget_other_kernels(kernel: Any, history: AmaxHistory) -> None:
    """Starts over where a kernel of another magnitude is assigned.

    A step moves the largest weight by far less than a factor of 2, and what it assigns is traced. JAX's trainer writes
    all variables back after its steps, the history after the kernel: what is done here to an old one does not stay.
    """

    def assign(value: Any) -> Any:
        assigned = type(kernel).assign(kernel, value)
        if is_traced() or not all(backend.is_concrete(weight._value) for weight in (kernel, history.slots)):
            return assigned
        amax = float(keras.ops.max(keras.ops.abs(kernel.value)))
        kept = float(keras.ops.max(history.amaxes()[ROLES.index("kernel"), : history.length]))
        if kept and not kept / 2 <= amax <= kept * 2:
            history.forget()
        return assigned

    kernel.assign = assign

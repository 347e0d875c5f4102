"""Layers that train with Keras's int8 and int4."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.common.keras_private import AutocastScope
from keras_mp.rebuild.merged import Serves
from keras_mp.rebuild.walk import quantization_trained_for
from keras_mp.stability.quantized_product import SavesLora, dequantized_weights

# The float weights of each class that Keras quantizes, by their private attributes.
WEIGHTS = {
    keras.layers.ReversibleEmbedding: ("_embeddings", "reverse_embeddings"),
    keras.layers.Embedding: ("_embeddings",),
    keras.layers.EinsumDense: ("_kernel",),
    keras.layers.Dense: ("_kernel",),
}


class QuantizationAware(Serves, SavesLora):
    """Computes as after `quantize()`, with gradients of float weights.

    A twin of the layer, which lives for one call, is quantized by Keras's own `quantize()`, and its `quantized_call` is
    the forward pass, with all that comes before the layer's class. So nothing is written here of how Keras quantizes.
    """

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        twin = quantized_twin(self)
        if not isinstance(self, keras.layers.Embedding):
            function, kernel = self.activation or keras.activations.linear, keras.ops.convert_to_tensor(self._kernel)

            def product(inputs: Any, kernel: Any) -> Any:
                plain = _twin(self, _kernel=kernel, bias=None, activation=None, lora_enabled=False)
                return super(QuantizationAware, plain).call(keras.ops.stop_gradient(_read(twin, inputs)))  # type: ignore[misc]

            vars(twin)["activation"] = lambda x: function(_with_gradient(x, product, inputs, kernel))
            return twin.quantized_call(inputs, *args, **kwargs)
        outputs = twin.quantized_call(inputs, *args, **kwargs)
        if not kwargs.get("reverse") and not any(args):
            plain = _twin(self, _embeddings=keras.ops.convert_to_tensor(self._embeddings), lora_enabled=False)
            rows = keras.ops.cast(super(QuantizationAware, plain).call(inputs), outputs.dtype)  # type: ignore[misc]
            return _from_both(outputs, rows)
        cap = self.logit_soft_cap

        def logits(*operands: Any) -> Any:
            x, table = _operands(twin, *operands)
            logits = keras.ops.matmul(x, keras.ops.transpose(table) if _is_tied(twin) else table)
            return logits if cap is None else cap * keras.ops.tanh(logits / cap)

        # Keras's own logits in int8 have no gradient.
        weights = keras.ops.convert_to_tensor(self._embeddings if self.tie_weights else self.reverse_embeddings)
        dequantized = dequantized_weights(twin, weights.dtype)
        return _with_gradient(keras.ops.stop_gradient(outputs), logits, inputs, weights, dequantized)

    def served(self: Any) -> Any:
        """The layer as it is quantized."""
        return self if quantization_trained_for(self) is None else quantized_twin(self)

    # What is saved is not merged.

    def _get_kernel_with_merged_lora(self: Any) -> tuple[Any, Any, Any]:
        return self._kernel, getattr(self, "kernel_scale", None), getattr(self, "kernel_zero", None)

    def _get_embeddings_with_merged_lora(self: Any) -> tuple[Any, Any, Any]:
        return self._embeddings, getattr(self, "embeddings_scale", None), getattr(self, "embeddings_zero", None)


def logits_operands(layer: Any, features: Any, kernel: Any) -> tuple[Any, Any]:
    """The operands of logits, with the float ones' gradients.

    Args:
        features: floats, the layer's input.
        kernel: the float weights, in the layer's own order of axes.

    Returns:
        Features, in float32 and dequantized where the layer quantizes its inputs; and dequantized weights.
    """
    twin = quantized_twin(layer)
    features = keras.ops.cast(features, "float32") if twin.inputs_quantizer else features
    return _operands(twin, features, kernel, dequantized_weights(twin, kernel.dtype))


def _operands(twin: Any, features: Any, kernel: Any, dequantized: Any) -> tuple[Any, Any]:
    dequantized = keras.ops.transpose(dequantized) if _is_tied(twin) else dequantized
    if twin.inputs_quantizer:
        features = _from_both(keras.ops.stop_gradient(_read(twin, features)), features)
    return features, _from_both(keras.ops.stop_gradient(dequantized), kernel)


def _is_tied(layer: Any) -> bool:
    return isinstance(layer, keras.layers.ReversibleEmbedding) and layer.tie_weights


def _read(twin: Any, inputs: Any) -> Any:
    """A quantized layer's inputs, as it multiplies them, dequantized."""
    if not twin.inputs_quantizer:
        return inputs
    codes, scale = twin.inputs_quantizer(inputs, axis=getattr(twin, "quantization_axis", -1))
    codes, scale = keras.ops.cast(codes, "float32"), keras.ops.cast(scale, "float32")
    return keras.ops.cast(keras.ops.divide(codes, scale), inputs.dtype)


def _with_gradient(value: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """A value, also with a function's gradients."""

    @backend.custom_gradient
    def same(value: Any, *operands: Any) -> Any:
        def as_value(*operands: Any) -> Any:
            return keras.ops.cast(function(*operands), value.dtype)

        return value, lambda upstream: (upstream, *backend.gradients_of(as_value, list(operands), upstream))

    return same(value, *operands)


@backend.custom_gradient
def _from_both(value: Any, rows: Any) -> Any:
    """The value, with the gradient that both would have."""
    return value, lambda upstream: (upstream, upstream)


def quantized_twin(layer: Any, config: Any = None, **changed: Any) -> Any:
    """A layer after `quantize()`, for one call; codes are tensors.

    Args:
        config: Keras's config of the quantization; by default that for which the layer trains.
        changed: attributes in place of the layer's own, such as other weights.
    """
    names = next(names for cls, names in WEIGHTS.items() if isinstance(layer, cls))
    config = quantization_trained_for(layer) if config is None else config
    with AutocastScope(None), patched(_ON_TENSORS):
        weights = {name: changed.get(name, getattr(layer, name)) for name in names if hasattr(layer, name)}
        floats = {
            name: keras.ops.stop_gradient(keras.ops.cast(backend.as_tensor(some), "float32"))
            for name, some in weights.items()
        }
        twin = _twin(layer, **{**changed, **floats})
        # The class's own: that of the layer is bound to the layer.
        type(twin).quantize(twin, config.mode, type_check=False, config=config)
    return twin


def _twin(layer: Any, **attributes: Any) -> Any:
    twin: Any = object.__new__(_twin_class(type(layer)))  # type: ignore[arg-type]
    # Without methods that are set on the layer, as `inspect` and `find_nonfinite` do: they are bound to it.
    own = {
        name: value for name, value in vars(layer).items() if not inspect.isfunction(getattr(type(layer), name, None))
    }
    vars(twin).update(own, **attributes)
    return twin


@functools.cache
def _twin_class(cls: type) -> type:
    return type(cls.__name__, (_Twin, cls), {})


class _Twin:
    """A layer's attributes for one call, which Keras leaves alone."""

    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    def add_weight(self, shape: Any, initializer: Any = None, dtype: Any = None, **options: Any) -> Any:
        return _Weight(shape, initializer, dtype or self.variable_dtype)  # type: ignore[attr-defined]


class _Weight(keras.Variable):
    """A variable that holds a tensor of a program."""

    def __init__(self, shape: Any, initializer: Any, dtype: str) -> None:
        # Private, as what makes a variable would make it outside of the program.
        self._name = self._path = "weight"
        self._shape, self._dtype, self._ndim = tuple(shape), keras.backend.standardize_dtype(dtype), len(shape)
        self._initializer = keras.initializers.get(initializer)
        self._value = self._regularizer = self._constraint = None
        self._trainable, self._autocast = False, True

    def assign(self, value: Any) -> Any:
        self._value = keras.ops.cast(value, self._dtype)
        # To the compiler as a variable: knowing how a scale was made, it would divide by that in another order.
        if not backend.is_concrete(self._value):
            (self._value,) = backend.barrier([self._value], [])
        return self._value


def _to_array(convert_to_numpy: Callable[..., Any]) -> Callable[..., Any]:
    def to_array(x: Any) -> Any:
        traced = keras.ops.is_tensor(x) and not backend.is_concrete(x)
        return _Array(keras.ops.convert_to_tensor(x)) if traced else convert_to_numpy(x)

    return to_array


def _of_array(convert_to_tensor: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: convert_to_tensor(_tensor(x), *args, **kwargs)


_ON_TENSORS = {"keras.src.ops.convert_to_numpy": _to_array, "keras.src.ops.convert_to_tensor": _of_array}


class _Array(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor that NumPy's functions compute on by the backend's."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), np.dtype(keras.backend.standardize_dtype(tensor.dtype))

    def __array_ufunc__(self, function: Any, method: str, *arguments: Any, **options: Any) -> Any:
        return self._computed(function.__name__, arguments, options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return self._computed(function.__name__, arguments, options)

    def _computed(self, name: str, arguments: Sequence[Any], options: Any) -> Any:
        arguments = keras.tree.map_structure(_tensor, list(arguments))
        return _Array(_EXACT.get(name, getattr(keras.ops, name))(*arguments, **options))

    def astype(self, dtype: Any) -> Any:
        return _Array(keras.ops.cast(self.tensor, np.dtype(dtype).name))

    def reshape(self, *shape: int) -> Any:
        return _Array(keras.ops.reshape(self.tensor, shape))

    def __getitem__(self, key: Any) -> Any:
        return _Array(self.tensor[key])


def _tensor(x: Any) -> Any:
    return x.tensor if isinstance(x, _Array) else x


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    def exact(x: Any, y: Any) -> Any:
        result = function(_unknown(x, y), _unknown(y, x))
        if keras.ops.is_tensor(x) and keras.ops.is_tensor(y) or backend.is_concrete(result):
            return result
        # A scale: of a / (b / 15) the compiler would make 15 a / b, another code where a is halfway between two.
        return backend.barrier([result], [])[0]

    return exact


def _unknown(x: Any, beside: Any) -> Any:
    """Hides from compilers that an operand is repeated.

    Else it multiplies by the reciprocal, which is rounded, or adds a constant in another order.
    """
    if not keras.ops.is_tensor(beside) or not keras.backend.is_float_dtype(beside.dtype):
        return x
    if keras.ops.is_tensor(x) and x.shape == beside.shape:
        return x
    return keras.ops.where(keras.ops.isnan(beside), beside, x)


def _left_shifted(x: Any, bits: Any) -> Any:
    # On some accelerators it is wrong in 8 bits where it overflows, says Keras, which packs on the host.
    wide = keras.ops.left_shift(keras.ops.cast(x, "int32"), keras.ops.cast(bits, "int32"))
    return keras.ops.cast(wide, x.dtype)


_EXACT: dict[str, Callable[..., Any]] = {
    "left_shift": _left_shifted,
    **{name: _exactly(getattr(keras.ops, name)) for name in ("add", "subtract", "multiply", "divide")},
}

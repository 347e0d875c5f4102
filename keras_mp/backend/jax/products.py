"""Matrix products and attention with float32 sums."""

from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.backend.jax.devices import traced_chip


def fused_attention_in_float32(dtype: str) -> bool:
    """Whether Keras's fused attention adds up and normalizes scores in float32, as jax.nn.dot_product_attention does.

    On a CPU that function asks XLA for a product of float16 that it has not (jax 0.10): "F16_F16_F32 is not supported".
    """
    return not (dtype == "float16" and traced_chip().platform == "cpu")


def fused_attention(query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float) -> Any:
    """Attends with cuDNN's fused kernels, whose softmax is in float32, or returns None where they do not serve.

    Args:
        query: shape `(batch, rows, heads, features)`.
        key, value: shape `(batch, columns, key heads, features)`.
        mask: booleans, shape `(batch, columns)` or `(batch, rows or 1, columns)`, or None.
        causal: whether row i sees only the columns 0 to i.
        scale: the factor of the scores.
    """
    # With a mask cuDNN reads it whole, as 16-bit numbers of size rows x columns a head.
    chip = traced_chip()
    if mask is not None or chip.platform != "gpu" or query.dtype not in (jnp.float16, jnp.bfloat16):
        return None
    # cuDNN's own limits: features up to 128, in steps of 8 (JAX's documentation of dot_product_attention).
    if query.shape[3] > 128 or query.shape[3] % 8 or (causal and query.shape[1] != key.shape[1]):
        return None
    if "NVIDIA" not in chip.kind or (chip.capability or 0) < 8:
        return None
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, scale=scale, implementation="cudnn")


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts two 16-bit tensors and returns the float32 sums; see `keras_mp.stability.accumulate`."""

    def product(left: Any, right: Any) -> Any:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)

    if jax.__version_info__ >= (0, 8):
        return product(left, right)

    # jax 0.7 compiles some of them for a CPU, and then cannot run them. The product of two 16-bit numbers is exact in
    # float32, so the operands can as well be float32.
    def product_on_cpu(left: Any, right: Any) -> Any:
        return product(left.astype(jnp.float32), right.astype(jnp.float32))

    return jax.lax.platform_dependent(left, right, cpu=product_on_cpu, default=product)


def full_float32() -> Any:
    """Within it, products of float32 operands are float32 products: by default a TPU makes one bfloat16 pass of one."""
    return jax.default_matmul_precision("highest")


def keras_has_kernel(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether `keras.ops.dot_product_attention` takes a kernel on this device that keeps no scores.

    Args:
        query: shape `(batch, rows, heads, features)`.
        key, value: shape `(batch, columns, key heads, features)`.
        mask: the mask as Keras gives it, or None.
    """
    # Private, as Keras has no public way to ask.
    from keras.src.backend.jax.nn import _can_use_flash_attention

    platform = traced_chip().platform
    if platform == "tpu":
        return mask is None  # the kernel for TPUs needs to know its mask when it is compiled
    low = query.dtype in (jnp.float16, jnp.bfloat16)
    return platform == "gpu" and low and _can_use_flash_attention(query, key, value, None)

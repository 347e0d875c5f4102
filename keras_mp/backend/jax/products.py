"""Matrix products and attention with float32 sums."""

from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.backend.jax.attention import splash_attention
from keras_mp.backend.jax.devices import traced_chip


def fused_attention_in_float32(dtype: str) -> bool:
    """Whether Keras's fused attention adds up and normalizes scores in float32, as jax.nn.dot_product_attention does.

    On a CPU that function asks XLA for a product of float16 that it has not (jax 0.10): "F16_F16_F32 is not supported".
    """
    return not (dtype == "float16" and traced_chip().platform == "cpu")


def fused_attention(
    query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float, mean_of_unseen: bool = False
) -> Any:
    """Attends with the kernel of the chip, whose softmax is in float32, or returns None where it does not serve.

    On a TPU that is Splash, on NVIDIA's GPUs cuDNN's.

    Args:
        query: shape `(batch, rows, heads, features)`.
        key, value: shape `(batch, columns, key heads, features)`.
        mask: booleans, shape `(batch or 1, heads or 1, rows or 1, columns)`, or None.
        causal: whether row i sees only the columns 0 to i.
        scale: the factor of the scores.
        mean_of_unseen: whether a row that sees no key is the mean of all values, and not 0.
    """
    chip = traced_chip()
    if chip.platform == "tpu":
        return splash_attention(query, key, value, mask, causal=causal, scale=scale, mean_of_unseen=mean_of_unseen)
    # With a mask cuDNN reads it whole, as 16-bit numbers of size rows x columns a head.
    if mask is not None or chip.platform != "gpu" or query.dtype not in (jnp.float16, jnp.bfloat16):
        return None
    # cuDNN's own limits: features up to 128, in steps of 8 (JAX's documentation of dot_product_attention).
    if query.shape[3] > 128 or query.shape[3] % 8 or (causal and query.shape[1] != key.shape[1]):
        return None
    if not _can_train(query, key):
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


def keras_has_kernel(query: Any, key: Any, value: Any) -> bool:
    """Whether `keras.ops.dot_product_attention` trains by a kernel that keeps no scores; that for TPUs is not trusted.

    Args:
        query: shape `(batch, rows, heads, features)`.
        key, value: shape `(batch, columns, key heads, features)`.
    """
    # Private, as Keras has no public way to ask.
    from keras.src.backend.jax.nn import _can_use_flash_attention

    low = query.dtype in (jnp.float16, jnp.bfloat16) and _can_train(query, key)
    return traced_chip().platform == "gpu" and low and _can_use_flash_attention(query, key, value, None)


def _can_train(query: Any, key: Any) -> bool:
    """Whether cuDNN's kernel has gradients: JAX refuses odd lengths, and as late as when it differentiates."""
    return query.shape[1] % 2 == key.shape[1] % 2 == 0

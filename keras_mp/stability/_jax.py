"""Products with float32 sums, and normalization, on JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keras_mp.backend.jax.devices import traced_chip


def fused_attention_in_float32(dtype: str) -> bool:
    """Whether Keras's fused attention keeps its scores in float32.

    It adds up and normalizes them as jax.nn.dot_product_attention does. On a CPU that function asks XLA for a product
    of float16 that it has not (jax 0.10): "F16_F16_F32 is not supported".
    """
    return not (dtype == "float16" and traced_chip().platform == "cpu")


def einsum_float32(equation: str, left: Any, right: Any) -> Any:
    """Contracts 16-bit tensors into float32; see `keras_mp.stability.accumulate`."""

    def product(left: Any, right: Any) -> Any:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)

    if jax.__version_info__ >= (0, 8):
        return product(left, right)

    # jax 0.7 compiles some of them for a CPU, and then cannot run them. The product of two 16-bit numbers is exact in
    # float32, so the operands can as well be float32.
    def product_on_cpu(left: Any, right: Any) -> Any:
        return product(left.astype(jnp.float32), right.astype(jnp.float32))

    return jax.lax.platform_dependent(left, right, cpu=product_on_cpu, default=product)


def normalize_batch(x: Any, gamma: Any, beta: Any, epsilon: float) -> None:
    """Returns None: XLA fuses what Keras's layer does."""


def normalize_rows(
    plain: Callable[[Any], Any], x: Any, gamma: Any, beta: Any, epsilon: float, *, centered: bool, dtype: str
) -> Any:
    """Normalizes each row of x by the plain function."""
    return plain(x)

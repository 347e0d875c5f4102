"""What attention computes otherwise where its products run as kernels of a CPU, between which no compiler stands."""

from collections.abc import Callable
from typing import Any

import keras

from keras_mp.backend.tensorflow.islands.programs import has_islands
from keras_mp.backend.tensorflow.transforms import barrier

# To start a block's kernels takes longer than to move the scores of so few rows through memory.
_WHOLE = 256


def rows_at_once(rows: int, block: int, *, causal: bool) -> int:
    """How many rows of queries attention takes at once: as many as a block has, or all where that is faster.

    Args:
        rows: the number of all rows of queries.
        block: the number of rows of a block.
        causal: whether a block leaves out the columns behind its last row.
    """
    return rows if not causal and 0 < rows <= _WHOLE and has_islands() else block


def computed_once(x: Any) -> Any:
    """Returns the same tensor, which many operations read, and whose own a compiler does not merge with theirs.

    XLA for GPUs weighs each merge against all readers. The mask of a deep model has hundreds, and to compile took twice
    as long.
    """
    return x if has_islands() else barrier([x], [])[0]


def product_over_rows(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A product over rows whose sums are rounded next to the dtype of its operands.

    Args:
        plain: a function that contracts `(batch, heads, group, rows, n)` with `(batch, heads, group, rows, m)` over
            group and rows, to float32 sums of shape `(batch, heads, n, m)`.

    Returns:
        That function; or one by a kernel of a CPU, which sums in float32, too, and rounds the sums itself. For that
        one the sizes but the first must be known.
    """
    return _by_kernel if has_islands() else plain


def _by_kernel(left: Any, right: Any) -> Any:
    _, heads, group, rows, _ = left.shape
    left, right = (keras.ops.reshape(x, (-1, heads, group * rows, x.shape[4])) for x in (left, right))
    return keras.ops.matmul(keras.ops.transpose(left, (0, 1, 3, 2)), right)

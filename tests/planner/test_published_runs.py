"""The list of published runs, its groups and what is set aside, and how a compile that takes too long falls back."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planner import predictions  # noqa: E402
from benchmarks.planner.published_runs import RUNS, SMALLER  # noqa: E402
from models.llama import LlamaSize, llama  # noqa: E402

pytestmark = pytest.mark.slow
# What a process prints for each form of a run: a larger form takes too long, the next fails, the last is compiled.
PROGRAM = """
import json, sys, time
form = int(sys.argv[sys.argv.index("--form") + 1])
if form == 0:
    time.sleep(60)
print("a compiler's words")
print(json.dumps([None, {"failed": "no room"}, {"seconds": 2.0, "compile seconds": 1.0}][form]))
"""


def test_a_compile_beyond_the_limit_falls_to_the_next_smaller_form(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(predictions, "__file__", str(program))
    monkeypatch.setattr(predictions, "LIMIT", 1)
    result = predictions.in_time("a run", next(iter(RUNS.values())))
    assert result["seconds"] == 2.0 and result["tried"] == ["not in 1 s", "no room"]
    program.write_text(f"print({json.dumps(json.dumps({'failed': 'no room'}))})")
    failed = predictions.in_time("a run", next(iter(RUNS.values())))
    assert failed["failed"] == "; ".join(["no room"] * (len(SMALLER) + 1))


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a policy of JAX")
def test_every_second_product_of_a_block_is_kept():
    """Of the five products, of which queries, keys and values are one, the second and the fourth are computed again."""
    width, hidden, blocks, rows = 64, 160, 2, 64
    sizes, tokens = LlamaSize(blocks, width, 4, 4, hidden, 100), keras.KerasTensor((2, rows // 2), "int32")

    def operations():
        model = llama(sizes, rows // 2, remat=True)
        model.compile("adam", keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
        return keras_mp.inspect(model, (tokens, tokens)).flops

    from benchmarks.selective import kept_products

    recomputed = operations()
    with kept_products((0, 2, 4)):
        saved = recomputed - operations()
    assert saved >= 2 * rows * blocks * (3 * width**2 + width * hidden)


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a policy of JAX")
def test_of_a_product_in_8_bits_the_result_in_16_bits_is_kept():
    """Not the sums in float32, from which it is scaled."""
    import jax
    import jax.numpy as jnp
    from jax._src.ad_checkpoint import saved_residuals

    from benchmarks.selective import kept_products

    x, kernel = jnp.ones((32, 64), "bfloat16"), jnp.ones((64, 48), "float32")
    with kept_products((0, 2, 4)):
        block = jax.checkpoint(lambda x, kernel: jnp.tanh(keras_mp.fp8.matmul(x, kernel)).sum())
        kept = [(array.shape, array.dtype) for array, _ in saved_residuals(block, x, kernel)]
    assert ((32, 48), "bfloat16") in kept and ((32, 48), "float32") not in kept


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="barriers of JAX")
def test_a_loss_with_the_arrays_of_pytorch_is_kerass_loss():
    import jax

    from benchmarks.eager_loss import EagerCrossEntropy

    rng = np.random.default_rng()
    logits, labels = rng.normal(size=(2, 6, 11)).astype("float32"), rng.integers(0, 11, (2, 6)).astype("int32")
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for loss in (EagerCrossEntropy(), plain):
        value, gradient = jax.value_and_grad(lambda logits, loss=loss: loss(labels, logits))(logits)
        wanted, wanted_gradient = jax.value_and_grad(lambda logits: plain(labels, logits))(logits)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)

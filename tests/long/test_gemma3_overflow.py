"""Gemma 3 in float16: the overflow of keras-hub issue 2424, in a tiny model with activations of that size.

Pull request 2519 of keras-hub mended `Gemma3DecoderBlock.call` in three places, each under `is_float16`: it clips the
block's input, and makes both residual additions in float32 and clips them to 65504. Here the block takes its other
branch, `x + attention` in float16, which is the code as it was before.
"""

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.slow

hub = pytest.importorskip("keras_hub")
decoder_block = pytest.importorskip("keras_hub.src.models.gemma3.gemma3_decoder_block")

LARGEST = 65504
JAX = keras.backend.backend() == "jax"


class Namespace:
    """A module with some of its names changed."""

    def __init__(self, module, **names):
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.fixture
def before_the_mend(monkeypatch):
    backend = Namespace(keras.backend, standardize_dtype=lambda dtype: "")
    monkeypatch.setattr(decoder_block, "keras", Namespace(keras, backend=backend))


def gemma3(width=16):
    sizes = dict(vocabulary_size=32, num_layers=2, num_query_heads=2, num_key_value_heads=1, head_dim=8)
    norms = dict(use_post_ffw_norm=True, use_post_attention_norm=True)
    backbone = hub.models.Gemma3Backbone(
        **sizes, **norms, hidden_dim=width, intermediate_dim=2 * width, image_size=None, name="backbone"
    )
    return hub.models.Gemma3CausalLM(None, backbone)


def scaled(model, scale):
    """The norms after attention and feed-forward multiply by a large weight, as Gemma 3's do (transformers#37226)."""
    for path in ("post_attention_norm", "post_ffw_norm"):
        for block in blocks_of(model):
            weight = getattr(block, path).scale
            weight.assign(np.full(weight.shape, scale - 1))


def reaching_800_000():
    """A model in float32 whose activations reach 800,000 (unsloth#4014) in one channel; float16 holds its weights."""
    model, data = drawn(width=128), batch()
    for block in blocks_of(model):
        for layer in (block.attention.output_dense, block.ffw_linear):
            kernel = np.array(layer.kernel)
            kernel[..., 0] *= 20
            layer.kernel.assign(kernel)
    scaled(model, 10_000)
    scaled(model, 10_000 * 800_000 / max(sums_of(model, data[0]).values()))
    assert max(np.abs(weight).max() for weight in model.get_weights()) < LARGEST
    return model, data


def blocks_of(model):
    return [model.backbone.get_layer(f"decoder_block_{place}") for place in range(2)]


def batch():
    tokens = np.random.default_rng().integers(1, 32, (4, 16))
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens


def drawn(width=16):
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(int(np.random.default_rng().integers(2**31)))
    return gemma3(width)


def copied(model, policy):
    keras.config.set_dtype_policy(policy)
    copy = gemma3(model.backbone.hidden_dim)
    copy.set_weights(model.get_weights())
    return copy


def sums_of(model, x):
    """The residual sums of each block in float32: after the attention, and after the feed-forward; their largest."""
    sums = []
    undo = []
    for block in blocks_of(model):
        norm = block.pre_ffw_norm

        def noting(value, call=norm.call):
            sums.append(value)
            return call(value)

        vars(norm)["call"] = noting
        undo.append(norm)
    outputs = keras.Model(model.backbone.inputs, [block.output for block in blocks_of(model)])
    try:
        after = outputs(x)
    finally:
        for norm in undo:
            del vars(norm)["call"]
    places = [(index, "x + attention") for index in range(2)] + [(index, "x + attention_x") for index in range(2)]
    largest = [float(np.abs(np.asarray(value)).max()) for value in (*sums[-2:], *after)]
    return dict(sorted(zip(places, largest, strict=True)))


def overflowing(scale):
    """A model in float32 whose residual sums overflow in float16, and whose terms do not; and a batch."""
    while True:
        model, (x, y) = drawn(), batch()
        scaled(model, scale)
        sums = sums_of(model, x)
        if max(sums.values()) > 1.05 * LARGEST and not any(abs(size / LARGEST - 1) < 0.01 for size in sums.values()):
            return model, (x, y), sums


def test_the_residual_sum_that_overflows_is_named_to_the_line(before_the_mend):
    # A vector of 16 that is normalized has no value above 4, so that no term of a sum reaches 65504.
    reference, data, sums = overflowing(scale=16_000)
    model = copied(reference, "mixed_float16")
    (block, line), _ = next((place, size) for place, size in sums.items() if size > LARGEST)

    report = keras_mp.audit(model, data)
    suspects = {suspect.path: suspect for suspect in report.suspects("mixed_float16") if not suspect.safe}
    spoiled = [index for index in range(2) if sums[index, "x + attention_x"] > LARGEST]
    assert {f"backbone/decoder_block_{index}" for index in spoiled} <= suspects.keys()
    assert not any("post_" in path for path in suspects)

    nonfinite = keras_mp.numerics.find_nonfinite(model, data)
    print(f"\nresidual sums in float32: {sums}\n{nonfinite}")
    assert nonfinite.path.startswith(f"backbone/decoder_block_{block}") and nonfinite.kind == "Inf"
    assert nonfinite.remedy == "float32 for this layer"
    operation, _, text = nonfinite.operation.partition(" in gemma3_decoder_block.py, line ")
    assert operation == ("add" if JAX else "AddV2") and text.partition(": ")[2].endswith(f"= {line}")
    assert f"Operation: {nonfinite.operation}" in str(nonfinite)


def test_activations_of_800_000_are_audited_and_found(before_the_mend):
    reference, data = reaching_800_000()
    sums = sums_of(reference, data[0])
    assert max(sums.values()) == pytest.approx(800_000, rel=0.01)
    model = copied(reference, "mixed_float16")

    audit = keras_mp.audit(model, data)
    print("", *(f"{suspect.path}: {suspect.reason}" for suspect in audit.suspects() if not suspect.safe), sep="\n")
    report = {layer.path: layer for layer in audit.layers}
    for index in range(2):
        audited = report[f"backbone/decoder_block_{index}"]
        assert not audited.verdicts["mixed_float16"].ok and audited.verdicts["mixed_bfloat16"].ok
        assert audited.ranges["output"].largest == pytest.approx(sums[index, "x + attention_x"], rel=1e-4)

    nonfinite = keras_mp.numerics.find_nonfinite(model, data)
    print(nonfinite)
    assert nonfinite.path == "backbone/decoder_block_0/post_attention_norm" and nonfinite.kind == "Inf"
    operation, _, line = nonfinite.operation.partition(" in gemma3_layers.py, line ")
    assert operation == ("convert_element_type" if JAX else "Cast")
    assert line.endswith(": return ops.cast(normed_inputs, self.compute_dtype)")

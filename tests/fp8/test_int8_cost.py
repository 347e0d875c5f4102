"""When INT8 pays: the size from which on a chip gains, and what convert and explain make of it."""

import warnings

import keras
import pytest
from twins import twin

import keras_mp
from keras_mp import convert
from keras_mp.fp8 import Scalings
from keras_mp.fp8.convert import decisions
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.selection import GAINS_FROM, gains_from


def test_a_chip_that_nothing_is_known_of_is_refused():
    with pytest.raises(ValueError, match="target='h100': there are no compiled cycles of INT8 for .*With: v5e, v6e"):
        gains_from("h100")


@pytest.mark.filterwarnings("ignore:.*compute in float32")
def test_convert_takes_what_gains_on_the_target(monkeypatch):
    sizes = [32, 64, 32, 16]  # of which the second and the third are neither first nor last
    dense = [keras.layers.Dense(size, use_bias=False, name=f"dense{index}") for index, size in enumerate(sizes)]
    model = keras.Sequential([keras.Input((16,)), *dense])
    monkeypatch.setitem(GAINS_FROM, "v5e", (8192, 32, 64))  # in place of the size of large layers
    rows = {row.path: row for row in decisions(model, target="v5e", batch_size=8192, scaling=Scalings.named("int8"))}
    printed = " ".join(str(keras_mp.report(model, target="v5e", batch_size=8192, scaling="int8")).split())
    assert [path for path, row in rows.items() if row.float8] == ["dense1"]
    assert rows["dense1"].reason == "its product of 32 by 64 gains"
    assert rows["dense2"].reason == "its product of 64 by 32 does not gain"
    assert "INT8" in printed and "On v5e a layer gains from 8192 rows, 32 inputs and 64 outputs on" in printed
    int8 = convert(twin(model), Scalings.named("int8"), target="v5e", batch_size=8192)
    assert "1 of 4 products are in INT8" in str(keras_mp.report(int8))  # whatever convert would use
    assert [layer.name for layer in int8.layers if isinstance(layer, Float8Layer)] == ["dense1"]
    for target, batch_size in (("v5e", 8191), ("v6e", 8192)):
        with pytest.warns(UserWarning, match="none of the 4 .* is in INT8.* its product of 32 by 64 does not gain"):
            convert(model, Scalings.named("int8"), target=target, batch_size=batch_size)
    assert "On v5e" not in str(keras_mp.report(model, target="v6e", batch_size=8192, scaling="int8"))
    with pytest.raises(ValueError, match="TPU v5e has no FP8 units"):
        convert(model, Scalings.named("delayed"), target="v5e", batch_size=8192)


@pytest.mark.parametrize("recipe", [Scalings.named("int8", source="static"), Scalings.named("static")], ids=str)
def test_static_scales_warn_in_float16(recipe):
    dense = [keras.layers.Dense(16, dtype="mixed_float16") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *dense])
    other = twin(model)
    with pytest.warns(UserWarning, match="compute in float16, whose loss scale grows after the static scales"):
        convert(model, recipe, select=lambda path, layer: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fp8")
        convert(other, "delayed", select=lambda path, layer: True)

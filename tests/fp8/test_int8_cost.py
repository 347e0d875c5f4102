"""When INT8 pays: the table of compiled cycles, and what convert and explain make of it."""

import warnings
from pathlib import Path

import keras
import pytest
from twins import twin

from keras_mp.fp8 import DelayedScaling, Int8Scaling, StaticScaling, convert, explain
from keras_mp.fp8.cost import CYCLES, compiled_cost
from keras_mp.fp8.layers import Float8Layer

ROOT = Path(__file__).parents[2]
SMALL, LARGE = (2048, 2048, 8192), (8192, 4096, 16384)


def test_the_largest_layer_that_is_no_larger_decides():
    delayed = Int8Scaling()
    assert compiled_cost(*LARGE, "v5e", delayed).shape == LARGE
    assert compiled_cost(10**6, 10**5, 10**5, "v5e", delayed).shape == LARGE
    for index in range(3):
        below = tuple(size - (place == index) for place, size in enumerate(LARGE))
        assert compiled_cost(*below, "v5e", delayed).shape == SMALL
        assert compiled_cost(*(size - (place == index) for place, size in enumerate(SMALL)), "v5e", delayed) is None
    all_three = compiled_cost(*LARGE, "v6e", Int8Scaling("static", kernel_gradient="int8"))
    cycles = CYCLES["v6e"][LARGE]
    assert all_three[:2] == (cycles["bfloat16"], cycles["static, kernel gradient INT8"])
    assert all_three.gain == cycles["bfloat16"] / cycles["static, kernel gradient INT8"]


def test_what_the_table_lacks_is_refused():
    with pytest.raises(ValueError, match="target='h100': there are no compiled cycles of INT8 for .*With: v5e, v6e"):
        compiled_cost(*LARGE, "h100", Int8Scaling())
    with pytest.raises(ValueError, match="Int8Scaling, current, kernel gradient INT8, has no compiled cycles"):
        compiled_cost(*LARGE, "v5e", Int8Scaling("current", kernel_gradient="int8"))


@pytest.mark.filterwarnings("ignore:.*compute in float32")
def test_convert_takes_what_gains_on_the_target(capsys, monkeypatch):
    sizes = [32, 64, 32, 16]  # of which the second and the third are neither first nor last
    dense = [keras.layers.Dense(size, use_bias=False, name=f"dense{index}") for index, size in enumerate(sizes)]
    model = keras.Sequential([keras.Input((16,)), *dense])
    # Million cycles of a layer as large as the second, in place of those of large ones.
    small = {"bfloat16": 29.3, "delayed": 21.1, "delayed, kernel gradient INT8": 27.9}
    monkeypatch.setitem(CYCLES, "v5e", {(8192, 32, 64): small})
    monkeypatch.setitem(CYCLES, "v6e", {(8192, 32, 64): small | {"delayed": 30.0}})
    rows = {row.path: row for row in explain(model, target="v5e", batch_size=8192, recipe=Int8Scaling())}
    printed = capsys.readouterr().out
    assert [path for path, row in rows.items() if row.float8] == ["dense1"]
    assert "gains: " in rows["dense1"].reason and "in INT8, 1.39 times as fast (compiled" in rows["dense1"].reason
    assert rows["dense2"].reason == "its product of 64 by 32 is smaller than those whose cycles are known"
    assert "INT8" in printed and "29.3 M" in printed and "Compiled for v5e" in printed
    int8 = convert(twin(model), Int8Scaling(), target="v5e", batch_size=8192)
    assert [layer.name for layer in int8.layers if isinstance(layer, Float8Layer)] == ["dense1"]
    with pytest.warns(UserWarning, match="nothing is in INT8 of the 4 .* its product of 32 by 64 does not gain"):
        convert(model, Int8Scaling(), target="v6e", batch_size=8192)
    # 0.95 of bfloat16's cycles: less than a tenth is saved.
    with pytest.warns(UserWarning, match="its product of 32 by 64 does not gain enough"):
        convert(model, Int8Scaling(kernel_gradient="int8"), target="v6e", batch_size=8192)
    with pytest.raises(ValueError, match="TPU v5e has no FP8 units"):
        convert(model, DelayedScaling(), target="v5e", batch_size=8192)


@pytest.mark.parametrize("recipe", [Int8Scaling("static"), StaticScaling()], ids=str)
def test_static_scales_warn_in_float16(recipe):
    dense = [keras.layers.Dense(16, dtype="mixed_float16") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *dense])
    other = twin(model)
    with pytest.warns(UserWarning, match="compute in float16, whose loss scale grows after the static scales"):
        convert(model, recipe, select=lambda path, layer: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fp8")
        convert(other, "delayed", select=lambda path, layer: True)


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "int8.md").read_text()
    part = page.partition("<!-- made by benchmarks/int8_cycles.py -->")[2].partition("<!-- end -->")[0]
    lines = [line.strip("| ").split(" | ") for line in part.strip().splitlines()]
    shown = {tuple(cells[:2]): [float(cell) for cell in cells[2:]] for cells in lines[2:]}
    chips = lines[0][2::2]
    assert chips == list(CYCLES)
    for place, chip in enumerate(chips):
        for shape, values in CYCLES[chip].items():
            for name, cycles in values.items():
                relative = round(cycles / values["bfloat16"], 2)
                assert shown[str(shape), name][2 * place :][:2] == [cycles, pytest.approx(relative, abs=0.0051)]
    assert len(shown) == sum(len(values) for values in CYCLES["v5e"].values())

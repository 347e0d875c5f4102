"""The lines of code that reports name: calls that the kit has, and the same on the page about NaN."""

import ast
import inspect
from pathlib import Path

import pytest

import keras_mp
from keras_mp.reporting import remedies

LINES = {name: value for name, value in vars(remedies).items() if name.isupper()}
FILLED = {"precision": "mixed_bfloat16", "steps": 4, "dtype": "float8", "strategy": "data", "devices": 2}
PAGE = Path(__file__).parents[2] / "docs" / "nan.md"


@pytest.mark.parametrize("name", [name for name in LINES if name != "FLOAT32_LAYER"])
def test_a_remedy_is_a_call_that_the_kit_takes(name):
    line = LINES[name].format(recipe="delayed", **FILLED)
    calls = [node for node in ast.walk(ast.parse(line + " pass" * line.endswith(":"))) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func): call for call in calls}
    ((first, call),) = [
        (name, call) for name, call in names.items() if name.startswith("keras_mp.") and "(" not in name
    ]
    function = keras_mp
    for part in first.split(".")[1:]:
        function = getattr(function, part)
    inspect.signature(function).bind(*call.args, **{word.arg: word.value for word in call.keywords})


def test_the_page_about_nan_has_the_lines_of_the_reports():
    page = PAGE.read_text()
    for line in (remedies.STABILIZE, remedies.SCALE_LOSS, remedies.KEEP_STATISTICS, remedies.FLOAT32_LAYER):
        assert f"`{line}`" in page

"""One check of whole numbers, with one message, for all arguments."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from keras_mp.system.argument_checks import whole_number

PACKAGE = Path(__file__).parents[2] / "keras_mp"


def test_whole_numbers_pass_as_python_s_own():
    for value in (3, np.int64(3), np.uint8(3)):
        assert type(whole_number("steps", value, 3)) is int and whole_number("steps", value) == 3


def test_anything_else_is_named_with_its_value():
    for value in (0, -1, 2.0, "2", None, True, np.bool_(True), np.float32(2), [2]):
        with pytest.raises(ValueError, match=re.escape(f"steps={value!r} must be a whole number, 1 or more") + "$"):
            whole_number("steps", value)


def test_the_message_has_the_unit_and_what_else_is_right():
    with pytest.raises(ValueError, match=r"^sample=-1 must be a whole number of values, 0 or more, or None for all$"):
        whole_number("sample", -1, 0, "values", "or None for all")


def test_no_module_checks_whole_numbers_by_itself():
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        if "whole number" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise):
                assert "whole number" not in ast.unparse(node), f"{path}:{node.lineno}: use whole_number"

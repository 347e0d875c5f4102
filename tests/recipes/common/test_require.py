import json

import pytest

from recipes.common.require import MissingPackageError, require


def test_returns_the_module():
    assert require("json", extra="data") is json


def test_a_missing_package_is_an_error_with_the_command():
    with pytest.raises(MissingPackageError, match=r'no_such_package.*pip install "keras-mp\[plots\]"'):
        require("no_such_package.part", extra="plots")

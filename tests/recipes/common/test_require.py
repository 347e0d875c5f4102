import json
import re

import pytest

from keras_mp.system.install import install_command
from recipes.common.require import MissingPackageError, require


def test_returns_the_module():
    assert require("json", extra="data") is json


def test_a_missing_package_is_an_error_with_the_command():
    with pytest.raises(MissingPackageError, match="no_such_package.*" + re.escape(install_command("plots"))):
        require("no_such_package.part", extra="plots")

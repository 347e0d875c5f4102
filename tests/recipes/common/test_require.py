import importlib.util
import re

import pytest

from keras_mp.system.packages import install_command
from recipes.common.require import MissingPackageError, require


@pytest.mark.parametrize("extra", ["data", "plots"])
@pytest.mark.parametrize("there, all_of_it", [(object(), "train"), (None, "data,plots")])
def test_one_command_installs_all_that_a_training_recipe_needs(extra, there, all_of_it, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    with pytest.raises(MissingPackageError, match=re.escape(install_command(all_of_it))):
        require("no_such_package", extra=extra)

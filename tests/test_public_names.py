"""Every public name of an earlier version still works, or warns of the new one.

The names, parameters, members and options lie in `compat/public_names/`, a file for each version, written by
`compat/write_public_names.py` in a checkout of that version; its docstring has the two commands.
"""

import functools
import inspect
import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "compat"
sys.path.insert(0, str(HERE))

from write_public_names import commands, members  # noqa: E402

import keras_mp  # noqa: E402

VERSIONS = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "public_names").glob("*.json"))}
COMMANDS = [(version, name) for version, names in VERSIONS.items() for name in names if name.startswith("keras-mp ")]
NAMES = [(version, name) for version, names in VERSIONS.items() for name in names if not name.startswith("keras-mp ")]
POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
VARIABLE = ("VAR_POSITIONAL", "VAR_KEYWORD")


def resolve(name):
    """The object of a name such as "stabilize" or "fp8.convert"."""
    return functools.reduce(getattr, name.split("."), keras_mp)


def warns_of(function, parameter):
    """Whether a call by this keyword warns that it has a new name; without other arguments the call itself fails."""
    with warnings.catch_warnings(record=True) as caught, suppress(Exception):
        warnings.simplefilter("always")
        function(**{parameter: None})
    return any(f"({parameter}=...) is now" in str(warning.message) for warning in caught)


def check_parameters(function, before):
    """Checks that each call that was right is right: by keyword, by position, and without what has a default."""
    now = inspect.signature(function).parameters
    order = [name for name, parameter in now.items() if parameter.kind.name in POSITIONAL and name != "self"]
    for place, (name, kind, has_default) in enumerate(before):
        if kind in VARIABLE:
            assert any(parameter.kind.name == kind for parameter in now.values()), f"takes no more {kind} {name}"
        elif name not in now:
            assert warns_of(function, name), f"{name}= is gone without a warning"
        else:
            assert kind not in POSITIONAL or order[place] == name, f"{name} is no longer argument {place}"
            assert not has_default or now[name].default is not inspect.Parameter.empty, f"{name} has no default"
    known = {name for name, _, _ in before}
    added = [p for p in now.values() if p.name not in known and p.name != "self" and p.kind.name not in VARIABLE]
    replaced = sum(name not in now for name, kind, _ in before if kind not in VARIABLE)
    assert sum(parameter.default is parameter.empty for parameter in added) <= replaced, "there are new, required ones"


@pytest.mark.parametrize("version, name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_works_as_it_did_or_warns(version, name):
    before = VERSIONS[version][name]
    value = resolve(name)
    if "parameters" in before:
        check_parameters(value, before["parameters"])
    for member, parameters in before.get("members", {}).items():
        assert member in members(value), f"{member} is gone"
        if parameters is not None:
            check_parameters(getattr(value, member), parameters)


@pytest.mark.parametrize("version, name", COMMANDS)
def test_a_command_takes_the_options_that_it_took(version, name):
    assert set(VERSIONS[version][name]["options"]) <= set(commands()[name.removeprefix("keras-mp ")])


def renamed(new=None, *, other=1):
    """What `check_parameters` must refuse: `old` is gone."""


def test_a_parameter_that_is_gone_moved_or_newly_required_is_seen():
    check_parameters(renamed, [["new", "POSITIONAL_OR_KEYWORD", True]])
    for before, message in (
        ([["old", "POSITIONAL_OR_KEYWORD", True]], "old= is gone without a warning"),
        ([["first", "VAR_POSITIONAL", False]], "takes no more VAR_POSITIONAL first"),
        ([["other", "POSITIONAL_OR_KEYWORD", True]], "other is no longer argument 0"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_parameters(renamed, before)
    with pytest.raises(AssertionError, match="there are new, required ones"):
        check_parameters(lambda new, *, more: None, [["new", "POSITIONAL_OR_KEYWORD", False]])

from pathlib import Path
from typing import Annotated, Optional

import pytest
import typer

from keras_mp.cli.training_recipe import parse

OPTIONS = [
    ("epochs", Annotated[int, "passes over the data"], 20),
    ("learning_rate", Annotated[float, "the peak"], 0.1),
    ("data_dir", Annotated[str | None, "where the data lie"], None),
    ("export", Annotated[bool, "write a SavedModel"], True),
    ("folder", Path, Path("here")),
    ("width", Optional[int], None),  # noqa: UP045 (the older spelling is what is tested)
]


def parsed(*arguments):
    return parse(OPTIONS, arguments, "train", "A recipe.\n\n    keras-mp train\n    keras-mp train twice")


def test_both_forms_and_every_type():
    given = parsed("--epochs", "3", "--learning-rate=1e-3", "--data-dir", "here", "--no-export", "--width=8")
    assert given == {
        "epochs": 3, "learning_rate": 0.001, "data_dir": "here", "export": False, "folder": Path("here"), "width": 8,
    }  # fmt: skip
    assert parsed() == {name: default for name, _, default in OPTIONS}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--epoch=3"], "No such option: --epoch"),
        (["--epochs", "many"], "valid integer"),
        (["--epochs"], "'--epochs' requires an argument"),
    ],
)
def test_an_unknown_option_and_a_wrong_or_missing_value_are_errors_of_usage(arguments, said):
    with pytest.raises(typer.BadParameter.__mro__[1], match=said):
        parsed(*arguments)


def test_help_lists_the_options_with_defaults_and_texts_below_the_description(capsys):
    with pytest.raises(typer.Exit):
        parsed("--help")
    printed = capsys.readouterr().out
    assert "  A recipe.\n\n      keras-mp train\n      keras-mp train twice\n" in printed
    assert "--learning-rate" in printed and "the peak  [default: 0.1]" in printed and "--no-export" in printed

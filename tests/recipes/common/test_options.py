import dataclasses
from typing import Annotated

import pytest

from recipes.common.options import parse


@dataclasses.dataclass(frozen=True)
class Config:
    epochs: Annotated[int, "passes over the data"] = 20
    learning_rate: Annotated[float, "the peak"] = 0.1
    data_dir: Annotated[str | None, "where the data lie"] = None
    export: Annotated[bool, "write a SavedModel"] = True


def parsed(*arguments, config=None):
    return parse(config or Config(), arguments, "train", "A recipe.")


def test_both_forms_and_every_type():
    assert parsed("--epochs", "3", "--learning-rate=1e-3", "--data-dir", "here", "--no-export") == Config(
        3, 0.001, "here", False
    )


def test_what_is_not_given_stays_as_the_config_has_it():
    assert parsed("--epochs=3", config=Config(learning_rate=0.5)) == Config(3, 0.5)


def test_an_unknown_option_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match="unknown option --epoch: did you mean --epochs?"):
        parsed("--epoch=3")
    with pytest.raises(ValueError, match="unknown option --zzz: Known: .*--no-export"):
        parsed("--zzz")


def test_a_wrong_or_missing_value_is_an_error():
    with pytest.raises(ValueError, match="--epochs: invalid int value: 'many'"):
        parsed("--epochs", "many")
    with pytest.raises(ValueError, match="--epochs: expected one argument"):
        parsed("--epochs")


def test_help_lists_the_fields_with_defaults_and_texts(capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--help")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for text in ("--learning-rate", "the peak (default: 0.1)", "--no-export", "A recipe."):
        assert text in printed

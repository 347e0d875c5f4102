import dataclasses
from pathlib import Path
from typing import Annotated, Optional

import pytest

from keras_mp.training.training_recipe import parse


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
    with pytest.raises(ValueError, match=r"unknown option --epoch. Did you mean '--epochs'\?"):
        parsed("--epoch=3")
    with pytest.raises(ValueError, match="unknown option --zzz. Known: .*--no-export"):
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


@dataclasses.dataclass(frozen=True)
class Plain:
    """Fields without a text, with a place, with typing's spelling, and one that no caller sets."""

    epochs: int = 20
    folder: Path = Path("here")
    width: Optional[int] = None  # noqa: UP045 (the older spelling is what is tested)
    made: int = dataclasses.field(default=0, init=False)


def test_a_field_needs_no_text_and_may_be_a_path(capsys):
    assert parsed("--epochs=3", "--folder", "there", "--width=8", config=Plain()) == Plain(3, Path("there"), 8)
    with pytest.raises(ValueError, match="unknown option --made"):
        parsed("--made=1", config=Plain())
    with pytest.raises(SystemExit):
        parsed("--help", config=Plain())
    assert "default: 20" in capsys.readouterr().out

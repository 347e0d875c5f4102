import dataclasses

import pytest

from keras_mp.system.atomic_write import atomic_write
from recipes.common.config import TrainingConfig
from recipes.common.run_folder import new_run_folder, run_folder


def test_a_second_run_gets_a_folder_of_its_own(tmp_path):
    names = [new_run_folder(str(tmp_path / "runs"), "digits").name for _ in range(3)]
    assert names == ["digits", "digits-2", "digits-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_name_that_is_a_path_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match="name is the name of a folder"):
        new_run_folder(str(tmp_path / "runs"), name)


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, failure):
    (tmp_path / "a.txt").write_text("before")
    with pytest.raises(failure), atomic_write(tmp_path / "a.txt") as partial:
        partial.write_text("ha")
        raise failure
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"


def test_a_saved_model_that_will_be_replaced_is_named_before_the_training(tmp_path, capsys):
    config = TrainingConfig(output=str(tmp_path), name="run", resume=True)
    folder = run_folder(config)
    assert capsys.readouterr().out == f"there is no run 'run' in {str(tmp_path)!r} to resume: this is the first\n"
    (folder / "saved_model").mkdir()
    assert run_folder(config) == folder
    assert capsys.readouterr().out == f"{folder / 'saved_model'} exists, and is replaced when this training has ended\n"
    assert run_folder(dataclasses.replace(config, export=False)) == folder and capsys.readouterr().out == ""

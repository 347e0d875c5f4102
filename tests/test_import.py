"""What importing the kit costs, and that one backend is enough."""

import ast
import collections
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import keras
import pytest

import keras_mp

ROOT = Path(__file__).parents[1]
BACKEND = keras.backend.backend()
OTHER = "jax" if BACKEND == "tensorflow" else "tensorflow"
HEAVY = {"jax", "tensorflow", "tensorflow_datasets", "matplotlib", "sklearn", "rich", "typer", "pandas", "scipy"}


PLACES = [name for name in keras_mp.__all__ if isinstance(getattr(keras_mp, name), types.ModuleType)]
TOP = [name for name in keras_mp.__all__ if name not in PLACES]
PUBLIC = [*TOP, *(f"{place}.{name}" for place in PLACES for name in getattr(keras_mp, place).__all__)]


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_neither_backend():
    loaded = run("import sys, keras_mp; print(*{m.partition('.')[0] for m in sys.modules})")
    assert not HEAVY & set(loaded) and "keras" not in loaded


def test_classes_are_registered_also_where_keras_is_imported_after():
    of_treated = "keras.saving.get_registered_object('keras_mp>Treated')"
    program = f"import keras_mp, sys; assert 'keras' not in sys.modules; import keras; assert {of_treated}"
    run(program, KERAS_BACKEND="jax")  # which is imported sooner


def test_the_package_alone_as_a_wheel_holds_it_has_every_public_name_and_imports_nothing_heavy(tmp_path):
    shutil.copytree(ROOT / "keras_mp", tmp_path / "keras_mp")
    file, known, *loaded = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules |= {{'recipes': None, 'models': None}}\n"
        "import keras; before = set(sys.modules)\n"
        "import keras_mp; shown = [getattr(keras_mp, name) for name in keras_mp.__all__]\n"
        "[getattr(place, name) for place in shown if isinstance(place, type(sys)) for name in place.__all__]\n"
        "loaded = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(keras_mp.__file__, 'h100' in keras_mp.chips.CHIPS, *loaded)"
    )
    assert file == str(tmp_path / "keras_mp" / "__init__.py") and known == "True"
    assert "keras_mp" in loaded and not HEAVY & set(loaded)


def test_folders_of_the_same_names_beside_a_script_hide_nothing(tmp_path):
    try:
        importlib.metadata.distribution("keras-mp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("keras-mp is not installed")
    for file in ("keras_mp/README.md", "models/mine.py", "recipes/mine.py"):  # a clone, and folders of a reader's own
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    (tmp_path / "script.py").write_text(
        "import keras_mp, models.mine, recipes.mine\n"
        "print(keras_mp.__file__, models.mine.__file__, recipes.mine.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, *own = done.stdout.split()
    assert Path(package).name == "__init__.py" and own == [
        str(tmp_path / f"{name}/mine.py") for name in ("models", "recipes")
    ]


def test_the_library_names_neither_the_recipes_nor_the_models_of_the_repository():
    for path in (ROOT / "keras_mp").rglob("*.py"):
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                named |= {node.module} if node.module and not node.level else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # What a process of its own is started with, or import_module is given.
                named |= set(re.findall(r"(?<![.\w])(?:recipes|models)\.\w+|-m (?:recipes|models)\b", node.value))
        assert not [name for name in named if name.split(".")[0].split()[-1] in ("recipes", "models")], path


def test_every_public_name_is_there():
    for module in (keras_mp, *(getattr(keras_mp, place) for place in PLACES)):
        for name in module.__all__:
            assert getattr(module, name) is not None and name in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'make_lean'; it is keras_mp.lean.make_lean"):
        _ = keras_mp.make_lean
    assert len(TOP) <= 17 and len(PUBLIC) <= 66
    with pytest.raises(AttributeError, match="no attribute 'stabilise'; it has .*stabilize"):
        _ = keras_mp.stabilise


@pytest.mark.slow
def test_type_checkers_see_the_public_names_and_no_other(tmp_path):
    pytest.importorskip("mypy", reason="mypy, of the extra test, is not installed")
    program = tmp_path / "program.py"
    lines = [f"reveal_type(keras_mp.{name})" for name in PUBLIC]
    program.write_text("\n".join(["import keras_mp", *lines, "keras_mp.stabilise"]))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2] for line in printed if "Revealed type is" in line]
    assert len(revealed) == len(PUBLIC) and '"Any"' not in revealed
    # From its cache mypy reports an unchanged program under the path that it had in an earlier run.
    assert [line.partition("program.py")[2] for line in printed if "error" in line][:-1] == [
        f':{len(lines) + 2}: error: Module has no attribute "stabilise"; maybe "stabilize"?  [attr-defined]'
    ]


# What ends up as a row of a benchmark's report.
NOT_RAISED_TO_USERS = {"CannotMixError", "CannotRunError", "Unanswered", "WorkloadError"}


def test_every_exception_is_public():
    defined = set()
    for path in (ROOT / "keras_mp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = " ".join(map(ast.unparse, node.bases))
                defined |= {node.name} if re.search(r"(Error|Exception)\b", bases) else set()
    assert defined - NOT_RAISED_TO_USERS == set(keras_mp.errors.__all__)
    assert all(issubclass(getattr(keras_mp.errors, name), Exception) for name in keras_mp.errors.__all__)


# Names for users, and the rooms' own; the programs of processes of their own; what a room needs of a backend.
TWICE = {"_jax", "_tensorflow", "chips", "layers", "worker"}


def test_a_file_name_means_one_thing():
    rooms = [path for path in (ROOT / "keras_mp").rglob("*.py") if "backend" not in path.parts]
    names = collections.Counter(path.stem for path in rooms if path.stem != "__init__")
    assert len(names) > 100 and {name for name, count in names.items() if count > 1} <= TWICE


def test_variables_are_called_what_they_are():
    for path in [*(ROOT / "keras_mp").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
            assert name not in ("each", "found"), f"{path}:{node.lineno}"


# None in sys.modules makes an import fail as if the package were not installed.
WITHOUT = f"import sys; sys.modules['{OTHER}'] = None\n"
TRAIN = """
import os, keras, keras_mp, numpy as np
keras_mp.set_global_policy("float32")
with keras_mp.set_global_policy("mixed_bfloat16"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.LayerNormalization()])
model = keras_mp.stabilize(model)
model.compile("sgd", "mse")
model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
print(sum(part.change == "stabilize" and not part.done for part in keras_mp.report(model).parts))
"""


@pytest.mark.slow
def test_the_kit_works_without_the_other_backend():
    assert run(WITHOUT + TRAIN)[-1] == "0"


@pytest.mark.jax
@pytest.mark.skipif(BACKEND != "jax", reason="on the TensorFlow backend TensorFlow is there")
def test_the_example_of_the_readme_ends_in_a_sentence_without_tensorflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    printed = " ".join(run(WITHOUT + example, PYTHONPATH=str(ROOT)))
    assert (
        "which is not installed: pip install" in printed
        and '[tensorflow]"' in printed
        and printed.endswith("`keras-mp export model.keras saved_model`")
    )
    assert (tmp_path / "model.keras").is_file()

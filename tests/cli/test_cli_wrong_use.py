"""The command line under wrong use: one line that says what is wrong and what would be right, never a traceback."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import typer

from keras_mp import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs `keras-mp` in this process, in a folder of its own; returns the exit status and both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())  # export sets it
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["keras-mp", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = capfd.readouterr()
        return ended.value.code or 0, streams.out, streams.err

    return run


class Mix(keras.layers.Layer):
    """A layer of a user's own, in no module that is imported, and not registered."""

    def call(self, x):
        return 2 * x


def save(path, layers, inputs=(6,), loss="mse", **options):
    model = keras.Sequential([keras.Input(inputs), *layers], name="small")
    if loss:
        model.compile("sgd", loss)
    model.save(path, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and every wrong file beside it."""
    folder = tmp_path_factory.mktemp("files")
    save(folder / "model.keras", [keras.layers.Dense(1)])
    save(folder / "mix.keras", [keras.layers.Dense(1), Mix()])
    save(folder / "lambda.keras", [keras.layers.Dense(1), keras.layers.Lambda(lambda x: 2 * x)])
    save(folder / "bare.keras", [keras.layers.Dense(1)], loss=None)
    save(folder / "open.keras", [keras.layers.Embedding(5, 2), keras.layers.GlobalAveragePooling1D()], (None,))
    (folder / "text.keras").write_text("not a model")
    (folder / "cut.keras").write_bytes((folder / "model.keras").read_bytes()[:500])
    with zipfile.ZipFile(folder / "zip.keras", "w") as archive:
        archive.writestr("hello.txt", "hello")
    (folder / "folder.keras").mkdir()
    (folder / "model.weights.h5").write_bytes(b"")
    (folder / "model.h5").write_bytes(b"")
    (folder / "saved_model").mkdir()
    (folder / "saved_model" / "saved_model.pb").write_bytes(b"")
    x, y = np.ones((4, 6), "float32"), np.ones((4, 1), "float32")
    np.savez(folder / "data.npz", x=x, y=y)
    np.savez(folder / "objects.npz", x=np.array([{"a": 1}] * 4), y=y)
    np.savez(folder / "empty.npz")
    np.savez(folder / "no_records.npz", x=x[:0], y=y[:0])
    np.savez(folder / "no_labels.npz", x=x)
    np.savez(folder / "lengths.npz", x=x, y=y[:3])
    np.savez(folder / "words.npz", x=np.array(["a"] * 4), y=y)
    np.savez(folder / "wide.npz", x=np.ones((4, 7), "float32"), y=y)
    np.savez(folder / "scalar.npz", x=np.float32(1), y=y)
    np.save(folder / "array.npy", x)
    (folder / "text.npz").write_text("x y")
    (folder / "zero.npz").write_bytes(b"")
    damaged = bytearray((folder / "data.npz").read_bytes())
    damaged[200:260] = bytes(60)
    (folder / "damaged.npz").write_bytes(damaged)
    return folder


MODELS = {
    "missing.keras": "there is no file",
    "folder.keras": "is not a .keras file but a folder",
    "text.keras": "is not a .keras file but not complete, or of another kind",
    "cut.keras": "is not a .keras file but not complete, or of another kind",
    "zip.keras": "does not load",
    "mix.keras": "it holds the class 'Mix', not registered with Keras: name the module that defines it with --import",
    "lambda.keras": "it holds a Python lambda, which can run any code: if you trust the file, pass --unsafe",
    "model.weights.h5": "holds only weights: load them into their model, and give the .keras file",
    "model.h5": r"is not a .keras file but not complete, or of another kind: write one with",
    "saved_model": "is not a .keras file but a folder: write one",
}
DATA = {
    "missing.npz": "there is no file",
    "objects.npz": "array 'x' in .* holds Python objects, which are not read because they can run any code",
    "empty.npz": "must hold x, and holds none",
    "no_records.npz": r"must have as many records each, 1 or more: x \(0, 6\), y \(0, 1\)",
    "no_labels.npz": "data has no labels: the loss of model 'small' needs batches",
    "lengths.npz": r"must have as many records each, 1 or more: x \(4, 6\), y \(3, 1\)",
    "words.npz": "array 'x' in .* is of dtype <U1, and input .* of model 'small' takes float32",
    "wide.npz": r"data does not fit model 'small'.* x of shape \(4, 7\)",
    "scalar.npz": r"must have as many records each, 1 or more: x \(\), y \(4, 1\)",
    "array.npy": "data has no labels: the loss of model 'small' needs batches",
    "text.npz": "is not an .npz or .npy file: write one with numpy.savez",
    "zero.npz": "is not an .npz or .npy file: write one with numpy.savez",
    "damaged.npz": "is damaged",
    "saved_model": "is a folder, not an .npz or .npy file",
}


def one_line(result, said):
    status, out, err = result
    assert status in (1, 2) and out == "", (status, out, err)
    assert err.count("\n") == 1 and err.startswith("error: ") and len(err) < 700, err
    assert re.search(said, err), err


@pytest.mark.parametrize(
    "name, file",
    [*(("audit", file) for file in MODELS), *((name, "text.keras") for name in ("inspect", "bench", "export"))],
)
def test_a_file_that_is_no_model(command, files, name, file):
    one_line(command(name, files / file, *(["out"] if name == "export" else [])), MODELS[file])


@pytest.mark.slow
def test_a_bench_of_which_nothing_ran_is_an_error(command, files):
    status, out, err = command("bench", files / "mix.keras")
    last = err.splitlines()[-1]
    assert (status, out) == (1, "") and last.startswith("error: ") and "Traceback" not in err
    assert re.search(MODELS["mix.keras"], last) and last.count("Mix") == 1


@pytest.mark.parametrize("file", DATA)
def test_data_that_is_none(command, files, file):
    one_line(command("audit", files / "model.keras", "--data", files / file), DATA[file])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("audit bare.keras", "is not compiled for training: compile it with a loss, and save it"),
        ("audit open.keras", "leaves more open .* give the size with --length, or give some with --data"),
        ("inspect open.keras", "leaves more open than the batch, .* call keras_mp.inspect"),
        ("inspect model.keras --length 7", "--length is for a model that leaves sizes open: all of model .*"),
        ("inspect no_such_recipe", "unknown training recipe 'no_such_recipe'"),
        ("inspect model.keras --target h100x8", "target names 8 chips: pass strategy='data', 'fully_sharded'"),
        ("inspect model.keras --target h100x3 --strategy data", "names 3 chips, which is not one of 2"),
        ("audit model.keras --batch-size -1", "batch_size=-1 must be a whole number, 1 or more"),
        ("inspect model.keras --batch-size 0", "batch_size=0 must be a whole number, 1 or more"),
        ("bench model.keras --batch-size -2", "batch_size=-2 must be a whole number, 1 or more"),
        ("bench model.keras --seconds -1", "seconds must be 0 or above, got -1"),
        ("inspect model.keras --target h10", "target='h10' is not known. Did you mean 'h100'"),
        ("advise model.keras --target h100 --compare float8", "compare='float8' must be one of"),
        ("advise model.keras --target h100 --inference", "`keras-mp inspect --inference --target CHIP`"),
        ("advise model.keras --target h100 --strategy data", "name them, as h100x4"),
        ("advise model.keras --target h100x2 --strategy dta", "Did you mean 'data'"),
        ("advise model.keras --target host", "target='host': how much memory this machine leaves"),
        ("audit model.keras --widht 8", "unknown after .*model.keras': --widht 8. `keras-mp audit --help` lists"),
        ("audit mix.keras --import no_such_module", "No module named 'no_such_module'"),
        ("audit mix.keras --import layers.py", "takes a module's name, not a file's: --import layers"),
        ("audit mix.keras --import json", "the class 'Mix', which json does not define, not registered"),
        ("audit model.keras --html .", "--html '.' is a folder: name a file in it"),
        ("inspect model.keras --html .", "--html '.' is a folder: name a file in it"),
        ("bench model.keras --html .", "--html '.' is a folder: name a file in it"),
        ("export model.keras model.keras", "exists"),
        ("export model.keras out --verify missing.npz", "there is no file"),
    ],
)
def test_wrong_options(command, files, monkeypatch, arguments, said):
    monkeypatch.chdir(files)
    one_line(command(*arguments.split()), said)


LISTS = {  # each option that takes several names: the function that gets them, and what it gets
    ("inspect", "compare"): ("keras_mp.planner.inspect:inspect", ["mixed_bfloat16", "fp8"]),
    ("advise", "compare"): ("keras_mp.planner.advise:advise", ["mixed_bfloat16", "fp8"]),
    ("advise", "target"): ("keras_mp.planner.advise:advise", ["h100", "v5e"]),
    ("bench", "compare"): ("keras_mp.bench.timing:time_in_processes", ["float32", "mixed_bfloat16"]),
}


def test_every_list_is_of_commas_with_blanks_or_without(command, files, monkeypatch):
    commands = typer.main.get_command(cli.app).commands
    options = [(name, option) for name, known in commands.items() for option in known.params]
    lists = {(name, o.name) for name, o in options if "separated by commas" in (getattr(o, "help", "") or "").lower()}
    assert lists == {*LISTS}
    for (name, option), (function, expected) in LISTS.items():
        given = mock.Mock(side_effect=ValueError("given"))
        monkeypatch.setattr(function.replace(":", "."), given)
        more = ["--target", "h100"] if (name, option) == ("advise", "compare") else []
        listed = command(name, files / "model.keras", *more, f"--{option}", f" {', '.join(expected)} ,,")
        one_line(listed, "error: given")
        assert expected in [*given.call_args.args, *given.call_args.kwargs.values()], name


def test_advise_takes_every_option_of_inspect():
    commands = typer.main.get_command(cli.app).commands
    names = {name: {text for o in commands[name].params for text in o.opts} for name in ("inspect", "advise")}
    assert names["advise"] == names["inspect"]


@pytest.mark.parametrize("arguments", ["inspekt", "audit", "audit model.keras --steps many", "doctor --x"])
def test_what_the_command_line_itself_refuses(command, arguments):
    status, _, err = command(*arguments.split())
    assert status == 2 and "Traceback" not in err and "Usage" in err


def test_the_version():
    from typer.testing import CliRunner

    from keras_mp.cli import app

    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and re.fullmatch(
        r"keras-mp (\d+\.\d+\.\d+|from a clone, not installed)\n", result.output
    )


@pytest.mark.slow
def test_a_pipe_that_is_closed_early_ends_it_quietly(files):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        [sys.executable, "-m", "keras_mp.cli", "doctor", "--chips"],
        cwd=files,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    program.stdout.close()  # as `| head -0`
    err = program.stderr.read()
    assert program.wait(timeout=120) in (0, 1, 141) and err == ""


@pytest.mark.parametrize("backend, arguments", [("tensorflow", ["doctor", "--chips"]), ("jax", ["train", "mine.py"])])
def test_without_a_backend_a_command_says_what_to_install(tmp_path, backend, arguments):
    code = f"import sys; sys.modules[{backend!r}] = None; from keras_mp import cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"{backend} is not installed" in done.stderr and f'pip install -e "{ROOT}[{backend}]"' in done.stderr

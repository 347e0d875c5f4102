import importlib.util

import pytest

from benchmarks import recipe_parity as parity

pytestmark = pytest.mark.slow


def test_the_table_has_the_means_and_their_largest_difference():
    text = parity.table("test accuracy", {"float32": [0.98, 1.0], "mixed_float16": [0.96, 0.97]})
    assert "| float32 | 98.00% | 100.00% | 99.00% |" in text
    assert "| mixed_float16 | 96.00% | 97.00% | 96.50% |" in text
    assert "Largest difference between two means: 2.50 percentage points." in text


def test_every_precision_and_seed_runs_and_the_report_says_how_to_repeat_it(tmp_path, monkeypatch, capsys):
    runs = []

    def run(recipe, precision, seed, options):
        runs.append((recipe, precision, seed, options))
        return {
            "result": {"metric": "test accuracy", "value": 0.9},
            "versions": {"keras": "3.15.1"},
            "history": [2.0, 1.0 + seed],
        }

    monkeypatch.setattr(parity, "run", run)
    out = tmp_path / "parity.md"
    picture = tmp_path / "parity.svg"
    options = ["--seeds", "2", "--out", str(out), "--curves", str(picture), "--epochs", "5"]
    assert parity.main(["digits", *options]) == 0
    assert runs == [("digits", p, s, ["--epochs", "5"]) for s in range(2) for p in parity.COMPARED]
    assert "keras 3.15.1" in out.read_text() and "benchmarks/recipe_parity.py digits --seeds 2" in out.read_text()
    assert "| 2 | 1.5000 | 1.5000 | 1.5000 |" in out.read_text()
    assert "loss on the test data less float32" in picture.read_text()
    assert "90.00%" in capsys.readouterr().out


def test_a_run_is_a_process_whose_summary_is_read(tmp_path, monkeypatch):
    recipe = tmp_path / "tiny.py"
    recipe.write_text(
        "import dataclasses, json, pathlib, types\n"
        "from typing import Annotated\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    policy: Annotated[str, ''] = ''\n"
        "    seed: Annotated[int, ''] = 0\n"
        "    output: Annotated[str, ''] = ''\n"
        "    name: Annotated[str, ''] = ''\n"
        "    export: Annotated[bool, ''] = True\n"
        "def tiny(): return Config()\n"
        "def train(config):\n"
        "    folder = pathlib.Path(config.output, config.name)\n"
        "    folder.mkdir()\n"
        "    (folder / 'summary.json').write_text(json.dumps(dataclasses.asdict(config)))\n"
        "    (folder / 'history.csv').write_text('epoch,test_loss\\n1,2.5\\n2,1.5\\n')\n"
        "    return types.SimpleNamespace(interrupted=False)\n"
    )
    if importlib.util.find_spec("jax"):
        monkeypatch.setenv("KERAS_BACKEND", "jax")  # which a process imports in a third of the time
    config = parity.run(str(recipe), "mixed_bfloat16", 7, [])
    assert (config["policy"], config["seed"], config["export"]) == ("mixed_bfloat16", 7, False)
    assert config["history"] == [2.5, 1.5]
    with pytest.raises(RuntimeError, match="No such option: --zzz"):
        parity.run(str(recipe), "float32", 0, ["--zzz"])

"""The language model from its config to the files it leaves; what a full run reaches is in its docstring."""

import dataclasses
import json
from pathlib import Path

import keras
import pytest
from bits import bits_of

from recipes import language_model as recipe
from recipes.datasets.text import sequences, split

QUICK = dataclasses.replace(
    recipe.language_model(), sequence_length=16, layers=1, width=128, heads=2, epochs=2, batch_size=8, generate=20
)


@pytest.mark.parametrize(
    "model, policy, layer",
    [
        ("gpt", "float32", "block1_dense_1"),
        pytest.param("llama", "mixed_bfloat16", "block1_gate", marks=pytest.mark.jax),
    ],
)
@pytest.mark.slow
def test_a_short_training_leaves_whole_files(tmp_path, corpus, capsys, model, policy, layer):
    config = dataclasses.replace(QUICK, policy=policy, corpus=corpus, output=str(tmp_path), model=model)
    result = recipe.train(config)
    folder = tmp_path / "language_model"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.keras", "history.csv", "curves.png", "summary.json", "generated.txt"}
    assert not any("partial" in name for name in names)

    keras.mixed_precision.set_global_policy("float32")
    model = keras.saving.load_model(folder / "model.keras")
    assert model.get_layer(layer).compute_dtype == policy.removeprefix("mixed_")
    assert result.metric == "validation bits per byte"
    inputs, targets = sequences(split(Path(corpus).read_bytes(), 16)[1], 16)
    bits = bits_of(model, inputs, targets) / targets.size
    assert result.value == pytest.approx(bits, rel=1e-5 if policy == "float32" else 1e-3)
    assert result.value < 6  # 8 is a guess without a model
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["result"]["value"] == result.value and summary["config"]["corpus"] == corpus

    generated = (folder / "generated.txt").read_bytes()
    assert generated.startswith(b"The ") and len(generated) == len("The ") + 20
    printed = capsys.readouterr().out
    assert f"{result.value:.4f}" in printed and printed.rstrip("\n").splitlines()[-1].startswith("The ")
    if result.saved_model:
        assert result.low_precision_ops == 0 and result.max_difference <= 1e-5


@pytest.mark.slow
def test_two_micro_batches_are_a_batch_and_remat_changes_nothing(tmp_path, corpus, monkeypatch):
    # At a rate that changes within a window, the two would take different ones.
    monkeypatch.setattr(recipe, "warmup_then_cosine", lambda peak, steps: 1e-3)
    options = {"policy": "float32", "corpus": corpus, "output": str(tmp_path), "export": False, "width": 32}
    whole = recipe.train(dataclasses.replace(QUICK, batch_size=16, **options)).value
    halves = recipe.train(dataclasses.replace(QUICK, batch_size=8, accumulate=2, remat=True, **options)).value
    assert halves == pytest.approx(whole, rel=1e-4)

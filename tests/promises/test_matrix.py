"""Each promise of the kit, for each kind of model and each change; tests/promises/matrix.py says what is not run."""

import keras
import matrix
import pytest
import zoo

# What `make test` runs, by column; the rest is slow, and of the rest continuous integration runs every third cell of a
# row and of a column. On JAX, where a cell takes several times as long, each column has one row, quick or slow.
QUICK = {
    "stabilize": ("convolutional", "attention", "own_code", "translator"),
    "stabilize, FP8": ("attention", "own_step"),
    "stabilize, INT8": ("sequential",),
    "stabilize, qat_int4": ("functional",),
    "stabilize, narrow_frozen": ("lora", "distilled"),
    "make_lean": ("gpt", "attention"),
    "make_lean, remat": ("gpt",),
    "make_lean, FP8, stabilize": ("subclassed",),
    "prepare, float32": ("own_step", "distilled", "graph_in_init", "operations"),
    "prepare, float16": ("dict_of_inputs", "images", "nested_and_shared"),
}
QUICK_ON_JAX = {
    "stabilize": "functional",
    "stabilize, INT8": "own_step",
    "stabilize, narrow_frozen": "distilled",
    "make_lean": "gpt",
    "prepare, float32": "own_step",
    "prepare, float16": "convolutional",
}
SLOW_ON_JAX = {
    "stabilize, FP8": "functional",
    "stabilize, qat_int4": "functional",
    "make_lean, remat": "gpt",
    "make_lean, FP8, stabilize": "lora",
}


def marked(row, column, promises):
    quick = row in QUICK[column] if matrix.TENSORFLOW else QUICK_ON_JAX.get(column) == row
    on_jax = {**QUICK_ON_JAX, **SLOW_ON_JAX}[column] == row
    marks = [pytest.mark.jax] * on_jax + [pytest.mark.slow] * (not quick)
    third = (list(zoo.MODELS).index(row) + list(matrix.COLUMNS).index(column)) % 3 == 0
    marks += [pytest.mark.rare] * (matrix.TENSORFLOW and not quick and not third)
    return pytest.param(row, column, promises, marks=marks, id=f"{row}-{column}")


@pytest.fixture(autouse=True)
def vocabulary_in_chunks(monkeypatch):
    """The models are so small that whole logits take less memory: a lean head would not be tested."""
    monkeypatch.setattr("keras_mp.lean.chunked_head.chunks_save_memory", lambda *sizes: True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("row, column, promises", [marked(*cell) for cell in matrix.cells()])
def test_promises(row, column, promises, tmp_path):
    if row in ("experts", "lora", "int4_lora"):
        pytest.importorskip("keras_hub", reason="the model is KerasHub's: pip install keras-hub")
    if "int4" in row + column:
        pytest.importorskip("keras", "3.14", reason="Keras packs int4 in groups from 3.14")
    cell = matrix.Cell(row, column)
    for promise in promises:
        getattr(cell, promise)(*[tmp_path] * (promise == "file"))


@pytest.mark.slow
@pytest.mark.parametrize("row", matrix.UNSAVED)
def test_plain_keras_cannot_load_what_it_saves(row, tmp_path):
    model, x = matrix.built(row, "float32")
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras", vars(zoo), compile=False, safe_mode=False)
        if matrix.off(matrix.outputs(loaded, x), matrix.outputs(model, x)):
            raise ValueError("it computes something else")


@pytest.mark.skipif(not matrix.TENSORFLOW, reason="the page is that of TensorFlow, which runs more of it")
def test_the_page_is_the_matrix():
    assert matrix.PAGE.read_text() == matrix.page(), "PYTHONPATH=tests python tests/promises/matrix.py writes it"
